"""Rights and their bounds: keys, sessions, foreign pages, rebound names, and what every answer says to browsers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.router.server import RouterServer
from app.dashboard.auth import TRIES, TRIES_S, Keys, Sessions
from app.dashboard.guard import MAX_BODY_BYTES
from app.dashboard.refusal import Refusal
from tests.app.dashboard.parts import ADMIN, VIEWER, Dashboard, dashboard
from tests.app.ingress.rig import make_router


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[RouterServer]:
    made = make_router(tmp_path)
    await made.start([f"unix:{tmp_path}/r.sock"])
    yield made
    await made.stop()


@pytest.fixture
async def board(tmp_path: Path, router: RouterServer) -> AsyncIterator[Dashboard]:
    async with dashboard(tmp_path, router) as made:
        yield made


async def login(board: Dashboard, key: str) -> dict[str, str]:
    """Logs in and returns the headers of a page that has."""
    answer = await board.client.post("/api/login", json={"key": key})
    assert answer.status_code == 200, answer.text
    board.client.cookies.clear()
    cookie = answer.headers["set-cookie"].partition(";")[0]
    return {"cookie": cookie, "x-csrf-token": answer.json()["csrf"], "origin": board.url}


def said(answer: httpx.Response, status: int) -> str:
    """The message of a refusal."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"message"}
    return str(body["message"])


async def test_without_a_key_only_page_login_and_what_probes_need_answer(board: Dashboard) -> None:
    for path in ("/api/session", "/api/stream", "/api/status", "/api/audit", "/api/policy", "/api/nothing"):
        assert "log in with a key" in said(await board.client.get(path), 401)
    for method, path in (
        ("PUT", "/api/policy"),
        ("POST", "/api/undo"),
        ("DELETE", "/"),
        ("POST", "/metrics"),
    ):
        said(await board.client.request(method, path), 401)
    assert (await board.client.get("/health")).json()["live"] is True
    # there are no sums without an ingress, and this needs no key either
    assert "ingress replicas have told" in said(await board.client.get("/metrics"), 503)


async def test_from_elsewhere_figures_need_a_key_too(tmp_path: Path, router: RouterServer) -> None:
    async with dashboard(tmp_path, router, host="0.0.0.0") as board:
        for path in ("/metrics", "/health"):
            said(await board.client.get(path), 401)
            keyed = await board.client.get(path, headers={"authorization": f"Bearer {VIEWER}"})
            # there is no ingress whose counts could be added up
            assert keyed.status_code == (503 if path == "/metrics" else 200)


async def test_a_cookie_cannot_be_read_by_scripts_or_sent_by_other_sites(board: Dashboard) -> None:
    answer = await board.client.post("/api/login", json={"key": VIEWER})
    assert answer.json()["role"] == "viewer"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "max-age=3600" in cookie
    assert "secure" not in cookie
    assert VIEWER not in cookie


async def test_viewers_look_and_admins_change(board: Dashboard) -> None:
    viewer = await login(board, VIEWER)
    session = (await board.client.get("/api/session", headers=viewer)).json()
    assert session == {
        "role": "viewer", "csrf": viewer["x-csrf-token"], "version": "0.0", "model": "m", "experiments": False,
    }  # fmt: skip
    change = {"decode": "round_robin"}
    assert "may look" in said(await board.client.put("/api/policy", json=change, headers=viewer), 403)
    admin = await login(board, ADMIN)
    assert (await board.client.put("/api/policy", json=change, headers=admin)).status_code == 200
    assert (await board.client.post("/api/logout", headers=viewer)).status_code == 200


@pytest.mark.parametrize("key", ["", "wrong", VIEWER + "x", None, 7, ["a"]])
async def test_a_wrong_key_opens_nothing(board: Dashboard, key: Any) -> None:
    message = said(await board.client.post("/api/login", json={"key": key}), 401)
    assert "none of the keys" in message
    assert ADMIN not in message
    bearer = {"authorization": f"Bearer {key or None}"}
    said(await board.client.get("/api/status", headers=bearer), 401)
    said(await board.client.get("/api/status", headers={"authorization": "Basic YTpi"}), 401)


async def test_many_wrong_keys_have_to_wait_and_a_right_one_never_has() -> None:
    now_s = 0.0
    sessions = Sessions(Keys((VIEWER,), (ADMIN,)), 60.0, lambda: now_s)
    for _ in range(TRIES):
        with pytest.raises(Refusal, match="none of the keys"):
            sessions.login("guess", "10.0.0.1")
    with pytest.raises(Refusal, match="wait a minute") as refused:
        sessions.login("guess", "10.0.0.1")
    assert refused.value.status == 429
    with pytest.raises(Refusal, match="none of the keys"):
        sessions.login("guess", "10.0.0.2")
    # logins and programs with a right key at the address of the one that guesses
    assert sessions.login(ADMIN, "10.0.0.1")[0] == "admin"
    assert sessions.who(None, f"Bearer {VIEWER}", "10.0.0.1").role == "viewer"
    # which makes no room for a further guess
    with pytest.raises(Refusal, match="wait a minute"):
        sessions.login("guess", "10.0.0.1")
    now_s = TRIES_S + 1
    with pytest.raises(Refusal, match="none of the keys"):
        sessions.login("guess", "10.0.0.1")


