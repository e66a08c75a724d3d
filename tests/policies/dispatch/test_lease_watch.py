"""Tests that pool entries are rescued in the order in which their leases end, if they still wait then."""

import math

import pytest

from policies.dispatch.config import DispatchConfig
from policies.dispatch.lease_watch import LeaseWatch, StarvingEntries, rescue
from policies.request.terms import Terms
from policies.routing.base import Reason
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import PoolEntry, Request, RequestId, Role


def cluster(*leases_until_s: float) -> ClusterState:
    """Returns a state with the free decode workers d0 and d1, and a pool entry r0, r1, ... for each lease's end."""
    state = ClusterState()
    state.apply(ev.EngineUp(0.0, "p", Role.PREFILL, "g", "n", 8, 10_000))
    for name in ("d0", "d1"):
        state.apply(ev.EngineUp(0.0, name, Role.DECODE, "g", "n", 2, 1_000))
    for i, until_s in enumerate(leases_until_s):
        enter(state, f"r{i}", until_s)
    return state


def enter(
    state: ClusterState, attempt_id: str, until_s: float, now_s: float = 0.0, tokens: int = 100
) -> None:
    state.apply(ev.Arrived(now_s, Request(attempt_id, now_s, tokens, 8, deadline_s=50.0)))
    state.apply(ev.PrefillRouted(now_s, attempt_id, "p", colocated=False))
    state.apply(ev.PrefillDone(now_s, attempt_id, until_s, 1, 0))


def test_the_first_to_end_comes_first_by_lease_less_margin_or_deadline() -> None:
    state = cluster(40.0, 20.0, 99.0)
    watch = LeaseWatch(state)
    watch.add(state.take_entered(), margin_s=8.0)
    due: list[tuple[float, str]] = []
    for now_s in (13.3, 13.4, 31.9, 32.0, 49.9, 50.0):
        while (entry := watch.due(now_s)) is not None:
            due.append((now_s, entry.request.attempt_id))
            state.apply(ev.Closed(now_s, entry.request.attempt_id, "rejected"))
    # 2/3 of 20, which is later than 20 - 8; 40 - 8, which is later than 2/3 of 40; its own deadline
    assert due == [(13.4, "r1"), (32.0, "r0"), (50.0, "r2")]


def test_an_entry_that_left_and_came_back_is_due_by_its_new_lease() -> None:
    state = cluster(20.0)
    watch = LeaseWatch(state)
    watch.add(state.take_entered(), margin_s=0.0)
    enter(state, "r0", 45.0, now_s=5.0)
    watch.add(state.take_entered(), margin_s=0.0)
    assert watch.due(30.0) is None
    entry = watch.due(45.0)
    assert entry is not None and entry.entered_s == 5.0


def test_another_margin_holds_for_all_that_wait() -> None:
    state = cluster(20.0)
    watch = LeaseWatch(state)
    watch.add(state.take_entered(), margin_s=0.0)
    assert watch.due(15.0) is None
    watch.restart(margin_s=5.0)
    assert watch.due(15.0) is not None


def test_it_does_not_grow_with_what_has_left() -> None:
    state = cluster()
    watch = LeaseWatch(state)
    for i in range(5000):
        enter(state, f"r{i}", 20.0)
        watch.add(state.take_entered(), margin_s=0.0)
        state.apply(ev.Closed(0.0, f"r{i}", "finished"))
    assert len(watch._due) <= 1024 + 4


def test_a_rescue_takes_the_least_loaded_worker_with_kv_room_even_without_a_slot() -> None:
    state = cluster(20.0)
    # d0 uses 1 of 2 slots and 900 KV tokens; d1 uses all its slots but has KV room
    for i, worker in enumerate(("d0", "d1", "d1")):
        enter(state, f"x{i}", 40.0, tokens=900 if worker == "d0" else 10)
        state.apply(ev.DecodeRouted(0.0, f"x{i}", worker))
    entry = state.pool_entry("r0")
    workers = state.snapshot(0.0).workers
    both = rescue(entry, [workers["d0"], workers["d1"]], 1)
    assert both is not None and both.worker == "d0" and both.reason is Reason.LEASE_RESCUE
    assert [(r.worker, r.cost) for r in both.ranking] == [("d0", 0.5), ("d1", 1.0)]
    enter(state, "y", 40.0, tokens=1)
    state.apply(ev.DecodeRouted(0.0, "y", "d0"))  # 99 tokens are left: too few
    workers = state.snapshot(0.0).workers
    full = rescue(entry, [workers["d0"], workers["d1"]], 1)
    assert full is not None and full.worker == "d1"
    assert rescue(entry, [workers["d0"]], 1) is None
    # d1 has 2 sequences in 2 slots: none may be sent beyond them, or one more that is there already
    assert rescue(entry, [workers["d0"], workers["d1"]], 0) is None
    enter(state, "z", 40.0, tokens=1)
    state.apply(ev.DecodeRouted(0.0, "z", "d1"))
    assert rescue(entry, [state.snapshot(0.0).workers["d1"]], 1) is None


