"""Requests/s of k engines: limits by hand, objectives kept by an exact queue, never fewer with more engines."""

import heapq
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine_model.timing import TimingProfile
from policies.routing.params import BadParameter
from policies.scaling.capacity import Demand, Margins, table
from policies.scaling.observation import Capability, Room

PROFILE = TimingProfile("test", 0.0, 1e-4, 0.02, 1e-4, 1e-7, 131_072, 1e10, 0.0)
ROOMY = Capability(PROFILE, slots=64, kv_tokens=10**9)
PLAIN = Margins(most_rho=0.9, kv_share=1.0, deviations=0.0)


def test_without_objectives_an_engine_works_at_its_limits() -> None:
    """A prompt of 2,000 tokens takes 0.2 s: 4.5/s at 90 %. 64 slots step in 20 + 6.4 + 64 * 2,050 * 1e-7 = 39.5 ms, so
    64 streams of 100 tokens end in 3.95 s: 16.2/s. Lengths are rounded to steps of 5 %.
    """
    found = table(ROOMY, Demand(2_000, 2_000, 100), 4, PLAIN)
    assert found.prefill[1] == pytest.approx(4.5, rel=0.03)
    assert found.decode[1] == pytest.approx(16.2, rel=0.05)
    assert found.prefill[0] == found.decode[0] == found.colocated[0] == 0.0
    # together: rho of prompts and of decode steps fill the engine
    assert found.colocated[1] < min(found.prefill[1], found.decode[1])
    assert found.infeasible == ()


def test_kv_and_tpot_bound_the_batch() -> None:
    """KV of 21,000 tokens holds 10 requests of 2,100: 20 + 1 + 2.05 ms a step, so 10 / 2.305 s = 4.34/s. A TPOT of 26
    ms leaves 6 ms for 0.305 ms a sequence: 19.7 of them in 100 * 26 ms: 7.57/s.
    """
    small = Capability(PROFILE, slots=64, kv_tokens=21_000)
    assert table(small, Demand(2_000, 2_000, 100), 2, PLAIN).decode[1] == pytest.approx(4.34, rel=0.06)
    tight = table(ROOMY, Demand(2_000, 2_000, 100, tpot_s=0.026), 2, PLAIN)
    assert tight.decode[1] == pytest.approx(7.57, rel=0.12)


def test_objectives_that_no_engine_meets_are_named() -> None:
    assert table(ROOMY, Demand(20_000, 20_000, 100, ttft_s=1.0), 2, PLAIN).infeasible == ("TTFT",)
    assert table(ROOMY, Demand(100, 100, 100, tpot_s=0.01), 2, PLAIN).infeasible == ("TPOT",)


@pytest.mark.parametrize("servers", [1, 2, 8])
def test_an_exact_queue_keeps_the_objective_at_the_tables_rate(servers: int) -> None:
    """Poisson arrivals at k servers of 0.2 s behind one queue: at most 1 % wait longer than TTFT less the service."""
    demand = Demand(2_000, 2_000, 100, ttft_s=1.0, prompt_cv=0.0)
    rate = table(ROOMY, demand, servers, Margins(share=0.99)).prefill[servers]
    rng, free, at_s, late = random.Random(7), [0.0] * servers, 0.0, 0
    for _ in range(20_000):
        at_s += rng.expovariate(rate)
        start_s = max(at_s, heapq.heappop(free))
        heapq.heappush(free, start_s + 0.2)
        late += start_s - at_s > 0.8
    assert late / 20_000 <= 0.012
    # and not by far too many engines
    assert rate >= 0.45 * servers / 0.2


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.floats(1, 50_000),
    output=st.floats(1, 4_000),
    ttft_s=st.one_of(st.none(), st.floats(0.05, 30)),
    tpot_s=st.one_of(st.none(), st.floats(0.01, 1)),
)
def test_more_engines_never_carry_less(
    prompt: float, output: float, ttft_s: float | None, tpot_s: float | None
) -> None:
    found = table(ROOMY, Demand(prompt, prompt, output, ttft_s, tpot_s), 300, Margins())
    for rates in (found.prefill, found.decode, found.colocated):
        assert len(rates) == 513 and np.isfinite(rates).all()
        assert (np.diff(rates) >= 0.0).all() and rates[0] == 0.0
    for rate in (0.0, 1.0, 50.0):
        fewest = int(found.fewest(np.array([rate]), found.decode)[0])
        assert fewest == 0 or found.decode[fewest - 1] < rate
        assert fewest > 512 or found.decode[fewest] >= rate - 1e-9


def test_bad_margins_are_refused() -> None:
    for build in (
        lambda: Margins(share=1.0),
        lambda: Margins(deviations=-1.0),
        lambda: Demand(math.nan, 1.0, 1.0),
    ):
        with pytest.raises(BadParameter):
            build()


def test_a_colocated_engine_may_have_slots_and_kv_of_its_own() -> None:
    """With as many as decode engines the table is the same; with fewer, colocated engines alone carry less."""
    demand, own = Demand(200, 200, 100), Room(4, 10**9)
    same, fewer = (table(replace(ROOMY, colocated=room), demand, 4, PLAIN) for room in (Room(64, 10**9), own))
    alike = table(ROOMY, demand, 4, PLAIN)
    assert np.array_equal(same.colocated, alike.colocated)
    assert np.array_equal(fewer.decode, alike.decode)
    assert np.array_equal(fewer.colocated, table(Capability(PROFILE, *own), demand, 4, PLAIN).colocated)
    assert fewer.colocated[1] < 0.5 * alike.colocated[1]
