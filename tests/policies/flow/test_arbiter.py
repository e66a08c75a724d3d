"""The arbiter: permits, slots, chunk sizes, refusals."""

import dataclasses
import math
from typing import Any

import pytest

from policies.flow.arbiter import Arbiter
from policies.flow.base import (
    BadEvent,
    BadFlow,
    DuplicateFlow,
    FlowError,
    Port,
    Side,
    Stage,
    TooManyFlows,
    UnknownFlow,
)
from policies.flow.config import ArbiterConfig
from policies.flow.events import (
    Advanced,
    Bandwidth,
    Cleared,
    Done,
    Lost,
    Ordered,
    Permit,
    PolicySet,
    Posted,
    Submitted,
    Tick,
    Unscheduled,
    Withdrawn,
)
from policies.flow.registry import flow_policy
from policies.routing.params import BadParameter
from policies.state.events import PolicyChoice
from tests.policies.flow.link import Link, flow

SMALL = ArbiterConfig(
    port_bytes_per_s=1000.0, chunk_s=0.1, least_chunk_bytes=1, whole_at_most_s=None, learn=False, late_s=1e6
)


def arbiter(name: str = "mfs", **changed: Any) -> Arbiter:
    return Arbiter(flow_policy(name), dataclasses.replace(SMALL, **changed))


def test_a_flow_alone_gets_one_permit_for_all_of_it() -> None:
    assert arbiter().apply(Submitted(flow("x", 5000, due_s=10.0)), 0.0) == [Permit("x", 5000, 1, whole=True)]


def test_a_second_flow_finds_one_slot_for_a_chunk_and_a_third_waits() -> None:
    made = arbiter()
    made.apply(Submitted(flow("x", 5000, due_s=100.0)), 0.0)
    assert made.apply(Submitted(flow("y", 500, due_s=100.0)), 0.0) == [Permit("y", 100, 4)]
    assert made.apply(Submitted(flow("z", 500, due_s=10.0)), 0.0) == []
    assert [p.flow_id for p in made.apply(Done("x", 5000, 5.0, last=True), 5.0)] == ["z"]


@pytest.mark.parametrize("name", ["edf", "mfs", "sjf"])
def test_whole_reads_do_not_make_an_order_first_come_first_served(name: str) -> None:
    """Two reads of 5 s, then one of 0.5 s that is due first: at most the first one is posted before it, 4.8 s of it
    left, which shares the link with it. Had the second been posted whole on its arrival, the third would end at 10 s.
    """
    link = Link(arbiter(name))
    link.submit(flow("a", 5000, due_s=100.0, source="a", target="y"))
    link.submit(flow("b", 5000, due_s=100.0, source="a", target="z"), 0.1)
    link.submit(flow("c", 500, due_s=3.0, source="a", target="y"), 0.2)
    link.run()
    assert link.ended["c"] < 1.5
    assert max(link.ended.values()) == pytest.approx(10.5)


def test_while_others_wait_permits_are_chunks_of_the_configured_time() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 150, due_s=100.0)), 0.0)
    made.apply(Submitted(flow("y", 500, due_s=100.0)), 0.0)
    made.apply(Submitted(flow("z", 500, due_s=100.0)), 0.0)
    [permit] = made.apply(Done("x", 150, 0.15, last=True), 0.15)
    assert (permit.size, permit.whole) == (100, False)  # 0.1 s of 1000 bytes/s


def test_no_permit_is_for_less_than_the_least_part_of_its_flow_unless_less_is_left() -> None:
    """A chunk is 100 bytes long by its time, and the flow cannot be divided into less than 250."""
    made = arbiter(window=1, whole_read_when_alone=False)
    sizes = [p.size for p in made.apply(Submitted(flow("x", 600, least=250)), 0.0)]
    for now_s in (1.0, 2.0):
        sizes += [p.size for p in made.apply(Done("x", 250, 0.25), now_s)]
    assert sizes == [250, 250, 100]
    gated = arbiter(whole_read_when_alone=False)
    for name, source in (("x", "c"), ("y", "d")):
        gated.apply(Submitted(flow(name, 900, source=source, least=250), gated=True), 0.0)
    assert [p.size for p in gated.apply(Cleared("x", 300), 0.0)] == [250]


