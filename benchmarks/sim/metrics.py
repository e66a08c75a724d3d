"""The metrics of a run: a flat dictionary of numbers, made from a `RunResult`.

Names include units. A metric is None where there was nothing to measure. The window of the simulation
(`SimConfig.warmup_s`, `measure_s`) decides which requests, steps, links and decisions the result contains; rates are
over its length, `RunResult.duration_s`. A `Window` selects requests further, by arrival.

Times are defined at `RequestRecord` (TTFT ends with the decode engine's first token). A request that never reached a
moment adds nothing to the times that end there. It is counted as `unfinished`, and misses every SLO that it had.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from benchmarks.sim.flow_driver import FlowStats
from benchmarks.sim.records import FleetStats, RequestRecord, RunResult
from predictors.protocol import FloatArray

Metrics: TypeAlias = dict[str, float | None]

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Window:
    """A time interval [start_s, end_s) that selects the requests that arrive in it."""

    start_s: float
    end_s: float

    def holds(self, at_s: float) -> bool:
        return self.start_s <= at_s < self.end_s

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def ttft_s(r: RequestRecord) -> float | None:
    """Returns the seconds from arrival to the first token, or None where there was none."""
    return _between(r.arrived_s, r.first_token_s)


def tpot_s(r: RequestRecord) -> float | None:
    """Returns the mean seconds per token after the first; None for a single token or an unfinished request."""
    if r.output_tokens < 2 or r.finished_s is None or r.first_token_s is None:
        return None
    return (r.finished_s - r.first_token_s) / (r.output_tokens - 1)


def jct_s(r: RequestRecord) -> float | None:
    """Returns the seconds from arrival to the last token, or None for an unfinished request."""
    return _between(r.arrived_s, r.finished_s)


_TIMES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft": ttft_s,
    "tpot": tpot_s,
    "jct": jct_s,
    "prefill_queue": lambda r: _between(r.arrived_s, r.prefill_started_s),
    "prefill": lambda r: _between(r.prefill_started_s, r.prefill_done_s),
    # Layer by layer, a request is routed before its prefill ends: it does not wait in the pool.
    "pool": lambda r: _not_negative(_between(r.prefill_done_s, r.decode_routed_s)),
    "transfer": lambda r: _between(r.transfer_started_s, r.transfer_done_s),
    # This is the time from the KV's arrival to the first token, which is the first step and the wait for it.
    # A stream that moved to another engine has its first token before its last transfer, and adds nothing.
    "decode_wait": lambda r: _if_positive(_between(r.transfer_done_s, r.first_token_s)),
}


def summarise(result: RunResult, window: Window | None = None) -> Metrics:
    """Returns all metrics of the run by name. Raises ValueError for a window, or a run, without length."""
    length_s = result.duration_s if window is None else window.length_s
    if length_s <= 0:
        raise ValueError(f"nothing is measured in {length_s} s: the window, or the run, has no length")
    requests = [r for r in result.requests if window is None or window.holds(r.arrived_s)]
    found: Metrics = {"requests": float(len(requests)), "measured_s": length_s}
    for name, of in _TIMES.items():
        found.update(_distribution(name, (of(r) for r in requests)))
    found.update(_outcomes(requests, length_s))
    found.update(_placement(requests))
    found.update(_steps(result))
    if result.flows is not None:
        found.update(_flows(result.flows, requests))
    if result.fleet is not None:
        found.update(_fleet(result.fleet))
    found.update({f"link_use/{link}": use for link, use in sorted(result.link_use.items())})
    found.update({f"peak/{name}": value for name, value in sorted(result.peaks.items())})
    found.update({f"decisions/{reason}": float(n) for reason, n in sorted(result.decisions.items())})
    return found


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _not_negative(seconds: float | None) -> float | None:
    return None if seconds is None else max(seconds, 0.0)


def _if_positive(seconds: float | None) -> float | None:
    return None if seconds is None or seconds < 0.0 else seconds


def _distribution(name: str, values: Iterable[float | None]) -> Metrics:
    seen = np.array([v for v in values if v is not None], dtype=np.float64)
    if not seen.size:
        return {f"{name}_mean_s": None, **{f"{name}_p{q}_s": None for q in PERCENTILES}}
    if not np.isfinite(seen).all() or seen.min() < -1e-9:
        raise ValueError(f"{name}: a time of {seen.min()} s: the run's records are wrong")
    levels: FloatArray = np.asarray(np.percentile(seen, PERCENTILES), dtype=np.float64)
    return {
        f"{name}_mean_s": float(seen.mean()),
        **{f"{name}_p{q}_s": v for q, v in zip(PERCENTILES, levels.tolist(), strict=True)},
    }


def _outcomes(requests: Sequence[RequestRecord], length_s: float) -> Metrics:
    """Returns SLO attainment (for TTFT, TPOT and both), goodput, and the numbers of requests by how they ended."""
    met_ttft = [_met(ttft_s(r), r.ttft_slo_s) for r in requests if r.ttft_slo_s is not None]
    met_tpot = [
        _met(0.0 if r.finished_s is not None and r.output_tokens < 2 else tpot_s(r), r.tpot_slo_s)
        for r in requests
        if r.tpot_slo_s is not None
    ]
    finished = sum(r.finished_s is not None for r in requests)
    rejected = sum(r.rejected is not None for r in requests)
    met = sum(meets_slo(r) for r in requests)
    return {
        "ttft_slo_share": _mean(met_ttft),
        "tpot_slo_share": _mean(met_tpot),
        "slo_share": met / len(requests) if met_ttft or met_tpot else None,
        "goodput_per_s": met / length_s,
        "finished": float(finished),
        "rejected": float(rejected),
        "unfinished": float(len(requests) - finished - rejected),
    }


def meets_slo(r: RequestRecord) -> bool:
    """Returns whether the request finished and met every SLO it has. An output of one token meets any TPOT."""
    if r.finished_s is None or r.rejected is not None:
        return False
    tpot = 0.0 if r.output_tokens < 2 else tpot_s(r)
    return (r.ttft_slo_s is None or _met(ttft_s(r), r.ttft_slo_s)) and (
        r.tpot_slo_s is None or _met(tpot, r.tpot_slo_s)
    )


def _met(value_s: float | None, slo_s: float | None) -> bool:
    return value_s is not None and slo_s is not None and value_s <= slo_s


def _placement(requests: Sequence[RequestRecord]) -> Metrics:
    """Returns the shares of prefix hits, colocation and transfer tiers, the bytes moved, and the preemptions."""
    prompt = sum(r.prompt_tokens for r in requests)
    moved = [r for r in requests if r.tier is not None]
    tiers = Counter(r.tier for r in moved)
    moved_bytes: Counter[int] = Counter()
    for r in moved:
        moved_bytes[r.tier or 0] += r.transfer_bytes
    found: Metrics = {
        "prefill_hit_share": _ratio(sum(r.prefill_hit_tokens for r in requests), prompt),
        "decode_hit_share": _ratio(sum(r.decode_hit_tokens for r in requests), prompt),
        "colocated_share": _ratio(sum(r.colocated for r in requests), len(requests)),
        "preemptions": float(sum(r.preemptions for r in requests)),
        "transfer_gbytes": sum(r.transfer_bytes for r in requests) / 1e9,
    }
    for tier in sorted(t for t in tiers if t is not None):
        found[f"tier_share/{tier}"] = tiers[tier] / len(moved)
        found[f"tier_gbytes/{tier}"] = moved_bytes[tier] / 1e9
    return found


def _steps(result: RunResult) -> Metrics:
    steps = result.steps
    return {
        "throughput_tok_s": _ratio(steps.tokens, result.duration_s),
        "decode_steps": float(steps.steps),
        "imbalance_tokens": steps.mean_imbalance_tokens if steps.steps else None,
        "barrier_idle_share": _ratio(steps.idle_s, steps.idle_s + steps.busy_s),
        "kernel_events": float(result.kernel_events),
        "duration_s": result.duration_s,
    }


def _flows(stats: FlowStats, requests: Sequence[RequestRecord]) -> Metrics:
    """Returns the metrics of scheduled flows, and those of MFS 6.1 that tell why requests are in time.

    `cct_mean_s` is the mean time of a collective, which overlaps with no computation of its instance. The earliness of
    a request is the time from its first token to its deadline, negative where it was late; `earliness_early_mean_s` is
    that of the requests that were in time, and `earliness_slo_mean` the same in units of their SLOs.
    """
    found: Metrics = {
        "cct_mean_s": _ratio(stats.collective_s, stats.collectives),
        "reuse_stall_s": stats.stalled_s,
        "permits": float(stats.permits),
        "pruned": float(len(stats.pruned)),
    }
    for stage, of in stats.stages.items():
        found[f"flow_mean_s/{stage.name.lower()}"] = _ratio(of.seconds, of.flows)
        found[f"flow_gbytes/{stage.name.lower()}"] = of.bytes / 1e9
    early = [(e, r.ttft_slo_s) for r in requests if (e := earliness_s(r)) is not None and e >= 0]
    found["earliness_early_mean_s"] = _ratio(sum(e for e, _ in early), len(early))
    found["earliness_slo_mean"] = _ratio(sum(e / slo for e, slo in early if slo), len(early))
    for name in sorted({r.request_class for r in requests}):
        met = [
            _met(ttft_s(r), r.ttft_slo_s)
            for r in requests
            if r.request_class == name and r.ttft_slo_s is not None
        ]
        found[f"ttft_slo_share/{name}"] = _mean(met)
    return found


def _fleet(stats: FleetStats) -> Metrics:
    """Returns engine-seconds, in all and by duty, and how often engines changed in the whole run."""
    return {
        "fleet/engine_s": stats.total_s,
        **{f"fleet/{duty.value}_s": seconds for duty, seconds in sorted(stats.engine_s.items())},
        **{
            f"fleet/{name}": float(getattr(stats, name))
            for name in ("starts", "activations", "switches", "deactivations", "stops", "moved")
        },
    }


def earliness_s(r: RequestRecord) -> float | None:
    """Returns the seconds from the first token to the TTFT deadline; None without a first token or an SLO."""
    ttft = ttft_s(r)
    return None if ttft is None or r.ttft_slo_s is None else r.ttft_slo_s - ttft


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and math.isfinite(whole) else None
