"""Tests of which pool entries an event tries: after room came all from the front, otherwise only the new ones."""

import math

from policies.dispatch.config import DispatchConfig
from policies.dispatch.pool_scan import Placement, PoolScan
from policies.request.terms import Terms
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import PoolEntry, Request, Role

CONFIG = DispatchConfig(tick_entries=2, starvation_s=5.0)
NOTHING_FITS = Placement(bounded=False, slots_left=True, blocked_by=None)
FULL = Placement(bounded=False, slots_left=False, blocked_by=None)


class Pool:
    """A pool and its scan; every attempt to place entries returns `answer`."""

    def __init__(self) -> None:
        self.state = ClusterState()
        self.state.apply(ev.EngineUp(0.0, "p", Role.PREFILL, "g", "n", 99, 100_000))
        self.scan = PoolScan(self.state)
        self.answer = NOTHING_FITS

    def enter(
        self,
        attempt_id: str,
        now_s: float = 0.0,
        priority: int = 0,
        ttft_slo_s: float | None = None,
        slo_presses: bool = True,
        arrived_s: float | None = None,
    ) -> None:
        terms = Terms(priority=priority, ttft_slo_s=ttft_slo_s, slo_presses=slo_presses)
        request = Request(attempt_id, now_s, 10, 8, terms=terms, waits_since_s=arrived_s)
        self.state.apply(ev.Arrived(now_s, request))
        self.state.apply(ev.PrefillRouted(now_s, attempt_id, "p", colocated=False))
        self.state.apply(ev.PrefillDone(now_s, attempt_id, 99.0, 1, 0))

    def tried(self, room_came: bool, now_s: float = 0.0, config: DispatchConfig = CONFIG) -> list[str]:
        seen: list[str] = []

        def place(entries: list[PoolEntry]) -> Placement:
            seen.extend(entry.request.attempt_id for entry in entries)
            return self.answer

        self.scan.scan(room_came, self.state.take_entered(), now_s, config, place)
        return seen


def test_room_has_the_whole_pool_tried_two_an_event_and_then_nothing() -> None:
    pool = Pool()
    for attempt_id in ("a", "b", "c"):
        pool.enter(attempt_id)
    assert pool.tried(room_came=True) == ["a", "b"]
    assert pool.tried(room_came=False) == ["c"]  # any event resumes the scan
    assert pool.tried(room_came=False) == []


def test_without_room_only_new_entries_are_tried() -> None:
    pool = Pool()
    pool.enter("a")
    pool.answer = FULL
    assert pool.tried(room_came=True) == ["a"]
    pool.enter("b")
    assert pool.tried(room_came=False) == ["b"]


def test_more_room_on_the_way_and_urgent_entries_bring_it_back_to_the_front() -> None:
    pool = Pool()
    for attempt_id in ("a", "b", "c"):
        pool.enter(attempt_id, priority=1)
    assert pool.tried(room_came=True) == ["a", "b"]
    assert pool.tried(room_came=True) == ["c"]
    assert pool.tried(room_came=False) == ["a", "b"]  # again, as room came meanwhile
    pool.enter("urgent", priority=0)
    assert pool.tried(room_came=False) == ["urgent", "a"]


def test_a_starving_entry_keeps_new_ones_out_until_it_has_left() -> None:
    pool = Pool()
    pool.enter("old")
    pool.answer = Placement(bounded=False, slots_left=True, blocked_by=pool.state.pool_entry("old"))
    assert pool.tried(room_came=True, now_s=6.0) == ["old"]
    pool.enter("new", now_s=6.0)
    assert pool.tried(room_came=False, now_s=6.0) == [] and not pool.scan.unblocked(6.0)
    pool.state.apply(ev.Closed(6.0, "old", "cancelled"))
    assert pool.scan.unblocked(6.0)


