"""A load whose ratio of prefill to decode shifts, on eight engines: fixed divisions against role switches.

Halves of `HALF_S` alternate: long prompts with short outputs (16,000 in, 128 out, 1.2 requests/s), then short prompts
with long outputs (512 in, 1,536 out, 5.5 requests/s). By the profile the first half needs 5.2 engines to prefill, the
second 5 to decode, so every fixed division is short in one of them. Eight engines are all that there are: a policy can
only switch roles, or leave engines idle.

The loads were resized once to save time, and `joint` was changed after a first run of the reported seeds, in which a
rival led; the seeds that are reported now are others.

"ours, outputs known" is ours with the present half's mean output in place of what it has learned. It was added to find
out why a rival led, and has no aim: outputs tell their length when they end, so a policy learns of a shift late.

Aims, written before the first run: the goodput of ours (requests within TTFT and TPOT, a second) is at least 25 % over
the best fixed division's; no rival has more goodput than ours.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.scaling_common import FIRST_SEED, OURS, RIVALS, Mix, kept, policy, requests, run
from benchmarks.experiments.scaling_tuned import SHIFT
from benchmarks.workloads.record import WorkloadRequest
from policies.scaling.base import Counts, Limits
from policies.scaling.joint import Joint, JointState
from policies.scaling.observation import Observation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "a shifting ratio of prefill to decode on eight engines: fixed divisions against role switches"
SEEDS = (8, 1)
SEEDS_FROM = FIRST_SEED
ENGINES = 8
FIXED = (3, 4, 5, 6)
HALF_S, HALVES = 240.0, 3
PROMPTS, OUTPUTS = (Mix(16_000.0, 128.0), 1.2), (Mix(512.0, 1_536.0), 5.5)
LIMITS = Limits(prefill_max=ENGINES - 1, decode_max=ENGINES - 1, budget=ENGINES)
KNOWN = "ours, outputs known"


@dataclass(frozen=True, slots=True)
class _Known(Joint):
    """Ours, told the mean output of the present half."""

    def _learned(self, seen: Observation, state: JointState) -> JointState:
        learned = Joint._learned(self, seen, state)
        mix, _ = _half(int(seen.now_s // HALF_S))
        return replace(learned, lengths=replace(learned.lengths, output_tokens=mix.output))


def _half(number: int) -> tuple[Mix, float]:
    return PROMPTS if number % 2 == 0 else OUTPUTS


def variants(quick: bool) -> list[Variant]:
    fixed = FIXED[1:3] if quick else FIXED
    found = [
        Variant(f"fixed {p}P{ENGINES - p}D", {"policy": "fixed", "params": {}, "prefill": p}) for p in fixed
    ]
    found += [
        Variant(name, {"policy": name, "params": SHIFT[name], "prefill": 4}) for name in (*RIVALS, OURS)
    ]
    return [*found, Variant(KNOWN, {"policy": OURS, "params": SHIFT[OURS], "prefill": 4, "known": True})]


@functools.lru_cache(maxsize=2)
def work(seed: int) -> tuple[WorkloadRequest, ...]:
    made: list[WorkloadRequest] = []
    for half in range(HALVES):
        mix, rate = _half(half)
        made += requests(mix, [rate], HALF_S, seed * 1_000 + half, half * HALF_S)
    return tuple(made)


def run_one(config: Config, seed: int) -> Metrics:
    """Measures two halves, of each kind one; the half before them warms up."""
    first = Counts(config["prefill"], ENGINES - config["prefill"])
    scaling = policy(config["policy"], config["params"], LIMITS)
    if config.get("known"):
        assert isinstance(scaling, Joint)
        scaling = _Known(**{one.name: getattr(scaling, one.name) for one in fields(scaling)})
    return kept(run(work(seed), first, scaling, seed, HALF_S, (HALVES - 1) * HALF_S, period_s=0.5))


def compare(results: Results) -> list[Row]:
    fixed = [name for name in results.variants if name.startswith("fixed")]
    best = max(fixed, key=lambda name: results.mean(name, "goodput_per_s"))
    rows = []
    for rival, aim, least in ((best, ">= 25 %", 25.0), *((name, "not below 0", 0.0) for name in RIVALS)):
        less, half = results.reduction_percent(rival, OURS, "goodput_per_s")
        row = Row(f"goodput of ours above {rival}", None, -less, "%", half)
        rows.append(aimed(row, aim, least=least))
    for name in ("regime_rule", OURS):
        less, half = results.reduction_percent(name, KNOWN, "goodput_per_s")
        rows.append(Row(f"goodput of {KNOWN}, above {name}", None, -less, "%", half))
    for name in results.variants:
        found = results.spread(name, "goodput_per_s")
        rows.append(Row(f"{name}: goodput", None, found.mean, "1/s", found.half_width))
        rows.append(Row(f"{name}: requests in time", None, 100.0 * results.mean(name, "slo_share"), "%"))
        if not name.startswith("fixed"):
            rows.append(Row(f"{name}: role switches", None, results.mean(name, "fleet/switches")))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure()
    spreads = {name: results.spread(name, "goodput_per_s") for name in results.variants}
    look.bars(axes[0], {name: (s.mean, s.half_width) for name, s in spreads.items()}, "goodput, requests/s")
    return {"ratio_shift": made}
