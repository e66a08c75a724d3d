"""Changes of policies, limits and settings of scaling in words: router and autoscaler answer, events come out."""

from typing import Any

import orjson
import pytest

from actors.router.admin import RouterAdmin
from actors.router.decisions import DecisionLog
from actors.wire import messages as wire
from app.dashboard.policies import MOST_TEXT, Policies
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.simple.join_shortest_queue import JoinShortestQueue


class Router:
    """A router's administration, which answers as the router does."""

    def __init__(self) -> None:
        dispatcher = Dispatcher(DispatchConfig(), JoinShortestQueue(), JoinShortestQueue())
        self._admin = RouterAdmin(dispatcher, DecisionLog(), None, dispatcher.handle, lambda: None)

    def policy(self, **change: Any) -> dict[str, Any]:
        """Changes policies, if any are given, and returns the answer."""
        what: Any = "set_policy" if change else "policy"
        answer = self._admin.answer(wire.Admin(1, what, orjson.dumps(change)))
        assert answer.status == 200, answer.body
        found: dict[str, Any] = orjson.loads(answer.body)
        return found


@pytest.mark.parametrize(
    ("before", "change", "words"),
    [
        ({}, {"decode": "round_robin"}, ["decode policy: join_shortest_queue -> round_robin"]),
        (
            {},
            {"admission": {"name": "by_wait", "params": {"margin": 0.5}}},
            ["admission policy: open -> by_wait (margin 0.5)"],
        ),
        (
            {"admission": {"name": "by_wait", "params": {"margin": 0.5}}},
            {"admission": {"name": "by_wait", "params": {"hold_s": 1.0}}},
            ["admission policy: by_wait (margin 0.5 -> 0.2, hold_s 2.0 -> 1.0)"],
        ),
        (
            {"fairness": {"name": "vtc", "params": {"class_ratio": 4.0}}},
            {"fairness": "none"},
            ["fairness policy: vtc (class_ratio 4.0) -> none"],
        ),
        ({}, {"dispatch": {"max_queue": 77}}, ["dispatch: max_queue 1024 -> 77"]),
        (
            {},
            {"prefill": "round_robin", "dispatch": {"max_queue": 77}},
            ["prefill policy: join_shortest_queue -> round_robin", "dispatch: max_queue 1024 -> 77"],
        ),
        # set again as it is
        ({"decode": "netkv"}, {"decode": "netkv"}, []),
    ],
)
def test_a_change_at_the_router_is_told_with_parameters(
    before: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    router, policies = Router(), Policies()
    assert policies.router(router.policy(**before)) == []
    found = policies.router(router.policy(**change))
    assert [one.text for one in found] == words
    assert {one.kind for one in found} <= {"policy"}
    assert policies.router(router.policy()) == []


def test_a_policy_of_transfers_that_comes_back_with_its_agents_has_not_changed() -> None:
    policies = Policies()
    levels = {"name": "mfs", "params": {"levels": 2}}
    assert policies.router({"flow": levels}) == []
    assert policies.router({"flow": None}) == []
    assert policies.router({"flow": levels}) == []
    [changed] = policies.router({"flow": {"name": "mfs", "params": {"levels": 4}}})
    assert changed.text == "flow policy: mfs (levels 2 -> 4)"


def test_what_is_long_is_not_told_at_length() -> None:
    policies = Policies()

    def heatmap(*rows: float) -> dict[str, Any]:
        return {"decode": {"name": "blend", "params": {"heatmap": {"rows": list(rows), "unit": "s"}}}}

    policies.router(heatmap(*([0.25] * 100)))
    [changed] = policies.router(heatmap(*([0.5] * 200)))
    # 4 characters and a comma for each of 0.25, one less for each of 0.5, and the brackets
    assert changed.text == "decode policy: blend (heatmap.rows of 501 characters -> of 801 characters)"
    many = {"decode": {"name": "blend", "params": {f"parameter_{n}": n for n in range(100)}}}
    [changed] = policies.router(many)
    assert len(changed.text) == MOST_TEXT


def scaling(
    mode: str = "auto", policy: str = "fixed", wanted: int | None = None, **more: Any
) -> dict[str, Any]:
    group = {"name": "decode", "min": 1, "max": 3, "keeps_warm": 0, "warm_max": 0, "wanted": wanted} | more
    limits = {"decode_max": group["max"], "budget": 8}
    return {"mode": mode, "policy": {"name": policy, "params": {"limits": limits}}, "groups": [group]}


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (scaling(), scaling("manual", wanted=3), "scaling: fixed -> by hand (decode 3)"),
        (scaling("manual", wanted=3), scaling("manual", wanted=2), "scaling: by hand (decode 3 -> 2)"),
        (scaling("manual", wanted=3), scaling(), "scaling: by hand (decode 3) -> fixed"),
        # the limits of the policy are the bounds of the groups
        (scaling(), scaling(max=4), "bounds of decode: max 3 -> 4"),
        (scaling(), scaling(policy="slo"), "scaling: fixed -> slo"),
    ],
)
def test_a_change_at_the_autoscaler_is_told(before: dict[str, Any], now: dict[str, Any], words: str) -> None:
    policies = Policies()
    assert policies.autoscaler(before) == []
    assert [one.text for one in policies.autoscaler(now)] == [words]
    assert policies.autoscaler(now) == []
