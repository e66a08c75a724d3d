"""Judges the simulator by load and policy: the same requests on a live Sluice through Ray Serve and simulated.

    python -m benchmarks.experiments.truth --engines sim     2 prefill + 4 decode sim engines
    python -m benchmarks.experiments.truth --engines vllm    1 + 1 vLLM engines, SmolLM2
    python -m benchmarks.experiments.truth --quick           a short form that shows that all parts work

A cell is a pair of policies at a load; loads are shares of what the fleet carries (`capacity_per_s`), so those above 1
are overload. Admission is as shipped, and every request has the objectives of `Plan`. A cell has several blocks of
requests. Both sides get the requests of a block at the same times; those of its first `warm_s` seconds are not judged,
because a live app comes warm from the block before, and a simulated one starts cold. Refused requests have no times,
and count for goodput, which is the requests a second that met their objectives.

The error of a figure is simulated / live - 1, both over the requests of all blocks. Half of its 95 % interval is the
jackknife's over the blocks. TTFT p99 is judged only where both sides answered `LEAST_FOR_P99` requests: with fewer it
is a matter of less than ten requests.

Sim engines get all loads and three pairs of policies. vLLM engines get the loads below 1 and one pair, since one engine
of each role leaves nothing to choose, and each request takes them seconds.

The simulator is calibrated as in `validate_live`. The calibration and each block are parts of the measurement that are
kept, so the command goes on after an interruption. The exit status is 0 only if all aims are met: 1 where one is missed
or open by its interval, an answer was lost, or the app did not run.

Not claimed: engines that die, which the simulator does not model; scheduled flows; a decode beside a prefill on the
same cores, which only vLLM engines have.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments import agreement
from benchmarks.experiments.agreement import Times
from benchmarks.experiments.base import Row, aimed
from benchmarks.experiments.twin import (
    Setup,
    ValidationError,
    live_times,
    lone_requests,
    refused,
    replay_live,
    sim_setup,
    simulated_outcomes,
    vllm_setup,
)
from benchmarks.experiments.validate_live import calibrated, set_policies
from benchmarks.live.kept import Parts
from benchmarks.live.machine import command, facts, save
from benchmarks.live.servers import ROOT, Server, ServerError, running
from benchmarks.live.stats import percentile
from benchmarks.progress import teller
from benchmarks.seeds import spread
from benchmarks.sim.calibration import CalibrationError
from benchmarks.sim.config import ControlPlane
from benchmarks.workloads.record import WorkloadRequest
from policies.engine_model.timing import TimingProfile

OUT = ROOT / "benchmarks" / "results" / "experiments" / "truth"
POLICIES = (
    ("join_shortest_queue", "join_shortest_queue"),
    ("predicted_ttft", "balance_route_0"),
    ("predicted_ttft", "composition"),
)
LEAST_FOR_P99 = 1000
FIGURES = (("ttft", 0.5), ("ttft", 0.95), ("ttft", 0.99), ("tpot", 0.5), ("tpot", 0.95))

Outcomes = Sequence[Times | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement: `loads` under each of `policies`, each in `blocks` blocks.

    A block lasts as long as `requests` requests need on average, and a load above 1 gets as many more as it is above 1,
    since part of them are refused. Objectives are in seconds. `seeds` simulations draw ties anew.
    """

    policies: tuple[tuple[str, str], ...]
    loads: tuple[float, ...]
    blocks: int
    requests: int
    warm_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    seeds: int
    attempts: int = 3

    def work(self, setup: Setup, rate_per_s: float, load: float, seed: int) -> list[WorkloadRequest]:
        """Returns the requests of a block, those of the warm-up among them."""
        seconds = self.warm_s + self.judged_s(rate_per_s, load)
        drawn = replace(setup.mix, rate_per_s=rate_per_s, seconds=seconds).requests(seed)
        return [replace(one, ttft_slo_s=self.ttft_slo_s, tpot_slo_s=self.tpot_slo_s) for one in drawn]

    def judged_s(self, rate_per_s: float, load: float) -> float:
        """Returns the seconds of a block in which the requests that are judged come."""
        return self.requests * max(1.0, load) / rate_per_s


