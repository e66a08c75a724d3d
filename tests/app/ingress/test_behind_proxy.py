"""Administration behind a reverse proxy: without the key nothing answers, whatever the proxy adds or leaves out."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.ingress.admin import _METHODS, PATH
from app.ingress.config import IngressConfig
from tests.app.ingress.rig import ADMIN_KEY, MODEL, Rig, pair, rig

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
ASKED = [(method, PATH + name) for name, methods in _METHODS.items() for method in methods]
ASKED += [
    ("GET", PATH + "explain/x"),
    ("GET", PATH + "journal/5"),
    ("PUT", PATH + "engines/p"),
    ("POST", PATH + "policy"),
]
ROUNDABOUT = [
    "/sluice/admin/policy/",
    "/sluice/admin//policy",
    "//sluice/admin/policy",
    "/sluice/./admin/policy",
    "/v1/../sluice/admin/policy",
    "/v1/..%2fsluice/admin/policy",
    "/sluice%2fadmin/policy",
    "/sluice/admin%2fpolicy",
    "/SLUICE/admin/policy",
    "/sluice/admin/policy?key=x",
    "/sluice/admin/policy%00",
]
"""Ways to write the path of an administrator's endpoint that a proxy may pass on as they are, or clean."""

SENT_BY_PROXIES = {
    "nginx without settings": {"host": "127.0.0.1:8000", "connection": "close"},
    "nginx as its documentation shows it": {
        "host": "api.example.com",
        "x-real-ip": "203.0.113.9",
        "x-forwarded-for": "203.0.113.9",
        "x-forwarded-proto": "https",
    },
    "HAProxy, which passes the host on": {"host": "localhost"},
    "a client that names this machine": {
        "host": "localhost",
        "x-forwarded-for": "127.0.0.1",
        "x-real-ip": "127.0.0.1",
    },
    "RFC 7239": {"host": "api.example.com", "forwarded": "for=127.0.0.1;host=localhost;proto=https"},
    "a proxy's own user": {"host": "localhost", "x-forwarded-user": "admin", "remote-user": "admin"},
    "basic authentication of the proxy": {"host": "localhost", "authorization": "Basic YWRtaW46YWRtaW4="},
    "another server's token": {"host": "localhost", "authorization": "Bearer of-another-server"},
}


KNOWN_NAMES = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, allowed_hosts=("api.example.com",))
"""Without the name of the proxy, its requests would be refused for that alone: `allowed_hosts` is what an operator sets
behind a proxy that passes it on.
"""


async def refused(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    for method, path in ASKED:
        answer = await client.request(method, path, headers=headers, json={"dispatch": {"max_queue": 1}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "admin_key"), (method, path)


async def unchanged(made: Rig) -> None:
    """The router's policies are as they were, which an administrator sees."""
    answer = await made.client.get(PATH + "policy")
    assert answer.status_code == 200 and answer.json()["dispatch"]["max_queue"] > 1


@pytest.mark.parametrize("headers", SENT_BY_PROXIES.values(), ids=SENT_BY_PROXIES)
async def test_nothing_that_proxies_send_from_this_machine_gives_a_right(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with rig(tmp_path, pair(tmp_path), KNOWN_NAMES) as made:
        async with httpx.AsyncClient(base_url=made.url, timeout=100) as client:
            await refused(client, headers)
        await unchanged(made)


@asynccontextmanager
async def nginx(folder: Path, upstream: int) -> AsyncIterator[str]:
    """A nginx with nothing but a `proxy_pass`, and its URL."""
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        "events {}\n"
        "http {\n"
        "  access_log off;\n"
        + "".join(f"  {name}_temp_path {folder}/{name};\n" for name in names)
        + f"  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{upstream}; }} }}\n"
        "}\n"
    )
    command = (NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log"))
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionRefusedError:
                    assert process.returncode is None, (folder / "error.log").read_text()
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    break
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian's nginx-light)")
async def test_behind_a_real_nginx_with_its_defaults_only_the_key_administers(tmp_path: Path) -> None:
    folder = tmp_path / "nginx"
    folder.mkdir()
    async with rig(tmp_path, pair(tmp_path), KNOWN_NAMES) as made, nginx(folder, made.listener.port) as url:
        async with httpx.AsyncClient(base_url=url, timeout=100) as client:
            for headers in SENT_BY_PROXIES.values():
                await refused(client, headers)
            # the way is a way: output comes through it, and with the key administration does
            answer = await client.post("/v1/chat/completions", json=made.chat())
            assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 w2 w3 "
            key = {"authorization": f"Bearer {ADMIN_KEY}"}
            assert (await client.get(PATH + "policy", headers=key)).status_code == 200
        for path in ROUNDABOUT:
            status = await raw_status(url, path)
            assert status in (400, 401, 404), path
        await unchanged(made)


async def test_no_other_way_to_write_a_path_leads_around_the_key(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        for path in ROUNDABOUT:
            assert await raw_status(made.url, path) in (400, 401, 404), path


async def raw_status(url: str, path: str) -> int:
    """Returns the status of a GET whose path is sent as it is, which HTTP clients would clean."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return int(answer.split(b" ", 2)[1])
