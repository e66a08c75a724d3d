"""The dispatcher with an admission policy: what it measures, whom it refuses, holds and sheds, what it says, and that
it does nothing of this while nobody has an objective.
"""

import dataclasses
import math
import random
import re
from typing import Any

import pytest

from policies.admission.base import Case, Judgement, Moment, Outlook, Verdict
from policies.admission.by_wait import ByWait
from policies.admission.open import Open
from policies.admission.rates import Line
from policies.dispatch.config import DispatchConfig
from policies.dispatch.dispatcher import Action, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.dispatch.gate import FADES_S, PER_S, REMEMBERS_S, Arrivals
from policies.fairness.base import FairnessPolicy
from policies.fairness.none import NoFairness
from policies.fairness.vtc import VirtualTokenCounter
from policies.journal.lines import JournalWriter
from policies.journal.replay import replay
from policies.request.stage import Stage
from policies.request.terms import Terms
from policies.routing.base import PolicyError
from policies.routing.registry import decode_policy, prefill_policy
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.standby import Phase, Standby
from policies.state.standing import PROMPT_TOKENS
from policies.state.views import Request, Role
from tests.policies.random_events import Life, decided_alike

# prompts of this length count as 1,000 tokens
PROMPT = 1000 - PROMPT_TOKENS
PLAIN = ByWait(margin=0.0, deviations=0.0, tpot_margin=0.0)
BOTH = pytest.mark.parametrize("shed_by", ["forecast", "optimistic"])


class Fleet:
    """A prefill engine and a decode engine of `slots` slots, worked by hand: a prompt takes 1 s, a token 10 ms, an
    answer 100 tokens.
    """

    def __init__(
        self,
        policy: ByWait | Open = PLAIN,
        slots: int = 2,
        prefill_slots: int = 1,
        fairness: FairnessPolicy = NoFairness(),  # noqa: B008  # frozen
        queue_timeout_s: float = 1e6,
    ) -> None:
        config = DispatchConfig(queue_timeout_s=queue_timeout_s, max_queue=64, status_stale_s=1e6)
        self.d = Dispatcher(config, JoinShortestQueue(), JoinShortestQueue(), policy, fairness)
        self.now_s = 0.0
        self.journal: list[str] = []
        self._writer = JournalWriter(self.journal.append, self.d, "test")
        for name, role, n in (("p", Role.PREFILL, prefill_slots), ("d", Role.DECODE, slots)):
            self.handle(ev.EngineUp(0.0, name, role, "g", name, n, 10**6))
            self.handle(ev.EngineStatus(0.0, name, 0, 0, 0))

    def handle(self, event: ev.Event) -> list[Action]:
        actions = self.d.handle(event)
        self._writer.record(event, actions)
        return actions

    def arrive(
        self, name: str, slo_s: float | None = None, priority: int = 0, again: bool = False, **terms: Any
    ) -> list[Action]:
        made = Terms(priority=priority, ttft_slo_s=slo_s, **terms)
        request = Request(name, self.now_s, PROMPT, 100, terms=made, again=again)
        return self.handle(ev.Arrived(self.now_s, request))

    def tick(self, after_s: float = 0.0) -> list[Action]:
        self.now_s += after_s
        return self.handle(ev.Tick(self.now_s))

    def prefilled(self, name: str, after_s: float = 1.0) -> list[Action]:
        self.now_s += after_s
        return self.handle(ev.PrefillDone(self.now_s, name, self.now_s + 600.0, 1, 0))

    def decode(self, *names: str) -> list[Action]:
        """Decodes 100 tokens of each sequence in 1 s, and ends them."""
        for name in names:
            self.handle(ev.Admitted(self.now_s, name))
        self.handle(ev.Progressed(self.now_s + 0.01, names[0], 1))
        self.now_s += 1.0
        self.handle(ev.ProgressedMany(self.now_s, tuple((name, 100) for name in names)))
        self.tick()
        actions = []
        for name in names:
            actions += self.handle(ev.Closed(self.now_s, name, "finished", 100))
        return actions

    def routed(self) -> list[str]:
        """Returns the requests whose prompts were sent to an engine, in order."""
        return re.findall(r'"action":"RoutePrefill","attempt_id":"(\w+)"', "".join(self.journal))

    def measure(self, slo_s: float | None = 1e3) -> None:
        """Has the gate measure what the engines do, and leaves the fleet empty, and the gate awake if the request that
        it measures has an objective.
        """
        self.tick()
        self.arrive("m0", slo_s=slo_s)
        self.prefilled("m0")
        self.decode("m0")
        self.tick()
        assert self.d.state.in_flight == 0


