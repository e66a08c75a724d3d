"""`sluice.admin` and the dashboard: the SDK can do all that the page can, and all that it does exists."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.routing import Match, Route

from app.dashboard.auth import Keys, Sessions
from app.dashboard.config import Settings
from app.dashboard.feed import Feed
from app.dashboard.run_routes import routes as run_routes
from app.dashboard.server import STATIC, DashboardApp
from app.dashboard.stream import Stream
from sluice import ApiError, AuthenticationError, InvalidResponseError
from sluice.admin import Dashboard
from tests.app.dashboard.parts import ADMIN, VIEWER, dashboard
from tests.app.ingress.rig import MODEL, pair, rig, until

CALLS: dict[str, Callable[[Dashboard], Any]] = {
    "session": lambda d: d.session(),
    "status": lambda d: d.status(),
    "metrics": lambda d: d.metrics(),
    "watch": lambda d: next(d.watch()),
    "heat": lambda d: d.heat(["a", "b"]),
    "request": lambda d: d.request("a/b"),
    "policies": lambda d: d.policies(),
    "set_policies": lambda d: d.set_policies(decode="netkv"),
    "scaling": lambda d: d.scaling(),
    "plan": lambda d: d.plan(bounds={"decode": {"max": 3}}),
    "scale": lambda d: d.scale({"decode": 2}),
    "assign": lambda d: d.assign("decode-1", duty="warm"),
    "drain": lambda d: d.drain("decode-1"),
    "changes": lambda d: d.changes(),
    "undo": lambda d: d.undo("c1"),
    "experiments": lambda d: d.experiments(),
    "check_experiment": lambda d: d.check_experiment("name: x"),
    "start_experiment": lambda d: d.start_experiment("name: x"),
    "stop_experiment": lambda d: d.stop_experiment(),
    "run": lambda d: d.run("r1"),
    "delete_run": lambda d: d.delete_run("r1"),
    "compare_runs": lambda d: d.compare_runs(["r1", "r2"]),
    "report": lambda d: d.report("r1", "png"),
    "whatif_base": lambda d: d.whatif_base(),
    "start_whatif": lambda d: d.start_whatif("text", [], "0123456789abcdef"),
    "whatif": lambda d: d.whatif(),
    "stop_whatif": lambda d: d.stop_whatif(),
}
"""One call of each method; a method without one fails the first test."""

OF_A_BROWSER = {("POST", "/api/login"), ("POST", "/api/logout"), ("GET", "/"), ("GET", "/health")}
"""Routes that a client with a key has no use for: sessions, the page itself, and a probe."""

Route_ = tuple[str, str]


@pytest.fixture(scope="module")
def served() -> list[Route]:
    """The routes of the dashboard's server, with those of experiments and what-if."""
    settings = Settings("127.0.0.1", 0, "m", "0.0", Path("unused"))
    feed, none = Feed({}), cast(Any, None)
    sessions, more = Sessions(Keys((), ()), 60.0), run_routes(none, none)
    app = DashboardApp(settings, feed, Stream(feed.snapshot), none, sessions, more)
    return [route for route in app.routes if isinstance(route, Route)]


def named(served: list[Route], method: str, path: str) -> Route_:
    """Returns the route that serves a request; the test fails if none does."""
    scope = {"type": "http", "method": method, "path": path, "headers": []}
    for route in served:
        if route.matches(scope)[0] is Match.FULL:
            return method, route.path
    raise AssertionError(f"the dashboard has no {method} {path}")


def of_the_page(served: list[Route]) -> set[Route_]:
    """Returns the routes that the page's modules ask by `get`, `post`, `put` and `remove` of `api.js`."""
    methods = {"get": "GET", "post": "POST", "put": "PUT", "remove": "DELETE"}
    found = set()
    for module in STATIC.rglob("js/**/*.js"):
        text = module.read_text()
        if module.name == "api.js":
            continue
        calls = re.findall(r"(?<![.\w])(get|post|put|remove)\(", text)
        paths = re.findall(r"(?<![.\w])(get|post|put|remove)\([\"`](/api/[^\"`]*)", text)
        assert len(calls) == len(paths), f"{module.name}: write the path of each call where it is made"
        for name, path in paths:
            bare = re.sub(r"\$\{[^}]*\}", "x", path).partition("?")[0]
            found.add(named(served, methods[name], bare))
    return found


