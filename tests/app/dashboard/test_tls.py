"""The dashboard over TLS: login, stream, changes and the SDK on a real listener with a certificate."""

import asyncio
import json
import ssl
from pathlib import Path

import httpx
import pytest

from sluice.admin import Dashboard
from tests.app.dashboard.parts import ADMIN, dashboard
from tests.app.ingress.rig import MODEL, pair, rig, until
from tests.app.ingress.test_tls import certificate


async def test_login_stream_and_changes_over_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=cert)
    files = {"tls_cert": cert, "tls_key": key}
    async with (
        rig(tmp_path, pair(tmp_path)) as made,
        dashboard(tmp_path, made.router, model=MODEL, **files) as board,
    ):
        await until(lambda: len(board.feed.ingresses) == 1, "an ingress")
        url = f"https://127.0.0.1:{board.server.port}"
        async with httpx.AsyncClient(base_url=url, verify=trusted, timeout=60) as client:
            page = await client.get("/")
            assert "default-src 'self'" in page.headers["content-security-policy"]
            answer = await client.post("/api/login", json={"key": ADMIN}, headers={"origin": url})
            assert answer.status_code == 200, answer.text
            cookie = answer.headers["set-cookie"].lower()
            assert all(word in cookie for word in ("secure", "httponly", "samesite=strict"))
            assert (await client.get("/api/session")).json()["role"] == "admin"
            events = []
            async with client.stream("GET", "/api/stream") as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("data: "):
                        events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 3:
                        break
            assert [one["seq"] - events[0]["seq"] for one in events] == [0, 1, 2]
            assert events[-1]["line"]["ingresses"] == 1
            headers = {"x-csrf-token": answer.json()["csrf"], "origin": url}
            changed = await client.put("/api/policy", json={"decode": "netkv"}, headers=headers)
            assert changed.status_code == 200, changed.text
            assert made.router.dispatcher.decode.name == "netkv"
            left = await client.post("/api/logout", headers=headers)
            assert "secure" in left.headers["set-cookie"].lower()
            assert (await client.get("/api/session")).status_code == 401
        await asyncio.to_thread(undone_by_the_sdk, url, trusted, changed.json()["id"])
        assert made.router.dispatcher.decode.name == "join_shortest_queue"
        with pytest.raises(httpx.TransportError):
            await board.client.get("/health")


def undone_by_the_sdk(url: str, trusted: ssl.SSLContext, change: str) -> None:
    with httpx.Client(verify=trusted) as http, Dashboard(url, key=ADMIN, http_client=http) as client:
        assert client.undo(change).after["decode"]["name"] == "join_shortest_queue"


async def test_without_tls_the_cookie_goes_over_plain_http_too(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        answer = await board.client.post("/api/login", json={"key": ADMIN})
        assert "secure" not in answer.headers["set-cookie"].lower()