def reject(actions: list[Action]) -> Reject:
    [action] = actions
    assert isinstance(action, Reject)
    return action


def test_rates_are_those_of_the_work_that_was_done() -> None:
    fleet = Fleet()
    fleet.measure()
    [route] = fleet.arrive("r", slo_s=5.0)
    assert isinstance(route, RoutePrefill) and route.admission is not None
    assert route.admission.verdict is Verdict.ADMIT and route.admission.budget_s == 5.0
    # 1,000 tokens at 1 s; the decode engine had the KV at once and a first token after 10 ms
    assert route.admission.terms == {
        "waited_s": 0.0, "queue_s": 0.0, "prefill_s": pytest.approx(1.0), "pool_s": 0.0, "transfer_s": 0.0,
        "first_step_s": pytest.approx(0.01),
    }  # fmt: skip


def test_what_cannot_make_it_is_refused_at_once_with_its_wait() -> None:
    fleet = Fleet()
    fleet.measure()
    fleet.arrive("a")
    for i in range(3):
        assert not fleet.arrive(f"b{i}")
    # one prompt is computed and three are queued: the fifth begins in 4 s and has its first token at 5.01 s
    refused = reject(fleet.arrive("c", slo_s=5.0))
    assert (refused.status, refused.reason, refused.retry_after_s) == (
        429,
        "ttft_objective",
        pytest.approx(4.0),
    )
    assert refused.admission is not None and refused.admission.terms["queue_s"] == pytest.approx(4.0)
    assert refused.detail.startswith("the first token is expected after 5.0 s (queue 4.00 + prefill 1.00")
    assert fleet.d.queue_size == 3 and not fleet.arrive("d", slo_s=5.02)
    # half of the prompt that is computed is done
    fleet.tick(0.5)
    assert fleet.d.queue_size == 4 and not fleet.arrive("e", slo_s=5.52)


def test_the_same_fleet_takes_everything_with_open() -> None:
    fleet = Fleet(Open())
    fleet.measure()
    for i in range(9):
        assert not [a for a in fleet.arrive(f"r{i}", slo_s=1e-6) if isinstance(a, Reject)]
    assert not fleet.tick(100.0) and fleet.d.queue_size == 8


def test_retries_and_what_has_no_objective_are_taken() -> None:
    fleet = Fleet()
    fleet.measure()
    fleet.arrive("a")
    assert not fleet.arrive("none") and not fleet.arrive("again", slo_s=1e-6, again=True)
    assert reject(fleet.arrive("first", slo_s=1e-6)).reason == "ttft_objective"
    # nor is it shed later
    assert not fleet.tick(60.0) and fleet.d.queue_size == 2


def test_a_prompt_that_was_computed_before_is_not_refused_when_it_comes_back() -> None:
    fleet = Fleet()
    fleet.measure()
    fleet.arrive("back", slo_s=5.0)
    fleet.prefilled("back")
    fleet.d.handle(ev.Admitted(fleet.now_s, "back"))
    fleet.arrive("other")
    # preempted: the same attempt arrives again, behind another prompt and far too late
    fleet.now_s += 30.0
    assert not fleet.arrive("back", slo_s=1e-6)
    assert fleet.d.queue_size == 1


def test_more_urgent_requests_are_not_counted_as_before_but_as_overtaking() -> None:
    fleet = Fleet()
    fleet.measure()
    fleet.arrive("a")
    for i in range(3):
        fleet.arrive(f"batch{i}", priority=1)
    # only the prompt that is computed comes before it: 1 + 1 + 0.01 s
    assert not fleet.arrive("fast", slo_s=2.02, priority=-1)
    fleet = Fleet()
    fleet.measure()
    fleet.arrive("a")
    assert not fleet.arrive("x")
    for i in range(3):
        fleet.arrive(f"fast{i}", priority=-1)
        fleet.d.handle(ev.Closed(fleet.now_s, f"fast{i}", "cancelled"))
    # they left, but such as they come, and take 3 * ln 2 / 10 of the prefill worker's 1,000 tokens a second
    refused = reject(fleet.arrive("y", slo_s=3.1))
    assert refused.admission is not None
    assert refused.admission.terms["queue_s"] == pytest.approx(2.0 / (1.0 - 0.3 * math.log(2.0)))


