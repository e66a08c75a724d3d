"""Late chunks: an engine that stands still gives its slots up, and all sums are right when it moves again."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.flow.arbiter import MOST_LATE, Arbiter
from policies.flow.base import Flow, Port, Side
from policies.flow.config import ArbiterConfig
from policies.flow.events import Done, FlowEvent, Lost, Permit, Submitted, Tick, Unscheduled, Withdrawn
from policies.flow.ports import PortState
from policies.flow.registry import flow_policy
from policies.journal.flows import replay
from tests.policies.flow.link import Link, flow
from tests.policies.flow.scenarios import CONFIGS, NAMES, NODES, flows
from tests.policies.flow.test_journal import Journalled

CHUNKS = ArbiterConfig(
    port_bytes_per_s=1000.0, chunk_s=0.1, least_chunk_bytes=1, whole_read_when_alone=False, learn=False
)
"""Two chunks of 100 bytes at a port. Two that share it take 0.2 s; they are late after a second."""


def arbiter(**changed: Any) -> Arbiter:
    return Arbiter(flow_policy("mfs"), dataclasses.replace(CHUNKS, **changed))


def names(permits: list[Permit]) -> list[str]:
    return [permit.flow_id for permit in permits]


def ingress(made: Arbiter, node: str = "b") -> PortState:
    return made.ports.at(Port(node, Side.INGRESS))


def stuck(**changed: Any) -> Arbiter:
    """Returns an arbiter at 1 s. Two chunks of `x`, from c to b, do not arrive; `y`, from a to b, has two permits."""
    made = arbiter(**changed)
    assert names(made.apply(Submitted(flow("x", 1000, source="c")), 0.0)) == ["x", "x"]
    assert made.apply(Submitted(flow("y", 1000)), 0.0) == []
    assert names(made.apply(Tick(), 1.0)) == ["y", "y"]
    return made


@pytest.mark.parametrize(
    ("still", "other"),
    [({"source": "c"}, {"source": "d"}), ({"target": "c"}, {"target": "d"})],
    ids=["lender", "reader"],
)
def test_an_engine_that_stands_still_gives_its_slots_up_and_gets_no_further_ones(
    still: dict[str, str], other: dict[str, str]
) -> None:
    made = arbiter()
    assert names(made.apply(Submitted(flow("x", 1000, **still)), 0.0)) == ["x", "x"]
    assert made.apply(Submitted(flow("y", 300, **other)), 0.0) == []
    assert made.apply(Tick(), 0.9) == []
    assert made.next_tick_s() == 1.0
    assert names(made.apply(Tick(), 1.0)) == ["y", "y"]
    assert names(made.apply(Done("y", 100, 0.2), 1.2)) == ["y"]
    made.apply(Done("y", 100, 0.2), 1.2)
    assert made.apply(Done("y", 100, 0.1, last=True), 1.3) == []
    # both slots are free, and x is known as it was
    view = made.view("x", 1.3)
    assert (view.left, view.posted, view.permits) == (1000, 200, (100, 100))
    assert (made.blocked("x"), made.late_chunks, made.next_tick_s()) == (True, 2, None)
    # another read between the same nodes waits, too
    assert made.apply(Submitted(flow("z", 100, **still)), 1.4) == []


def test_late_chunks_are_answered_when_they_arrive_and_then_their_reads_go_on() -> None:
    made = stuck()
    port = ingress(made)
    assert (port.posted, port.late, port.moving) == (2, 2, 2)
    assert made.apply(Done("x", 100, 1.5), 1.5) == []
    assert (port.posted, port.late, made.blocked("x")) == (2, 1, True)
    assert made.apply(Done("x", 100, 1.5), 1.5) == []
    assert (port.posted, port.late, made.blocked("x")) == (2, 0, False)
    # x was submitted before y, and waits as any other flow does
    assert names(made.apply(Done("y", 100, 0.2), 1.6)) == ["x"]
    assert (port.posted, port.moving) == (2, 2)


def test_what_is_in_flight_of_an_aborted_read_stays_late_until_a_part_of_it_arrives() -> None:
    made = stuck()
    port = ingress(made)
    assert made.apply(Withdrawn("x", posted=200), 1.5) == []
    assert (port.posted, port.late) == (2, 1)
    assert names(made.apply(Done("y", 100, 0.2), 1.6)) == ["y"]
    # one of its two chunks has arrived, so that the other one counts again: three chunks are posted
    assert made.apply(Done("x", 100, 1.8), 1.8) == []
    assert (port.posted, port.late) == (3, 0)
    assert made.apply(Done("y", 100, 0.2), 1.9) == []
    assert names(made.apply(Done("x", 100, 1.9, last=True), 1.9)) == ["y"]
    assert (port.posted, port.late, made.flow_ids()) == (2, 0, ["y"])


def test_what_is_posted_without_a_permit_behind_a_late_chunk_is_late_at_once() -> None:
    made = stuck()
    made.apply(Submitted(flow("z", 500, source="c")), 1.1)
    assert made.apply(Unscheduled("z"), 1.2) == []
    port = ingress(made)
    assert (port.posted, port.late) == (2, 3)
    assert names(made.apply(Done("y", 100, 0.2), 1.3)) == ["y"]
    assert names(made.apply(Lost(("x", "z")), 1.4)) == []
    assert (port.posted, port.late, port.waiting) == (2, 0, 1)


def test_two_lenders_on_one_node_do_not_wait_for_one_another() -> None:
    made = arbiter()
    made.apply(Submitted(flow("x", 1000, engines="p1>d")), 0.0)
    made.apply(Submitted(flow("y", 300, engines="p1>d")), 0.0)
    made.apply(Submitted(flow("z", 300, engines="p2>d")), 0.0)
    assert names(made.apply(Tick(), 1.0)) == ["z", "z"]
    assert [made.blocked(name) for name in "xyz"] == [True, True, False]


def test_a_chunk_that_shares_a_slow_port_is_not_late() -> None:
    """Each of two chunks of 500 bytes should take 1 s at 1000 bytes/s; only after four times as long it is late."""
    made = arbiter(chunk_s=0.5)
    made.apply(Submitted(flow("x", 1000, source="c")), 0.0)
    made.apply(Submitted(flow("y", 1000)), 0.0)
    for now_s in (1.0, 2.0, 3.0):
        assert made.next_tick_s() == now_s
        assert made.apply(Tick(), now_s) == []
    assert names(made.apply(Tick(), 4.0)) == ["y", "y"]


def test_of_a_port_that_is_only_assumed_to_be_fast_a_chunk_is_late_by_the_slowest_bandwidth() -> None:
    """25 MB take 0.5 s at 50 MB/s, so that they are late after 2 s, and not after the 0.02 s of the assumption."""
    made = arbiter(port_bytes_per_s=5e9, learn=True, chunk_s=0.001, least_chunk_bytes=25_000_000, window=1)
    made.apply(Submitted(flow("x", 10**9, source="c")), 0.0)
    made.apply(Submitted(flow("y", 10**9)), 0.0)
    assert made.apply(Tick(), 1.0) == []
    assert names(made.apply(Tick(), 2.0)) == ["y"]


def test_late_chunks_beyond_a_bound_keep_their_slots() -> None:
    """Every second another chunk is late, each of other engines, until there are eight."""
    made = arbiter(window=1)
    for number in range(12):
        made.apply(Submitted(flow(f"f{number}", 1000, engines=f"p{number}>d")), 0.0)
    for number in range(1, MOST_LATE + 1):
        assert names(made.apply(Tick(), float(number))) == [f"f{number}"]
    assert made.apply(Tick(), 9.0) == []
    port = ingress(made)
    assert (port.posted, port.late) == (1, MOST_LATE)
    # one of them has arrived, so that the one with the slot may be late, too
    assert made.apply(Done("f0", 100, 9.5), 9.5) == []
    assert len(made.apply(Tick(), 10.0)) == 1
    assert (port.posted, port.late) == (1, MOST_LATE)


def test_a_late_chunk_teaches_nothing_of_a_ports_bandwidth() -> None:
    link = Link(arbiter(learn=True))
    link.still = {"c"}
    link.submit(flow("x", 1000, source="c"))
    link.submit(flow("y", 5000))
    link.run(until_s=8.0)
    assert link.ended.keys() == {"y"}
    assert ingress(link.arbiter).learned() == pytest.approx(1000.0, rel=0.01)
    link.still = set()
    link.run()
    assert link.ended.keys() == {"x", "y"}
    assert ingress(link.arbiter).learned() == pytest.approx(1000.0, rel=0.01)


def test_a_port_of_which_every_chunk_is_late_is_learned_to_be_slow() -> None:
    """Chunks of 10 ms at the assumed 1 MB/s take 10 s, and up to 18 of them share the port."""
    link = Link(arbiter(port_bytes_per_s=1e6, chunk_s=0.01, least_chunk_bytes=1000, learn=True))
    for number in range(40):
        link.submit(flow(f"f{number}", 10_000, engines=f"p{number}>d"))
    link.run()
    assert len(link.ended) == 40
    assert link.arbiter.ports.rate("a", "b") <= 1001.0


class Counted(Journalled):
    """A link that checks after each event that every posted chunk is counted once, in a slot or as late."""

    work_conserving = True

    def tell(self, event: FlowEvent) -> list[Permit]:
        permits = super().tell(event)
        window = self.arbiter.config.window
        for node in NODES:
            for side in Side:
                port = self.arbiter.ports.at(Port(node, side))
                end = "source" if side is Side.EGRESS else "target"
                posted = [chunk for chunk in self.chunks if getattr(chunk.flow, end) == node]
                assert port.posted + port.late == len(posted)
                assert port.posted == port.moving <= window
                assert port.late <= MOST_LATE * window
        for name in self.arbiter.flow_ids() if self.work_conserving else ():
            view, each = self.arbiter.view(name, self.now_s), self.flows[name]
            if view.left > view.posted and not self.arbiter.blocked(name):
                ports = (Port(each.source, Side.EGRESS), Port(each.target, Side.INGRESS))
                busy = [port for port in ports if self.arbiter.ports.at(port).posted]
                assert busy, f"{name} waits at two idle ports"
        return permits


@settings(max_examples=60, deadline=None)
@given(NAMES, CONFIGS, flows(), st.sampled_from(NODES))
def test_while_a_node_stands_still_all_reads_between_others_end_and_afterwards_its_own(
    name: str, config: ArbiterConfig, given_flows: list[tuple[float, Flow]], still: str
) -> None:
    made = Counted(Arbiter(flow_policy(name), config))
    made.work_conserving = name != "karuna"
    for at_s, each in given_flows:
        made.submit(each, at_s)
    made.run(until_s=0.4)
    made.still = {still}
    made.run(until_s=2000.0)
    others = {each.flow_id for _, each in given_flows if still not in (each.source, each.target)}
    assert others <= made.ended.keys()
    made.still = set()
    made.run()
    assert len(made.ended) == len(given_flows)
    for node in NODES:
        for side in Side:
            port = made.arbiter.ports.at(Port(node, side))
            assert (port.posted, port.late, port.moving, port.waiting) == (0, 0, 0, 0)
    assert [step for step in replay(made.lines) if not step.equal] == []