def plan(kind: str, quick: bool) -> Plan:
    """Returns what is measured on engines of a kind, or its short form."""
    if quick:
        return Plan(POLICIES if kind == "sim" else POLICIES[:1], (0.6, 1.5), 2, 12, 1.0, 1.5, 0.05, 2, 1)
    if kind == "sim":
        return Plan(POLICIES, (0.3, 0.6, 0.9, 1.1, 1.5), 4, 300, 10.0, 1.5, 0.05, 5)
    return Plan(POLICIES[:1], (0.3, 0.6, 0.9), 4, 50, 10.0, 5.0, 0.2, 5)


def capacity_per_s(setup: Setup, profile: TimingProfile) -> float:
    """Returns the requests a second that the fleet carries: what the slower of its two tiers carries with full slots.

    prefill = engines / mean prompt's step,  decode = engines * slots / (mean output tokens * full step)
    """
    prompt, output = sum(setup.mix.prompt_tokens) / 2, sum(setup.mix.output_tokens) / 2
    prefill = setup.prefill / profile.step_s(round(prompt), 0, 0)
    step_s = profile.step_s(0, setup.slots, round(setup.slots * (prompt + output / 2)))
    return min(prefill, setup.decode * setup.slots / (output * step_s))


# ------------------------------------------------------------------------------------------------------ measurement


def judged(work: Sequence[WorkloadRequest], outcomes: Outcomes, warm_s: float) -> list[Times | None]:
    """Returns the outcomes of the requests that came after the warm-up."""
    return [found for one, found in zip(work, outcomes, strict=True) if one.at_s >= warm_s]


def as_json(outcomes: Outcomes) -> list[list[float | None] | None]:
    """Returns outcomes as results keep them: a list [ttft, tpot, jct] in seconds, or None for a refused request."""
    return [None if one is None else agreement.as_json([one])[0] for one in outcomes]


def outcomes_of(stored: Sequence[Sequence[float | None] | None]) -> list[Times | None]:
    """Returns the outcomes that `as_json` gave."""
    return [None if one is None else agreement.times_of([one])[0] for one in stored]


def block(
    server: Server,
    setup: Setup,
    made: Plan,
    model: tuple[TimingProfile, ControlPlane, float],
    policies: tuple[str, str],
    load: float,
    seed: int,
) -> dict[str, Any]:
    """Measures one block of a cell on both sides; `model` has profile, control plane and capacity.

    A replay in which the client itself could not send in time is repeated, whatever its result.
    """
    profile, control, capacity = model
    rate_per_s = load * capacity
    work = made.work(setup, rate_per_s, load, seed)
    disturbed_ms = list[float]()
    while True:
        set_policies(server.command.port, policies)
        prompts = 100 * seed + len(disturbed_ms)
        answers = replay_live(server.command.port, setup, work, prompts, refusals=True)
        late_ms = 1e3 * percentile([answer.late_s for answer in answers], 0.95)
        limit_s = setup.late_limit_s
        if limit_s is None or late_ms <= 1e3 * limit_s or len(disturbed_ms) + 1 >= made.attempts:
            break
        disturbed_ms.append(late_ms)
    times = live_times(work, answers)
    live = [None if refused(answer) else time for answer, time in zip(answers, times, strict=True)]
    runs = [
        simulated_outcomes(setup.simulated(profile, control, policies, ties), work)
        for ties in range(made.seeds)
    ]
    return {
        "seconds": made.judged_s(rate_per_s, load),
        "client_late_p95_ms": late_ms,
        "disturbed_replays_late_p95_ms": disturbed_ms,
        "live": as_json(judged(work, live, made.warm_s)),
        "simulated": [as_json(judged(work, run, made.warm_s)) for run in runs],
    }