def test_a_sleeping_fleet_refuses_nothing_and_budgets_count_from_its_waking() -> None:
    fleet = Fleet()
    fleet.measure()
    d = fleet.d
    d.handle(ev.StandbyChanged(fleet.now_s, Standby(Phase.ASLEEP, (Role.PREFILL, Role.DECODE), 100.0)))
    for name in ("p", "d"):
        d.handle(ev.EngineDown(fleet.now_s, name))
    assert not fleet.arrive("r", slo_s=1.5)
    assert not fleet.tick(30.0)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        d.handle(ev.EngineUp(fleet.now_s, name, role, "g", name, 2, 10**6))
    d.handle(ev.StandbyChanged(fleet.now_s, Standby()))
    d.handle(ev.EngineStatus(fleet.now_s, "d", 0, 0, 0))
    [route] = d.handle(ev.EngineStatus(fleet.now_s, "p", 0, 0, 0))
    assert isinstance(route, RoutePrefill) and route.admission is not None
    assert route.waited_s == 30.0 and route.admission.terms["waited_s"] == 0.0


@BOTH
def test_the_newest_goes_first_while_the_oldest_is_late(shed_by: str) -> None:
    fleet = Fleet(dataclasses.replace(PLAIN, shed_by=shed_by))
    fleet.measure()
    fleet.arrive("a")
    for name, slo_s in (("r0", 2.5), ("r1", 3.5), ("r2", 6.5)):
        assert not fleet.arrive(name, slo_s=slo_s)
    # the prompt of a takes 3.4 s, not 1 s: then r0 and r1 are too late. r2 and the newest are not, and the newest goes
    # first, behind which r2 is still in time: 3.4 + 1 + 1 + 0.01 s
    fleet.now_s += 3.0
    assert not fleet.arrive("new", slo_s=6.0)
    actions = fleet.prefilled("a", after_s=0.4)
    rejected = {a.attempt_id: a.reason for a in actions if isinstance(a, Reject)}
    routed = [a.attempt_id for a in actions if isinstance(a, RoutePrefill)]
    assert rejected == {"r0": "late", "r1": "late"} and routed == ["new"]
    assert fleet.d.queue_size == 1


@BOTH
def test_a_late_request_is_shed_though_it_is_not_the_head(shed_by: str) -> None:
    fleet = Fleet(dataclasses.replace(PLAIN, shed_by=shed_by))
    fleet.measure()
    fleet.arrive("a")
    fleet.arrive("patient")
    assert not fleet.arrive("hurried", slo_s=3.5)
    late = reject(fleet.tick(2.6))
    assert (late.attempt_id, late.reason, late.status) == ("hurried", "late", 429)


@pytest.mark.parametrize(("shed_by", "first"), [("forecast", "new"), ("optimistic", "old")])
def test_the_newest_does_not_go_before_an_oldest_that_is_only_in_doubt(shed_by: str, first: str) -> None:
    fleet = Fleet(ByWait(shed_by=shed_by))
    fleet.measure()
    fleet.arrive("a")
    # 1.2 * (1 + 1 + 0.01) s
    assert not fleet.arrive("old", slo_s=3.0)
    # the prompt of a takes 1.9 s, not 1 s: 1.9 + 1.2 * 1.01 = 3.112 s by the forecast, and 2.91 s at best
    fleet.now_s += 1.9
    assert not fleet.arrive("new", slo_s=6.0)
    actions = fleet.prefilled("a", after_s=0.0)
    assert [a.attempt_id for a in actions if isinstance(a, RoutePrefill)] == [first]
    assert [a.attempt_id for a in actions if isinstance(a, Reject)] == (["old"] if first == "new" else [])
    text = "".join(fleet.journal)
    assert ('"detail":"in doubt: the first token is expected after 2.9 s' in text) == (first == "old")
    assert all(step.equal for step in replay(text.splitlines()))


