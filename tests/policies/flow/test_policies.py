"""Levels and orders of each flow policy, by hand; the registry."""

import math

import pytest

from policies.flow.base import (
    WEIGHTS_LEVEL,
    FixedPorts,
    Flow,
    FlowState,
    Port,
    Side,
    Stage,
    mlu,
    ranking,
)
from policies.flow.mfs import MFS
from policies.flow.registry import DEFAULT, FLOW, UnknownFlowPolicy, flow_policy
from policies.flow.rmlq import thresholds
from policies.routing.params import BadParameter
from tests.policies.flow.link import flow

PORTS = FixedPorts(1000.0)


def order(policy: str, *flows: Flow, now_s: float = 0.0) -> list[str]:
    states = [FlowState(each, number, 0.0) for number, each in enumerate(flows)]
    return [state.flow.flow_id for state in ranking(flow_policy(policy), states, PORTS, now_s)]


def test_thresholds_fall_geometrically() -> None:
    assert thresholds(4, 0.5, 4.0) == (0.125, 0.03125, 0.0078125)


@pytest.mark.parametrize(
    ("size", "level"),
    [
        # MLU 1250 / (10 s * 1000 bytes/s) = 0.125 = Q_1
        (1250, 1),
        (1249, 2),
        (313, 2),  # Q_2 = 0.03125
        (312, 3),
        (78, 4),  # Q_3 = 0.0078125: 78 bytes are 0.0078
        (10_000, 1),  # MLU 1
        (10_001, 9),  # MLU > 1: the scavenger
    ],
)
def test_the_level_of_an_explicit_deadline_follows_its_mlu(size: int, level: int) -> None:
    state = FlowState(flow("x", size, due_s=10.0), 0, 0.0)
    assert MFS().place(state, PORTS, 0.0).level == level
    assert mlu(state, PORTS, 0.0) == size / 10_000


def test_a_place_says_when_the_next_threshold_is_crossed() -> None:
    state = FlowState(flow("x", 1000, due_s=10.0), 0, 0.0)
    state.stand(MFS().place(state, PORTS, 0.0))
    assert (state.level, state.place and state.place.until_s) == (2, 2.0)  # 1000 / (8 s * 1000) = Q_1
    state.stand(MFS().place(state, PORTS, 2.0))
    assert state.level == 1
    assert state.place is not None
    assert state.place.until_s == math.nextafter(9.0, math.inf)  # after 9 s it cannot be in time


def test_a_level_does_not_fall_while_bytes_arrive() -> None:
    state = FlowState(flow("x", 5000, due_s=10.0), 0, 0.0)
    state.stand(MFS().place(state, PORTS, 0.0))
    state.left = 10
    assert MFS().place(state, PORTS, 1.0).level == 1


@pytest.mark.parametrize(("rli", "level"), [(0, 2), (1, 3), (6, 8), (7, 8), (100, 8)])
def test_the_level_of_an_implicit_deadline_follows_its_layer(rli: int, level: int) -> None:
    assert (
        MFS().place(FlowState(flow("x", 10, stage=Stage.REUSE, rli=rli), 0, 0.0), PORTS, 0.0).level == level
    )


def test_mfs_orders_stages_within_and_between_levels() -> None:
    found = order(
        "mfs",
        flow("loose", 100, due_s=1000.0),
        flow("no deadline", 10),
        flow("doomed", 5000, due_s=1.0),
        # MLU 0.05: P_2, behind the collective of that level
        flow("p2", 500, due_s=10.0),
        flow("reuse of the next layer", 10, stage=Stage.REUSE, rli=1),
        flow("collective", 10_000, stage=Stage.COLLECTIVE),
        flow("reuse needed now", 10, stage=Stage.REUSE),
        flow("urgent", 900, due_s=1.0),
    )
    assert found == [
        "urgent",
        "collective",
        "reuse needed now",
        "p2",
        "reuse of the next layer",
        "loose",
        "no deadline",
        "doomed",
    ]


