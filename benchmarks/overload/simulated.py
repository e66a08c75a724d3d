"""The simulator's figures beside the live ones: the same requests on the same engines, in virtual time.

The policies are those of the live side `sluice`, down to the pair of routing policies that a configuration has without
a choice. Not claimed: a setup on vLLM, whose engine's timing on these cores is not known to the simulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.config import RouterConfig
from benchmarks.overload.load import PRIORITY, SLO_S, WEIGHTS, Times, Work
from benchmarks.overload.outcomes import End, Outcome
from benchmarks.overload.sides import DECODES, PREFILL_SLOTS, PREFILLS, SLOTS, sim_timing
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import EngineSpec, SimConfig
from benchmarks.sim.records import RequestRecord
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import PROFILES
from policies.state.views import Role


def sim_config(seed: int, cut_s: float, params: Mapping[str, Any] | None = None) -> SimConfig:
    """Returns the configuration of the side `sluice` for the simulator, with `params` of its admission policy."""
    profile = replace(PROFILES["tick_1ms"], **sim_timing())
    router = RouterConfig()
    return SimConfig(
        (
            EngineSpec("prefill", Role.PREFILL, PREFILLS, profile, slots=PREFILL_SLOTS, prefix_cache=False),
            EngineSpec("decode", Role.DECODE, DECODES, profile, slots=SLOTS, prefix_cache=False),
        ),
        prefill=(router.prefill.name, router.prefill.params),
        decode=(router.decode.name, router.decode.params),
        admission=("by_wait", params or {}),
        fairness=("vtc", {}),
        dispatch=DispatchConfig(seed=seed),
        seed=seed,
        measure_s=cut_s,
        drain=False,
    )


def simulated(
    load: Sequence[Work], times: Times, seed: int, params: Mapping[str, Any] | None = None
) -> list[Outcome]:
    """Returns the outcomes of a load in the simulator, in the same order, with `params` of its admission policy."""
    requests = [
        WorkloadRequest(
            f"r{index}",
            work.at_s,
            work.prompt_tokens,
            work.output_tokens,
            client=work.tenant,
            priority=PRIORITY[work.request_class],
            request_class=work.request_class,
            max_tokens=work.output_tokens,
            ttft_slo_s=SLO_S[work.request_class],
            weight=WEIGHTS[work.tenant],
        )
        for index, work in enumerate(load)
    ]
    records = {
        one.request_id: one for one in simulate(sim_config(seed, times.cut_s, params), requests).requests
    }
    return [_outcome(work, records[f"r{index}"], times.cut_s) for index, work in enumerate(load)]


def _outcome(work: Work, record: RequestRecord, cut_s: float) -> Outcome:
    end: End = "cut"
    ended_s = cut_s
    if record.rejected_s is not None:
        end, ended_s = "refused", record.rejected_s
    elif record.finished_s is not None:
        end, ended_s = "whole", record.finished_s
    return Outcome(work, work.at_s, ended_s, end, record.first_token_s, record.rejected or "")