def after_a_burst(shed_by: str) -> tuple[Fleet, list[Action]]:
    """Returns a fleet in whose queue the request "modest" of the tenant "ant" waits, which allows 3.5 s, and behind it
    "greedy" of "ox"; and what was done after a burst of more urgent requests, of which none is left, and by a tick.

    The only slot is taken, and a prompt of "ox" waits in the pool. So "modest" expects its slot in (1 + 1.5 * sqrt(1))
    / 1 = 2.5 s at one departure a second, and is taken: 1.2 * (2.5 + 0.01) = 3.01 s. The burst takes 4 * ln 2 / 10 of
    these departures a second. Then the slot comes after 2.5 / 0.727 = 3.44 s by the forecast, and after 1 s at best, in
    which the prompt is computed.
    """
    sharing = VirtualTokenCounter(slack_tokens=0.0, credit_tokens=0.0)
    fleet = Fleet(ByWait(hold_s=10.0, shed_by=shed_by), slots=1, fairness=sharing)
    fleet.measure()
    # counting begins with the second tenant
    for tenant in ("ant", "ox"):
        fleet.arrive(tenant, tenant=tenant)
        fleet.handle(ev.Closed(fleet.now_s, tenant, "cancelled"))
    for name in ("runs", "pooled"):
        fleet.arrive(name, tenant="ox")
        fleet.prefilled(name)
        if name == "runs":
            fleet.handle(ev.Admitted(fleet.now_s, name))
    held = ev.PolicyChoice("by_wait", {"hold_s": 1.0, "shed_by": shed_by})
    fleet.handle(ev.PoliciesChanged(fleet.now_s, admission=held))
    assert not fleet.arrive("modest", slo_s=3.5, tenant="ant")
    assert not fleet.arrive("greedy", tenant="ox")
    for i in range(4):
        assert not fleet.arrive(f"urgent{i}", priority=-1, tenant="ant")
    actions = []
    for i in range(4):
        actions += fleet.handle(ev.Closed(fleet.now_s, f"urgent{i}", "cancelled"))
    return fleet, [*actions, *fleet.tick(0.2)]


@pytest.mark.parametrize(("shed_by", "first"), [("forecast", "greedy"), ("optimistic", "modest")])
def test_a_burst_of_urgent_requests_does_not_cost_a_modest_tenant_its_turn(shed_by: str, first: str) -> None:
    fleet, actions = after_a_burst(shed_by)
    came_s = fleet.now_s - 0.2
    if shed_by == "forecast":
        # at its turn, and at once
        late = reject(actions)
        assert (late.attempt_id, late.reason) == ("modest", "late")
        assert late.admission is not None and late.admission.terms["waited_s"] == 0.0
    else:
        assert not actions and fleet.d.queue_size == 2
    # the running sequence ends: the pooled one gets its slot, and nobody is before the next one
    fleet.handle(ev.Progressed(fleet.now_s, "runs", 100))
    fleet.handle(ev.Closed(fleet.now_s, "runs", "finished", 100))
    fleet.decode("pooled")
    # the prompt of the next one is computed from 1.2 s after the arrival of "modest" on, which is in time with 3.5 s
    assert fleet.routed()[-1] == first and fleet.now_s == pytest.approx(came_s + 1.2)


def test_a_head_in_doubt_that_is_held_lets_nobody_pass_until_it_is_shed_at_best() -> None:
    fleet, actions = after_a_burst("optimistic")
    assert not actions
    # at best it needs 1.01 s of its 3.5 s
    assert not fleet.tick(2.2) and fleet.d.queue_size == 2
    late = reject(fleet.tick(0.2))
    assert (late.attempt_id, late.reason, late.status) == ("modest", "late", 429)
    assert late.detail.startswith("the first token comes at best after 3.6 s (waited 2.60 + prefill 1.00")
    # another try would be judged by the forecast, which has the burst and the deviations
    assert late.admission is not None and late.admission.terms["pool_s"] == 0.0
    assert late.retry_after_s == late.admission.wait_s > 1.0
    text = "".join(fleet.journal)
    assert '"shed_by":"optimistic"' in text.partition("\n")[0] and "comes at best after" in text
    assert all(step.equal for step in replay(text.splitlines()))


def test_prompts_are_not_computed_while_decode_is_full_and_begin_when_it_is_not() -> None:
    fleet = Fleet(dataclasses.replace(PLAIN, hold_s=0.4), slots=1)
    fleet.measure()
    fleet.arrive("a")
    fleet.prefilled("a")
    fleet.d.handle(ev.Admitted(fleet.now_s, "a"))
    fleet.tick(0.1)
    # the slot of a is free in 1 s, when the prompt of b is computed: there is no wait in the pool
    [first] = fleet.arrive("b")
    assert isinstance(first, RoutePrefill)
    fleet.prefilled("b", after_s=0.1)
    # c must wait for a and b: 2 s, of which its prompt takes 1 s
    assert not fleet.arrive("c") and fleet.d.queue_size == 1
    assert not fleet.tick(0.2)
    actions = fleet.d.handle(ev.Closed(fleet.now_s, "a", "finished", 100)) + fleet.tick(0.2)
    assert [type(a) for a in actions] == [RoutePrefill, RouteDecode] or {type(a) for a in actions} == {
        RoutePrefill,
        RouteDecode,
    }
    assert fleet.d.queue_size == 0