def test_equal_layers_are_ordered_by_red() -> None:
    states = [FlowState(flow(name, 10, stage=Stage.REUSE), i, 0.0) for i, name in enumerate("xyz")]
    states[1].red, states[2].red = 1.0, 0.0
    assert [state.flow.flow_id for state in ranking(MFS(), states, PORTS, 0.0)] == ["z", "y", "x"]


def test_the_baselines_by_hand() -> None:
    flows = (
        flow("long", 3000, stage=Stage.COLLECTIVE),
        flow("late due", 2000, due_s=9.0),
        flow("early due", 2500, due_s=5.0),
        flow("short", 100, stage=Stage.REUSE),
    )
    assert order("fair", *flows) == ["long", "late due", "early due", "short"]  # nothing served: as they came
    assert order("sjf", *flows) == ["short", "late due", "early due", "long"]
    assert order("edf", *flows) == ["early due", "late due", "long", "short"]
    assert order("karuna", *flows) == ["early due", "late due", "short", "long"]


@pytest.mark.parametrize("policy", sorted(FLOW))
def test_weights_wait_for_everything_else(policy: str) -> None:
    found = order(
        policy,
        flow("first weights", 10, stage=Stage.WEIGHTS),
        flow("second weights", 1, stage=Stage.WEIGHTS),
        flow("no deadline", 10_000),
        flow("doomed", 5000, due_s=1.0),
        flow("collective", 10_000, stage=Stage.COLLECTIVE),
        flow("reuse", 10, stage=Stage.REUSE, rli=50),
    )
    assert found[-2:] == ["first weights", "second weights"]


def test_the_level_of_weights_is_below_the_scavenger_of_any_policy() -> None:
    lowest = MFS(levels=64).place(FlowState(flow("doomed", 5000, due_s=1.0), 0, 0.0), PORTS, 0.0).level
    assert lowest == WEIGHTS_LEVEL - 1
    with pytest.raises(BadParameter):
        MFS(levels=65)


def test_karuna_gives_a_deadline_its_least_rate_and_none_that_cannot_be_kept() -> None:
    policy = flow_policy("karuna")
    place = policy.place(FlowState(flow("x", 2000, due_s=8.0), 0, 0.0), PORTS, 0.0)
    assert (place.level, place.rate) == (1, 250.0)
    place = policy.place(FlowState(flow("x", 2000, due_s=1.0), 0, 0.0), PORTS, 0.0)
    assert (place.level, place.rate) == (2, None)


def test_the_slower_port_counts() -> None:
    ports = FixedPorts(1000.0, {Port("b", Side.INGRESS): 100.0, Port("b", Side.EGRESS): 1.0})
    assert ports.rate("a", "b") == 100.0


def test_the_registry_builds_every_policy_by_its_name() -> None:
    assert set(FLOW) == {"mfs", "fair", "sjf", "edf", "karuna"}
    assert {name: flow_policy(name).name for name in FLOW} == {name: name for name in FLOW}
    assert DEFAULT == "mfs"


@pytest.mark.parametrize(
    ("name", "params", "complaint"),
    [
        ("mfq", {}, "choose one of edf, fair, karuna, mfs, sjf"),
        ("mfs", {"level": 3}, "it takes base, infeasible_above, levels, scale"),
        ("fair", {"levels": 3}, "it takes none"),
    ],
)
def test_an_unknown_name_or_parameter_is_refused_with_the_known_ones(
    name: str, params: dict[str, int], complaint: str
) -> None:
    with pytest.raises(UnknownFlowPolicy, match=complaint):
        flow_policy(name, params)


@pytest.mark.parametrize("params", [{"levels": 1}, {"scale": 0.0}, {"base": 1.0}, {"infeasible_above": 0.9}])
def test_parameters_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(BadParameter, match="policy mfs"):
        flow_policy("mfs", params)
