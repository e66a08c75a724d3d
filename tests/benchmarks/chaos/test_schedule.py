"""The schedule of faults: decided by its seed, and never without a well engine of each role."""

from collections import Counter

import pytest

from benchmarks.chaos.schedule import BARE, ENGINES, FLOW, READS, SIM, VLLM, Kind, Schedule, role_of

WELL = {"prefill": 3, "decode": 4, "router": 1, "ingress": 2, "controller": 1, "proxy": 1, "core": 4}


def test_a_seed_decides_all() -> None:
    schedules = [
        [s.next(WELL) for _ in range(50)]
        for s in (Schedule(SIM, 1, WELL), Schedule(SIM, 1, WELL), Schedule(SIM, 2, WELL))
    ]
    assert schedules[0] == schedules[1]
    assert schedules[0] != schedules[2]


@pytest.mark.parametrize("kinds", [(*SIM, *BARE), VLLM], ids=["sim", "vllm"])
def test_a_round_has_every_kind_in_its_number(kinds: tuple[Kind, ...]) -> None:
    schedule, length = Schedule(kinds, 3, WELL), sum(kind.times for kind in kinds)
    orders = []
    for _ in range(3):
        drawn = [fault for _ in range(length) if (fault := schedule.next(WELL))]
        assert Counter(fault.kind for fault in drawn) == {kind: kind.times for kind in kinds}
        assert all(f.kind.least_s <= f.seconds <= max(f.kind.most_s, 0.0) for f in drawn)
        orders.append([fault.kind.name for fault in drawn])
    assert orders[0] != orders[1] != orders[2]


AWAY = ("router", "controller")
"""Parts without a possible fault while the router is away: Serve's controller is spared while anything is missing."""
OWED = {kind: kind.times for kind in SIM if kind.part in AWAY}


def drawn_while_away(schedule: Schedule, faults: int) -> None:
    drawn = [schedule.next(WELL | {"router": 0}) for _ in range(faults)]
    assert all(fault is not None and fault.kind.part not in AWAY for fault in drawn)


def test_a_kind_that_has_to_wait_keeps_its_place() -> None:
    schedule = Schedule(SIM, 1, WELL)
    drawn_while_away(schedule, sum(kind.times for kind in SIM) - sum(OWED.values()))
    owed = [fault.kind for _ in range(sum(OWED.values())) if (fault := schedule.next(WELL))]
    assert Counter(owed) == OWED


def test_a_new_round_begins_while_the_rest_of_one_has_to_wait_and_what_is_owed_goes_first() -> None:
    schedule = Schedule(SIM, 1, WELL)
    drawn_while_away(schedule, sum(kind.times for kind in SIM))
    owed = [fault.kind for _ in range(sum(OWED.values())) if (fault := schedule.next(WELL))]
    assert Counter(owed) == OWED
    rest = sum(kind.times for kind in SIM) - sum(OWED.values())
    drawn = Counter(fault.kind for _ in range(rest) if (fault := schedule.next(WELL)))
    assert all(drawn[kind] == number for kind, number in OWED.items())


def test_no_further_round_begins_once_a_whole_round_has_to_wait() -> None:
    schedule, away = Schedule(VLLM, 1, WELL), WELL | {"decode": 1}
    waits = sum(kind.times for kind in VLLM if role_of(kind.part) in ("decode", "controller"))
    length = sum(kind.times for kind in VLLM)
    assert waits < length <= 2 * waits
    drawn = [schedule.next(away) for _ in range(2 * (length - waits))]
    assert None not in drawn
    assert schedule.next(away) is None


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


def test_a_partition_needs_somebody_to_be_cut_off_from() -> None:
    schedule = Schedule([kind for kind in BARE if kind.action == "partition"], 1, WELL)
    assert schedule.next({"ingress": 2}) is None
    fault = schedule.next({"ingress": 2, "router": 1})
    assert fault is not None
    assert fault.kind.part == "ingress"
    assert fault.other(["a", "b", "c"]) == fault.other(["c", "b", "a"])


def test_every_fault_of_flows_and_reads_is_drawn_where_its_part_is_well() -> None:
    well = WELL | {"agent": 2, "coordinator": 1}
    schedule = Schedule((*FLOW, *READS), 1, well)
    drawn = {fault.kind.name for _ in range(300) if (fault := schedule.next(well))}
    assert drawn == {kind.name for kind in (*FLOW, *READS)}
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
