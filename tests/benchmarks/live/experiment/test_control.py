"""Policies that an experiment changes are checked before it begins and put back after it, by the router's answers."""

import re
from typing import Any

import pytest
import yaml

from actors.router.admin import RouterAdmin
from actors.router.decisions import DecisionLog
from actors.wire.messages import Admin
from app.dashboard import changes
from benchmarks.live.experiment.control import Control, ControlError
from benchmarks.live.experiment.plan import Bounds, Plan, Policies, read
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.journal.codec import loads
from policies.routing.registry import decode_policy, prefill_policy
from sluice._core import policy_body
from sluice.types import Policies as Answered
from tests.app.dashboard.test_static import STATIC


def router() -> RouterAdmin:
    dispatcher = Dispatcher(DispatchConfig(), prefill_policy("round_robin"), decode_policy("round_robin"))
    return RouterAdmin(dispatcher, DecisionLog(), None, dispatcher.handle, lambda: None)


class Client:
    """The SDK's calls for policies, as the router itself answers them."""

    def __init__(self) -> None:
        self._router = router()

    def ask(self, what: Any, body: bytes = b"") -> dict[str, Any]:
        answer = self._router.answer(Admin(1, what, body))
        assert answer.status == 200, answer.body
        return loads(answer.body.decode())

    def policies(self) -> Answered:
        return Answered.model_validate(self.ask("policy"))

    def set_policies(self, **chosen: Any) -> None:
        arguments: dict[str, Any] = dict.fromkeys(
            ("prefill", "decode", "prefill_params", "decode_params", "dispatch")
        )
        self.ask("set_policy", policy_body(**(arguments | chosen)))


def control(client: Client) -> Control:
    made = Control("http://127.0.0.1:1", "a key")
    made.client.close()
    made.client = client  # type: ignore[assignment]
    return made


def plan(policy: dict[str, Any]) -> Plan:
    phases = [{"name": "a", "for_s": 10, "rate_per_s": 1}]
    action = {"at_s": 1, "policy": policy}
    return read(yaml.safe_dump({"name": "x", "load": {"phases": phases}, "actions": [action]}), Bounds())


CHANGES: dict[str, dict[str, Any]] = {
    "prefill": {"prefill": "random"},
    "decode": {"decode": {"name": "netkv", "params": {"step_base_s": 0.5}}},
    "admission": {"admission": "by_wait"},
    "fairness": {"fairness": {"name": "vtc", "params": {"class_ratio": 4.0}}},
    "dispatch": {"dispatch": {"max_queue": 7}},
    "all of them": {"admission": "by_wait", "fairness": "vtc", "dispatch": {"max_queue": 9}},
}


@pytest.mark.parametrize("policy", CHANGES.values(), ids=CHANGES)
def test_policies_are_changed_and_put_back(policy: dict[str, Any]) -> None:
    client = Client()
    made, wanted, before = control(client), plan(policy), client.policies()
    made._check_policies(wanted)
    kept = made.before(wanted)
    made.do(wanted.actions[0])
    changed = client.policies()
    assert all(getattr(changed, stage) != getattr(before, stage) for stage in policy)
    assert made.restore(kept) != []
    assert client.policies() == before
    # the second time there is nothing left to do
    assert made.restore(kept) == []


@pytest.mark.parametrize("stage", Policies.STAGES)
def test_a_policy_that_the_router_does_not_have_is_refused_before_the_run(stage: str) -> None:
    made = control(Client())
    with pytest.raises(ControlError, match=f"no {stage} policy 'nothing'; there are "):
        made._check_policies(plan({stage: "nothing"}))


def test_plan_page_and_server_know_every_policy_that_the_router_offers() -> None:
    available = set(Client().ask("policy")["available"])
    assert set(Policies.STAGES) == set(changes.STAGES) == available
    (line,) = re.findall(
        r"^const STAGES = (.*);$", (STATIC / "js/views/control.js").read_text(), re.MULTILINE
    )
    assert set(re.findall(r'\["(\w+)", ', line)) == available | {"dispatch"}