def test_a_whole_permit_covers_no_more_than_its_bound() -> None:
    made = arbiter(whole_at_most_s=1.0, window=1)
    assert made.apply(Submitted(flow("x", 5000)), 0.0) == [Permit("x", 1000, 8, whole=False)]


def test_all_that_is_posted_of_a_flow_alone_stays_within_the_bound_and_a_chunk() -> None:
    made = arbiter(whole_at_most_s=0.3, window=2)
    permits = made.apply(Submitted(flow("x", 5000)), 0.0)
    assert [p.size for p in permits] == [300, 100]
    assert [p.size for p in made.apply(Done("x", 300, 0.3), 0.3)] == [200]


def test_a_chunk_may_be_answered_with_another_size() -> None:
    made = arbiter(window=1, whole_read_when_alone=False)
    made.apply(Submitted(flow("x", 150)), 0.0)
    [permit] = made.apply(Done("x", 80, 0.08), 0.08)  # its blocks ended before 100 bytes
    assert (permit.size, permit.whole) == (70, True)
    assert made.apply(Done("x", 30, 0.03), 0.11) == []  # a whole permit takes several answers
    assert "x" in made
    made.apply(Done("x", 40, 0.04, last=True), 0.15)
    assert "x" not in made


def test_a_chunk_that_moves_more_than_it_was_permitted_leads_to_no_permit_without_bytes() -> None:
    """Two permits of 100 are open for 230 bytes; a chunk moves 150, so that the other covers more than is left."""
    made = arbiter(whole_read_when_alone=False)
    assert [p.size for p in made.apply(Submitted(flow("x", 230)), 0.0)] == [100, 100]
    assert made.apply(Done("x", 150, 0.15), 0.15) == []
    assert [p.size for p in made.apply(Done("x", 50, 0.2), 0.2)] == [30]


def test_a_whole_permit_covers_what_chunks_before_it_leave_and_stays_open_until_the_flow_ends() -> None:
    """100 bytes and the other 50 are permitted; chunks of 99, 50 and 1 arrive, the last two under the whole permit."""
    made = arbiter(whole_read_when_alone=False)
    assert [(p.size, p.whole) for p in made.apply(Submitted(flow("x", 150)), 0.0)] == [
        (100, False),
        (50, True),
    ]
    assert made.apply(Done("x", 99, 0.1), 0.1) == []
    assert made.view("x", 0.1).posted == 51
    assert made.apply(Done("x", 50, 0.1), 0.2) == []
    assert made.view("x", 0.2).posted == 1
    made.apply(Done("x", 1, 0.1, last=True), 0.3)
    assert "x" not in made


def test_a_whole_permit_that_overtakes_another_gives_its_slot_back() -> None:
    """100 bytes and the other 50 are permitted, and the 50 arrive first: one slot is free, and the 100 are the rest."""
    made = arbiter(whole_read_when_alone=False)
    made.apply(Submitted(flow("x", 150)), 0.0)
    made.apply(Submitted(flow("y", 500)), 0.0)
    assert [p.flow_id for p in made.apply(Done("x", 50, 0.1), 0.1)] == ["y"]
    assert made.apply(Done("x", 99, 0.2), 0.2) == []
    assert made.view("x", 0.2).posted == made.view("x", 0.2).left == 1


def test_a_chunk_answers_its_permit_and_not_that_of_larger_chunks_in_flight() -> None:
    """396 of 540 bytes are in flight as one chunk; of 100 more 99 arrive first. After both, 45 are left."""
    made = arbiter(whole_read_when_alone=False)
    permits = made.apply(Submitted(flow("x", 540), in_flight=(396,)), 0.0)
    assert [p.size for p in permits] == [100]
    assert [(p.size, p.whole) for p in made.apply(Done("x", 99, 0.1), 0.1)] == [(45, True)]
    made.apply(Done("x", 396, 0.4), 0.4)
    assert made.view("x", 0.4).posted == made.view("x", 0.4).left == 45


def test_a_withdrawn_flow_holds_its_ports_until_its_chunk_has_arrived() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 5000)), 0.0)
    made.apply(Submitted(flow("y", 500)), 0.0)
    assert made.apply(Withdrawn("x", posted=100), 0.1) == []
    assert [p.flow_id for p in made.apply(Done("x", 100, 0.2, last=True), 0.2)] == ["y"]


