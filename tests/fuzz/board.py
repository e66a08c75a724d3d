# ruff: noqa: E501  (one case a line)
"""HTTP to the dashboard: bytes of every kind, sessions and keys that are right, wrong or half so, and any change.

A finding is an error in the log, a status that is ours, an answer that does not come, a connection or a reader that
stays, a session in order that is no longer served, or memory that grows.
"""

import asyncio
import re
import socket
import time
from pathlib import Path
from random import Random
from typing import Any

from app.dashboard.guard import MAX_BODY_BYTES
from tests.app.dashboard.parts import ADMIN, VIEWER, Dashboard, dashboard
from tests.app.ingress.rig import make_router
from tests.fuzz import mutate
from tests.fuzz.corpus import HEADERS, METHODS, RAW
from tests.fuzz.talk import HANG_S, count_answers, receive, talk, unread
from tests.fuzz.watch import Watch

SAMPLE = 64
QUIET_S = 0.05
"""Time after which a client leaves that has sent half a request, or follows the stream."""
EXPECTED_5XX = {503}
"""The router says that there is no autoscaler, too many pages are open, or no ingress has told its counts."""
LOOK_EVERY = 20
"""Connections between two looks whether a session in order is served."""

PATHS = (
    "/", "/health", "/metrics", "/api/session", "/api/status", "/api/engines/heat?group=g", "/api/engines/heat?ids=a,b",
    "/api/engines/heat?ids=" + "a," * 200, "/api/engines/heat", "/api/requests/cmpl-1", "/api/requests/%2e%2e%2f", "/api/requests/",
    "/api/requests/%ff", "/api/audit", "/api/policy", "/api/scale", "/static/app.css", "/static/js/main.js", "/static/%2e%2e/server.py",
    "/static/../server.py", "/static/%00", "/static/" + "a" * 5000, "/api/stream", "/nothing", "//api/status", "/api/status/", "*", "/\x7f", "",
)  # fmt: skip
CHANGES = (
    ("POST", "/api/login"), ("POST", "/api/logout"), ("PUT", "/api/policy"), ("PUT", "/api/scale"), ("POST", "/api/undo"),
    ("PUT", "/api/engines/decode-1"), ("PUT", "/api/engines/%ff"), ("POST", "/api/engines/decode-1/drain"),
)  # fmt: skip
BODIES: tuple[dict[str, Any], ...] = (
    {"key": VIEWER}, {"key": "x"}, {"prefill": "round_robin"}, {"decode": {"name": "netkv", "params": {"step_base_s": 0.5}}},
    {"dispatch": {"max_queue": 500, "kv_high_water": 0.9}}, {"counts": {"g": 2}}, {"counts": {"g": 2}, "plan": True},
    {"bounds": {"g": {"min": 1, "max": 2}}}, {"mode": "auto"}, {"role": "decode", "duty": "warm"}, {"id": "x"}, {},
)  # fmt: skip
ODD = (
    "origin: null", "origin: http://[", "origin: http://localhost", "origin: http://evil.example", "host: [::1", "host: [v1.x]",
    "host: evil.example", "cookie: sluice_session=", "cookie: sluice_session=a.b.c", "cookie: a=\x01; sluice_session=\"", "cookie: =",
    "x-csrf-token: x", "last-event-id: 99999999999999999", "last-event-id: 3", "range: bytes=0-10", "range: bytes=9-1,a-b",
    "range: bytes=-99999999999999999999", "if-none-match: x", "if-modified-since: x", "accept-encoding: gzip",
    f"content-length: {MAX_BODY_BYTES + 1}", "authorization: Bearer \xe9", "authorization: Digest x",
)  # fmt: skip

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Session:
    """A login of an administrator, and one of a viewer: the headers that each page sends."""

    def __init__(self, admin: tuple[str, str], viewer: tuple[str, str]) -> None:
        self.admin = {"cookie": f"sluice_session={admin[0]}", "x-csrf-token": admin[1]}
        self.viewer = {"cookie": f"sluice_session={viewer[0]}", "x-csrf-token": viewer[1]}

    def headers(self, rng: Random) -> list[str]:
        """Returns the headers by which a client says who it is."""
        kind = rng.random()
        if kind < 0.15:
            return []
        if kind < 0.3:
            return [f"authorization: Bearer {rng.choice((ADMIN, VIEWER, 'x'))}"]
        lines = [
            f"{name}: {value}" for name, value in rng.choice((self.admin, self.admin, self.viewer)).items()
        ]
        if kind > 0.85:
            lines = [mutate.of_bytes(rng, line.encode()).decode("latin-1") for line in lines]
        return lines


