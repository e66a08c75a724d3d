"""The schedule of faults: decided by its seed, and never without a well engine of each role."""

from collections import Counter

import pytest

from benchmarks.chaos.schedule import ENGINES, FLOW, SIM, VLLM, Schedule, role_of

WELL = {"prefill": 3, "decode": 4, "router": 1, "ingress": 2, "controller": 1, "proxy": 1}


def test_a_seed_decides_all() -> None:
    schedules = [
        [s.next(WELL) for _ in range(50)]
        for s in (Schedule(SIM, 1, WELL), Schedule(SIM, 1, WELL), Schedule(SIM, 2, WELL))
    ]
    assert schedules[0] == schedules[1]
    assert schedules[0] != schedules[2]


def test_every_kind_comes_about_as_often_as_it_weighs() -> None:
    """2,000 draws: a kind of share p comes 2,000 p times, give or take five standard deviations."""
    schedule, seen = Schedule(SIM, 3, WELL), Counter[str]()
    for _ in range(2000):
        fault = schedule.next(WELL)
        assert fault is not None
        seen[fault.kind.name] += 1
        assert fault.kind.least_s <= fault.seconds <= max(fault.kind.most_s, 0.0)
    whole = sum(kind.weight for kind in SIM)
    for kind in SIM:
        share = kind.weight / whole
        assert abs(seen[kind.name] - 2000 * share) < 5 * (2000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("kinds", [SIM, VLLM])
def test_a_role_keeps_a_well_engine(kinds: tuple[object, ...]) -> None:
    for role in ENGINES:
        schedule = Schedule(kinds, 1, WELL)  # type: ignore[arg-type]
        parts = {role_of(fault.kind.part) for _ in range(300) if (fault := schedule.next(WELL | {role: 1}))}
        assert role not in parts
        assert parts


def test_the_only_flow_agent_is_harmed_when_it_is_well() -> None:
    kinds = [kind for kind in FLOW if kind.part == "agent"]
    schedule = Schedule(kinds, 1, {"agent": 1})
    actions = {fault.kind.action for _ in range(50) if (fault := schedule.next({"agent": 1}))}
    assert actions == {"kill", "stop"}
    assert schedule.next({"agent": 0}) is None


def test_every_fault_of_flows_is_drawn_where_its_part_is_well() -> None:
    well = WELL | {"agent": 2, "coordinator": 1}
    schedule = Schedule(FLOW, 1, well)
    drawn = {fault.kind.name for _ in range(300) if (fault := schedule.next(well))}
    assert drawn == {kind.name for kind in FLOW}
    assert {"kill coordinator", "cut decode", "expire prefill", "swap prefill"} <= drawn
    without = {fault.kind.part for _ in range(300) if (fault := schedule.next(well | {"coordinator": 0}))}
    assert without == {"agent", "decode", "prefill"}


def test_poison_needs_a_third_engine_of_its_role() -> None:
    schedule = Schedule([kind for kind in SIM if kind.action == "poison"], 1, WELL)
    assert schedule.next(WELL | {"decode": 2, "prefill": 2}) is None
    assert schedule.next(WELL | {"decode": 2}) is not None


def test_an_ingress_is_stopped_only_where_another_serves() -> None:
    kinds = [kind for kind in SIM if kind.part == "ingress"]
    schedule = Schedule(kinds, 1, WELL)
    actions = {fault.kind.action for _ in range(100) if (fault := schedule.next({"ingress": 1}))}
    assert actions == {"kill"}
    assert Schedule(kinds, 1, WELL).next({"ingress": 0}) is None


def test_a_victim_is_chosen_by_the_draw_whatever_the_order() -> None:
    fault = Schedule(SIM, 5, WELL).next(WELL)
    assert fault is not None
    assert fault.victim(["a", "b", "c"]) == fault.victim(["c", "a", "b"])


def test_the_controller_is_spared_while_a_process_is_to_come_back() -> None:
    kinds = [kind for kind in SIM if kind.part == "controller"]
    assert Schedule(kinds, 1, WELL).next(WELL) is not None
    for part in WELL:
        assert Schedule(kinds, 1, WELL).next(WELL | {part: WELL[part] - 1}) is None