def test_an_entry_of_the_pool_that_is_late_gives_its_place_up() -> None:
    fleet = Fleet(dataclasses.replace(PLAIN, hold_s=100.0), slots=1)
    fleet.measure()
    fleet.arrive("a")
    fleet.prefilled("a")
    fleet.d.handle(ev.Admitted(fleet.now_s, "a"))
    fleet.arrive("b", slo_s=4.0)
    fleet.prefilled("b")
    assert not fleet.tick(2.9)
    late = reject(fleet.tick(0.2))
    assert (late.attempt_id, late.reason) == ("b", "late") and fleet.d.state.pool_size == 0
    # a retry is not shed
    fleet.arrive("c", slo_s=0.5, again=True)
    fleet.prefilled("c")
    assert not fleet.tick(10.0) and fleet.d.state.pool_size == 1


def test_a_tpot_objective_below_what_a_token_takes_is_refused() -> None:
    fleet = Fleet()
    fleet.measure()
    refused = reject(fleet.arrive("r", tpot_slo_s=0.009))
    assert (refused.reason, refused.status, refused.retry_after_s) == ("tpot_objective", 429, 1.0)
    [taken] = fleet.arrive("s", tpot_slo_s=0.011)
    assert isinstance(taken, RoutePrefill)


def test_the_policy_changes_at_run_time_and_measures_from_then_on() -> None:
    fleet = Fleet(Open())
    fleet.measure()
    fleet.d.handle(ev.PoliciesChanged(fleet.now_s, admission=ev.PolicyChoice("by_wait", {"hold_s": 5.0})))
    assert fleet.d.admission == ByWait(hold_s=5.0)
    fleet.arrive("a")
    # nothing was measured under `open`
    assert not fleet.arrive("b", slo_s=1e-3)
    with pytest.raises(ValueError, match="admission policy 'nope' is not known"):
        fleet.d.handle(ev.PoliciesChanged(fleet.now_s, admission=ev.PolicyChoice("nope")))
    assert fleet.d.admission == ByWait(hold_s=5.0)
    fleet.d.handle(ev.PoliciesChanged(fleet.now_s, admission=ev.PolicyChoice("open")))
    assert fleet.d.admission == Open()


@pytest.mark.parametrize("fairness", [VirtualTokenCounter(), NoFairness()], ids=lambda one: one.name)
def test_a_request_of_more_choices_than_slots_is_not_held_in_an_idle_fleet(fairness: FairnessPolicy) -> None:
    """Two slots free two sequences a second, so the last of 20 choices waits for 9 s, and for nobody else's sequences:
    held until then it would never be sent, and nobody could pass it.
    """
    fleet = Fleet(slots=2, fairness=fairness)
    fleet.measure()
    many = Request("many", fleet.now_s, PROMPT, 100, slots=20)
    assert [type(action) for action in fleet.handle(ev.Arrived(fleet.now_s, many))] == [RoutePrefill]


def test_a_request_of_several_choices_is_held_for_the_slot_with_which_it_begins() -> None:
    """With six of eight slots free it begins, though the mean wait for its last choice is above `hold_s`."""
    fleet = Fleet(dataclasses.replace(PLAIN, hold_s=0.5), slots=8, fairness=VirtualTokenCounter())
    fleet.measure()
    for name in ("a", "b"):
        fleet.arrive(name)
        fleet.prefilled(name)
        fleet.handle(ev.Admitted(fleet.now_s, name))
    # 8 departures a second; 40 more than are free would wait for 5 s
    many = Request("many", fleet.now_s, PROMPT, 100, slots=46)
    assert [type(action) for action in fleet.handle(ev.Arrived(fleet.now_s, many))] == [RoutePrefill]


def test_tokens_that_are_slower_than_in_proportion_leave_the_router_able_to_judge() -> None:
    """A line through the time of a token by the size of a batch may be 0 at no sequences, and then no wait is known."""
    fleet = Fleet(slots=2)
    fleet.measure()
    line = fleet.d._gate._rates.lines[Role.DECODE] = Line()
    for sequences, token_s in ((4.0, 0.010), (8.0, 0.030)):
        line.add(sequences, token_s, 100.0, 1.0)
    for i in range(8):
        fleet.arrive(f"r{i}", slo_s=100.0)
    fleet.tick()
    assert fleet.d.queue_size == 7
    # a token takes 1/300 s, so two slots free 6 a second, and five sequences wait for them
    (refused,) = fleet.arrive("late", slo_s=1.0)
    assert isinstance(refused, Reject) and refused.status == 429


