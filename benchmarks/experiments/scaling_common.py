"""The common parts of the scaling experiments: engines, loads, objectives, policies, and one run.

Engines are Llama-3.1-8B-Instruct on L20 (`flowkv_hetero` has the profile). They start cold in `STARTS["cold"]` (55 s),
and a day is compressed to `DAY_S`, so the load changes faster beside a start than it does in life: scaling has it
harder here. Engine time counts starting, warm, serving and draining engines alike. Requests are Poisson with lognormal
lengths; router and dispatcher are the live ones with shortest queues.

`scaling_tuned` has the parameters, which `scaling_tuning` searched for all policies alike on seeds from `TUNING_SEED`
on. What is reported has seeds from `FIRST_SEED` on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Metrics, Results, Row, aimed
from benchmarks.experiments.flowkv_hetero import BLOCK_TOKENS, KV_TOKENS, PROFILES
from benchmarks.seeds import all_met, met
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane, EngineSpec, SimConfig
from benchmarks.sim.fleet_setup import STARTS, FleetSetup, StartSteps
from benchmarks.sim.metrics import summarise
from benchmarks.sim.planned import Planned
from benchmarks.sim.records import RunResult
from benchmarks.workloads.arrivals import Diurnal
from benchmarks.workloads.lengths import Lognormal
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Synthetic
from policies.dispatch.dispatcher import DispatchConfig
from policies.scaling.base import Counts, Limits, ScalingPolicy
from policies.scaling.capacity import Demand, Margins, table
from policies.scaling.observation import Capability
from policies.scaling.registry import make
from policies.state.views import Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TUNING_SEED, FIRST_SEED = 1_000, 2_000
"""The first seeds of the search for parameters, and of what is reported: no parameter was chosen on the latter."""
SLOTS = 128
MOST = 1_024
STATUS_ALWAYS_S = 1.0
CV = 0.4  # ASSUMPTION: of prompts and outputs
# ASSUMPTION: twice the TTFT of flowkv_roles for prompts of twice the length
TTFT_SLO_S, TPOT_SLO_S = 16.0, 0.08
RIVALS = ("ongoing", "latency_ratio", "demand_rate", "regime_rule")
OURS = "joint"
KEPT = (
    "requests",
    "slo_share",
    "goodput_per_s",
    "ttft_p99_s",
    "unfinished",
    "rejected",
    "fleet/engine_s",
    "fleet/warm_s",
    "fleet/starting_s",
    "fleet/starts",
    "fleet/switches",
    "fleet/moved",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Mix:
    """Requests of one kind: mean prompt and mean output in tokens."""

    prompt: float
    output: float

    def demand(self) -> Demand:
        return Demand(self.prompt, self.prompt, self.output, TTFT_SLO_S, TPOT_SLO_S, CV)


CHAT = Mix(12_000.0, 800.0)
"""ASSUMPTION: long prompts keep the number of requests small for what they ask of engines."""


def capability() -> Capability:
    return Capability(PROFILES["L20"], SLOTS, KV_TOKENS["L20"] // BLOCK_TOKENS * BLOCK_TOKENS)


def engines(prefill: int, decode: int) -> tuple[EngineSpec, ...]:
    """Returns the groups of prefill and of decode engines that serve from the beginning."""

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

    return some("p", Role.PREFILL, prefill), some("d", Role.DECODE, decode)


def requests(
    mix: Mix, rates: Sequence[float], step_s: float, seed: int, begins_s: float = 0.0
) -> list[WorkloadRequest]:
    """Returns the requests of `len(rates)` steps of `step_s` seconds, each with its rate in requests/s."""
    lengths = Lognormal.of_mean(mix.prompt, CV), Lognormal.of_mean(mix.output, CV)
    stream = Synthetic(f"at{begins_s:g}", Diurnal(tuple(rates), step_s), *lengths).stream(seed)
    whole_s = len(rates) * step_s
    return [
        dataclasses.replace(r, at_s=begins_s + r.at_s, ttft_slo_s=TTFT_SLO_S, tpot_slo_s=TPOT_SLO_S)
        for r in takewhile(lambda r: r.at_s < whole_s, stream)
    ]


def fewest(mix: Mix, rate: float, headroom: float = 0.0) -> Counts:
    """Returns the fewest prefill and decode engines that carry `rate` requests/s and `headroom` more, by
    `policies.scaling.capacity`; one more than `MOST` of a role where `MOST` do not.
    """
    carried = table(capability(), mix.demand(), MOST, Margins())
    wanted = rate * (1.0 + headroom)
    prefill = next((k for k, r in enumerate(carried.prefill) if k and r >= wanted), MOST + 1)
    decode = next((k for k, r in enumerate(carried.decode) if k and r >= wanted), MOST + 1)
    return Counts(prefill, decode)


def foreseen(mix: Mix, rates: Sequence[float], step_s: float, headroom: float, start_s: float) -> Planned:
    """Returns the plan of one who knows the mean rate of each step: the fewest engines of this step and the next
    `step_s`, with those that later steps need started in time and none kept without need.
    """
    counts = [fewest(mix, rate, headroom) for rate in rates]
    now = [
        Counts(max(a.prefill, b.prefill), max(a.decode, b.decode))
        for a, b in zip(counts, [*counts[1:], counts[-1]], strict=True)
    ]
    ahead = math.ceil(start_s / step_s) + 1
    rows = [
        (i * step_s, one, max(later.total for later in now[i : i + ahead]) - one.total)
        for i, one in enumerate(now)
    ]
    return Planned(tuple((at_s, one, max(0, warm)) for at_s, one, warm in rows))


def policy(name: str, params: Mapping[str, Any], limits: Limits) -> ScalingPolicy:
    """Returns a registered policy with parameters and bounds."""
    return make(name, {**params, "limits": dataclasses.asdict(limits)})


def run(
    work: Sequence[WorkloadRequest],
    first: Counts,
    scaling: ScalingPolicy,
    seed: int,
    warmup_s: float,
    measure_s: float,
    warm: int = 0,
    start: StartSteps = STARTS["cold"],
    period_s: float = 0.5,
) -> RunResult:
    """Runs one load; the fleet begins with `first` serving and `warm` warm engines. Requests wait as long as they
    must: what is late is counted, not refused.
    """
    made = SimConfig(
        engines(first.prefill, first.decode),
        dispatch=DispatchConfig(
            max_queue=1_000_000,
            queue_timeout_s=7_200.0,
            starvation_s=math.inf,
            overdue_by_slo=False,
            # three reports, as in the live system
            status_stale_s=3.0 * max(STATUS_ALWAYS_S, period_s),
            seed=seed,
        ),
        control=ControlPlane(
            progress_s=2.0 * period_s,
            status_s=period_s,
            status_always_s=STATUS_ALWAYS_S,
            tick_s=period_s,
            request_timeout_s=7_200.0,
            prefill_limit_s=math.inf,
            transfer_limit_s=math.inf,
        ),
        scaling=FleetSetup(scaling, start, warm),
        seed=seed,
        warmup_s=warmup_s,
        measure_s=measure_s,
    )
    return simulate(made, work)


def kept(result: RunResult, more: Sequence[str] = ()) -> dict[str, float | None]:
    """Returns the measures that the experiments store."""
    found: Metrics = summarise(result)
    return {name: found.get(name) for name in (*KEPT, *more)}


def measured(results: Results, names: Sequence[str] | None = None) -> list[Row]:
    """Returns two rows for each variant: the share of its requests in time, and its engine time."""
    rows = []
    for name in results.variants if names is None else names:
        for metric, what, scale, unit in (
            ("slo_share", "requests in time", 100.0, "%"),
            ("fleet/engine_s", "engine time", 1.0 / 3_600.0, "h"),
        ):
            found = results.spread(name, metric)
            width = None if found.half_width is None else scale * found.half_width
            rows.append(Row(f"{name}: {what}", None, scale * found.mean, unit, width))
    return rows


def against(results: Results, ours: str, rival: str, name: str) -> Row:
    """Returns a row of the engine time of `ours` beside that of `rival`; the note has the attainment.

    It is met where ours is surely worse in neither, missed where it is surely worse in one and surely better in none,
    and open else. Less than 0.1 points of attainment or 1 % of engine time is no difference.
    """
    row = beside(results, ours, rival, name)
    gain = results.paired(rival, ours, "slo_share").difference
    attained = _compared(100.0 * gain.mean, 100.0 * (gain.half_width or 0.0), 0.1)
    cheaper = _compared(-(row.ours or 0.0), row.half_width or 0.0, 1.0)
    kept = [None if found is None else found >= 0 for found in (attained, cheaper)]
    reached = all_met(kept)
    if reached is False and 1 in (attained, cheaper):
        # Each is surely better in one of the two.
        reached = None
    return aimed(row, "worse in neither", also=[reached])


def beside(results: Results, ours: str, rival: str, name: str) -> Row:
    """Returns a row of the engine time of `ours` beside that of `rival`, without an aim; the note has attainment."""
    gain = results.paired(rival, ours, "slo_share").difference
    saved, half = results.reduction_percent(rival, ours, "fleet/engine_s")
    sure = "" if gain.half_width is None else f" ± {100.0 * gain.half_width:.2f}"
    note = f"attainment {100.0 * gain.mean:+.2f}{sure} points"
    return Row(f"{name}: engine time", None, -saved, "%", half, note=note)


def _compared(gain: float, half: float, margin: float) -> int | None:
    """Returns 1 where a gain is surely above the margin, -1 where it is surely below -margin, 0 where it is surely
    neither worse, and None where its interval holds -margin.
    """
    not_worse = met(gain - half, gain + half, least=-margin)
    if not_worse is not True:
        return -1 if not_worse is False else None
    return 1 if gain - half > margin else 0


def plane(results: Results, names: Sequence[str], label: str) -> Figure:
    """Draws attainment over engine time, a mark for each variant."""
    from benchmarks import plots as look

    made, axes = look.figure()
    series = {
        name: look.Series(
            [results.mean(name, "fleet/engine_s") / 3_600.0], [100.0 * results.mean(name, "slo_share")]
        )
        for name in names
    }
    look.lines(axes[0], series, label, "requests in time, %")
    return made
