"""The flows of stages 1 and 2: shares and pairs by hand, and bytes that are conserved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.flow.base import Side, Stage
from policies.flow.stages import advanced_rli, collective, home_of, reuse_flow, share_of


@given(st.integers(0, 10**12), st.integers(1, 64))
def test_the_shares_of_all_groups_are_the_whole_and_nearly_equal(size: int, groups: int) -> None:
    shares = [share_of(size, group, groups) for group in range(groups)]
    assert sum(shares) == size and max(shares) - min(shares) <= 1


def test_the_flow_of_a_layer_group_is_as_far_as_its_group() -> None:
    flows = [reuse_flow("r", "b", "lender", "home", 10, group, 4, 0.5, "e/") for group in range(4)]
    # 10 bytes over 4 groups: 2.5, 5, 7.5, 10, rounded down
    assert [flow.size for flow in flows] == [2, 3, 2, 3]
    assert [flow.rli for flow in flows] == [0, 1, 2, 3]
    assert {(flow.stage, flow.source, flow.target, flow.due_s) for flow in flows} == {
        (Stage.REUSE, "lender", "home", None)
    }
    assert flows[2].flow_id == "e/r/1/2"
    # after group 0 has ended, group 1 computes: its data is at distance 0
    assert [advanced_rli(group, 1) for group in (1, 2, 3)] == [0, 1, 2]
    # a prefix that is read before its request is computed waits for those before it
    assert reuse_flow("r", "b", "lender", "home", 10, 0, 1, 0.5, before=3).rli == 3


def test_an_all_to_all_of_three_nodes_has_a_flow_for_each_pair() -> None:
    # 600 bytes over 6 ordered pairs
    exchange = collective("b", 2, ("x", "y", "z"), 600.0, 0.1)
    pairs = {(flow.source, flow.target) for flow in exchange.flows}
    assert pairs == {(a, b) for a in "xyz" for b in "xyz" if a != b}
    assert {flow.size for flow in exchange.flows} == {100} and exchange.weight == 1.0
    assert len({flow.flow_id for flow in exchange.flows}) == 6
    assert {(flow.stage, flow.rli, flow.request_id) for flow in exchange.flows} == {
        (Stage.COLLECTIVE, 0, "b")
    }


@given(st.integers(2, 9), st.integers(1, 10**9))
def test_both_patterns_load_every_port_alike(nodes: int, size: int) -> None:
    span = [f"n{number}" for number in range(nodes)]
    for pattern in ("pairs", "ring"):
        flows, weight = collective("b", 0, span, float(size), 0.0, pattern)  # type: ignore[arg-type]
        for side in Side:
            loads = dict.fromkeys(span, 0)
            for flow in flows:
                loads[flow.source if side is Side.EGRESS else flow.target] += flow.size
            assert len(set(loads.values())) == 1
        assert sum(flow.size for flow in flows) == pytest.approx(size, abs=len(flows))
        assert weight * len(flows) == nodes * (nodes - 1)


def test_the_home_of_a_request_does_not_depend_on_the_process() -> None:
    # crc32 of these ids is fixed by its definition
    assert [home_of(name, ("x", "y")) for name in ("r1", "r2", "r3", "r4")] == ["y", "y", "y", "x"]