def test_answers_that_end_without_a_token_leave_the_router_able_to_judge() -> None:
    """The first client leaves before its first token, so the mean answer has no tokens while a second one streams."""
    fleet = Fleet(slots=1)
    fleet.tick()
    for name in ("left", "streams"):
        fleet.arrive(name)
        fleet.prefilled(name)
        fleet.handle(ev.Admitted(fleet.now_s, name))
        if name == "left":
            fleet.handle(ev.Closed(fleet.now_s, name, "cancelled", 0))
    fleet.handle(ev.Progressed(fleet.now_s, "streams", 1))
    fleet.tick(1.0)
    fleet.handle(ev.Progressed(fleet.now_s, "streams", 100))
    fleet.tick(1.0)
    assert fleet.d.state.usual_output_tokens == 0.0
    assert not fleet.arrive("next", slo_s=100.0) and fleet.d.queue_size == 1


@dataclasses.dataclass(frozen=True)
class Raises(ByWait):
    """The policy that raises at the request `bad` at one moment."""

    at: Moment = Moment.ARRIVAL

    def judge(self, case: Case, outlook: Outlook) -> Judgement:
        if case.request.attempt_id == "bad" and case.moment is self.at:
            raise ZeroDivisionError("float division by zero")
        return ByWait.judge(self, case, outlook)


@pytest.mark.parametrize("at", Moment)
def test_a_request_at_which_the_policy_raises_is_rejected_and_others_are_served(at: Moment) -> None:
    """The request that stays would make the router raise at each event, and nothing would be sent any more."""
    fleet = Fleet(Raises(at=at, hold_s=math.inf, ahead_s=math.inf), slots=1)
    decided: list[Action] = []
    faults: list[str] = []

    def act(event: ev.Event) -> None:
        try:
            decided.extend(fleet.d.handle(event))
        except PolicyError as error:
            faults.append(str(error))
            decided.extend(error.decided)

    for name in ("a", "bad", "b"):
        act(ev.Arrived(0.0, Request(name, 0.0, PROMPT, 100, terms=Terms(ttft_slo_s=90.0))))
    for now_s, name in ((1.0, "a"), (2.0, "bad"), (3.0, "b")):
        # with `a` in the only slot the others wait in the pool
        if name != "bad" or at is Moment.POOLED:
            act(ev.PrefillDone(now_s, name, 600.0, 1, 0))
        act(ev.Tick(now_s + 0.5))
    (fault,) = faults
    assert fault.startswith("policy by_wait raised ZeroDivisionError") and "at request bad" in fault
    rejected = [one for one in decided if isinstance(one, Reject)]
    assert [(one.attempt_id, one.status, one.reason) for one in rejected] == [("bad", 500, "policy_error")]
    assert {"a", "b"} <= {one.attempt_id for one in decided if isinstance(one, RoutePrefill)}
    assert fleet.d.queue_size == 0


def test_a_full_queue_still_refuses_by_its_own_rule() -> None:
    fleet = Fleet()
    fleet.arrive("a")
    for i in range(64):
        fleet.arrive(f"r{i}")
    assert reject(fleet.arrive("more", slo_s=1e6)).reason == "queue_full"


@pytest.mark.parametrize("how", ["retry", "migration", "preemption"])
def test_a_full_queue_refuses_no_committed_request(how: str) -> None:
    fleet = Fleet(Open())
    # a request of the class "batch" that migrates is two steps more urgent, and no more than "interactive"
    name, priority = "back", -1 if how == "migration" else 0
    if how == "preemption":
        fleet.arrive(name)
        fleet.prefilled(name)
        fleet.handle(ev.Admitted(fleet.now_s, name))
    fleet.arrive("a")
    for i in range(64):
        fleet.arrive(f"r{i}", priority=priority)
    # the newest of the others goes, though it would be served before
    gone = reject(fleet.arrive(name, priority=priority, again=how != "preemption"))
    assert (gone.attempt_id, gone.status, gone.reason) == ("r63", 429, "queue_full")
    # one that comes afterwards and is more urgent than all does not drive it out either
    assert reject(fleet.arrive("urgent", priority=-2)).attempt_id == "r62"
    assert fleet.d.state.stage(name) is Stage.QUEUED and fleet.d.queue_size == 64
    # its own limit of time holds all the same
    fleet.handle(ev.PoliciesChanged(fleet.now_s, dispatch={"queue_timeout_s": 5.0}))
    assert name in {one.attempt_id for one in fleet.tick(6.0) if isinstance(one, Reject)}


