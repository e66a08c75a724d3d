"""The dashboard's HTTP API and its listener.

The routes read what the feed knows, or ask the router (`changes`). Who may call them is decided before they run
(`guard`). Errors are `{"message"}`, in words that a page can show.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from actors import garbage
from app.dashboard.auth import COOKIE, Sessions, Who
from app.dashboard.changes import Changes
from app.dashboard.config import Settings
from app.dashboard.feed import Feed
from app.dashboard.guard import Guard, address_of
from app.dashboard.refusal import Refusal
from app.dashboard.registry import exposition
from app.dashboard.stream import MOST_READERS, Stream
from app.fleet.status import quarantined_by_engine, shown_engine, shown_flow, shown_load, shown_sleep
from app.listening import Pipelined, bound_socket, uvicorn_config, uvicorn_server

log = logging.getLogger("ray.serve.dashboard")

STATIC = Path(__file__).parent / "static"
MOST_HEAT = 128
"""Engines whose heat strips one answer has."""
MOST_CONNECTIONS = 512
STOP_S = 2.0
"""Seconds for running answers when the server stops."""
RETRY_S = 3.0
"""Seconds between attempts to listen on a port that is taken."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[Request], Awaitable[Response]]


class DashboardApp:
    """The ASGI application. `more` are further routes (experiments and what-if, `run_routes.routes`)."""

    def __init__(
        self,
        settings: Settings,
        feed: Feed,
        stream: Stream,
        changes: Changes,
        sessions: Sessions,
        more: Sequence[BaseRoute] = (),
    ) -> None:
        self._settings, self._feed, self._stream = settings, feed, stream
        self._changes, self._sessions = changes, sessions
        self._experiments = bool(more)
        gets: dict[str, Handler] = {
            "/": self._page,
            "/health": self._health,
            "/metrics": self._metrics,
            "/api/session": self._session,
            "/api/status": self._status,
            "/api/engines/heat": self._heat,
            "/api/requests/{request:path}": self._request,
            "/api/audit": self._audit,
        }
        routes: list[BaseRoute] = [Route(path, handler) for path, handler in gets.items()]
        routes += [
            Route("/api/stream", _Streamed(self)),
            Route("/api/login", self._login, methods=["POST"]),
            Route("/api/logout", self._logout, methods=["POST"]),
            Route("/api/policy", self._policy, methods=["GET", "PUT"]),
            Route("/api/scale", self._scale, methods=["GET", "PUT"]),
            Route("/api/undo", self._undo, methods=["POST"]),
            Route("/api/engines/{engine}", self._engine, methods=["PUT"]),
            Route("/api/engines/{engine}/drain", self._drain, methods=["POST"]),
            *more,
            Mount("/static", _Static(directory=STATIC, check_dir=False)),
        ]
        self.routes = routes
        handlers: Any = {Refusal: _refused, 404: _not_there, 405: _not_there, 500: _bug}
        self.asgi = Guard(Starlette(routes=routes, exception_handlers=handlers), sessions, settings)

    # ------------------------------------------------------------------------------------------------------ session

    async def _login(self, request: Request) -> Response:
        asked = await _object(request)
        role, cookie, csrf = self._sessions.login(asked.get("key"), address_of(dict(request.scope)))
        answer = _json({"role": role, "csrf": csrf})
        answer.set_cookie(
            COOKIE,
            cookie,
            max_age=max(0, int(self._sessions.session_s)),
            httponly=True,
            samesite="strict",
            secure=self._settings.secure,
        )
        log.info("login as %s from %s", role, address_of(dict(request.scope)))
        return answer

    async def _logout(self, request: Request) -> Response:
        self._sessions.logout(request.cookies.get(COOKIE))
        answer = _json({})
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=self._settings.secure)
        return answer

    async def _session(self, request: Request) -> Response:
        who = _who(request)
        return _json(
            {
                "role": who.role,
                "csrf": who.csrf,
                "version": self._settings.version,
                "model": self._settings.model,
                "experiments": self._experiments,
            }
        )

    # -------------------------------------------------------------------------------------------------------- reads

    async def _page(self, request: Request) -> Response:
        page = STATIC / "index.html"
        if not page.is_file():
            raise Refusal(404, f"the page is missing ({page}): the API is at /api, figures are at /metrics")
        return FileResponse(page, headers={"cache-control": "no-cache"})

    async def _health(self, request: Request) -> Response:
        line = self._feed.line
        return _json({"live": True, "ready": line.get("ready"), "detail": line.get("detail")})

    async def _metrics(self, request: Request) -> Response:
        missing = self._feed.registry.missing
        if missing is not None:
            raise Refusal(503, f"there are no sums yet: {missing}")
        return Response(exposition(self._feed.registry, self._feed.seen), media_type=TEXT)

    async def _status(self, request: Request) -> Response:
        return _json(status_of(self._feed, self._settings.model))

    async def _heat(self, request: Request) -> Response:
        engines = self._feed.engines.shown()
        group, ids = request.query_params.get("group"), request.query_params.get("ids")
        if (group is None) == (ids is None):
            raise Refusal(400, "give either group or ids (engines' ids, separated by commas)")
        asked = (
            ids.split(",") if ids is not None else [e for e, one in engines.items() if one["group"] == group]
        )
        if len(asked) > MOST_HEAT:
            raise Refusal(400, f"{len(asked)} engines are too many: ask for {MOST_HEAT} at most, by ids")
        return _json(self._feed.heat.shown(asked))

    async def _request(self, request: Request) -> Response:
        wanted = request.path_params["request"]
        kept = self._feed.requests.find(wanted)
        explained, why = None, None
        # the router knows it by its attempts even where a client has used an id twice
        known = kept["attempts"][0] if kept is not None and kept["attempts"] else wanted
        try:
            explained = await self._changes.read("explain", {"id": known})
        except Refusal as refusal:
            why = str(refusal)
        return _json({"request": kept, "explain": explained, "explain_message": why})

    async def _audit(self, request: Request) -> Response:
        return _json({"changes": self._changes.audit()})

    # ------------------------------------------------------------------------------------------------------ changes

    async def _policy(self, request: Request) -> Response:
        if request.method == "PUT":
            return _json(await self._changes.policy(await request.body(), _who(request).name))
        return _json(await self._changes.read("policy"))

    async def _scale(self, request: Request) -> Response:
        if request.method == "PUT":
            return _json(await self._changes.scale(await _object(request), _who(request).name))
        return _json(await self._changes.read("scale"))

    async def _engine(self, request: Request) -> Response:
        engine, asked = request.path_params["engine"], await _object(request)
        return _json(await self._changes.engine(engine, asked, _who(request).name))

    async def _drain(self, request: Request) -> Response:
        engine = request.path_params["engine"]
        return _json(await self._changes.engine(engine, {"duty": "warm"}, _who(request).name))

    async def _undo(self, request: Request) -> Response:
        asked = await _object(request)
        return _json(await self._changes.undo(str(asked.get("id", "")), _who(request).name))

    # ------------------------------------------------------------------------------------------------------- stream

    async def stream(self, scope: Any, receive: Any, send: Any) -> None:
        """Serves the event stream to one reader. Raises Refusal 503 if there are too many."""
        if self._stream.readers >= MOST_READERS:
            raise Refusal(503, f"{MOST_READERS} pages are open: close one")
        given = next((value for name, value in scope["headers"] if name == b"last-event-id"), b"")
        last_id = int(given) if given.isdigit() and len(given) < 16 else None
        await self._stream.serve(last_id, receive, send, scope["state"]["holds"])