def test_new_entries_that_a_starving_one_keeps_out_are_tried_when_it_has_left() -> None:
    pool = Pool()
    pool.enter("old")
    pool.answer = FULL
    assert pool.tried(room_came=True) == ["old"]
    # it had not begun to starve when the pool was scanned
    pool.enter("new", now_s=6.0)
    assert pool.tried(room_came=False, now_s=6.0) == [] and not pool.scan.unblocked(6.0)
    pool.state.apply(ev.Closed(6.0, "old", "cancelled"))
    assert pool.scan.unblocked(6.0)


def test_a_new_entry_that_starves_already_is_tried_all_the_same() -> None:
    pool = Pool()
    pool.enter("waits")
    pool.answer = FULL
    pool.tried(room_came=True, config=DispatchConfig())
    # its prompt took five of its six seconds
    pool.enter("late", now_s=5.0, ttft_slo_s=6.0, arrived_s=0.0)
    assert pool.tried(room_came=False, now_s=5.0, config=DispatchConfig()) == ["late"]


def test_without_a_limit_an_entry_starves_by_its_lease_as_granted() -> None:
    config = DispatchConfig(tick_entries=2)
    assert config.starvation_s is None
    pool = Pool()
    # its lease was granted for 99 s, so it starves from 66 s on, however often it is renewed
    pool.enter("old")
    assert pool.tried(room_came=True, now_s=1.0, config=config) == ["old"]
    pool.state.apply(ev.LeaseRenewed(59.0, "old", 158.0))
    pool.enter("b", now_s=60.0)
    assert pool.tried(room_came=False, now_s=60.0, config=config) == ["b"]
    pool.answer = Placement(bounded=False, slots_left=True, blocked_by=pool.state.pool_entry("old"))
    assert pool.tried(room_came=True, now_s=67.0, config=config) == ["old", "b"]
    pool.enter("c", now_s=67.0)
    assert pool.tried(room_came=False, now_s=67.0, config=config) == []
    pool.state.apply(ev.LeaseRenewed(68.0, "old", 167.0))
    assert not pool.scan.unblocked(68.0)
    pool.enter("d", now_s=69.0)
    assert pool.tried(room_came=False, now_s=69.0, config=config) == []
    # one that never starves keeps nothing out
    endless = DispatchConfig(tick_entries=2, starvation_s=math.inf)
    pool.enter("e", now_s=70.0)
    assert pool.tried(room_came=False, now_s=70.0, config=endless) == ["e"]


def test_an_objective_that_ends_sooner_than_the_lease_makes_an_entry_starve_in_its_last_third() -> None:
    config = DispatchConfig(tick_entries=2)
    pool = Pool()
    pool.enter("old", ttft_slo_s=9.0)
    pool.answer = FULL
    pool.tried(room_came=True, config=config)
    pool.enter("a", now_s=6.0)
    assert pool.tried(room_came=False, now_s=6.0, config=config) == ["a"]
    pool.enter("b", now_s=6.1)
    assert pool.tried(room_came=False, now_s=6.1, config=config) == []
    by_lease = DispatchConfig(tick_entries=2, overdue_by_slo=False)
    pool.enter("c", now_s=6.2)
    assert pool.tried(room_came=False, now_s=6.2, config=by_lease) == ["c"]
    # once the objective is missed nobody waits for it, and what did is tried again
    pool.enter("d", now_s=9.0)
    assert pool.tried(room_came=False, now_s=9.0, config=config) == [] and not pool.scan.unblocked(9.0)
    assert pool.scan.unblocked(9.1)
    pool.enter("e", now_s=9.1)
    assert pool.tried(room_came=False, now_s=9.1, config=config) == ["e"]
    # two thirds of the lease of 99 s
    pool.enter("f", now_s=66.1)
    assert pool.tried(room_came=False, now_s=66.1, config=config) == []


def test_an_objective_that_does_not_press_makes_no_entry_starve() -> None:
    config = DispatchConfig(tick_entries=2)
    pool = Pool()
    pool.enter("old", ttft_slo_s=9.0, slo_presses=False)
    pool.answer = FULL
    pool.tried(room_came=True, config=config)
    pool.enter("new", now_s=8.0)
    assert pool.tried(room_came=False, now_s=8.0, config=config) == ["new"]