def of_the_sdk(served: list[Route]) -> dict[str, Route_]:
    """Returns the route that each method of the SDK asks."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(418, json={"message": "seen"})

    found = {}
    with (
        httpx.Client(transport=httpx.MockTransport(answer)) as http,
        Dashboard(key="k", http_client=http) as d,
    ):
        for method, call in CALLS.items():
            asked.clear()
            with pytest.raises(ApiError):
                call(d)
            (request,) = asked
            assert request.headers["authorization"] == "Bearer k"
            found[method] = named(served, request.method, request.url.path)
    return found


def changes(routes: set[Route_]) -> set[Route_]:
    return {(method, path) for method, path in routes if method != "GET"} - OF_A_BROWSER


def test_each_method_of_the_sdk_asks_a_route_and_each_route_has_a_method(served: list[Route]) -> None:
    own = {n for n, _ in inspect.getmembers(Dashboard, inspect.isfunction) if not n.startswith("_")} - {
        "close"
    }
    assert set(CALLS) == own
    all_routes = {
        (method, route.path) for route in served for method in (route.methods or {"GET"}) if method != "HEAD"
    }
    assert set(of_the_sdk(served).values()) == all_routes - OF_A_BROWSER


def test_what_the_page_changes_the_sdk_can_change_and_the_other_way_round(served: list[Route]) -> None:
    page, sdk = of_the_page(served), set(of_the_sdk(served).values())
    assert changes(page) == changes(sdk)
    assert page - OF_A_BROWSER <= sdk
    assert len(changes(sdk)) == 12


@pytest.mark.usefixtures("sums_at_once")
async def test_a_script_watches_changes_and_undoes(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router, model=MODEL) as board:
        await until(lambda: len(board.feed.ingresses) == 1, "an ingress")
        await until(lambda: board.feed.line.get("ready"), "an application that is ready")
        # an id may have a slash
        headers = {"x-request-id": "team/42"}
        answer = await made.client.post("/v1/chat/completions", json=made.chat(), headers=headers)
        shown_id = answer.headers["x-request-id"]
        assert shown_id.startswith("team/42")
        await until(lambda: board.feed.requests.find(shown_id), "the request")
        await asyncio.to_thread(script, board.url, shown_id)
        assert made.router.dispatcher.decode.name == "join_shortest_queue"


def script(url: str, shown_id: str) -> None:
    with Dashboard(url, key=ADMIN) as d:
        assert d.session()["role"] == "admin"
        watched = d.watch()
        (first, snapshot), (second, delta) = next(watched), next(watched)
        assert (first, second, delta["seq"]) == ("snapshot", "delta", snapshot["seq"] + 1)
        watched.close()
        seen = d.request(shown_id)
        assert seen.request is not None and seen.explain is not None
        assert seen.explain.decisions[0].action == "RoutePrefill"
        assert [engine.id for engine in d.status().engines] == ["d", "p"]
        assert set(d.heat(["d"])["engines"]) == {"d"}
        change = d.set_policies(decode="netkv")
        assert (change.before["decode"]["name"], d.policies().decode.name) == ("join_shortest_queue", "netkv")
        assert d.drain("p").after == {"role": "prefill", "duty": "warm"}
        assert d.undo(change.id).after == change.before
        assert [one.what for one in d.changes()] == [
            "undo: policy: decode netkv", "engine p: warm", "policy: decode netkv"
        ]  # fmt: skip
        assert d.changes()[-1].undone
        with pytest.raises(ApiError, match="No autoscaler") as caught:
            d.scale({"decode": 2})
        assert caught.value.status_code == 404
        with pytest.raises(ApiError, match="undone already") as caught:
            d.undo(change.id)
        assert caught.value.status_code == 409
    with Dashboard(url, key=VIEWER) as d:
        assert d.metrics().total("sluice_requests_total", code="200", model=MODEL) == 1
        with pytest.raises(ApiError) as caught:
            d.drain("p")
        assert caught.value.status_code == 403
    with Dashboard(url, key="wrong") as d, pytest.raises(AuthenticationError):
        d.status()


def test_an_answer_that_is_no_object_is_said() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=json.dumps([1]))

    with (
        httpx.Client(transport=httpx.MockTransport(answer)) as http,
        Dashboard(http_client=http) as d,
        pytest.raises(InvalidResponseError, match="expected a JSON object"),
    ):
        d.session()


def test_a_watcher_that_has_fallen_behind_is_told_that_it_gets_a_new_snapshot() -> None:
    sent = [("snapshot", 1), ("delta", 2), ("snapshot", 9), ("delta", 10)]

    def answer(request: httpx.Request) -> httpx.Response:
        text = "".join(f'event: {name}\nid: {seq}\ndata: {{"seq": {seq}}}\n\n' for name, seq in sent)
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    with (
        httpx.Client(transport=httpx.MockTransport(answer)) as http,
        Dashboard("http://board", key=ADMIN, http_client=http) as client,
    ):
        assert [(name, value["seq"]) for name, value in client.watch()] == sent
