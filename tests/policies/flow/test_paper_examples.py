"""MFS's hand-worked examples: Figures 6 and 7 and Table 1, by permits over one port of capacity 1.

A unit of size is 1,000 bytes and the port moves 1,000 bytes/s, so sizes and times read as in the paper. Chunks take
1/8 s, which every time below is a multiple of.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from policies.flow.arbiter import Arbiter
from policies.flow.base import FlowPolicy, FlowState, Place, Ports, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.events import Ordered
from policies.flow.mfs import MFS
from policies.flow.registry import flow_policy
from tests.policies.flow.link import Link, flow

UNIT = ArbiterConfig(
    window=1,
    chunk_s=0.125,
    least_chunk_bytes=1,
    whole_read_when_alone=False,
    port_bytes_per_s=1000.0,
    learn=False,
)


@dataclass(frozen=True)
class LeastLaxity:
    """The ideal that MFS approximates: it knows the latest start of every flow, implicit or not."""

    due: dict[str, float]
    name: str = "least laxity"
    paper: ClassVar[str] = "MFS 3.2"
    formula: ClassVar[str] = "due - now - bytes_left / B"
    turns: ClassVar[bool] = False

    def place(self, state: FlowState, ports: Ports, now_s: float) -> Place:
        rate = ports.rate(state.flow.source, state.flow.target)
        return Place(1, (self.due[state.flow.flow_id] - state.left / rate,))


# ------------------------------------------------------------------------------------------------------- Figures 6, 7


def layer_1(policy: str, kv_stage: Stage) -> float:
    """Returns the end of a collective of size 2 beside a KV flow of size 1, both from time 0 on.

    The KV flow is prefix reuse for a later layer, or P2D of an earlier one with a loose deadline (20 units).
    """
    link = Link(Arbiter(flow_policy(policy), UNIT))
    explicit = kv_stage is Stage.P2D
    link.submit(flow("kv", 1000, stage=kv_stage, rli=0 if explicit else 1, due_s=20.0 if explicit else None))
    link.submit(flow("collective", 2000, stage=Stage.COLLECTIVE))
    link.run()
    assert link.ended["kv"] <= 3.0
    return link.ended["collective"]


@pytest.mark.parametrize("kv_stage", [Stage.REUSE, Stage.P2D])
@pytest.mark.parametrize(("policy", "starts"), [("mfs", 2.0), ("fair", 3.0), ("sjf", 3.0)])
def test_figure_6_layer_2_starts_when_the_collective_ends(
    policy: str, starts: float, kv_stage: Stage
) -> None:
    # the KV flow is submitted first, so its first chunk of 1/8 goes before the collective is known
    assert layer_1(policy, kv_stage) == pytest.approx(starts, abs=0.125)


def test_figure_6_edf_serves_the_loose_explicit_deadline_first() -> None:
    assert layer_1("edf", Stage.P2D) == 3.0


def test_figure_7_edf_shares_fairly_where_deadlines_are_implicit() -> None:
    assert layer_1("edf", Stage.REUSE) == pytest.approx(layer_1("fair", Stage.REUSE))


@pytest.mark.parametrize(("policy", "ends"), [("mfs", 3.0), ("fair", 4.0), ("sjf", 4.0), ("edf", 4.0)])
def test_figure_7_layer_2_ends_after_collective_and_computation(policy: str, ends: float) -> None:
    compute_s = 1.0
    assert layer_1(policy, Stage.P2D) + compute_s == pytest.approx(ends, abs=0.125)


# ------------------------------------------------------------------------------------------------------------ Table 1

SIZES = {"A": 2000, "B": 4000, "C": 3000}
DUE = {"A": 9.0, "B": 6.0, "C": 7.0}
"""Deadline - remaining time: 18 - 9, 12 - 6, 7 - 0."""
REQUESTS = {"A": 1, "B": 2, "C": 1}
"""Flow B carries requests 2 and 3."""


def table_1(policy: FlowPolicy) -> tuple[int, dict[str, float]]:
    """Returns the number of requests in time, of 4, and the end of each flow.

    A is prefix reuse of the next layer, B a collective, C a P2D transfer: only C's deadline is explicit. The requests'
    deadlines order the batches of B and A by RED (12, 18).
    """
    link = Link(Arbiter(policy, UNIT))
    link.tell(Ordered(("B", "A")))
    # B comes first by a hair, so its first chunk of 1/8 is permitted before the others are known
    link.submit(flow("B", SIZES["B"], stage=Stage.COLLECTIVE), at_s=0.0)
    link.submit(flow("C", SIZES["C"], stage=Stage.P2D, due_s=DUE["C"]), at_s=0.0)
    link.submit(flow("A", SIZES["A"], stage=Stage.REUSE, rli=1), at_s=0.0)
    link.run()
    return sum(REQUESTS[name] for name, due in DUE.items() if link.ended[name] <= due), link.ended


def test_table_1_least_laxity_is_in_time_for_all() -> None:
    in_time, ended = table_1(LeastLaxity(DUE))
    assert in_time == 4
    assert ended["B"] <= 6.0
    assert ended["C"] == pytest.approx(7.0, abs=1e-9)
    assert ended["A"] == pytest.approx(9.0, abs=1e-9)


def test_table_1_fair_sharing_is_in_time_for_one() -> None:
    in_time, ended = table_1(flow_policy("fair"))
    assert in_time == 1
    assert ended == {"A": pytest.approx(6.0, abs=0.25), "C": pytest.approx(8.0, abs=0.25), "B": 9.0}


@pytest.mark.parametrize("name", ["sjf", "edf"])
def test_table_1_shortest_job_and_earliest_deadline_are_in_time_for_two(name: str) -> None:
    assert table_1(flow_policy(name))[0] == 2


def test_table_1_the_papers_thresholds_promote_c_at_once() -> None:
    # C's MLU is 3 / 7 = 0.43 > Q_1 = 0.125: it ends at 3, and B, the collective, is late at 7
    in_time, ended = table_1(MFS(scale=0.5, base=4.0))
    assert in_time == 2
    assert ended["B"] == pytest.approx(7.0, abs=0.125)
    assert ended["A"] == 9.0


def test_table_1_a_first_threshold_of_a_half_promotes_c_at_one() -> None:
    in_time, ended = table_1(MFS(scale=2.0, base=4.0))
    assert in_time == 2
    assert ended["C"] == pytest.approx(4.0, abs=0.125)


def test_table_1_a_first_threshold_of_one_serves_all_just_in_time() -> None:
    in_time, ended = table_1(MFS(scale=4.0, base=4.0))
    assert in_time == 4
    assert ended == {"B": 4.0, "C": 7.0, "A": 9.0}