# -------------------------------------------------------------------------------------------- without objectives


@pytest.mark.parametrize("seed", range(6))
def test_while_nobody_has_an_objective_every_decision_is_that_of_open(seed: int) -> None:
    fairness = (NoFairness(), VirtualTokenCounter(), VirtualTokenCounter(class_ratio=4.0))[seed % 3]
    made = [
        Dispatcher(
            DispatchConfig(max_queue=16, queue_timeout_s=5.0),
            prefill_policy("load_aware"),
            decode_policy("composition"),
            policy,
            fairness,
        )
        for policy in (Open(), ByWait(), ByWait(hold_s=0.0, ahead_s=0.001))
    ]
    life = Life(random.Random(seed), changes_admission=False, slos=(None,))
    assert decided_alike(made, life, 2500) > 10
    assert not any(d.judges(life.now_s) for d in made)


@pytest.mark.parametrize("asked", [{"slo_s": 100.0}, {"tpot_slo_s": 1.0}], ids=["ttft", "tpot"])
def test_the_gate_is_awake_while_an_objective_waits_and_for_some_time_after_one_came(
    asked: dict[str, Any],
) -> None:
    fleet = Fleet(dataclasses.replace(PLAIN, hold_s=math.inf))
    fleet.measure(slo_s=None)
    assert not fleet.d.judges(fleet.now_s)
    fleet.arrive("a", **asked)
    fleet.tick(0.9 * REMEMBERS_S)
    # its prompt is computed, so it waits for a slot
    assert fleet.d.judges(fleet.now_s + REMEMBERS_S)
    fleet.prefilled("a")
    assert fleet.d.judges(fleet.now_s) and not fleet.d.judges(fleet.now_s + 0.1 * REMEMBERS_S)


def test_a_router_that_adopts_a_request_with_an_objective_is_awake_until_it_has_a_slot() -> None:
    fleet = Fleet()
    request = Request("r", 0.0, PROMPT, 100, terms=Terms(ttft_slo_s=100.0))
    fleet.handle(ev.Adopted(0.0, request, "prefilling", "p", None, 0, 0.0, 0))
    assert fleet.d.judges(1e6)
    fleet.prefilled("r")
    assert fleet.d.state.stage("r") is Stage.TRANSFERRING and not fleet.d.judges(fleet.now_s)


def test_one_request_with_an_objective_is_judged_by_rates_that_were_measured_before() -> None:
    fleet = Fleet()
    fleet.measure(slo_s=None)
    for i in range(6):
        # a prompt takes four times as long as that which was measured first
        fleet.arrive(f"slow{i}")
        fleet.prefilled(f"slow{i}", after_s=4.0)
        fleet.decode(f"slow{i}")
    fleet.arrive("a")
    for i in range(3):
        assert not fleet.arrive(f"b{i}")
    assert not fleet.d.judges(fleet.now_s)
    # four prompts come before it
    refused = reject(fleet.arrive("c", slo_s=15.0))
    assert refused.admission is not None and refused.reason == "ttft_objective"
    assert refused.admission.terms["queue_s"] == pytest.approx(16.0, rel=0.05)
    assert refused.retry_after_s == refused.admission.wait_s
    text = "".join(fleet.journal)
    assert all(step.equal for step in replay(text.splitlines()))


def test_more_urgent_requests_are_counted_while_the_gate_is_not_awake() -> None:
    fleet = Fleet()
    fleet.measure(slo_s=None)
    fleet.arrive("a")
    fleet.arrive("x")
    for i in range(3):
        fleet.arrive(f"fast{i}", priority=-1)
        fleet.handle(ev.Closed(fleet.now_s, f"fast{i}", "cancelled"))
    assert not fleet.d.judges(fleet.now_s)
    refused = reject(fleet.arrive("y", slo_s=3.1))
    assert refused.admission is not None
    assert refused.admission.terms["queue_s"] == pytest.approx(2.0 / (1.0 - 0.3 * math.log(2.0)))