class _Streamed:
    """An ASGI endpoint; Starlette takes a class's instance for one."""

    def __init__(self, app: DashboardApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app.stream(scope, receive, send)


class _Static(StaticFiles):
    """The files of the page, which browsers ask for again and get only when they have changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["cache-control"] = "no-cache"
        return answer


def status_of(feed: Feed, model: str) -> dict[str, Any]:
    """Returns the whole fleet in the form of `/sluice/status`. A figure that nobody has reported is null."""
    line, engines, status = feed.line, feed.engines, feed.engines.status
    statuses = {one.engine_id: one for one in status.statuses} if status else {}
    held = quarantined_by_engine(status.quarantined if status else ())
    standby = None if engines.fleet is None else engines.fleet.standby
    policies = line["policies"]
    return {
        "ready": line["ready"],
        "detail": line["detail"],
        "model": model,
        **({"sleep": shown_sleep(standby)} if standby is not None and standby.wake_limit_s else {}),
        "router": {
            "connected": line["router"]["connected"],
            "policy": {"prefill": policies["prefill"], "decode": policies["decode"]}
            if engines.fleet
            else None,
            "fallback": line["router"]["fallback"] > 0,
        },
        "load": shown_load(status.load) if status is not None and status.load is not None else None,
        "engines": [
            shown_engine(info, statuses.get(engine), held.get(engine, []))
            for engine, info in sorted(engines.infos.items())
        ],
        **({"flow": shown_flow(status.flows)} if status is not None and status.flows else {}),
        "requests": {name: line[name] for name in ("in_flight", "queued", "pool")},
        "leases": line["leases"],
        "replica": {"id": "dashboard", "pid": os.getpid(), "ingresses": line["ingresses"]},
    }


def _who(request: Request) -> Who:
    who = request.scope["state"]["who"]
    assert isinstance(who, Who)
    return who


def _json(value: Any, status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(orjson.dumps(value), status, headers=headers, media_type="application/json")


async def _object(request: Request) -> dict[str, Any]:
    """Returns the body, a JSON object; an empty body is an empty one. Raises Refusal 400."""
    body = await request.body()
    try:
        found = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(400, "the body must be a JSON object")
    return found


async def _refused(request: Request, error: Refusal) -> Response:
    return _json({"message": str(error)}, error.status)


async def _not_there(request: Request, error: Any) -> Response:
    status = int(error.status_code)
    what = "takes no" if status == 405 else "does not exist, for"
    return _json({"message": f"{request.url.path} {what} {request.method}"}, status)


async def _bug(request: Request, error: Exception) -> Response:
    return _json({"message": "internal error; the log of the deployment Dashboard says more"}, 500)


class DashboardServer:
    """Listens for one application, on a loop that already runs. A port that is taken is tried again: nothing of serving
    depends on the dashboard. `port` is the one that it has, or None.
    """

    def __init__(self, app: DashboardApp, settings: Settings, stream: Stream) -> None:
        self._app, self._settings, self._stream = app, settings, stream
        self.port: int | None = None
        self._server: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listens, or begins to try again."""
        try:
            await self._listen()
        except OSError as error:
            log.warning(
                "the dashboard %s; it tries again every %g s. Another port is set by dashboard.port, 0 turns it off",
                error, RETRY_S,
            )  # fmt: skip
            self._tasks.append(asyncio.create_task(self._try_again(), name="dashboard port"))

    async def stop(self) -> None:
        """Ends all streams and stops listening. Idempotent."""
        self._stream.stop()
        server, self._server = self._server, None
        if server is not None:
            server.should_exit = True
            await server.shutdown()
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _try_again(self) -> None:
        while self._server is None:
            await asyncio.sleep(RETRY_S)
            try:
                await self._listen()
            except OSError:
                continue

    async def _listen(self) -> None:
        settings = self._settings
        sock = bound_socket(settings.host, settings.port)
        try:
            config = uvicorn_config(
                self._app.asgi,
                settings.tls_cert,
                settings.tls_key,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(STOP_S),
                http=Pipelined,
            )
            server = uvicorn_server(config)
            await server.startup([sock])
        except BaseException:
            sock.close()
            raise
        self.port = sock.getsockname()[1]
        self._server = server
        self._tasks.append(asyncio.create_task(server.main_loop(), name="dashboard server"))
        garbage.settle()
        log.info("the dashboard listens on %s:%d", settings.host, self.port)