async def test_a_program_with_an_old_key_locks_nobody_out(board: Dashboard) -> None:
    old, right = ({"authorization": f"Bearer {key}"} for key in ("the key of last year", ADMIN))
    statuses = [(await board.client.get("/api/status", headers=old)).status_code for _ in range(TRIES + 2)]
    assert statuses == [401] * TRIES + [429] * 2
    assert (await board.client.get("/api/status", headers=right)).status_code == 200
    change = await board.client.put("/api/policy", json={"decode": "round_robin"}, headers=right)
    assert change.status_code == 200
    assert await login(board, ADMIN)


async def test_an_expired_or_forged_cookie_and_one_of_another_server_are_refused(
    tmp_path: Path, router: RouterServer
) -> None:
    (tmp_path / "other").mkdir()
    async with dashboard(tmp_path, router, session_s=-1.0) as board:
        expired = await login(board, ADMIN)
        assert "log in again" in said(await board.client.get("/api/session", headers=expired), 401)
    async with dashboard(tmp_path, router) as board, dashboard(tmp_path / "other", router) as other:
        elsewhere = await login(other, ADMIN)
        said(await board.client.get("/api/session", headers=elsewhere), 401)
        own = await login(board, ADMIN)
        # not the last character of the signature: two of its bits say nothing
        forged = {
            **own,
            "cookie": own["cookie"][:-2] + ("A" if own["cookie"][-2] != "A" else "B") + own["cookie"][-1],
        }
        said(await board.client.get("/api/session", headers=forged), 401)
        said(await board.client.get("/api/session", headers={"cookie": 'sluice_session=%00;;="[]'}), 401)
        assert (await board.client.get("/api/session", headers=own)).status_code == 200


async def test_a_login_ends_with_its_key() -> None:
    keys = Keys((VIEWER,), (ADMIN,))
    sessions = Sessions(keys, 60.0)
    _, cookie, _ = sessions.login(VIEWER, "x")
    assert sessions.who(cookie, None, "x").role == "viewer"
    keys._viewer = ("another viewer key",)
    with pytest.raises(Refusal, match="not taken any more"):
        sessions.who(cookie, None, "x")


async def test_a_page_from_elsewhere_changes_nothing(board: Dashboard) -> None:
    admin = await login(board, ADMIN)
    for origin in (
        "https://evil.example",
        "null",
        "http://[",
        f"http://127.0.0.1:{(board.server.port or 0) + 1}",
    ):
        foreign = {**admin, "origin": origin}
        assert "may change nothing" in said(
            await board.client.post("/api/undo", json={}, headers=foreign), 403
        )
    said(
        await board.client.post(
            "/api/login", json={"key": ADMIN}, headers={"origin": "https://evil.example"}
        ),
        403,
    )
    for token in ("", "0" * 32):
        forged = {**admin, "x-csrf-token": token}
        assert "x-csrf-token" in said(await board.client.post("/api/undo", json={}, headers=forged), 403)
    bearer = {"authorization": f"Bearer {ADMIN}"}
    said(await board.client.post("/api/undo", json={"id": "none"}, headers=bearer), 404)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "", "[", "localhost@evil.example."]
)
async def test_a_name_that_was_rebound_to_this_machine_is_refused(board: Dashboard, host: str) -> None:
    for path in ("/", "/health", "/api/session", "/metrics"):
        said(await board.client.get(path, headers={"host": host}), 403)


async def test_further_names_can_be_allowed(tmp_path: Path, router: RouterServer) -> None:
    async with dashboard(tmp_path, router, hosts=("sluice.example",)) as board:
        for host in ("sluice.example", "SLUICE.example:8002", "localhost:1", "[::1]:8002", "10.1.2.3"):
            assert (await board.client.get("/health", headers={"host": host})).status_code == 200


async def test_every_answer_keeps_browsers_from_running_anything_else(board: Dashboard) -> None:
    for path in ("/health", "/api/session", "/nothing", "/static/nothing.js"):
        headers = (await board.client.get(path)).headers
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


async def test_what_is_wrong_with_a_request_is_said_in_words(board: Dashboard) -> None:
    bearer = {"authorization": f"Bearer {ADMIN}"}
    client = board.client
    assert "not valid JSON" in said(await client.put("/api/scale", content=b"{", headers=bearer), 400)
    assert "JSON object" in said(await client.put("/api/scale", content=b"[1]", headers=bearer), 400)
    huge = b" " * (MAX_BODY_BYTES + 1)
    assert "send less" in said(await client.put("/api/policy", content=huge, headers=bearer), 413)
    assert "/api/none" in said(await client.get("/api/none", headers=bearer), 404)
    said(await client.delete("/api/policy", headers=bearer), 405)
    for path in ("/static/%2e%2e/server.py", "/static/..%2fserver.py"):
        said(await client.get(path), 404)
    shown = said(await client.get("/api/engines/heat?group=a&ids=b", headers=bearer), 400)
    assert "either group or ids" in shown
