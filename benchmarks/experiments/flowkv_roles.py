"""FlowKV 3.4 and B.1: roles that follow the load, on a load whose ratio of prefill to decode shifts. No figure of the
paper.

Eight engines of Llama-3.1-8B-Instruct on L20 (`flowkv_hetero` has them). The load alternates between two halves of a
period: long prompts with short outputs (8,000 in, 64 out, 2.4 requests/s), then short prompts with long outputs (512
in, 1,024 out, 11 requests/s). By the profile the first half needs 5.2 engines to prefill and 1 to decode, the second
1.6 and 5: every fixed division is short in one of them. Fixed divisions from 3P5D to 6P2D stand beside 4P4D with
FlowKV's role switch (`policies.routing.flowkv.role_switch`, as in the live router) for three lengths of a loan
(`switch_s`).

ASSUMPTION: the thresholds of the regimes, for which the paper prints no values. They are the best of 16 on other seeds
(`flowkv_roles_tuning`). A prefill engine with a queue has a low score here, since queues are counted as shares of 128
slots.

On seeds 0 to 2, before each role was judged by the queues of its own phase, loans to prefill were renewed without end
while decode was short, on two of the three seeds: sequences of a lent engine counted as prompts. That was mended then.
With thresholds that nobody had searched, loans of 30 s and of 10 s still ran away on some seeds of 0 to 4, and a form
of our own, which judged prefill by prompts that are still to be computed, did not. When both forms had had the same
search ours was no better than the paper's, so it was taken out. The aims stayed.

Aims, written before the first run: with the best `switch_s` the mean E2E is below that of the best fixed division,
and goodput (TTFT within 8 s and TPOT within 80 ms) above it. A first short run at 2 and 8 requests/s
showed that 5P3D is enough for both halves there; the rates were raised then, the aims stayed. Not claimed: anything
of the paper's, which has no experiment on its role switch.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.flowkv_hetero import BLOCK_TOKENS, KV_TOKENS, PROFILES
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane, EngineSpec, RoleSwitching, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.lengths import Lengths, Lognormal
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Synthetic
from policies.dispatch.dispatcher import DispatchConfig
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.state.views import Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "FlowKV 3.4: fixed roles against FlowKV's role switch on a load whose ratio shifts; synthetic requests"
)
SEEDS = (5, 2)
ENGINES = 8
SLOTS = 128
FIXED = (3, 4, 5, 6)
SWITCHES_S = (5.0, 10.0, 30.0)
PERIODS_S = (120.0,)
# mean prompt, mean output, requests/s
PROMPTS, OUTPUTS = (8_000.0, 64.0, 2.4), (512.0, 1_024.0, 11.0)
CV = 0.4  # ASSUMPTION
TTFT_SLO_S, TPOT_SLO_S = 8.0, 0.08
THRESHOLDS = RegimeThresholds(prefill_low=0.05, prefill_high=0.6, decode_low=0.3, decode_high=0.4, idle=0.12)
KEPT = (
    "jct_mean_s",
    "jct_p95_s",
    "ttft_mean_s",
    "tpot_mean_s",
    "goodput_per_s",
    "slo_share",
    "unfinished",
    "peak/role_switches",
)


def variants(quick: bool) -> list[Variant]:
    made = []
    for period_s in PERIODS_S[:1] if quick else PERIODS_S:
        base: dict[str, Any] = {"period_s": period_s, "periods": 2 if quick else 3}
        for prefill in FIXED[::2] if quick else FIXED:
            made.append(Variant(_fixed(prefill, period_s), base | {"prefill": prefill, "switch_s": 0.0}))
        for switch_s in SWITCHES_S:
            made.append(Variant(_switched(switch_s, period_s), base | switched(switch_s, THRESHOLDS)))
    return made


def switched(switch_s: float, thresholds: RegimeThresholds) -> dict[str, Any]:
    """Returns the part of a variant's configuration by which roles switch; four engines prefill at first."""
    return {"prefill": 4, "switch_s": switch_s, "thresholds": dataclasses.asdict(thresholds)}


def _fixed(prefill: int, period_s: float) -> str:
    return f"{prefill}P{ENGINES - prefill}D, period {period_s:g} s"


def _switched(switch_s: float, period_s: float) -> str:
    return f"switch {switch_s:g} s, period {period_s:g} s"