def test_a_withdrawn_flow_with_nothing_posted_frees_its_slots_at_once() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 5000)), 0.0)
    made.apply(Submitted(flow("y", 500)), 0.0)
    assert [p.flow_id for p in made.apply(Withdrawn("x"), 0.1)] == ["y"]
    assert made.flow_ids() == ["y"]


def test_an_unscheduled_flow_counts_as_posted_until_its_last_byte() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 300)), 0.0)
    made.apply(Submitted(flow("y", 500)), 0.0)
    assert made.apply(Unscheduled("y"), 0.1) == []
    assert made.apply(Done("x", 300, 0.3, last=True), 0.3) == []
    assert made.apply(Done("y", 200, 0.4), 0.5) == []
    made.apply(Submitted(flow("z", 10)), 0.5)
    assert [p.flow_id for p in made.apply(Done("y", 300, 0.3, last=True), 0.8)] == ["z"]


def test_flows_of_a_lost_node_or_worker_are_gone_with_their_slots() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 300)), 0.0)
    made.apply(Submitted(flow("y", 300, source="c")), 0.0)
    made.apply(Submitted(flow("z", 300, target="d", source="e")), 0.0)
    assert [p.flow_id for p in made.apply(Lost(("x", "ended long ago")), 0.1)] == ["y"]
    assert made.apply(Lost(node="b"), 0.2) == []
    assert made.flow_ids() == ["z"]


def test_a_restarted_agent_counts_what_its_workers_had_posted() -> None:
    made = arbiter(window=1)
    assert made.apply(Submitted(flow("x", 300), in_flight=(100,)), 0.0) == []
    assert [p.size for p in made.apply(Done("x", 100, 0.1), 0.1)] == [200]


def test_a_restarted_agent_takes_each_of_several_chunks_in_flight() -> None:
    made = arbiter(window=2)
    assert made.apply(Submitted(flow("x", 300), in_flight=(100, 100)), 0.0) == []
    assert made.apply(Submitted(flow("y", 100)), 0.0) == []
    assert len(made.apply(Done("x", 100, 0.2), 0.2)) == 1
    assert made.flow_ids() == ["x", "y"]


def test_a_last_byte_that_does_not_say_so_is_refused_and_changes_nothing() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 300)), 0.0)
    with pytest.raises(BadEvent, match="say last"):
        made.apply(Done("x", 300, 0.3), 0.3)
    made.apply(Withdrawn("x", posted=200), 0.4)
    assert made.apply(Done("x", 100, 0.1), 0.5) == []
    with pytest.raises(BadEvent, match="say last"):
        made.apply(Done("x", 100, 0.1), 0.6)
    made.apply(Done("x", 100, 0.1, last=True), 0.6)
    assert made.flow_ids() == []


@pytest.mark.parametrize("sizes", [(0,), (-1, 5), (5, 6), (True,), (1,) * 5000])
def test_chunks_in_flight_that_cannot_be_the_flows_are_refused(sizes: tuple[int, ...]) -> None:
    made = arbiter()
    with pytest.raises(BadEvent, match="in flight"):
        made.apply(Submitted(flow("x", 10 if len(sizes) < 9 else 9000), in_flight=sizes), 0.0)
    assert made.flow_ids() == []


def test_an_ingress_cuts_what_a_source_permits_while_another_source_sends_there() -> None:
    """Both sources permit 300 bytes of a read. While the other read waits, even for its source only, 100 are posted."""
    made = arbiter()
    for name, source in (("x", "c"), ("y", "d")):
        made.apply(Submitted(flow(name, 900, source=source), gated=True), 0.0)
    assert [p.size for p in made.apply(Cleared("x", 300), 0.0)] == [100]
    assert [p.size for p in made.apply(Cleared("y", 300), 0.0)] == [100]
    made.apply(Lost(("y",)), 0.1)
    # alone: what the source has permitted is posted, so that both arbiters count the same chunks
    assert [p.size for p in made.apply(Cleared("x", 300), 0.1)] == [300]


def test_a_lent_chunk_that_waits_for_its_readers_ingress_is_no_use_of_the_port() -> None:
    """A port of 1000 bytes/s is busy for a fifth of the time, and two permits are open at all times."""
    made = arbiter(learn=True, whole_read_when_alone=False)
    sizes = [p.size for p in made.apply(Submitted(flow("x", 100_000), lent=True), 0.0)]
    now_s = 0.0
    for _ in range(20):
        size = sizes.pop(0)
        assert made.apply(Posted("x"), now_s) == []
        now_s += size / 1000
        sizes += [p.size for p in made.apply(Done("x", size, size / 1000), now_s)]
        assert len(sizes) == 2
        now_s += 4 * size / 1000
    assert made.ports.at(Port("a", Side.EGRESS)).learned() == pytest.approx(1000.0)


