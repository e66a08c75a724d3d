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
    Done,
    Lost,
    Ordered,
    Permit,
    PolicySet,
    Submitted,
    Tick,
    Unscheduled,
    Withdrawn,
)
from policies.flow.registry import flow_policy
from policies.routing.params import BadParameter
from policies.state.events import PolicyChoice
from tests.policies.flow.link import Link, flow

SMALL = ArbiterConfig(port_bytes_per_s=1000.0, chunk_s=0.1, least_chunk_bytes=1, learn=False)


def arbiter(name: str = "mfs", **changed: Any) -> Arbiter:
    return Arbiter(flow_policy(name), dataclasses.replace(SMALL, **changed))


def test_a_flow_alone_gets_one_permit_for_all_of_it() -> None:
    assert arbiter().apply(Submitted(flow("x", 5000, due_s=10.0)), 0.0) == [Permit("x", 5000, 1, whole=True)]


def test_a_second_flow_finds_one_slot_and_a_third_waits() -> None:
    made = arbiter()
    made.apply(Submitted(flow("x", 5000, due_s=100.0)), 0.0)
    assert [p.whole for p in made.apply(Submitted(flow("y", 500, due_s=100.0)), 0.0)] == [True]
    assert made.apply(Submitted(flow("z", 500, due_s=100.0)), 0.0) == []
    assert [p.flow_id for p in made.apply(Done("x", 5000, 5.0, last=True), 5.0)] == ["z"]


def test_while_others_wait_permits_are_chunks_of_the_configured_time() -> None:
    made = arbiter(window=1)
    made.apply(Submitted(flow("x", 150, due_s=100.0)), 0.0)
    made.apply(Submitted(flow("y", 500, due_s=100.0)), 0.0)
    made.apply(Submitted(flow("z", 500, due_s=100.0)), 0.0)
    [permit] = made.apply(Done("x", 150, 0.15, last=True), 0.15)
    assert (permit.size, permit.whole) == (100, False)  # 0.1 s of 1000 bytes/s


def test_a_whole_permit_covers_no_more_than_its_bound() -> None:
    made = arbiter(whole_at_most_s=1.0, window=1)
    assert made.apply(Submitted(flow("x", 5000)), 0.0) == [Permit("x", 1000, 8, whole=False)]


def test_a_chunk_may_be_answered_with_another_size() -> None:
    made = arbiter(window=1, whole_read_when_alone=False)
    made.apply(Submitted(flow("x", 150)), 0.0)
    [permit] = made.apply(Done("x", 80, 0.08), 0.08)  # its blocks ended before 100 bytes
    assert (permit.size, permit.whole) == (70, True)
    assert made.apply(Done("x", 30, 0.03), 0.11) == []  # a whole permit takes several answers
    assert "x" in made
    made.apply(Done("x", 40, 0.04, last=True), 0.15)
    assert "x" not in made


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
    assert made.apply(Submitted(flow("x", 300), posted=100), 0.0) == []
    assert [p.size for p in made.apply(Done("x", 100, 0.1), 0.1)] == [200]


def test_a_restarted_agent_takes_each_of_several_chunks_in_flight() -> None:
    made = arbiter(window=1)
    assert made.apply(Submitted(flow("x", 300), posted=200), 0.0) == []
    assert made.apply(Submitted(flow("y", 100)), 0.0) == []
    assert made.apply(Done("x", 100, 0.1), 0.1) == []
    assert len(made.apply(Done("x", 100, 0.2), 0.2)) == 1
    assert made.flow_ids() == ["x", "y"]


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
        {"stage": 4},
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