def measured(
    setup: Setup, made: Plan, seed: int, say: Callable[[str], None], kept: Parts
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Starts the app, calibrates the simulator and measures all cells.

    Returns (cells, calibration). Raises ServerError, ValidationError or CalibrationError.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sluice-truth-") as folder,
        running(setup.command(Path(folder)), say) as server,
    ):
        replay_live(server.command.port, setup, lone_requests(setup, 4, 8, 0.3), seed + 100)
        used = kept.once("calibration", partial(calibrated, server, setup, seed), say)
        profile, control = TimingProfile(**used["profile"]), ControlPlane(**used["control"])
        model = (profile, control, capacity_per_s(setup, profile))
        cells = []
        for policies in made.policies:
            for load in made.loads:
                blocks = []
                for index in range(made.blocks):
                    part = f"{'/'.join(policies)}, load {load:g}, block {index}"
                    # All policies get the same requests; no two blocks of a load do.
                    drawn = 1000 * (1 + seed) + 100 * made.loads.index(load) + index
                    measure = partial(block, server, setup, made, model, policies, load, drawn)
                    blocks.append(kept.once(part, measure, say))
                    say(part)
                cells.append({"policies": policies, "load": load, "blocks": blocks})
    found = {name: used[name] for name in ("profile", "control", "calibration")}
    return cells, found | {"capacity_per_s": model[2]}


# ---------------------------------------------------------------------------------------------------------- judgement


def within_slo(one: Times | None, ttft_s: float, tpot_s: float) -> bool:
    """Returns whether a request was answered within both objectives."""
    return one is not None and one.ttft_s <= ttft_s and (one.tpot_s is None or one.tpot_s <= tpot_s)


def goodput_per_s(outcomes: Outcomes, seconds: float, ttft_s: float, tpot_s: float) -> float:
    """Returns the requests a second that met their objectives, among those that came within `seconds`."""
    return sum(within_slo(one, ttft_s, tpot_s) for one in outcomes) / seconds


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a cell on both sides, with the error in per cent and half of its 95 % interval.

    Times are in milliseconds, goodput in requests a second. `answered` is the lesser number of answers of both sides.
    """

    measure: str
    quantile: float | None
    live: float
    simulated: float
    half_width: float | None
    answered: int

    @property
    def error_percent(self) -> float:
        return 100.0 * (self.simulated / self.live - 1.0)

    @property
    def name(self) -> str:
        """The figure's name, as rows have it."""
        return (
            self.measure if self.quantile is None else f"{self.measure.upper()} p{round(100 * self.quantile)}"
        )

    @property
    def counts(self) -> bool:
        """Whether there were enough answers to judge the figure."""
        return self.quantile != 0.99 or self.answered >= LEAST_FOR_P99


def figures(cell: Mapping[str, Any], ttft_slo_s: float, tpot_slo_s: float) -> list[Figure]:
    """Returns the figures of a stored cell that both sides have; a side without an answer has no times."""
    blocks = [
        (
            outcomes_of(one["live"]),
            [outcomes_of(run) for run in one["simulated"]],
            float(one["seconds"]),
        )
        for one in cell["blocks"]
    ]
    live = [one for side, _, _ in blocks for one in side if one is not None]
    runs = [one for _, sides, _ in blocks for side in sides for one in side if one is not None]
    answered = min(len(live), round(len(runs) / len(blocks[0][1])))

    def times(measure: str, quantile: float, chosen: Sequence[int]) -> tuple[float, float] | None:
        sides = (
            [one for i in chosen for one in blocks[i][0] if one is not None],
            [one for i in chosen for run in blocks[i][1] for one in run if one is not None],
        )
        found = [agreement.values(side, measure) for side in sides]
        if not all(len(one) for one in found):
            return None
        first, second = (1e3 * float(np.quantile(one, quantile)) for one in found)
        return first, second

    def goodput(chosen: Sequence[int]) -> tuple[float, float] | None:
        seconds = sum(blocks[i][2] for i in chosen)
        first = [one for i in chosen for one in blocks[i][0]]
        second = [one for i in chosen for run in blocks[i][1] for one in run]
        simulated_s = seconds * len(blocks[0][1])
        live_per_s = goodput_per_s(first, seconds, ttft_slo_s, tpot_slo_s)
        if not live_per_s:
            return None
        return live_per_s, goodput_per_s(second, simulated_s, ttft_slo_s, tpot_slo_s)

    asked: list[tuple[str, float | None, Callable[[Sequence[int]], tuple[float, float] | None]]] = [
        (measure, quantile, partial(times, measure, quantile)) for measure, quantile in FIGURES
    ]
    asked.append(("goodput", None, goodput))
    made = []
    for measure, quantile, of in asked:
        whole = of(range(len(blocks)))
        if whole is not None:
            half = jackknife(of, len(blocks))
            made.append(Figure(measure, quantile, *whole, half, answered))
    return made