def test_a_worker_whose_chunks_take_no_time_makes_no_bandwidth_infinite() -> None:
    """The next grants at its ports are other workers' too."""
    made = arbiter(learn=True, whole_read_when_alone=False)
    permits = made.apply(Submitted(flow("x", 100_000)), 0.0)
    for number in range(8):
        size = permits.pop(0).size
        permits += made.apply(Done("x", size, 5e-324), 0.5 * (number + 1))
    assert math.isfinite(made.ports.at(Port("a", Side.EGRESS)).learned())
    made.apply(Lost(("x",)), 9.0)
    assert {p.flow_id for p in made.apply(Submitted(flow("y", 500, due_s=10.0)), 9.0)} == {"y"}


def test_a_whole_permit_of_a_lent_flow_stands_still_between_its_chunks() -> None:
    made = arbiter(learn=True)
    assert [p.whole for p in made.apply(Submitted(flow("x", 1000), lent=True), 0.0)] == [True]
    for number in range(9):
        made.apply(Posted("x"), number * 1.0)
        made.apply(Done("x", 100, 0.1), number * 1.0 + 0.1)
    assert made.ports.at(Port("a", Side.EGRESS)).learned() == pytest.approx(1000.0)
    with pytest.raises(BadEvent, match="lent"):
        made.apply(Submitted(flow("own", 100)), 9.0)
        made.apply(Posted("own"), 9.0)


def test_a_better_level_keeps_the_last_slot_of_a_port_for_itself() -> None:
    made = arbiter(whole_read_when_alone=False)
    for name in ("i", "j"):  # they fill b's ingress
        made.apply(Submitted(flow(name, 1000, source="c", due_s=1000.0)), 0.0)
    made.apply(Submitted(flow("urgent", 500, due_s=1.0)), 0.0)  # a to b: P_1, waits for b
    permits = made.apply(Submitted(flow("loose", 1000, target="d", due_s=1000.0)), 0.0)
    # a was idle: one slot, and the other one is kept
    assert [p.flow_id for p in permits] == ["loose"]
    assert [p.flow_id for p in made.apply(Done("i", 100, 0.2), 0.2)] == ["urgent"]


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 0},
        {"size": -1},
        {"size": math.nan},
        {"size": 1.5},
        {"size": True},
        {"source": ""},
        {"target": None},
        {"flow_id": ""},
        {"stage": 5},
        {"least": 0},
        {"least": 1.5},
        {"engines": None},
        {"due_s": math.nan},
        {"due_s": math.inf},
        {"rli": -1},
        {"compute_s": -1.0},
        {"compute_s": math.nan},
    ],
)
def test_a_flow_that_is_not_valid_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(BadFlow, match=next(iter(fields))):
        flow("x", **({"size": 10} | fields))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_that_is_no_number_above_0_is_refused(weight: float) -> None:
    made = arbiter()
    with pytest.raises(BadEvent, match="must be finite and > 0"):
        made.apply(Submitted(flow("x", 1), weight=weight), 0.0)
    assert made.flow_ids() == []