@pytest.mark.parametrize("policy", [Open(), ByWait()], ids=lambda policy: policy.name)
def test_beside_objectives_a_request_without_one_is_served_as_with_open(policy: ByWait | Open) -> None:
    """The only slot is taken for two minutes, and requests with objectives keep the gate awake. Those without one are
    held for a moment, and then wait in the pool instead of being rejected after a minute in the queue.
    """
    fleet = Fleet(policy, slots=1, prefill_slots=8, queue_timeout_s=60.0)
    fleet.measure()
    fleet.arrive("runs")
    fleet.prefilled("runs")
    fleet.handle(ev.Admitted(fleet.now_s, "runs"))
    patient = [f"patient{i}" for i in range(4)]
    actions = [action for name in patient for action in fleet.arrive(name)]
    waited: dict[str, float] = {}
    for second in range(120):
        if second % 20 == 0:
            actions += fleet.arrive(f"hurried{second}", slo_s=2.0)
        actions += fleet.handle(ev.Progressed(fleet.now_s, "runs", 20 * second))
        routed = {one.attempt_id: one.waited_s for one in actions if isinstance(one, RoutePrefill)}
        waited |= routed
        assert not [one for one in actions if isinstance(one, Reject) and one.attempt_id in patient]
        fleet.now_s += 1.0
        actions = []
        for name in routed:
            actions += fleet.prefilled(name, after_s=0.0)
        actions += fleet.tick()
    assert set(patient) <= set(waited)
    most_s = 0.0 if isinstance(policy, Open) else policy.hold_at_most_s + 1.0
    assert max(waited[name] for name in patient) <= most_s
    assert fleet.d.state.pool_size == len(patient) + (6 if isinstance(policy, Open) else 0)


def test_what_is_held_is_sent_before_the_limit_of_the_queue_would_reject_it() -> None:
    """A request with a long objective would be held for as long as the only slot is taken, and so would be all behind
    it, because nobody passes what is held.
    """
    fleet = Fleet(ByWait(), slots=1, prefill_slots=8, queue_timeout_s=60.0)
    fleet.measure()
    for name in ("runs", "pooled"):
        fleet.arrive(name)
        fleet.prefilled(name)
        if name == "runs":
            fleet.handle(ev.Admitted(fleet.now_s, name))
    assert not fleet.arrive("long", slo_s=1000.0) and not fleet.arrive("behind")
    actions = [action for _ in range(70) for action in fleet.tick(1.0)]
    sent = {one.attempt_id: one.waited_s for one in actions if isinstance(one, RoutePrefill)}
    assert list(sent) == ["long", "behind"] and len(actions) == 2
    assert all(40.0 <= waited_s <= 41.0 for waited_s in sent.values())
    text = "".join(fleet.journal)
    assert '"reason":"decode_full","budget_s":1000.0' in text
    assert all(step.equal for step in replay(text.splitlines()))


def test_a_request_without_an_objective_is_not_held_for_an_unknown_time() -> None:
    fleet = Fleet(slots=1, prefill_slots=8)
    fleet.arrive("runs")
    fleet.prefilled("runs")
    fleet.handle(ev.Admitted(fleet.now_s, "runs"))
    # it wakes the gate, and is held, because nothing was measured
    assert not fleet.arrive("hurried", slo_s=50.0) and fleet.d.queue_size == 1
    fleet.handle(ev.Closed(fleet.now_s, "hurried", "cancelled"))
    assert fleet.d.judges(fleet.now_s)
    assert [type(action) for action in fleet.arrive("patient")] == [RoutePrefill]


def test_arrivals_fade_by_half_in_their_half_life_whenever_they_are_looked_at() -> None:
    rng, arrivals, now_s = random.Random(4), Arrivals(), 0.0
    came: list[tuple[float, Request]] = []
    for step in range(400):
        now_s += rng.choice([0.0, 0.3, 7.0])
        terms = Terms(priority=rng.randrange(-3, 3))
        request = Request(f"r{step}", now_s, rng.randrange(1000), 10, rng.randrange(1, 4), terms)
        arrivals.add(request, now_s)
        came.append((now_s, request))
        now_s += rng.choice([0.0, 0.3, 7.0])
        priority = rng.randrange(-4, 5)
        urgent = [
            (PER_S * 0.5 ** ((now_s - at_s) / FADES_S), one)
            for at_s, one in came
            if one.terms.priority < priority
        ]
        tokens, sequences = arrivals.above(priority, now_s)
        expected = sum(share * (one.prompt_tokens + PROMPT_TOKENS) for share, one in urgent)
        assert tokens == pytest.approx(expected, abs=1e-2)
        assert sequences == pytest.approx(sum(share * one.slots for share, one in urgent), abs=1e-5)
    # looks between which nothing comes sum up nothing anew
    sums = arrivals._before
    arrivals.above(0, now_s)
    assert arrivals._before is sums
