"""Properties of every policy under the arbiter: ends, work conservation, levels, slots, harm by doomed flows."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.flow.arbiter import Arbiter
from policies.flow.base import FixedPorts, Flow, FlowState, Port, Side, Stage, ranking
from policies.flow.config import ArbiterConfig
from policies.flow.events import Bandwidth, Lost, Ordered, Tick, Withdrawn
from policies.flow.mfs import MFS
from policies.flow.registry import FLOW, flow_policy
from tests.policies.flow.link import Link, flow
from tests.policies.flow.scenarios import CONFIGS, NAMES, flows, link

SCAVENGER = MFS().levels + 1


class Watched(Link):
    """A link that checks after each event what must always hold."""

    work_conserving = True
    waits: frozenset[str] = frozenset()

    def tell(self, event):  # type: ignore[no-untyped-def]
        before = {name: self.arbiter.view(name, self.now_s) for name in self.arbiter.flow_ids()}
        permits = super().tell(event)
        self._slots()
        self._work()
        for name, was in before.items():
            if name in self.arbiter:
                self._level(name, was.level)
        return permits

    def _slots(self) -> None:
        posted = Counter((chunk.flow.source, "out") for chunk in self.chunks)
        posted += Counter((chunk.flow.target, "in") for chunk in self.chunks)
        assert not posted or max(posted.values()) <= self.arbiter.config.window

    def _work(self) -> None:
        out = {chunk.flow.source for chunk in self.chunks}
        into = {chunk.flow.target for chunk in self.chunks}
        if not self.work_conserving:
            return
        for name in self.arbiter.flow_ids():
            view = self.arbiter.view(name, self.now_s)
            if view.left > view.posted and name not in self.waits:
                each = self.flows[name]
                assert each.source in out or each.target in into, f"{name} waits at two idle ports"

    def _level(self, name: str, was: int) -> None:
        if self.arbiter.policy.name != "mfs":
            return
        view = self.arbiter.view(name, self.now_s)
        assert view.level <= was or view.level == SCAVENGER or was == SCAVENGER
        if view.level == 1:
            assert self.flows[name].stage is Stage.P2D
            assert self.flows[name].due_s is not None


def watched(name: str, config: ArbiterConfig, given_flows: list[tuple[float, Flow]]) -> Watched:
    made = Watched(Arbiter(flow_policy(name), config))
    made.work_conserving = name != "karuna"
    for at_s, each in given_flows:
        made.submit(each, at_s)
    return made


@settings(max_examples=60, deadline=None)
@given(NAMES, CONFIGS, flows())
def test_every_flow_ends_and_the_invariants_hold(
    name: str, config: ArbiterConfig, given_flows: list[tuple[float, Flow]]
) -> None:
    made = watched(name, config, given_flows)
    # fails where flows wait while nothing is on its way: a deadlock
    made.run()
    assert set(made.ended) == {each.flow_id for _, each in given_flows}
    permitted = Counter[str]()
    for _, permit in made.granted:
        permitted[permit.flow_id] += permit.size
    assert permitted == {each.flow_id: each.size for _, each in given_flows}


@settings(max_examples=40, deadline=None)
@given(CONFIGS, flows(), st.data())
def test_levels_only_rise_but_for_pruned_flows_under_orders_and_losses(
    config: ArbiterConfig, given_flows: list[tuple[float, Flow]], data: st.DataObject
) -> None:
    made = watched("mfs", config, given_flows)
    requests = sorted({each.request_id for _, each in given_flows})
    for at_s in (0.25, 1.0, 2.0):
        order = data.draw(st.permutations([f"b{request}" for request in requests]))
        pruned = data.draw(st.lists(st.sampled_from(requests), unique=True))
        made.at(at_s, lambda order=order, pruned=pruned: Ordered(tuple(order), tuple(pruned)))  # type: ignore[misc]
    made.run()
    assert len(made.ended) == len(given_flows)


@settings(max_examples=60, deadline=None)
@given(NAMES, CONFIGS, flows(), st.data())
def test_withdrawn_and_lost_flows_leave_no_slot_behind(
    name: str, config: ArbiterConfig, given_flows: list[tuple[float, Flow]], data: st.DataObject
) -> None:
    made = link(name, config, given_flows)
    made.run(until_s=0.75)
    present = made.arbiter.flow_ids()
    gone = data.draw(st.sets(st.sampled_from(present))) if present else set()
    for flow_id in sorted(gone)[::2]:
        made.tell(Withdrawn(flow_id))
    made.tell(Lost(tuple(sorted(gone)[1::2])))
    made.chunks = [chunk for chunk in made.chunks if chunk.flow.flow_id not in gone]
    made.run()
    assert set(made.ended) == {each.flow_id for _, each in given_flows} - gone


@pytest.mark.parametrize("policy", sorted(FLOW))
@settings(max_examples=40, deadline=None)
@given(flows(), st.floats(0.0, 5.0))
def test_the_ranking_is_one_total_order_whatever_the_order_of_the_flows(
    policy: str, given_flows: list[tuple[float, Flow]], now_s: float
) -> None:
    ports = FixedPorts(1000.0)

    def states() -> list[FlowState]:
        return [FlowState(each, number, 0.0) for number, (_, each) in enumerate(given_flows)]

    one = ranking(flow_policy(policy), states(), ports, now_s)
    other = ranking(flow_policy(policy), states()[::-1], ports, now_s)
    assert [state.flow.flow_id for state in one] == [state.flow.flow_id for state in other]
    assert len({state.rank for state in one}) == len(one)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.integers(2000, 50_000), min_size=1, max_size=4),
    st.integers(200, 2000),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_doomed_flows_delay_a_feasible_one_by_no_more_than_is_posted(
    window: int, doomed: list[int], size: int, at_s: float
) -> None:
    config = ArbiterConfig(
        window=window,
        chunk_s=0.1,
        least_chunk_bytes=1,
        whole_read_when_alone=False,
        port_bytes_per_s=1000.0,
        learn=False,
    )
    made = Link(Arbiter(flow_policy("mfs"), config))
    for number, each in enumerate(doomed):
        made.submit(flow(f"doomed{number}", each, due_s=1.0), at_s=0.0)  # MLU >= 2
    made.submit(flow("feasible", size, due_s=100.0), at_s=at_s)
    made.run()
    # what is posted when it comes, and, as posted chunks share the port, what is posted beside its own last chunk
    posted_s = (window + window - 1) * config.chunk_s
    assert made.ended["feasible"] - at_s <= size / 1000.0 + posted_s + 1e-6


def test_a_flow_that_becomes_doomed_is_scavenged_and_still_ends() -> None:
    config = ArbiterConfig(window=1, chunk_s=0.1, least_chunk_bytes=1, port_bytes_per_s=1000.0, learn=False)
    made = Link(Arbiter(flow_policy("mfs"), config))
    made.submit(flow("first", 3000, due_s=3.5))
    made.submit(flow("late", 1000, due_s=2.0))
    assert made.arbiter.view("late", 0.0).level == 1
    made.run(until_s=1.5)
    made.tell(Tick())
    assert made.arbiter.view("late", 1.5).level == SCAVENGER
    made.run()
    assert set(made.ended) == {"first", "late"}


def test_a_scavenged_flow_returns_when_its_port_turns_out_to_be_faster() -> None:
    config = ArbiterConfig(window=1, port_bytes_per_s=1000.0, learn=False)
    made = Link(Arbiter(flow_policy("mfs"), config))
    made.submit(flow("first", 1000, due_s=100.0))
    made.submit(flow("big", 10_000, due_s=5.0))
    assert made.arbiter.view("big", 0.0).level == SCAVENGER
    made.tell(Bandwidth(Port("a", Side.EGRESS), 4000.0))
    made.tell(Bandwidth(Port("b", Side.INGRESS), 4000.0))
    assert made.arbiter.view("big", 0.0).level == 1


def test_karuna_paces_a_deadline_flow_so_that_it_ends_just_in_time() -> None:
    config = ArbiterConfig(window=1, chunk_s=0.1, least_chunk_bytes=1, port_bytes_per_s=1000.0, learn=False)
    made = Link(Arbiter(flow_policy("karuna"), config))
    made.submit(flow("due", 1000, due_s=4.0))
    made.submit(flow("other", 2000, stage=Stage.COLLECTIVE))
    made.run()
    assert 3.5 <= made.ended["due"] <= 4.0
    assert made.ended["other"] == pytest.approx(2.7, abs=0.3)  # it got three quarters of the port