def jackknife(of: Callable[[Sequence[int]], tuple[float, float] | None], blocks: int) -> float | None:
    """Returns half of the 95 % interval of an error in per cent, from the pseudo-values of leaving out each block.

        pseudo_i = n * error - (n - 1) * error without block i

    None for one block, and where a side has nothing without one of the blocks.
    """
    if blocks < 2:
        return None
    chosen = [range(blocks), *([j for j in range(blocks) if j != i] for i in range(blocks))]
    found = [of(one) for one in chosen]
    errors = [100.0 * (pair[1] / pair[0] - 1.0) for pair in found if pair is not None]
    if len(errors) < len(found):
        return None
    return spread([blocks * errors[0] - (blocks - 1) * error for error in errors[1:]]).half_width


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a results file: of each figure both sides and, with an aim, the error."""
    aims, made = agreement.AIMS_PERCENT[whole["setup"]["kind"]], whole["plan"]
    for cell in whole["cells"]:
        where = f"{'/'.join(cell['policies'])}, load {cell['load']:g}"
        for one in figures(cell, made["ttft_slo_s"], made["tpot_slo_s"]):
            name, unit = f"{where}: {one.name}", "requests/s" if one.quantile is None else "ms"
            yield Row(f"{name}, live", None, one.live, unit)
            yield Row(f"{name}, simulated", None, one.simulated, unit)
            row = Row(f"{name}, simulated against live", None, one.error_percent, "%", one.half_width)
            within = aims[one.measure]
            if one.counts:
                yield aimed(row, f"within {within:g} %", least=-within, most=within)
            else:
                yield replace(row, note=f"not judged: {one.answered} answers")


def document(setup: Setup, made: Plan, cells: Sequence[Mapping[str, Any]], used: Mapping[str, Any]) -> Any:
    """Returns the result to be stored: everything that decides the outcome, and the outcome."""
    aims = agreement.AIMS_PERCENT[setup.kind]
    return {"setup": asdict(setup), "plan": asdict(made), **used, "aims_percent": aims, "cells": list(cells)}


VERDICTS = {True: "met", False: "missed", None: "open"}


def report(found: Sequence[Row]) -> str:
    """Returns the errors as a text table."""
    lines = []
    for row in found:
        if row.ours is not None and row.unit == "%":
            half = "" if row.half_width is None else f" +- {row.half_width:.1f}"
            verdict = f"{row.aim}: {VERDICTS[row.met]}" if row.aim else row.note
            lines.append(
                f"{row.name.removesuffix(', simulated against live'):64}{row.ours:+8.1f}{half} %   {verdict}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status (module docstring)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments.truth", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--engines", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts")
    parser.add_argument("--quick", action="store_true", help="a short form, whose figures say nothing")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: that of the committed ones)"
    )
    args = parser.parse_args(argv)
    if args.quick and args.out is None:
        parser.error("--quick wants --out: its figures are not to replace those of the whole command")
    machine, say = facts("benchmarks.experiments.truth"), teller()

    made = plan(args.engines, args.quick)
    setup = (sim_setup if args.engines == "sim" else vllm_setup)(made.policies, 0.0)
    kept = Parts(f"truth-{args.engines}", machine, {**asdict(setup), **asdict(made), "seed": args.seed})
    try:
        cells, used = measured(setup, made, args.seed, say, kept)
    except (ServerError, ValidationError, CalibrationError) as error:
        print(f"truth: {error}", file=sys.stderr)
        return 1
    whole = document(setup, made, cells, used) | {"seed": args.seed, "machine": machine, "parts": kept.ends()}
    whole["command"] = command("benchmarks.experiments.truth", argv)
    out = args.out or OUT
    if not save(out / f"{args.engines}.json", whole, levels=4):
        return 1
    kept.forget()
    found = list(rows(whole))
    print(f"{report(found)}\nwritten to {out}")
    return 0 if all(row.met is True for row in found if row.aim) else 1


if __name__ == "__main__":
    sys.exit(main())
