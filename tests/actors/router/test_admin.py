"""An administrator's questions to the router, over a real socket."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.router.decisions import DecisionLog
from actors.router.journal import JournalConfig, RouterJournal
from actors.router.server import RouterServer
from actors.wire import messages as wire
from actors.wire.channel import Identity
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.journal.replay import replay
from policies.routing.registry import DECODE, PREFILL
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from tests.actors.router.test_server import Peer, serving


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[RouterServer]:
    dispatcher = Dispatcher(DispatchConfig(), JoinShortestQueue(), JoinShortestQueue())
    journal = RouterJournal(JournalConfig(folder=f"{tmp_path}/journal"), dispatcher, "test")
    server = RouterServer(Identity("router", "r"), dispatcher, journal=journal)
    await server.start([f"unix:{tmp_path}/r.sock"])
    yield server
    await server.stop()


async def ask(ingress: Peer, what: str, body: Any = None) -> tuple[int, Any]:
    ingress.channel.send(wire.Admin(7, what, b"" if body is None else json.dumps(body).encode()))  # type: ignore[arg-type]
    answer = await ingress.get(wire.AdminAnswer)
    assert isinstance(answer, wire.AdminAnswer) and answer.ask == 7
    return answer.status, json.loads(answer.body)


async def route(ingress: Peer, attempt_id: str, request_id: str = "") -> None:
    """Takes one attempt all the way to its decode engine."""
    ingress.channel.send(wire.Submit(attempt_id, 64, 8, client_request_id=request_id))
    await ingress.get(wire.RoutePrefill, lambda m: m.attempt_id == attempt_id)  # type: ignore[attr-defined]
    ingress.channel.send(wire.PrefillReported(attempt_id, 30.0, 1024, 0))
    await ingress.get(wire.RouteDecode, lambda m: m.attempt_id == attempt_id)  # type: ignore[attr-defined]


async def test_the_policies_in_use_and_all_others_are_told_with_their_formulas(router: RouterServer) -> None:
    _, _, ingress = await serving(router)
    status, told = await ask(ingress, "policy")
    assert status == 200
    assert told["prefill"]["name"] == told["decode"]["name"] == "join_shortest_queue"
    assert told["dispatch"]["max_queue"] == 1024
    assert set(told["available"]["prefill"]) == set(PREFILL)
    assert set(told["available"]["decode"]) == set(DECODE)
    assert (told["fairness"]["name"], set(told["available"]["fairness"])) == ("none", {"none", "vtc"})
    assert (told["admission"]["name"], set(told["available"]["admission"])) == ("open", {"open", "by_wait"})
    for policies in told["available"].values():
        for policy in policies.values():
            assert policy["formula"] and "\n" not in policy["formula"]
    assert told["available"]["decode"]["netkv"]["params"]["max_inflight"] == 16


async def test_a_change_of_policy_holds_at_once_for_all_and_is_announced(router: RouterServer) -> None:
    _, _, ingress = await serving(router)
    await route(ingress, "a-1")
    status, told = await ask(
        ingress,
        "set_policy",
        {
            "prefill": "random",
            "decode": {"name": "power_of_two", "params": {"choices": 1}},
            "admission": {"name": "by_wait", "params": {"margin": 0.5}},
            "fairness": {"name": "vtc", "params": {"w_q": 4.0}},
            "dispatch": {"max_queue": 5},
        },
    )
    assert told["fairness"]["params"]["w_q"] == 4.0 and router.dispatcher.fairness.name == "vtc"
    assert told["admission"]["params"]["margin"] == 0.5 and router.dispatcher.admission.name == "by_wait"
    assert (status, told["decode"]["params"], told["dispatch"]["max_queue"]) == (200, {"choices": 1}, 5)
    fleet = await ingress.get(wire.Fleet, lambda f: f.prefill_policy == "random")  # type: ignore[attr-defined]
    assert isinstance(fleet, wire.Fleet) and fleet.decode_policy == "power_of_two"
    await route(ingress, "b-1")
    made = [(await ask(ingress, "explain", {"id": name}))[1]["decisions"] for name in ("a", "b")]
    assert [d["policy"]["name"] for d in made[0]] == ["join_shortest_queue", "join_shortest_queue"]
    assert [d["policy"]["name"] for d in made[1]] == ["random", "power_of_two"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"decode": "best"}, "decode policy 'best' is not known: choose one of balance_route_0, "),
        (
            {"decode": {"name": "netkv", "params": {"max_inflight": -1}}},
            "max_inflight is -1: it must be a whole",
        ),
        ({"decode": {"name": "netkv", "parms": {}}}, "decode must be a policy's name, or"),
        (
            {"decoder": "netkv"},
            "'decoder' is not known: give prefill, decode, admission, fairness, dispatch or flow",
        ),
        ({"admission": "shut"}, "admission policy 'shut' is not known: choose one of by_wait, open"),
        ({"fairness": "fcfs"}, "fairness policy 'fcfs' is not known: choose one of none, vtc"),
        ({"dispatch": {"kv_high_water": 7}}, "kv_high_water is 7: it must be a number > 0 and <= 1"),
        ({}, "nothing is asked for"),
        ([], "must be a JSON object"),
    ],
)
async def test_a_change_that_is_wrong_is_refused_and_the_old_policies_go_on(
    router: RouterServer, asked: Any, message: str
) -> None:
    _, _, ingress = await serving(router)
    before = (router.dispatcher.prefill, router.dispatcher.decode, router.dispatcher.config)
    status, told = await ask(ingress, "set_policy", asked)
    assert status == 400 and message in told["message"]
    assert (router.dispatcher.prefill, router.dispatcher.decode, router.dispatcher.config) == before
    await route(ingress, "a-1")


async def test_a_request_is_explained_by_any_name_that_its_client_may_know(router: RouterServer) -> None:
    _, _, ingress = await serving(router)
    await route(ingress, "abc-1", request_id="my-order-66")
    await route(ingress, "abc-2")  # another attempt of the same request
    for name in ("abc", "abc-1", "chatcmpl-abc", "cmpl-abc", "req-abc", "my-order-66"):
        status, told = await ask(ingress, "explain", {"id": name})
        assert status == 200, name
        assert [(d["attempt_id"], d["action"]) for d in told["decisions"]] == [
            ("abc-1", "RoutePrefill"),
            ("abc-1", "RouteDecode"),
            ("abc-2", "RoutePrefill"),
            ("abc-2", "RouteDecode"),
        ]
    first = told["decisions"][0]
    assert first["decision"]["reason"] == "only_candidate"
    assert first["decision"]["ranking"] == [
        {"worker": "p", "cost": 0.0, "terms": {"prefilling": 0.0, "decoding": 0.0}}
    ]
    assert "prefilling + decoding" in first["policy"]["formula"]
    status, told = await ask(ingress, "explain", {"id": "other"})
    assert status == 404 and "no decision is known for 'other'" in told["message"]
    assert "last 4096 requests" in told["message"] and "1 now; the newest are abc)" in told["message"]


async def test_refused_and_accepted_changes_are_in_the_journal_and_replay(
    router: RouterServer, tmp_path: Path
) -> None:
    _, _, ingress = await serving(router)
    await ask(ingress, "set_policy", {"decode": "best"})
    await ask(ingress, "set_policy", {"decode": "netkv"})
    await route(ingress, "a-1")
    status, told = await ask(ingress, "journal", {"tail": 1000})
    assert status == 200 and told["events"] > 5 and told["replayable"] is True
    events = [line["event"] for line in told["tail"] if "event" in line]
    assert events.count("PoliciesChanged") == 2
    assert (await ask(ingress, "journal", {"tail": 10**6}))[0] == 400
    await router.stop()
    (file,) = (tmp_path / "journal").iterdir()
    steps = list(replay(file.read_text().splitlines()))
    assert all(step.equal for step in steps) and len(steps) > 5
    refused = [
        line for step in steps for line in step.recorded if line.startswith('{"error":"UnknownPolicy"')
    ]
    assert len(refused) == 1


async def test_a_question_that_is_no_json_is_answered_and_the_connection_lives(router: RouterServer) -> None:
    _, _, ingress = await serving(router)
    ingress.channel.send(wire.Admin(1, "set_policy", b"{"))
    answer = await ingress.get(wire.AdminAnswer)
    assert isinstance(answer, wire.AdminAnswer) and answer.status == 400
    ingress.channel.send(wire.Admin(2, "set_policy", b"[" * 100_000))
    answer = await ingress.get(wire.AdminAnswer)
    assert isinstance(answer, wire.AdminAnswer) and answer.status == 400
    assert b"nested too deeply" in answer.body
    assert (await ask(ingress, "policy"))[0] == 200


async def test_a_bug_behind_a_question_is_answered_and_the_connection_lives(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, ingress = await serving(router)
    await route(ingress, "a-1")
    monkeypatch.setattr(DecisionLog, "explain", lambda self, request_id: [{"no JSON": object()}])
    status, told = await ask(ingress, "explain", {"id": "a"})
    assert status == 500 and "its log says more" in told["message"]
    assert (await ask(ingress, "policy"))[0] == 200
