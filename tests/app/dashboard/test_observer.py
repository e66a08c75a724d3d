"""A real router, two ingresses and a dashboard on sockets: what ingresses count arrives, and nothing waits for it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.scaling.bounds import bounds_of
from actors.scaling.control import Controller
from actors.scaling.fleet import Deployed, Fleet, Group, Replica
from actors.scaling.server import Autoscaler
from actors.telemetry import logs
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.sockets import connect
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.metrics import IngressMetrics
from policies.scaling import registry
from policies.state.views import Role
from tests.app.dashboard.parts import ADMIN, Dashboard, dashboard
from tests.app.ingress.rig import MODEL, Rig, ScriptedEngine, pair, rig, until

BEARER = {"authorization": f"Bearer {ADMIN}"}


@asynccontextmanager
async def second_ingress(made: Rig) -> AsyncIterator[IngressMetrics]:
    """Another ingress at the router of a rig. It has no listener; its figures are what the test counts."""
    metrics = IngressMetrics(MODEL)

    async def find() -> tuple[str, ...]:
        return made.router.addresses

    config = IngressConfig(served_names=(MODEL,), replica_id="second")
    connections = IngressConnections(config, Identity("ingress", "second"), find, metrics)
    await connections.start()
    try:
        yield metrics
    finally:
        await connections.stop()


def counted(board: Dashboard, name: str) -> float:
    one = board.feed.registry.sums().get(name)
    return 0.0 if one is None else sum(numbers[0] for _, numbers in one.series)


@pytest.mark.usefixtures("sums_at_once")
async def test_what_two_ingresses_count_is_summed_and_requests_are_seen_whole(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router, model=MODEL) as board:
        assert made.router.status().ingresses == 1
        await until(lambda: len(board.feed.ingresses) == 1, "an ingress at the dashboard")
        # the scripted engines answer whoever has connected last
        answers = [await made.client.post("/v1/chat/completions", json=made.chat()) for _ in range(5)]
        async with second_ingress(made) as second:
            await until(lambda: len(board.feed.ingresses) == 2, "two ingresses at the dashboard")
            second.answered(200, "batch")
            second.retries.labels("decode", "kv_load").inc()
            await until(lambda: counted(board, "sluice_requests_total") == 6, "6 requests in the sums")
            assert counted(board, "sluice_retries_total") == 1
            shown_id = answers[-1].headers["x-request-id"]
            await until(lambda: board.feed.requests.find(shown_id), "the last request")
            answer = (await board.client.get(f"/api/requests/{shown_id}", headers=BEARER)).json()
            names = [part["name"] for part in answer["request"]["parts"]]
            assert names == ["queue", "prefill", "pool", "transfer", "decode"]
            assert [part["engine"] for part in answer["request"]["parts"]] == [None, "p", "p", "d", "d"]
            assert answer["explain"]["decisions"][0]["action"] == "RoutePrefill"
            assert answer["request"]["output_tokens"] == 4
            text = (await board.client.get("/metrics")).text
            series = 'sluice_requests_total{class="standard",code="200",model="tiny",observer="dashboard"}'
            assert f"{series} 5.0" in text
            assert 'sluice_engine_prefill_tokens_total{engine="p",role="prefill"} 7.0' in text
            status = (await board.client.get("/api/status", headers=BEARER)).json()
            own = (await made.client.get("/sluice/status")).json()
            for part in ("ready", "detail", "model", "engines", "leases", "requests"):
                assert status[part] == own[part]
            assert status["router"] == own["router"]
        await until(lambda: len(board.feed.ingresses) == 1, "one ingress")
        assert counted(board, "sluice_requests_total") == 6
        # an observer is no ingress: shares of engines and windows of the autoscaler do not count it
        assert made.router.status().ingresses == 1


async def test_a_change_of_log_lines_reaches_the_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[tuple[str | None, str, bool | None]] = []
    # all of them are in this process, so each change is noted and not made
    monkeypatch.setattr(logs, "change", lambda *change: changed.append(change))
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: board.feed.engines.connected, "a router")
        await until(lambda: len(made.router._observers) == 1, "an observer at the router")
        answer = await made.client.put(
            "/sluice/admin/logs", json={"level": "DEBUG", "logger": "app.dashboard"}
        )
        # an ingress, two engines and the dashboard
        assert answer.json()["told"] == 4
        # the router's own, the ingress's and the dashboard's; scripted engines change nothing
        await until(lambda: len(changed) == 3, "a change in each process")
        assert set(changed) == {("DEBUG", "app.dashboard", None)}
        assert board.feed.engines.connected


async def test_a_dashboard_that_comes_back_is_found_and_a_new_router_too(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        for _ in range(2):
            async with dashboard(tmp_path, made.router) as board:
                await until(lambda b=board: len(b.feed.ingresses) == 1, "an ingress")  # type: ignore[misc]
                await until(lambda b=board: len(b.feed.engines.infos) == 2, "two engines")  # type: ignore[misc]
        answer = await made.client.post("/v1/chat/completions", json=made.chat())
        assert answer.status_code == 200


async def change(board: Dashboard, method: str, path: str, body: Any, status: int = 200) -> Any:
    answer = await board.client.request(method, path, json=body, headers=BEARER)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_policy_is_changed_undone_and_logged(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: board.feed.engines.connected, "a router")
        first = await change(
            board, "PUT", "/api/policy", {"decode": {"name": "netkv"}, "dispatch": {"max_queue": 77}}
        )
        assert first["before"]["decode"]["name"] == "join_shortest_queue"
        assert first["after"]["decode"]["name"] == "netkv"
        assert (first["before"]["dispatch"], first["after"]["dispatch"]) == (
            {"max_queue": 1024},
            {"max_queue": 77},
        )
        assert made.router.dispatcher.decode.name == "netkv"
        message = (await change(board, "PUT", "/api/policy", {"decode": "no such"}, 400))["message"]
        assert "no such" in message
        second = await change(board, "PUT", "/api/policy", {"decode": "round_robin"})
        assert (
            "later change" in (await change(board, "POST", "/api/undo", {"id": first["id"]}, 409))["message"]
        )
        undone = await change(board, "POST", "/api/undo", {"id": second["id"]})
        assert undone["after"] == second["before"]
        await change(board, "POST", "/api/undo", {"id": second["id"]}, 409)
        await change(board, "POST", "/api/undo", {"id": first["id"]})
        assert made.router.dispatcher.decode.name == "join_shortest_queue"
        assert made.router.dispatcher.config.max_queue == 1024
        log = (await board.client.get("/api/audit", headers=BEARER)).json()["changes"]
        assert [one["what"] for one in log] == [
            "undo: policy: decode netkv, dispatch", "undo: policy: decode round_robin",
            "policy: decode round_robin", "policy: decode netkv, dispatch",
        ]  # fmt: skip
        assert [one["undone"] for one in log] == [False, False, True, True]
        assert all("from 127.0.0.1" in one["who"] for one in log)
        await until(lambda: any(e["kind"] == "admin" for e in board.feed.snapshot()["events"]), "an event")


def policy_events(board: Dashboard) -> list[str]:
    return [one["text"] for one in board.feed.snapshot()["events"] if one["kind"] == "policy"]


async def test_a_change_by_anybody_of_any_policy_is_an_event_with_its_parameters(tmp_path: Path) -> None:
    """The changes are made at the ingress, as the SDK, the command and experiments make them."""
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: board.feed._policies._rules, "the policies of the beginning")
        seen: list[str] = []
        for asked, text in (
            ({"admission": "by_wait"}, "admission policy: open -> by_wait"),
            (
                {"admission": {"name": "by_wait", "params": {"margin": 0.5}}},
                "admission policy: by_wait (margin 0.2 -> 0.5)",
            ),
            ({"fairness": "vtc"}, "fairness policy: none -> vtc"),
            ({"dispatch": {"max_queue": 77}}, "dispatch: max_queue 1024 -> 77"),
            ({"decode": "netkv"}, "decode policy: join_shortest_queue -> netkv"),
        ):
            answer = await made.client.put("/sluice/admin/policy", json=asked)
            assert answer.status_code == 200, answer.text
            seen.append(text)
            await until(lambda: policy_events(board) == seen, text)


async def test_what_something_else_has_changed_is_not_undone(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: board.feed.engines.connected, "a router")
        made_change = await change(board, "PUT", "/api/policy", {"decode": "round_robin"})
        await made.client.put("/sluice/admin/policy", json={"decode": "netkv"})
        refused = await change(board, "POST", "/api/undo", {"id": made_change["id"]}, 409)
        assert "something else" in refused["message"]


async def test_role_and_duty_of_an_engine(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: len(board.feed.engines.infos) == 2, "two engines")
        heard: list[wire.Message] = []
        assert made.engines["p"].link is not None
        made.engines["p"].link._on_message = lambda _, message: heard.append(message)
        drained = await change(board, "POST", "/api/engines/p/drain", {})
        assert drained["before"] == {"role": "prefill", "duty": "active"}
        assert drained["after"] == {"role": "prefill", "duty": "warm"}
        await until(lambda: heard, "an order")
        assert heard == [wire.SetRole("prefill", "warm")]
        last = await change(board, "POST", "/api/engines/d/drain", {}, 409)
        assert "last active one" in last["message"]
        assert (
            "'nobody'"
            in (await change(board, "PUT", "/api/engines/nobody", {"duty": "warm"}, 404))["message"]
        )
        assert (
            "must be one of"
            in (await change(board, "PUT", "/api/engines/p", {"role": "both"}, 400))["message"]
        )
        await change(board, "PUT", "/api/engines/p", {"state": "down"}, 400)
        await change(board, "PUT", "/api/engines/p", {}, 400)


async def test_with_an_autoscaler_engines_take_no_orders_of_a_person(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: len(board.feed.engines.infos) == 2, "two engines")
        scaler = await connect(
            made.router.addresses, lambda: Channel(Identity("autoscaler", "a", None, 1), lambda c, m: None)
        )
        await until(lambda: made.router._autoscaler.connected, "an autoscaler at the router")
        refused = await change(board, "PUT", "/api/engines/p", {"duty": "warm"}, 409)
        assert "the autoscaler decides" in refused["message"]
        scaler.abort("done")


async def test_bounds_are_changed_planned_undone_and_logged(tmp_path: Path) -> None:
    """The autoscaler is real but for Ray Serve, whose numbers stay what they are."""
    groups = {"p": Group("p", Role.PREFILL, 1, 2, 1), "d": Group("d", Role.DECODE, 1, 3, 1)}

    def make(kept: Any) -> Any:
        bounds = {
            f"{g.role.value}_{w}": n for g in kept.values() for w, n in (("min", g.least), ("max", g.most))
        }
        warm = {"warm_min": kept["d"].warm, "warm_max": kept["d"].warm_most}
        return registry.make("fixed", {"limits": {**bounds, **warm, "budget": 8}})

    engines = [ScriptedEngine("p-0", "prefill", tmp_path), ScriptedEngine("d-0", "decode", tmp_path)]
    async with rig(tmp_path, engines) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: len(board.feed.engines.infos) == 2, "two engines")

        async def find() -> tuple[str, ...]:
            return made.router.addresses

        scaler = Autoscaler(
            Identity("autoscaler", "a", None, 1), find, Controller(make, groups), StillServe(), StillServe()
        )
        scaler.start()
        try:
            await until(lambda: scaler.rounds > 0, "a round")
            plan = await change(board, "PUT", "/api/scale", {"bounds": {"d": {"min": 2}}, "plan": True})
            assert plan["plan"]["serving"]["decode"] == 2
            asked = {"d": {"min": 2, "max": 4}, "p": {"max": 3}}
            first = await change(board, "PUT", "/api/scale", {"bounds": asked})
            assert first["before"]["bounds"]["d"] == {"min": 1, "max": 3, "warm": 0, "warm_max": 0}
            assert first["after"]["bounds"] == {
                "d": {"min": 2, "max": 4, "warm": 0, "warm_max": 0},
                "p": {"min": 1, "max": 3, "warm": 0, "warm_max": 0},
            }
            wrong = await change(board, "PUT", "/api/scale", {"bounds": {"d": {"max": 1}}}, 400)
            assert wrong["message"] == "d.max is 1: it must be 2..4096, at least min; nothing was changed"
            await change(board, "PUT", "/api/scale", {"bounds": {"d": "wide"}}, 400)
            # numbers have an undoing of their own
            numbers = await change(board, "PUT", "/api/scale", {"counts": {"d": 4}})
            refused = await change(board, "POST", "/api/undo", {"id": first["id"]}, 400)
            assert "d is set to 4 by an administrator, outside 1..3" in refused["message"]
            await change(board, "POST", "/api/undo", {"id": numbers["id"]})
            undone = await change(board, "POST", "/api/undo", {"id": first["id"]})
            assert (undone["before"], undone["after"]) == (first["after"], first["before"])
            assert bounds_of(scaler.controller.groups["d"]) == bounds_of(groups["d"])
            log = (await board.client.get("/api/audit", headers=BEARER)).json()["changes"]
            assert [one["what"] for one in log] == [
                "undo: bounds: d min 2 max 4, p max 3", "undo: numbers of engines: d 4", "numbers of engines: d 4",
                "bounds: d min 2 max 4, p max 3",
            ]  # fmt: skip
        finally:
            await scaler.stop()


class StillServe:
    """One replica of each group, which nothing changes, and a memory that is kept nowhere."""

    async def read(self) -> Fleet:
        one = {name: Deployed(1, (Replica("0", "n", 1.0),)) for name in ("p", "d")}
        return Fleet(one, head="n", deployed_s=1.0)

    async def set(self, targets: Mapping[str, int]) -> None:
        pass

    async def load(self) -> str | None:
        return None

    async def save(self, memory: str) -> None:
        pass


async def test_without_an_autoscaler_there_is_nothing_to_scale(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: board.feed.engines.connected, "a router")
        for method, body in (("GET", None), ("PUT", {"counts": {"decode": 2}}), ("PUT", {"plan": True})):
            assert "No autoscaler" in (await change(board, method, "/api/scale", body, 404))["message"]
        assert made.router.status().in_flight == 0


async def test_a_change_that_cannot_be_logged_is_not_made(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made, dashboard(tmp_path, made.router) as board:
        await until(lambda: board.feed.engines.connected, "a router")
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "audit.jsonl").symlink_to("/dev/full")
        refused = await change(board, "PUT", "/api/policy", {"decode": "netkv"}, 503)
        assert "nothing was changed" in refused["message"]
        assert made.router.dispatcher.decode.name == "join_shortest_queue"