def test_a_renewal_puts_an_entry_off_and_its_last_one_makes_it_due() -> None:
    state = cluster(30.0, 45.0)
    watch = LeaseWatch(state)
    watch.add(state.take_entered(), margin_s=8.0)
    for now_s in (10.0, 20.0):
        state.apply(ev.LeaseRenewed(now_s, "r0", now_s + 30))
    assert watch.due(36.9) is None  # r0 until 50 s, r1 until 45 s
    second = watch.due(37.0)
    assert second is not None and second.request.attempt_id == "r1"
    state.apply(ev.Closed(37.0, "r1", "finished"))
    assert watch.due(41.9) is None
    first = watch.due(42.0)
    assert first is not None and (first.request.attempt_id, first.entered_s) == ("r0", 0.0)


def test_an_entry_starves_when_two_thirds_of_its_first_lease_have_passed_renewed_or_not() -> None:
    state, config = cluster(30.0, 90.0), DispatchConfig()
    starving = StarvingEntries(state)
    starving.of("by lease", config.starves_from_s)
    starving.add(state.take_entered())
    state.apply(ev.LeaseRenewed(10.0, "r0", 40.0))
    assert starving.first(20.0) is None
    assert starving.first(20.1) == (True, 0, 0.0, "r0")
    state.apply(ev.LeaseRenewed(21.0, "r0", 51.0))
    assert starving.first(22.0) == (True, 0, 0.0, "r0")
    state.apply(ev.Closed(42.0, "r0", "finished"))
    assert starving.first(60.0) is None
    assert starving.first(60.1) == (True, 0, 0.0, "r1")
    starving.of("later", DispatchConfig(starvation_s=70.0).starves_from_s)
    assert starving.first(70.0) is None
    assert starving.first(70.1) == (True, 0, 0.0, "r1")
    starving.of("never", DispatchConfig(starvation_s=math.inf).starves_from_s)
    assert starving.first(1e9) is None


def test_an_entry_starves_in_the_last_third_of_its_objective_and_again_by_its_lease() -> None:
    state = cluster()
    for name, slo_s, presses in (("r0", 9.0, True), ("r1", 3.0, False), ("r2", None, True)):
        terms = Terms(ttft_slo_s=slo_s, slo_presses=presses)
        state.apply(ev.Arrived(0.0, Request(name, 0.0, 100, 8, terms=terms)))
        state.apply(ev.PrefillRouted(0.0, name, "p", colocated=False))
        state.apply(ev.PrefillDone(0.0, name, 30.0, 1, 0))
    starving = StarvingEntries(state)
    starving.of("by lease or objective", DispatchConfig().starves_from_s)
    starving.add(state.take_entered())
    first = (True, 0, 0.0, "r0")
    found = [starving.first(now_s) for now_s in (2.1, 6.0, 6.1, 9.0, 9.1, 20.0, 20.1)]
    assert found == [None, None, first, first, None, None, first]
    entry = state.pool_entry("r0")
    assert [starving.starves(entry, now_s) for now_s in (6.0, 6.1, 9.0, 9.1, 20.1)] == [
        False, True, True, False, True,
    ]  # fmt: skip


def test_an_objective_that_has_passed_unseen_makes_nothing_starve() -> None:
    state = cluster()
    state.apply(ev.Arrived(0.0, Request("r0", 0.0, 100, 8, terms=Terms(ttft_slo_s=0.001))))
    state.apply(ev.PrefillRouted(0.0, "r0", "p", colocated=False))
    state.apply(ev.PrefillDone(1.0, "r0", 31.0, 1, 0))
    starving = StarvingEntries(state)
    starving.of("by lease or objective", DispatchConfig().starves_from_s)
    starving.add(state.take_entered())
    assert [starving.first(now_s) for now_s in (1.0, 21.0)] == [None, None]
    assert starving.first(21.1) == (True, 0, 1.0, "r0")


class Watched(ClusterState):
    """A state that counts how often an entry of the pool was asked for."""

    asked = 0

    def find_waiting(self, attempt_id: RequestId) -> PoolEntry | None:
        self.asked += 1
        return super().find_waiting(attempt_id)


@pytest.mark.pure
def test_the_first_of_many_starving_entries_is_found_without_a_look_at_the_others() -> None:
    state = Watched()
    state.apply(ev.EngineUp(0.0, "p", Role.PREFILL, "g", "n", 8, 10_000))
    starving = StarvingEntries(state)
    starving.of("by lease", DispatchConfig().starves_from_s)
    for i in range(1000):
        enter(state, f"r{i:03d}", 30.0, now_s=i / 1000)
    starving.add(state.take_entered())
    assert starving.first(60.0) == (True, 0, 0.0, "r000")
    state.asked = 0
    for i in range(1000):
        assert starving.first(60.0) == (True, 0, i / 1000, f"r{i:03d}")
        state.apply(ev.Closed(60.0, f"r{i:03d}", "cancelled"))
    assert starving.first(60.0) is None
    # each is looked at once while it is first and once after it has left
    assert state.asked <= 2000


def test_starving_entries_do_not_grow_with_what_has_left() -> None:
    state = cluster()
    starving = StarvingEntries(state)
    starving.of("by lease", DispatchConfig().starves_from_s)
    for i in range(5000):
        enter(state, f"r{i}", 20.0)
        starving.add(state.take_entered())
        assert starving.first(19.0) == (True, 0, 0.0, f"r{i}")
        state.apply(ev.Closed(0.0, f"r{i}", "finished"))
    assert len(starving._coming) + len(starving._starving) <= 1024 + 4
