"""The gate in front of every route: it refuses what comes from elsewhere, from nobody, or is too large.

    Host        an IP address, localhost, or one of `dashboard.hosts`; a name that was rebound to this machine is
    refused Origin      of a change, where a browser sends one: this server who         a session's cookie or a key as
    bearer token; the page itself, the login, and on loopback /metrics and
                /health need neither
    CSRF        a change by a session carries its token in `x-csrf-token`
    role        viewers read, administrators change

Every answer gets the headers that keep a browser from running or framing anything else.
"""

import ipaddress
from collections.abc import Awaitable, Callable
from functools import partial
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

import orjson

from app.dashboard.auth import COOKIE, Sessions
from app.dashboard.config import Settings
from app.dashboard.refusal import Refusal

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

READS = ("GET", "HEAD")
MAX_BODY_BYTES = 2 * 2**20
"""Bytes of the largest body. A policy with a heatmap has some hundred kB."""

SECURITY: list[tuple[bytes, bytes]] = [
    (
        b"content-security-policy",
        b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Guard:
    """An ASGI application around another. It puts the caller into `scope["state"]["who"]`, and a function that says
    whether the caller may still do this into `scope["state"]["holds"]`.
    """

    def __init__(self, app: Any, sessions: Sessions, settings: Settings) -> None:
        self._app, self._sessions, self._settings = app, sessions, settings
        self._hosts = {"localhost", *(name.lower() for name in settings.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the dashboard does not speak {scope['type']}")
        started = False

        async def guarded(message: dict[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *SECURITY]}
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, _bounded(receive), guarded)
        except Refusal as refusal:
            if started:
                raise
            await _refuse(refusal, guarded)

    def _check(self, scope: Scope) -> None:
        """Lets a request pass. Raises Refusal."""
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        method, path = scope["method"], scope["path"]
        host = headers.get("host", "")
        if not self._is_ours(host):
            raise Refusal(
                403,
                f"this server is not called {host[:100]!r}: use its address, or add the name to dashboard.hosts",
            )
        reads = method in READS
        origin = headers.get("origin")
        if not reads and origin is not None and _host_of(origin) != host.lower():
            raise Refusal(403, f"a page of {origin[:100]!r} may change nothing here")
        state = scope.setdefault("state", {})
        if self._is_open(method, path):
            return
        authorization = headers.get("authorization")
        cookie = _cookie(headers.get("cookie", ""))
        who = state["who"] = self._sessions.who(cookie, authorization, address_of(scope))
        state["holds"] = partial(self._sessions.holds, who.role, cookie, authorization)
        if reads:
            return
        if who.csrf is not None and headers.get("x-csrf-token") != who.csrf:
            raise Refusal(403, "the header x-csrf-token is missing or wrong: load the page again")
        if who.role != "admin" and path != "/api/logout":
            raise Refusal(403, "this key may look and change nothing: log in with an admin key")

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self._hosts:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_open(self, method: str, path: str) -> bool:
        if path == "/api/login":
            return method == "POST"
        if method not in READS:
            return False
        if path in ("/metrics", "/health"):
            return self._settings.on_loopback
        return path == "/" or path.startswith("/static/")


def address_of(scope: Scope) -> str:
    """Returns the address of the client."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def _host_of(origin: str) -> str | None:
    """Returns the host, with its port, of an Origin header; None for one that is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _cookie(header: str) -> str | None:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def _bounded(receive: Receive) -> Receive:
    """Returns `receive` with a bound on the bytes of the body; beyond it Refusal 413 is raised."""
    size = 0

    async def bounded() -> dict[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise Refusal(413, f"a request may have {MAX_BODY_BYTES} bytes: send less")
        return message

    return bounded


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = orjson.dumps({"message": str(refusal)})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status >= 400:
        # what was not read of the request must not be taken for the next one
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
