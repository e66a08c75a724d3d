"""A server for the dashboard's page alone: it speaks the contract of `app/dashboard` over a made-up cluster.

    python -m tests.dashboard.server --engines 1024 --port 8002      keys: `admin` and `viewer`

Tests run it in a thread and steer it: `paused` keeps streams open and silent, `cut` breaks all of them, `refusing`
refuses new ones. `away` says why the autoscaler cannot be asked, and `unread` why the router cannot be asked for its
policies. `base` is what a what-if question begins with (None: it cannot be read), and its reading lasts as long as
`reading`. Without `experiments` there are none. The page's files are those of the checkout, with the security headers
that the application sends.
"""

import argparse
import asyncio
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tests.dashboard import answers
from tests.dashboard.synthetic import Cluster

STATIC = Path(__file__).resolve().parents[2] / "app" / "dashboard" / "static"
KEYS = {"admin": "admin", "viewer": "viewer"}
HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
RESUMED_S = 60
COMMENT_S = 10.0

Json = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]


class Server:
    """The server and its cluster. `period_s` is the time between deltas, which the cluster takes for a second."""

    def __init__(self, cluster: Cluster, period_s: float = 1.0, model: str = "smollm2-135m-instruct") -> None:
        self.cluster, self._period_s, self._model = cluster, period_s, model
        self.paused = self.refusing = self.reading = False
        self.experiments = True
        self.away: str | None = None
        self.unread: str | None = None
        self.policy_reads = 0
        self.base: Json | None = answers.BASE
        self.streams = self.resumed = self.snapshots = 0
        self.asked: list[tuple[str, str, Any]] = []
        """Changes as they were asked for: method, path and body."""
        self._kept: deque[Json] = deque(maxlen=RESUMED_S)
        self._readers: set[asyncio.Queue[str | None]] = set()
        self._sessions: dict[str, tuple[str, str]] = {}
        self._policy = answers.policies("flow" not in cluster.absent)
        self._counts: dict[str, int] | None = None
        self._bounds: dict[str, dict[str, int]] | None = None
        self._changes: list[Json] = []
        self._runs = [
            answers.run(name, cluster.at - 4000 + 700 * n)
            for n, name in enumerate(("burst", "burst", "drain"))
        ]
        self._runs.reverse()
        self._whatif: Json = {
            "state": "idle",
            "progress": 0.0,
            "phase": None,
            "message": None,
            "result": None,
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._uvicorn: uvicorn.Server | None = None
        self.url = ""

    # ------------------------------------------------------------------------------------------------- life, steering

    def start(self, port: int = 0) -> None:
        """Serves in a thread, on a free port for 0, and returns when it answers."""
        listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="warning", timeout_graceful_shutdown=1)
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        until = time.monotonic() + 20
        while not self._uvicorn.started:
            if time.monotonic() > until:
                raise TimeoutError("the development server did not start within 20 s")
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends the server and its streams."""
        assert self._uvicorn is not None and self._thread is not None
        self.cut()
        self._uvicorn.should_exit = True
        self._thread.join(20)

    def cut(self) -> None:
        """Breaks every open stream."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: [reader.put_nowait(None) for reader in self._readers])

    def forget_sessions(self) -> None:
        """Ends every session, as a restart with a new secret does."""
        self._sessions.clear()

    def another_changes(self, stage: str, name: str, **params: Any) -> None:
        """Changes a policy as another operator does, by a command: the page learns of it by the event alone."""
        base, was = self._policy["available"][stage][name], self._policy[stage]["name"]
        self._policy[stage] = base | {"params": base["params"] | params}
        self.cluster.event("policy", f"{stage} policy: {was} -> {name}", "info")

    async def _play(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            if self.paused:
                continue
            delta = self.cluster.step()
            self._kept.append(delta)
            text = _event("delta", delta)
            for reader in self._readers:
                reader.put_nowait(text)

    # --------------------------------------------------------------------------------------------------------- routes

    def _app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._loop = asyncio.get_running_loop()
            playing = asyncio.create_task(self._play())
            yield
            playing.cancel()

        routes = [
            Route("/", self._page),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/api/login", self._login, methods=["POST"]),
            Route("/api/logout", self._logout, methods=["POST"]),
            Route("/api/session", self._may(self._session)),
            Route("/api/stream", self._may(self._stream)),
            Route("/api/engines/heat", self._may(self._heat)),
            Route("/api/requests/{name:path}", self._may(self._request)),
            Route("/api/policy", self._may(self._read_policy)),
            Route("/api/policy", self._may(self._set_policy), methods=["PUT"]),
            Route("/api/scale", self._may(self._read_scale)),
            Route("/api/scale", self._may(self._set_scale), methods=["PUT"]),
            Route("/api/audit", self._may(self._audit)),
            Route("/api/undo", self._may(self._undo), methods=["POST"]),
            Route("/api/engines/{name}", self._may(self._set_engine), methods=["PUT"]),
            Route("/api/engines/{name}/drain", self._may(self._drain), methods=["POST"]),
            Route("/api/experiments", self._may(self._experiments)),
            Route("/api/experiments/check", self._may(self._check), methods=["POST"]),
            Route("/api/experiments/start", self._may(self._start), methods=["POST"]),
            Route("/api/experiments/stop", self._may(self._stop), methods=["POST"]),
            Route("/api/experiments/compare", self._may(self._compare)),
            Route("/api/experiments/runs/{name}", self._may(self._run), methods=["GET", "DELETE"]),
            Route("/api/experiments/runs/{name}/{report}", self._may(self._report)),
            Route("/api/whatif/base", self._may(self._base), methods=["POST"]),
            Route("/api/whatif", self._may(self._read_whatif)),
            Route("/api/whatif/start", self._may(self._start_whatif), methods=["POST"]),
            Route("/api/whatif/stop", self._may(self._stop_whatif), methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    def _may(self, endpoint: Endpoint) -> Endpoint:
        """Returns the endpoint behind the session, and for changes behind the token and the admin's role."""

        async def checked(request: Request) -> Response:
            session = self._sessions.get(request.cookies.get("sluice_session", ""))
            if session is None:
                return _refuse(401, "Sign in first.")
            role, csrf = session
            if request.method != "GET":
                if request.headers.get("x-csrf-token") != csrf:
                    return _refuse(403, "The token is missing or wrong: load the page again.")
                if role != "admin":
                    return _refuse(403, "A viewer key may not change anything.")
                body = await request.body()
                self.asked.append((request.method, request.url.path, json.loads(body) if body else None))
            request.state.role, request.state.csrf = role, csrf
            return await endpoint(request)

        return checked

    async def _page(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    async def _login(self, request: Request) -> Response:
        role = KEYS.get((await request.json()).get("key"))
        if role is None:
            return _refuse(401, "This key is neither a viewer key nor an admin key.")
        token, csrf = secrets.token_hex(8), secrets.token_hex(8)
        self._sessions[token] = role, csrf
        answer = JSONResponse({"role": role, "csrf": csrf})
        answer.set_cookie("sluice_session", token, httponly=True, samesite="strict")
        return answer

    async def _logout(self, request: Request) -> Response:
        self._sessions.pop(request.cookies.get("sluice_session", ""), None)
        return JSONResponse({})

    async def _session(self, request: Request) -> Response:
        state = request.state
        return JSONResponse(
            {
                "role": state.role,
                "csrf": state.csrf,
                "version": "0.0.0",
                "model": self._model,
                "experiments": self.experiments,
            }
        )

    async def _stream(self, request: Request) -> Response:
        if self.refusing:
            return _refuse(503, "The dashboard starts.")
        last = request.headers.get("last-event-id")
        missed = [delta for delta in self._kept if last is not None and delta["seq"] > int(last)]
        whole = last is not None and (
            int(last) == self.cluster.seq or (missed and missed[0]["seq"] == int(last) + 1)
        )
        first = (
            [_event("delta", delta) for delta in missed]
            if whole
            else [_event("snapshot", self.cluster.snapshot())]
        )
        self.resumed += bool(whole)
        self.snapshots += not whole
        reader: asyncio.Queue[str | None] = asyncio.Queue()
        self._readers.add(reader)
        self.streams += 1

        async def body() -> AsyncIterator[str]:
            try:
                yield "retry: 2000\n\n" + "".join(first)
                while True:
                    try:
                        text = await asyncio.wait_for(reader.get(), COMMENT_S)
                    except TimeoutError:
                        text = ": still here\n\n"
                    if text is None:
                        return
                    yield text
            finally:
                self._readers.discard(reader)
                self.streams -= 1

        return StreamingResponse(
            body(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _heat(self, request: Request) -> Response:
        return JSONResponse(self.cluster.heat(request.query_params.get("ids", "").split(",")[:128]))

    async def _request(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = self.cluster.request(name)
        if found is None:
            return JSONResponse(
                {"request": None, "explain": None, "explain_message": f"No decision is known for {name!r}."}
            )
        decode = [one for one in self.cluster.engines if one.startswith("decode")]
        return JSONResponse(
            {"request": found, "explain": answers.explain(name, found["at"], decode), "explain_message": None}
        )

    # -------------------------------------------------------------------------------------------------------- control

    def _changed(self, what: str, before: Any, after: Any) -> Response:
        change = {
            "id": f"c{len(self._changes) + 1}",
            "at": self.cluster.at,
            "who": "admin key …9f2c",
            "what": what,
            "before": before,
            "after": after,
            "undone": False,
            "can_undo": what != "drain",
        }
        self._changes.append(change)
        self.cluster.event("admin", f"{what}: by admin", "info")
        return JSONResponse({"id": change["id"], "before": before, "after": after})

    async def _read_policy(self, _: Request) -> Response:
        self.policy_reads += 1
        return JSONResponse(self._policy) if self.unread is None else _refuse(503, self.unread)

    async def _set_policy(self, request: Request) -> Response:
        asked = await request.json()
        before, after = {}, {}
        for stage, choice in asked.items():
            if stage == "dispatch":
                before[stage] = {name: self._policy[stage][name] for name in choice}
                self._policy[stage] = self._policy[stage] | choice
                after[stage] = choice
                continue
            base = self._policy["available"][stage][choice["name"]]
            before[stage] = {name: self._policy[stage][name] for name in ("name", "params")}
            self._policy[stage] = base | {"params": base["params"] | choice.get("params", {})}
            after[stage] = {name: self._policy[stage][name] for name in ("name", "params")}
        return self._changed("policy", before, after)

    async def _read_scale(self, _: Request) -> Response:
        if self.away is not None:
            return _refuse(503, self.away)
        if "scaling" in self.cluster.absent:
            return _refuse(
                404, "No autoscaler is connected to the router: set `scaling` in the configuration."
            )
        return JSONResponse(answers.scaling(self._counts, self._bounds))

    async def _set_scale(self, request: Request) -> Response:
        asked = await request.json()
        if asked.get("counts", {}).get("decode", 2) < 2:
            return _refuse(400, "decode = 1 is below its group's min of 2; nothing was changed")
        if asked.get("plan"):
            return JSONResponse(answers.scaling(asked.get("counts") or self._counts, asked.get("bounds")))
        if "bounds" in asked:
            before = {name: dict.fromkeys(own, 16) for name, own in asked["bounds"].items()}
            self._bounds = asked["bounds"]
            return self._changed("bounds", before, self._bounds)
        before, self._counts = self._counts, asked.get("counts")
        return self._changed("scale", before, self._counts)

    async def _set_engine(self, request: Request) -> Response:
        engine = self.cluster.engines[request.path_params["name"]]
        asked = await request.json()
        before = {name: engine[name] for name in asked}
        engine.update(asked)
        return self._changed("engine", before, asked)

    async def _drain(self, request: Request) -> Response:
        engine = self.cluster.engines[request.path_params["name"]]
        before, engine["state"] = engine["state"], "draining"
        return self._changed("drain", {"state": before}, {"state": "draining"})

    async def _audit(self, _: Request) -> Response:
        return JSONResponse({"changes": self._changes})

    async def _undo(self, request: Request) -> Response:
        name = (await request.json())["id"]
        change = next(one for one in self._changes if one["id"] == name)
        change["undone"], change["can_undo"] = True, False
        if change["what"] == "policy":
            for stage, choice in change["before"].items():
                self._policy[stage] = self._policy[stage] | choice
        return self._changed(f"undo of {change['what']}", change["after"], change["before"])

    # ---------------------------------------------------------------------------------------- experiments and what-if

    async def _experiments(self, _: Request) -> Response:
        running = next((one for one in self._runs if one["state"] == "running"), None)
        if running is not None:
            running["progress"] = min(1.0, running["progress"] + 0.2)
            if running["progress"] >= 1.0:
                running.update(answers.run(running["name"], running["began_at"]))
                running = None
        bounds = {"rate_per_s": 100.0, "duration_s": 1800.0, "disk_bytes": 1_000_000_000, "may_kill": False}
        return JSONResponse(
            {
                "shipped": answers.SHIPPED,
                "runs": self._runs,
                "folder": "/var/lib/sluice/runs",
                "running": running,
                "bounds": bounds,
            }
        )

    async def _check(self, request: Request) -> Response:
        text = (await request.json())["text"]
        problems = (
            []
            if "phases" in text
            else ["load.phases is missing: give at least one phase with for_s and rate_per_s"]
        )
        return JSONResponse(
            {"ok": not problems, "problems": problems, "plan": None if problems else answers.PLAN}
        )

    async def _start(self, request: Request) -> Response:
        if any(one["state"] == "running" for one in self._runs):
            return _refuse(409, "An experiment runs already: stop it first.")
        name = (await request.json())["text"].split("\n")[0].partition(": ")[2] or "unnamed"
        self._runs.insert(0, answers.run(name, self.cluster.at, "running", 0.2))
        return JSONResponse(self._runs[0])

    async def _stop(self, _: Request) -> Response:
        for one in self._runs:
            if one["state"] == "running":
                one.update(answers.run(one["name"], one["began_at"]) | {"state": "stopped"})
        return JSONResponse({})

    async def _run(self, request: Request) -> Response:
        found = next((one for one in self._runs if one["id"] == request.path_params["name"]), None)
        if found is None:
            return _refuse(404, "There is no such run.")
        if request.method == "DELETE":
            self._runs.remove(found)
            return JSONResponse({})
        return JSONResponse(
            {
                "run": found,
                "text": answers.SHIPPED[0]["text"],
                "versions": {"sluice": "0.0.0", "ray": "0", "commit": "0" * 12},
                "samples": answers.samples(1.0, max(2, int(120 * found["progress"]))),
                "actions": answers.PLAN["actions"],
                "requests": {"n": 1650},
            }
        )

    async def _compare(self, request: Request) -> Response:
        return JSONResponse(answers.compared(request.query_params["ids"].split(","), self._runs))

    async def _report(self, request: Request) -> Response:
        name = f'attachment; filename="{request.path_params["report"]}"'
        return PlainTextResponse("a report", headers={"content-disposition": name})

    async def _base(self, _: Request) -> Response:
        while self.reading:
            await asyncio.sleep(0.02)
        return _refuse(503, "No request has ended lately.") if self.base is None else JSONResponse(self.base)

    async def _read_whatif(self, _: Request) -> Response:
        state = self._whatif
        if state["state"] == "running":
            state["progress"] = min(1.0, state["progress"] + 0.5)
            if state["progress"] >= 1.0:
                state.update(state="done", phase=None, result=answers.simulated(state.pop("changes")))
        return JSONResponse({name: value for name, value in state.items() if name != "changes"})

    async def _start_whatif(self, request: Request) -> Response:
        asked = await request.json()
        self._whatif = {
            "state": "running",
            "progress": 0.0,
            "phase": "base, seed 1",
            "message": None,
            "result": None,
            "changes": asked["changes"],
        }
        return JSONResponse({"id": "w1"})

    async def _stop_whatif(self, _: Request) -> Response:
        self._whatif = {
            "state": "idle",
            "progress": 0.0,
            "phase": None,
            "message": "Stopped.",
            "result": None,
        }
        return JSONResponse({})


def _event(name: str, value: Json) -> str:
    return f"id: {value['seq']}\nevent: {name}\ndata: {json.dumps(value)}\n\n"


def _refuse(status: int, message: str) -> Response:
    return JSONResponse({"message": message}, status)


def main() -> None:
    """Serves until it is interrupted."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    options.add_argument("--engines", type=int, default=16)
    options.add_argument("--port", type=int, default=8002)
    options.add_argument(
        "--hostile", action="store_true", help="HTML in the names of model, nodes and requests"
    )
    given = options.parse_args()
    server = Server(Cluster(given.engines, hostile=given.hostile))
    server.start(given.port)
    print(f"{server.url} with {given.engines} engines; keys: {', '.join(KEYS)}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        server.stop()


if __name__ == "__main__":
    main()