def test_a_refused_event_changes_nothing() -> None:
    made = arbiter(most_flows=3, window=1)
    made.apply(Submitted(flow("x", 300)), 0.0)
    made.apply(Submitted(flow("y", 300)), 0.0)
    made.apply(Submitted(flow("w", 300)), 0.0)
    before = [made.view(name, 2.0) for name in made.flow_ids()]
    refused: list[tuple[Any, float, type[FlowError] | type[BadParameter]]] = [
        (Done("unknown", 1, 0.1), 1.0, UnknownFlow),
        (Done("y", 1, 0.1), 1.0, BadEvent),  # nothing posted
        (Done("x", 301, 0.1), 1.0, BadEvent),
        (Done("x", -1, 0.1), 1.0, BadEvent),
        (Done("x", 1, math.nan), 1.0, BadEvent),
        (Done("x", 1, -0.1), 1.0, BadEvent),
        (Submitted(flow("x", 1)), 1.0, DuplicateFlow),
        (Submitted(flow("z", 1)), 1.0, TooManyFlows),
        (Withdrawn("unknown"), 1.0, UnknownFlow),
        (Withdrawn("x", posted=301), 1.0, BadEvent),
        (Unscheduled("unknown"), 1.0, UnknownFlow),
        (Advanced("x", -1), 1.0, BadEvent),
        (Bandwidth(Port("a", Side.EGRESS), math.nan), 1.0, BadEvent),
        (Bandwidth(Port("a", Side.EGRESS), 0.0), 1.0, BadEvent),
        (PolicySet(PolicyChoice("no such policy")), 1.0, FlowError),
        (PolicySet(PolicyChoice("mfs", {"unknown": 1})), 1.0, FlowError),
        (PolicySet(PolicyChoice("mfs", {"levels": 1})), 1.0, BadParameter),
        (Tick(), -1.0, BadEvent),
        (Tick(), math.nan, BadEvent),
    ]
    for event, at_s, error in refused:
        with pytest.raises(error):
            made.apply(event, at_s)
        assert [made.view(name, 2.0) for name in made.flow_ids()] == before
    assert [p.flow_id for p in made.apply(Done("x", 300, 0.3, last=True), 2.0)] == ["y"]


def test_pruned_requests_go_last_and_come_back_with_the_next_order() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 300)), 0.0)
    for name in ("y", "z"):
        made.apply(Submitted(flow(name, 300, stage=Stage.COLLECTIVE)), 0.0)
    made.apply(Ordered(("z", "y"), pruned=("z",)), 0.1)
    assert made.view("z", 0.1).level == 9
    assert [p.flow_id for p in made.apply(Done("x", 300, 0.3, last=True), 0.3)] == ["y"]
    made.apply(Ordered(("z", "y")), 0.4)
    assert made.view("z", 0.4).level == 2
    assert [p.flow_id for p in made.apply(Done("y", 100, 0.1), 0.4)] == ["z"]


def test_an_order_for_many_flows_is_taken_over_in_turns() -> None:
    """600 flows hear of an order 256 at a time: in the event and in two ticks, which are due at once."""
    made = arbiter(window=1)
    names = [f"f{number}" for number in range(600)]
    for name in names:
        made.apply(Submitted(flow(name, 300, stage=Stage.REUSE, rli=3)), 0.0)
    made.apply(Ordered((), pruned=tuple(names)), 1.0)
    heard = [256, 512, 600]
    # the one chunk that is posted is looked at then
    later_s = SMALL.late_s
    for number in heard:
        assert [name for name in names if made.view(name, 1.0).pruned] == names[:number]
        assert made.next_tick_s() == (later_s if number == 600 else 1.0)
        made.apply(Tick(), 1.0)
    # a flow that comes meanwhile knows the latest order, and one that has ended is none of its business
    made.apply(Ordered((), pruned=("late",)), 2.0)
    made.apply(Submitted(flow("late", 300)), 2.0)
    made.apply(Lost(tuple(names[256:])), 2.0)
    made.apply(Tick(), 2.0)
    made.apply(Tick(), 2.0)
    assert [name for name in made.flow_ids() if made.view(name, 2.0).pruned] == ["late"]
    assert made.next_tick_s() == later_s


def test_reuse_rises_as_the_computation_advances_and_never_falls() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 300, stage=Stage.REUSE, rli=3)), 0.0)
    assert made.view("x", 0.0).level == 5
    made.apply(Advanced("x", 1), 0.0)
    assert made.view("x", 0.0).level == 3
    made.apply(Advanced("x", 5), 0.0)
    assert made.view("x", 0.0).level == 3


def test_the_policy_can_be_changed_under_way() -> None:
    link = Link(arbiter(window=1))
    for name, size in (("x", 300), ("y", 200), ("z", 100)):
        link.submit(flow(name, size))
    link.tell(PolicySet(PolicyChoice("fair")))
    assert {link.arbiter.view(name, 0.0).level for name in ("x", "y", "z")} == {1}
    link.run()
    assert set(link.ended) == {"x", "y", "z"}


def test_holds_are_counted_while_nothing_is_posted() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 300)), 0.0)
    made.apply(Submitted(flow("y", 300)), 1.0)
    assert made.view("y", 3.0).held_s == 2.0
    assert made.view("x", 3.0).held_s == 0.0