def work(period_s: float, periods: int, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of whole periods, each with its half of long prompts first."""
    made: list[WorkloadRequest] = []
    for half in range(2 * periods):
        prompt, output, rate = PROMPTS if half % 2 == 0 else OUTPUTS
        lengths: tuple[Lengths, Lengths] = (Lognormal.of_mean(prompt, CV), Lognormal.of_mean(output, CV))
        one = Synthetic(f"half{half}", Poisson(rate), *lengths)
        begins_s = half * period_s / 2.0
        made += [
            dataclasses.replace(r, at_s=begins_s + r.at_s, ttft_slo_s=TTFT_SLO_S, tpot_slo_s=TPOT_SLO_S)
            for r in takewhile(lambda r: r.at_s < period_s / 2.0, one.stream(seed * 1_000 + half))
        ]
    return made


def engines(prefill: int) -> tuple[EngineSpec, EngineSpec]:
    """Returns `prefill` engines that prefill at first, and the rest of the eight, which decode at first."""

    def some(name: str, role: Role, count: int) -> EngineSpec:
        return EngineSpec(
            name,
            role,
            count,
            PROFILES["L20"],
            slots=SLOTS,
            kv_blocks=KV_TOKENS["L20"] // BLOCK_TOKENS,
            block_size_tokens=BLOCK_TOKENS,
            prefix_cache=False,
            lease_s=600.0,
        )

    return some("p", Role.PREFILL, prefill), some("d", Role.DECODE, ENGINES - prefill)


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates whole periods; the first one warms up and is not measured."""
    switch_s, period_s = config["switch_s"], config["period_s"]
    roles = None
    if switch_s:
        roles = RoleSwitching(RoleSwitchConfig(switch_s), RegimeThresholds(**config["thresholds"]))
    made = SimConfig(
        engines(config["prefill"]),
        dispatch=DispatchConfig(
            max_queue=1_000_000,
            queue_timeout_s=3_600.0,
            starvation_s=math.inf,
            overdue_by_slo=False,
            seed=seed,
        ),
        control=ControlPlane(
            progress_s=0.2,
            request_timeout_s=3_600.0,
            prefill_limit_s=math.inf,
            transfer_limit_s=math.inf,
        ),
        roles=roles,
        seed=seed,
        warmup_s=period_s,
        measure_s=period_s * (config["periods"] - 1),
    )
    found = summarise(simulate(made, work(period_s, config["periods"], seed)))
    return {name: found.get(name) for name in KEPT}


def _periods(results: Results) -> list[float]:
    return sorted({config["period_s"] for config in results.variants.values()})


def compare(results: Results) -> list[Row]:
    rows: list[Row] = []
    for period_s in _periods(results):
        fixed = [_fixed(prefill, period_s) for prefill in FIXED if _fixed(prefill, period_s) in results.runs]
        switched = [_switched(switch_s, period_s) for switch_s in SWITCHES_S]
        quickest = min(fixed, key=lambda name: results.mean(name, "jct_mean_s"))
        ours = min(switched, key=lambda name: results.mean(name, "jct_mean_s"))
        gain, half = results.reduction_percent(quickest, ours, "jct_mean_s")
        name = f"period {period_s:g} s: mean E2E of {ours.split(',')[0]} below {quickest.split(',')[0]}"
        row = Row(name, None, gain, "%", half, note="the best of each")
        rows.append(aimed(row, "above 0", above=0.0))
        most = max(fixed, key=lambda name: results.mean(name, "goodput_per_s"))
        ours = max(switched, key=lambda name: results.mean(name, "goodput_per_s"))
        less, half = results.reduction_percent(most, ours, "goodput_per_s")
        name = f"period {period_s:g} s: goodput of {ours.split(',')[0]} above {most.split(',')[0]}"
        row = Row(name, None, -less, "%", half, note="the best of each")
        rows.append(aimed(row, "above 0", above=0.0))
        for name in (*fixed, *switched):
            for metric, what, scale, unit in (
                ("jct_mean_s", "mean E2E", 1.0, "s"),
                ("slo_share", "requests within both SLOs", 100.0, "%"),
            ):
                seen = results.spread(name, metric)
                width = None if seen.half_width is None else scale * seen.half_width
                rows.append(Row(f"{name}: {what}", None, scale * seen.mean, unit, width))
            if results.measured(name, "peak/role_switches"):
                seen = results.spread(name, "peak/role_switches")
                rows.append(Row(f"{name}: switches ordered", None, seen.mean, "", seen.half_width))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    periods = _periods(results)
    made, axes = look.figure(columns=len(periods))
    for axis, period_s in zip(axes, periods, strict=True):
        names = [n for n, c in results.variants.items() if c["period_s"] == period_s]
        shares = {n: results.spread(n, "slo_share") for n in names}
        values = {
            n.split(",")[0]: (100.0 * s.mean, None if s.half_width is None else 100.0 * s.half_width)
            for n, s in shares.items()
        }
        look.bars(axis, values, "requests within both SLOs, %", f"period {period_s:g} s")
    return {"flowkv_roles": made}
