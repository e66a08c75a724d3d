"""A prefill engine without a queue: prompts side by side, its pool as the only limit."""

import pytest

from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import IDEAL, EngineSpec, SimConfig
from benchmarks.sim.profiles import load
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.state.views import Role

PROFILE = load("netkv_llama3_70b_tp4_h100")
ALONE_S = 0.177 + 76e-6 * 1000  # prefill of 1,000 tokens


def prefill_times(queue: bool, kv_blocks: int = 1000) -> list[float | None]:
    """When each of three equal prompts, all sent at 0, is computed."""
    prefill = EngineSpec("p", Role.PREFILL, 1, PROFILE, kv_blocks=kv_blocks, prefill_queue=queue, chunked_prefill=False,
                         prefill_budget_tokens=1000)  # fmt: skip
    dispatch = DispatchConfig(kv_high_water=1.0)
    config = SimConfig((prefill, EngineSpec("d", Role.DECODE, 1, PROFILE)), control=IDEAL, dispatch=dispatch)
    found = simulate(config, [WorkloadRequest(name, 0.0, 1000, 2) for name in "abc"])
    assert all(r.finished_s is not None for r in found.requests)
    return [r.prefill_done_s for r in found.requests]


def test_prompts_are_computed_side_by_side() -> None:
    assert prefill_times(queue=False) == pytest.approx([ALONE_S] * 3)
    assert prefill_times(queue=True) == pytest.approx([ALONE_S, 2 * ALONE_S, 3 * ALONE_S])


def test_a_full_pool_makes_them_wait() -> None:
    """63 blocks a prompt: two fit; the third starts when the first two's KV has left (52.4 ms for 327.68 MB) and the
    router has heard of it (status reports come every 0.1 s).
    """
    first, second, third = prefill_times(queue=False, kv_blocks=130)
    assert (first, second) == pytest.approx((ALONE_S, ALONE_S))
    free_s = ALONE_S + 1000 * 327_680 / 6.25e9 + 8e-6
    assert third is not None
    assert free_s + ALONE_S - 1e-6 <= third <= free_s + ALONE_S + 0.1


def test_only_for_prefill_engines() -> None:
    with pytest.raises(ValueError, match="prefill_queue False is for engines of role prefill"):
        EngineSpec("d", Role.DECODE, 1, PROFILE, prefill_queue=False)
