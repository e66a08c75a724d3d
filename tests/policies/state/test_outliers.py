"""Tests of outlier detection: rates, back-off, probes, the share of a tier, and slowness against the median."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.state import events as ev
from policies.state.outliers import OutlierLimits
from policies.state.reducer import ClusterState
from policies.state.views import Health, Quarantine, Request, Role

LIMITS = OutlierLimits(failure_rate=0.5, slow_factor=4.0, base_s=2.0, max_s=60.0, max_share=0.8)


def cluster(prefills: int = 2, decodes: int = 4, limits: OutlierLimits = LIMITS) -> ClusterState:
    state = ClusterState()
    state.limit_outliers(limits)
    for i in range(prefills):
        state.apply(ev.EngineUp(0.0, f"p{i}", Role.PREFILL, "g", "n", 64, 10**6))
    for i in range(decodes):
        state.apply(ev.EngineUp(0.0, f"d{i}", Role.DECODE, "g", "n", 64, 10**6))
    return state


_ids = iter(range(10**9))


def transferring(state: ClusterState, now_s: float, prefill: str = "p0", decode: str = "d0") -> str:
    """Sends a request to both workers and returns its id."""
    attempt_id = f"r{next(_ids)}"
    state.apply(ev.Arrived(now_s, Request(attempt_id, now_s, 100, 64)))
    state.apply(ev.PrefillRouted(now_s, attempt_id, prefill, colocated=False))
    state.apply(ev.PrefillDone(now_s, attempt_id, now_s + 30, 1, 0))
    state.apply(ev.DecodeRouted(now_s, attempt_id, decode))
    return attempt_id


def fails(
    state: ClusterState, now_s: float, decode: str = "d0", code: str | None = "internal", prefill: str = "p0"
) -> None:
    attempt_id = transferring(state, now_s, prefill, decode)
    state.apply(ev.AttemptFailed(now_s, attempt_id, (decode,), "decode", code))
    state.apply(ev.Closed(now_s, attempt_id, "failed"))


def succeeds(state: ClusterState, now_s: float, decode: str = "d0", prefill: str = "p0") -> None:
    attempt_id = transferring(state, now_s, prefill, decode)
    state.apply(ev.Admitted(now_s, attempt_id))
    state.apply(ev.Closed(now_s, attempt_id, "finished", 8))


def quarantined(state: ClusterState) -> dict[str, str]:
    workers = state.snapshot(0.0).workers.values()
    return {w.id: w.quarantine.reason for w in workers if w.quarantine is not None}


def test_two_failures_in_a_row_quarantine_a_worker_and_not_its_partner() -> None:
    state = cluster()
    fails(state, 1.0)
    assert quarantined(state) == {}  # 0.3
    before = state.fleet_version
    fails(state, 2.0)
    assert quarantined(state) == {"d0": "failing"}  # 0.3 + 0.7 * 0.3 = 0.51
    assert state.snapshot(2.0).workers["d0"].quarantine == Quarantine("failing", 2.0, 4.0)
    assert state.fleet_version > before


def test_a_worker_that_fails_every_third_request_stays_and_one_that_fails_two_of_three_goes() -> None:
    # failure, success, success: the rate peaks at r = 0.7 * 0.49 r + 0.3 = 0.457
    state = cluster()
    for i in range(60):
        fails(state, float(i)) if i % 3 == 0 else succeeds(state, float(i))
    assert quarantined(state) == {}
    for i in range(60, 66):
        succeeds(state, float(i)) if i % 3 == 0 else fails(state, float(i))
    assert quarantined(state) == {"d0": "failing"}


@pytest.mark.parametrize("code", ["kv_load", "unknown_handle"])
def test_a_failed_hand_over_blames_both_ends_at_half_speed(code: str) -> None:
    state = cluster()
    for i in range(3):
        fails(state, float(i), code=code)
    assert quarantined(state) == {}  # 0.7 * (1 - 0.7^3) = 0.46
    fails(state, 3.0, code=code)
    assert quarantined(state) == {"d0": "failing", "p0": "failing"}  # 0.7 * (1 - 0.7^4) = 0.53


def test_the_end_that_is_well_is_cleared_by_its_other_partners() -> None:
    state = cluster()
    for i in range(12):  # p0 fails with d0 only
        fails(state, float(i), "d0", "kv_load")
        succeeds(state, float(i), "d1")
    assert quarantined(state) == {"d0": "failing"}


@pytest.mark.parametrize(
    "code", ["bad_request", "bad_output", "deadline", "cancelled", "draining", "quarantined"]
)
def test_failures_that_no_engine_is_to_blame_for_count_for_nothing(code: str) -> None:
    state = cluster()
    for i in range(20):
        fails(state, float(i), code=code)
    assert quarantined(state) == {}


@pytest.mark.parametrize("code", ["engine_lost", "engine_dead", "stalled", "not_connected", None])
def test_any_other_code_counts(code: str | None) -> None:
    state = cluster()
    fails(state, 0.0, code=code)
    fails(state, 1.0, code=code)
    assert quarantined(state) == {"d0": "failing"}


@pytest.mark.parametrize("code", ["kv_load", "unknown_handle", "stalled"])
def test_hand_overs_that_fail_while_they_wait_inside_a_full_engine_count_for_nothing(code: str) -> None:
    state = cluster(decodes=3)
    state.apply(ev.EngineUp(0.0, "d3", Role.DECODE, "g", "n", 1, 10**6))
    state.apply(ev.Admitted(0.0, transferring(state, 0.0, decode="d3")))
    for i in range(10):
        fails(state, float(i), "d3", code)
    assert quarantined(state) == {}
    fails(state, 10.0, "d3", "internal")
    fails(state, 11.0, "d3", "internal")
    assert quarantined(state) == {"d3": "failing"}


def test_of_an_engine_with_ranks_only_the_rank_that_had_the_request_is_blamed() -> None:
    state = cluster(decodes=0)
    for rank in range(4):
        state.apply(ev.EngineUp(0.0, f"e#{rank}", Role.DECODE, "g", "n", 64, 10**6))
    ranks = tuple(f"e#{rank}" for rank in range(4))
    for _ in range(2):
        attempt_id = transferring(state, 1.0, decode="e#2")
        state.apply(ev.AttemptFailed(1.0, attempt_id, ranks, "decode", "internal"))
        state.apply(ev.Closed(1.0, attempt_id, "failed"))
    assert quarantined(state) == {"e#2": "failing"}


def test_one_probe_at_a_time_with_exponential_back_off_and_a_success_closes() -> None:
    state = cluster()
    for _ in range(2):
        fails(state, 0.0)
    # 2 s, then 4, 8, 16, 32, 60 (64 is above the most), 60 after each probe that fails
    due_s = 2.0
    for wait_s in (4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        assert state.probes_due(due_s - 0.01) == []
        assert state.probes_due(due_s) == ["d0"]
        probe = transferring(state, due_s)
        assert state.probes_due(due_s) == []
        state.apply(ev.AttemptFailed(due_s, probe, ("d0",), "decode", "internal"))
        state.apply(ev.Closed(due_s, probe, "failed"))
        due_s += wait_s
    assert state.outlier_totals == {"quarantines_failing": 1, "quarantine_probes_failed": 6}
    succeeds(state, due_s)
    assert quarantined(state) == {}
    # soon again: the back-off goes on where it was; after a minute of health it begins anew
    for now_s, wait_s in ((due_s + 1, 60.0), (due_s + 200, 2.0)):
        for _ in range(2):
            fails(state, now_s)
        assert state.snapshot(0.0).workers["d0"].quarantine == Quarantine("failing", now_s, now_s + wait_s)
        succeeds(state, now_s + wait_s)
        assert quarantined(state) == {}


def test_the_first_tokens_of_a_long_stream_are_success_enough() -> None:
    state = cluster()
    for _ in range(2):
        fails(state, 0.0)
    probe = transferring(state, 2.0)
    state.apply(ev.Admitted(2.1, probe))
    state.apply(ev.Tick(2.2))
    assert quarantined(state) == {"d0": "failing"}
    state.apply(ev.ProgressedMany(2.3, ((probe, 1),)))
    state.apply(ev.Tick(2.4))
    assert quarantined(state) == {}


def test_a_probe_whose_client_left_makes_way_for_the_next() -> None:
    state = cluster()
    for _ in range(2):
        fails(state, 0.0)
    probe = transferring(state, 2.0)
    state.apply(ev.Closed(2.1, probe, "cancelled"))
    assert quarantined(state) == {"d0": "failing"}
    assert state.probes_due(2.1) == ["d0"]


def test_a_prefill_worker_s_probe_succeeds_when_its_kv_has_been_handed_over() -> None:
    state = cluster()
    for _ in range(2):
        attempt_id = f"r{next(_ids)}"
        state.apply(ev.Arrived(0.0, Request(attempt_id, 0.0, 100, 64)))
        state.apply(ev.PrefillRouted(0.0, attempt_id, "p0", colocated=False))
        state.apply(ev.AttemptFailed(0.0, attempt_id, ("p0",), "prefill", "internal"))
        state.apply(ev.Closed(0.0, attempt_id, "failed"))
    assert quarantined(state) == {"p0": "failing"}
    probe = transferring(state, 2.0)
    assert quarantined(state) == {"p0": "failing"}
    state.apply(ev.Admitted(2.1, probe))
    assert quarantined(state) == {}


def test_at_most_a_share_of_a_tier_is_quarantined_and_the_least_bad_serve() -> None:
    state = cluster()
    for worker in ("d0", "d1", "d2", "d3"):
        fails(state, 0.0, worker)
        fails(state, 0.0, worker)
    # 0.8 of 4 workers are 3; d3 is no worse than the others, so it serves
    assert quarantined(state) == dict.fromkeys(("d0", "d1", "d2"), "failing")
    # it is worse now than the least bad, which is d0 by name, and serves on until the back-off of d0 is over
    fails(state, 1.0, "d3")
    assert quarantined(state) == dict.fromkeys(("d0", "d1", "d2"), "failing")
    fails(state, 2.0, "d3")
    assert quarantined(state) == dict.fromkeys(("d1", "d2", "d3"), "failing")


def test_the_share_follows_the_fleet() -> None:
    state = cluster()
    for worker in ("d0", "d1", "d2"):
        fails(state, 0.0, worker)
        fails(state, 0.0, worker)
    state.apply(ev.EngineDown(1.0, "d3"))  # 0.8 of 3 are 2
    assert len(quarantined(state)) == 2
    state.apply(ev.EngineStatus(1.0, "d0", 0, 0, 0, Health.STALLED))  # 0.8 of 2 is 1
    assert len([worker for worker in quarantined(state) if worker != "d0"]) == 1
    state.limit_outliers(OutlierLimits(max_share=0.0))
    state.apply(ev.PoliciesChanged(2.0))
    assert [worker for worker in quarantined(state) if worker != "d0"] == []


def test_a_tier_of_one_is_never_quarantined_and_a_share_of_none_turns_it_off() -> None:
    for state in (cluster(decodes=1), cluster(limits=OutlierLimits(max_share=0.0))):
        for i in range(20):
            fails(state, float(i))
        assert quarantined(state) == {}


# ------------------------------------------------------------------------------------------------------- slowness


def decode_for(
    state: ClusterState, seconds: float, tokens_per_s: dict[str, float], from_s: float = 0.0
) -> None:
    """Decodes one long request on each worker, with progress and a tick four times a second."""
    requests = {worker: transferring(state, from_s, decode=worker) for worker in tokens_per_s}
    for attempt_id in requests.values():
        state.apply(ev.Admitted(from_s, attempt_id))
    for i in range(1, int(seconds * 4) + 1):
        now_s = from_s + i / 4
        items = tuple((requests[w], int(rate * i / 4)) for w, rate in tokens_per_s.items())
        state.apply(ev.ProgressedMany(now_s, items))
        state.apply(ev.Tick(now_s))
    for attempt_id in requests.values():
        state.apply(ev.Closed(from_s + seconds, attempt_id, "finished"))


def test_a_worker_four_times_slower_than_the_median_is_quarantined_by_its_tokens() -> None:
    state = cluster()
    decode_for(state, 60.0, {"d0": 50, "d1": 45, "d2": 60, "d3": 10})
    assert quarantined(state) == {"d3": "slow_decode"}
    assert state.outlier_totals["quarantines_slow_decode"] == 1


@pytest.mark.parametrize(
    "tokens_per_s",
    [
        # 3.0 times slower than the median of 47.5
        {"d0": 50, "d1": 45, "d2": 60, "d3": 16},
        # 12 ms a token, which nobody notices
        {"d0": 4000, "d1": 4000, "d2": 4000, "d3": 80},
        # which of two is odd?
        {"d0": 50, "d3": 5},
    ],
)
def test_what_is_not_far_behind_its_tier_stays(tokens_per_s: dict[str, float]) -> None:
    state = cluster()
    decode_for(state, 60.0, tokens_per_s)
    assert quarantined(state) == {}


def test_a_slow_worker_comes_back_when_its_probe_is_fast_and_not_before() -> None:
    state = cluster()
    speeds = {"d0": 50.0, "d1": 50.0, "d2": 50.0, "d3": 5.0}
    decode_for(state, 60.0, speeds)
    until_s = state.snapshot(60.0).workers["d3"].quarantine
    assert until_s is not None
    decode_for(state, 5.0, speeds, 60.0)
    assert state.outlier_totals["quarantine_probes_failed"] >= 1
    assert quarantined(state) == {"d3": "slow_decode"}
    decode_for(state, 5.0, speeds | {"d3": 50.0}, 70.0)
    assert quarantined(state) == {}


def test_a_worker_that_admits_slowly_is_quarantined() -> None:
    state = cluster()
    for i in range(8):
        for worker, seconds in (("d0", 0.01), ("d1", 0.02), ("d2", 0.3), ("d3", 1.5)):
            attempt_id = transferring(state, 10.0 * i, decode=worker)
            state.apply(ev.Admitted(10.0 * i + seconds, attempt_id))
        state.apply(ev.Tick(10.0 * i + 2))
    # the median of (0.25, 0.25, 0.3, 1.5) is sqrt(0.25 * 0.3) = 0.27, four times that is 1.1
    assert quarantined(state) == {"d3": "slow_admission"}


def test_requests_that_wait_inside_a_full_engine_do_not_make_it_slow() -> None:
    """Rescued entries are sent to workers without a free slot, and wait there as long as the others decode."""
    state = cluster(decodes=3)
    state.apply(ev.EngineUp(0.0, "d3", Role.DECODE, "g", "n", 4, 10**6))
    running = [transferring(state, 0.0, decode="d3") for _ in range(4)]
    for attempt_id in running:
        state.apply(ev.Admitted(0.1, attempt_id))
    for i in range(8):
        for worker, seconds in (("d0", 0.3), ("d1", 0.3), ("d2", 0.3), ("d3", 8.0)):
            attempt_id = transferring(state, 10.0 * i, decode=worker)
            state.apply(ev.Admitted(10.0 * i + seconds, attempt_id))
        state.apply(ev.Tick(10.0 * i + 9))
    assert quarantined(state) == {}


def test_a_prefill_worker_that_computes_slowly_is_quarantined() -> None:
    state = cluster(prefills=4)
    for i in range(12):
        now_s = 10.0 * i
        requests: list[tuple[float, str]] = []
        for p, (prompt, seconds) in enumerate(((1000, 0.1), (4000, 0.4), (100, 0.05), (1000, 2.0))):
            attempt_id = f"r{next(_ids)}"
            state.apply(ev.Arrived(now_s, Request(attempt_id, now_s, prompt, 64)))
            state.apply(ev.PrefillRouted(now_s, attempt_id, f"p{p}", colocated=False))
            requests.append((seconds, attempt_id))
        for seconds, attempt_id in sorted(requests):
            state.apply(ev.PrefillDone(now_s + seconds, attempt_id, now_s + 30, 1, 0))
            state.apply(ev.Closed(now_s + seconds, attempt_id, "cancelled"))
        state.apply(ev.Tick(now_s + 5))
    assert quarantined(state) == {"p3": "slow_prefill"}


def test_one_huge_sample_makes_no_worker_slow() -> None:
    state = cluster()
    for i in range(20):
        for worker in ("d0", "d1", "d2", "d3"):
            attempt_id = transferring(state, 100.0 * i, decode=worker)
            slow = worker == "d3" and i == 10
            state.apply(ev.Admitted(100.0 * i + (20.0 if slow else 0.3), attempt_id))
        state.apply(ev.Tick(100.0 * i + 30))
    assert quarantined(state) == {}


# ------------------------------------------------------------------------------------------------------ invariants

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "kv", "ok", "probe", "down", "up", "stall", "tick"]),
        st.integers(0, 3),
        st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]))
def test_whatever_happens_one_worker_of_each_tier_serves(steps, share: float) -> None:  # type: ignore[no-untyped-def]
    state = cluster(limits=OutlierLimits(max_share=share))
    now_s = 0.0
    for what, n, wait_s in steps:
        now_s += wait_s
        worker = f"d{n}"
        known = state.worker(worker) is not None
        if what == "down" and known:
            state.apply(ev.EngineDown(now_s, worker))
        elif what in ("up", "stall"):
            health = Health.READY if what == "up" else Health.STALLED
            state.apply(ev.EngineUp(now_s, worker, Role.DECODE, "g", "n", 64, 10**6, health))
        elif what == "tick":
            state.apply(ev.Tick(now_s))
        elif known and what == "probe" and worker in state.probes_due(now_s):
            (fails if n % 2 else succeeds)(state, now_s, worker)
        elif known and what != "probe" and worker not in quarantined(state):
            if what == "ok":
                succeeds(state, now_s, worker)
            else:
                fails(state, now_s, worker, "kv_load" if what == "kv" else "internal")
        for role in (Role.PREFILL, Role.DECODE):
            ready = [
                w
                for w in state.snapshot(now_s).workers.values()
                if w.role is role and w.health is Health.READY
            ]
            held = [w for w in ready if w.quarantine is not None]
            assert len(held) <= math.floor(share * len(ready) + 1e-9)
            assert len(held) < len(ready) or not ready
        assert set(state.quarantined) == set(quarantined(state))


def prefills(state: ClusterState, worker: str, fetches: bool, n: int, step_s: float, tokens: int) -> None:
    """`n` prompts of `tokens` tokens, one after another, each in `step_s`. Those that fetch hit but for 50 tokens."""
    for i in range(n):
        now_s, attempt_id = i * step_s, f"r{next(_ids)}"
        state.apply(ev.Arrived(now_s, Request(attempt_id, now_s, tokens, 64)))
        state.apply(ev.PrefillRouted(now_s, attempt_id, worker, colocated=False, fetches=fetches))
        end_s = now_s + step_s
        state.apply(ev.PrefillDone(end_s, attempt_id, end_s + 30, 1, tokens - 50 if fetches else 0))
        state.apply(ev.Closed(end_s, attempt_id, "finished"))
        state.apply(ev.Tick(end_s))


def test_a_worker_whose_prompts_wait_for_a_lent_prefix_is_not_slow() -> None:
    """p0 fetches: 1 s for 50 tokens, and 128 that count for a prompt, is 20 times what p1 to p3 take for a token."""
    state = cluster(prefills=4)
    for name in ("p0", "p1", "p2", "p3"):
        prefills(state, name, False, 20, 0.5, 1872)
    assert state.prefill_s_per_token("p0") == pytest.approx(0.5 / 2000)
    prefills(state, "p0", True, 200, 1.0, 2000)
    assert quarantined(state) == {}
    assert state.prefill_s_per_token("p0") == pytest.approx(0.5 / 2000)
    assert state.snapshot(0.0).workers["p0"].prefilling == 0


def prefilled(state: ClusterState, attempt_id: str, end_s: float, cached: int, compute_s: float) -> None:
    state.apply(ev.PrefillDone(end_s, attempt_id, end_s + 30, 1, cached, compute_s=compute_s))
    state.apply(ev.Closed(end_s, attempt_id, "finished"))


def routed(state: ClusterState, worker: str, at_s: float, tokens: int, fetches: bool) -> str:
    attempt_id = f"r{next(_ids)}"
    state.apply(ev.Arrived(at_s, Request(attempt_id, at_s, tokens, 64)))
    state.apply(ev.PrefillRouted(at_s, attempt_id, worker, colocated=False, fetches=fetches))
    return attempt_id


def test_prompts_that_wait_behind_fetching_ones_do_not_look_slow() -> None:
    """p0 computes 1,000 tokens a second. Each round: a prompt fetches 872 of 1,744 tokens until 0.05 s, and is computed
    until 1.05 s; the prompt of 872 tokens behind it is computed until 2.05 s. With the 128 that count for a prompt that
    is 2,000 tokens in the 2.05 s in which the second one is in work.
    """
    state = cluster(prefills=4)
    for name in ("p1", "p2", "p3"):
        prefills(state, name, False, 80, 1.0, 872)
    for i in range(20):
        at_s = 100.0 + 4 * i
        fetching = routed(state, "p0", at_s, 1744, True)
        behind = routed(state, "p0", at_s, 872, False)
        prefilled(state, fetching, at_s + 1.05, 872, compute_s=1.0)
        prefilled(state, behind, at_s + 2.05, 0, compute_s=1.0)
        state.apply(ev.Tick(at_s + 3.0))
    assert state.prefill_s_per_token("p0") == pytest.approx(2.05 / 2000)
    assert quarantined(state) == {}


@pytest.mark.parametrize("overlap_s", [0.0, 0.4, 1.0])
def test_a_fetching_prompt_is_in_work_for_as_long_as_it_is_computed(overlap_s: float) -> None:
    """A prompt fetches for 5 s and is computed for 1 s, `overlap_s` of it beside another prompt, which is in work for 1
    s: 2 - overlap_s seconds in all, for two prompts of 872 tokens.
    """
    state = cluster(prefills=4)
    for i in range(20):
        at_s = 100.0 + 10 * i
        fetching = routed(state, "p0", at_s, 1744, True)
        other = routed(state, "p0", at_s + 4.0 + overlap_s, 872, False)
        prefilled(state, other, at_s + 5.0 + overlap_s, 0, compute_s=1.0)
        prefilled(state, fetching, at_s + 6.0, 872, compute_s=1.0)
        state.apply(ev.Tick(at_s + 9.0))
    assert state.prefill_s_per_token("p0") == pytest.approx((2.0 - overlap_s) / 2000)
    assert state.snapshot(0.0).workers["p0"].prefilling == 0


def test_a_slow_worker_whose_prompts_all_fetch_is_found() -> None:
    """p0 takes 5 times as long for a token as p1 to p3, and never has a prompt that does not fetch."""
    state = cluster(prefills=4)
    for i in range(40):
        at_s = 100.0 + 10 * i
        slow = routed(state, "p0", at_s, 1744, True)
        for attempt_id in [routed(state, name, at_s, 872, False) for name in ("p1", "p2", "p3")]:
            prefilled(state, attempt_id, at_s + 1.0, 0, compute_s=1.0)
        prefilled(state, slow, at_s + 8.0, 872, compute_s=5.0)
        state.apply(ev.Tick(at_s + 9.0))
    assert quarantined(state) == {"p0": "slow_prefill"}