def request(rng: Random, session: Session) -> bytes:
    """Returns one request: a read or a change, in order or not."""
    method, path = ("GET", rng.choice(PATHS)) if rng.random() < 0.5 else rng.choice(CHANGES)
    if rng.random() < 0.1:
        method = rng.choice(METHODS)
    content = b""
    if method != "GET":
        kind = rng.randrange(10)
        base: Any = rng.choice(BODIES)
        if kind == 0:
            content = mutate.deep(rng)
        elif kind == 1:
            content = mutate.as_json(rng, mutate.value(rng))
        elif kind < 6:
            content = mutate.as_json(rng, base)
        else:
            content = mutate.as_json(rng, mutate.of_value(rng, base))
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *session.headers(rng)]
    if rng.random() < 0.4:
        lines += rng.sample(rng.choice((ODD, HEADERS)), rng.choice((1, 2)))
    if content or rng.random() < 0.2:
        lines.append(f"content-length: {len(content)}")
    made = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content
    return mutate.of_bytes(rng, made) if rng.random() < 0.1 else made


def connection(rng: Random, session: Session) -> tuple[int, bytes]:
    """Returns the number of requests of a client, and its bytes."""
    if rng.random() < 0.05:
        return 1, mutate.of_bytes(rng, rng.choice(RAW))
    count = rng.choice((1, 1, 2, 4))
    return count, b"".join(request(rng, session) for _ in range(count))


async def run(watch: Watch, seed: int, requests: int, folder: Path) -> None:
    """Sends about this number of requests, one connection after another."""
    rng, router = Random(f"{seed}/board"), make_router(folder / "router", product=True)
    await router.start([f"unix:{folder}/router/r.sock"])
    try:
        async with dashboard(folder / "board", router) as made:
            sessions = made.server._app._sessions
            admin, viewer = (sessions.login(key, "a")[1:] for key in (ADMIN, VIEWER))
            session = Session(admin, viewer)
            left, every, next_sample, talks = requests, max(1, requests // SAMPLE), requests, 0
            while left > 0 and not watch.over:
                count, data = connection(rng, session)
                left -= count
                await _talk(watch, made, rng, count, data)
                # or all later ones would be told to wait for a minute, or to log in again after one has logged out
                sessions._tries.clear()
                sessions._left.clear()
                talks += 1
                if talks % LOOK_EVERY == 0:
                    await _look(watch, made, session)
                if left <= next_sample:
                    next_sample = left - every
                    watch.sample()
            await _settled(watch, made)
            await _look(watch, made, session)
    finally:
        await router.stop()


async def _talk(watch: Watch, made: Dashboard, rng: Random, count: int, data: bytes) -> None:
    """Sends the bytes, and waits for what is answered."""
    got = await talk(watch, made.server._server, rng, data, _answered)
    count_answers(watch, got, _STATUS, EXPECTED_5XX, count, data)


async def _answered(protocol: Any, ours: socket.socket, got: bytearray) -> None:
    """Waits until the server has answered all that it will."""
    quiet_s: float | None = None
    while not protocol.transport.is_closing():
        receive(ours, got)
        cycle = protocol.cycle
        runs = cycle is not None and not cycle.response_complete
        if not runs and not unread(ours) and not protocol.transport.get_write_buffer_size():
            return
        # the rest of the body never comes, or this answer is the stream
        waits = runs and (cycle.more_body or b"text/event-stream" in got)
        if not waits:
            quiet_s = None
        elif quiet_s is None:
            quiet_s = time.monotonic() + QUIET_S
        elif time.monotonic() > quiet_s:
            return
        await asyncio.sleep(0 if quiet_s is None else 0.005)


async def _look(watch: Watch, made: Dashboard, session: Session) -> None:
    """Notes that a page with a session in order is not served."""
    answer = await made.client.get("/api/status", headers={"cookie": session.viewer["cookie"]})
    if answer.status_code != 200 or "engines" not in answer.json():
        watch.note(f"a session in order gets {answer.status_code}: {answer.text[:500]}")


async def _settled(watch: Watch, made: Dashboard) -> None:
    """Notes what is still there when all clients have gone."""
    server = made.server._server
    assert server is not None
    await made.client.aclose()
    made.client = type(made.client)(base_url=made.url, timeout=60)
    try:
        async with asyncio.timeout(HANG_S):
            while server.server_state.connections or server.server_state.tasks or made.stream.readers:
                await asyncio.sleep(0.005)
    except TimeoutError:
        state = server.server_state
        watch.note(
            f"{len(state.connections)} connections and {made.stream.readers} readers are left, and"
            f" {[task.get_stack() for task in state.tasks]}"
        )
