"""Validates the simulator: it runs one workload on a live Sluice through Ray Serve and simulated, and compares them.

    python -m benchmarks.experiments.validate_live --engines sim     2 prefill + 4 decode sim engines
    python -m benchmarks.experiments.validate_live --engines vllm    1 + 1 vLLM engines, SmolLM2

Both sides get the same arrivals (Poisson), prompt and output lengths, policies and limits. The simulator's parameters
are measured before, on other requests than those that are compared:

    sim     the engines' timing is given; lone requests give what ingress, router and HTTP add (ControlPlane.ingress_s)
    vllm    lone requests beside one that decodes, and bursts, give the timing profile (benchmarks.sim.calibration); the
            control plane is stock

Policies draw among ties, so the simulation is run under several seeds. A replay on sim engines in which the load client
itself could not send in time (because another program had the cores) is repeated, whatever its result. This is not an
experiment of `benchmarks run`, because it needs a live app and a quiet machine. The exit status is 1 if an answer was
lost or an error is above the aim.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import plots
from benchmarks.experiments import agreement
from benchmarks.experiments.agreement import Times
from benchmarks.experiments.twin import (
    Setup,
    ValidationError,
    calibrate_control,
    calibrate_engines,
    live_times,
    lone_requests,
    replay_live,
    sim_setup,
    simulated_times,
    vllm_setup,
)
from benchmarks.live.kept import Parts
from benchmarks.live.machine import command, facts, save
from benchmarks.live.openloop import Answer
from benchmarks.live.proctree import cpu_by_role, machine_busy_s, snapshot
from benchmarks.live.servers import ROOT, Server, ServerError, administrator, running
from benchmarks.live.stats import percentile
from benchmarks.progress import teller
from benchmarks.sim.calibration import CalibrationError
from benchmarks.sim.config import ControlPlane
from benchmarks.workloads.record import WorkloadRequest
from policies.engine_model.timing import TimingProfile

OUT = ROOT / "benchmarks" / "results" / "experiments" / "validate_live"


@dataclass(slots=True)
class Comparison:
    """One replay, live and simulated. `disturbed_ms` is how late the client was in each replay that was repeated."""

    policies: tuple[str, str]
    live: list[Times]
    simulated: list[list[Times]]
    client_late_ms: dict[str, float]
    cores: dict[str, float]
    disturbed_ms: list[float]

    @property
    def name(self) -> str:
        return " + ".join(self.policies)

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as results keep it."""
        return {
            "policies": self.policies,
            "requests": len(self.live),
            "simulated_seeds": len(self.simulated),
            "client_late_ms": self.client_late_ms,
            "busy_cores": self.cores,
            "disturbed_replays_late_p95_ms": self.disturbed_ms,
            "live": agreement.as_json(self.live),
            "simulated": [agreement.as_json(run) for run in self.simulated],
        }

    @classmethod
    def of(cls, case: Mapping[str, Any]) -> Comparison:
        """Returns the comparison that `as_json` gave, with times of six digits."""
        prefill, decode = case["policies"]
        live, runs = agreement.times_of(case["live"]), [agreement.times_of(run) for run in case["simulated"]]
        late_ms, cores = case["client_late_ms"], case["busy_cores"]
        return cls((prefill, decode), live, runs, late_ms, cores, case["disturbed_replays_late_p95_ms"])


def judge(
    server: Server,
    setup: Setup,
    profile: TimingProfile,
    control: ControlPlane,
    policies: tuple[str, str],
    settings: argparse.Namespace,
) -> Comparison:
    """Replays the workload under a pair of policies and returns the comparison.

    The live app is idle before each replay.
    """
    work, disturbed_ms = setup.mix.requests(settings.seed), list[float]()
    # No two replays of a run have the same prompts.
    prompts = settings.seed + 1000 * (1 + setup.policies.index(policies))
    while True:
        set_policies(server.command.port, policies)
        prompts += 1
        answers, cores = observed(server, setup, work, prompts)
        late_s = [answer.late_s for answer in answers]
        late_ms = {f"p{q}": 1e3 * percentile(late_s, q / 100) for q in (50, 95)}
        limit_s = setup.late_limit_s
        if limit_s is None or late_ms["p95"] <= 1e3 * limit_s or len(disturbed_ms) + 1 >= settings.attempts:
            break
        disturbed_ms.append(late_ms["p95"])
    runs = [
        simulated_times(setup.simulated(profile, control, policies, seed), work)
        for seed in range(settings.seeds)
    ]
    return Comparison(policies, live_times(work, answers), runs, late_ms, cores, disturbed_ms)


def observed(
    server: Server, setup: Setup, work: Sequence[WorkloadRequest], seed: int
) -> tuple[list[Answer], dict[str, float]]:
    """Replays the workload live.

    Returns (answers, number of cores that the app, this client and everything else kept busy during the replay).
    """
    before, busy_s, start_s, own_s = snapshot(server.pid), machine_busy_s(), time.monotonic(), _own_cpu_s()
    answers = replay_live(server.command.port, setup, work, seed)
    wall_s = time.monotonic() - start_s
    ours_s, busy_s = _own_cpu_s() - own_s, machine_busy_s() - busy_s
    app_s = sum(cpu_by_role(before, snapshot(server.pid)).values())
    others_s = max(0.0, busy_s - app_s - ours_s)
    return answers, {"app": app_s / wall_s, "client": ours_s / wall_s, "others": others_s / wall_s}


def _own_cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


def set_policies(port: int, policies: tuple[str, str]) -> None:
    """Sets the live app's policies, and waits until it has no request."""
    with administrator(port, 30.0) as client:
        change = dict(zip(("prefill", "decode"), policies, strict=True))
        client.put("/sluice/admin/policy", json=change).raise_for_status()
        for _ in range(300):
            status = client.get("/sluice/status").raise_for_status().json()
            if not status["requests"]["in_flight"] and not status["leases"]:
                return
            time.sleep(0.1)
    raise ValidationError(f"the app is not idle after 30 s: {status['requests']}, {status['leases']} leases")


def calibrated(server: Server, setup: Setup, seed: int) -> dict[str, Any]:
    """Returns profile and control plane of the simulator, and what the calibration found, as results keep them."""
    profile, control = setup.profile, ControlPlane()
    if setup.kind == "sim":
        control, found = calibrate_control(server.command.port, setup, seed)
    else:
        profile, found = calibrate_engines(server.command.port, setup, seed)
    return {"profile": asdict(profile), "control": asdict(control), "calibration": found}


def run(
    setup: Setup, settings: argparse.Namespace, say: Callable[[str], None], kept: Parts
) -> tuple[list[Comparison], dict[str, Any]]:
    """Starts the app, calibrates the simulator and compares both. The calibration and each pair of policies are parts
    of the measurement.

    Returns (comparisons, what the calibration found). Raises ServerError, ValidationError or CalibrationError.
    """
    seed = settings.seed
    with (
        tempfile.TemporaryDirectory(prefix="sluice-validate-") as folder,
        running(setup.command(Path(folder)), say) as server,
    ):
        warm = lone_requests(setup, 4, 8, 0.3)  # connections, caches
        replay_live(server.command.port, setup, warm, seed + 100)
        used = kept.once("calibration", partial(calibrated, server, setup, seed), say)
        found = used["calibration"]
        say(f"calibrated: {json.dumps({k: v for k, v in found.items() if k != 'measured'})}")
        profile, control = TimingProfile(**used["profile"]), ControlPlane(**used["control"])
        cases = []
        for policies in setup.policies:

            def measure(policies: tuple[str, str] = policies) -> dict[str, Any]:
                return judge(server, setup, profile, control, policies, settings).as_json()

            cases.append(Comparison.of(kept.once("/".join(policies), measure, say)))
    return cases, {name: used[name] for name in ("profile", "control", "calibration")}


def document(setup: Setup, cases: Sequence[Comparison], used: dict[str, Any]) -> dict[str, Any]:
    """Returns the result to be stored: everything that decides the outcome, and the outcome."""
    return {
        "setup": asdict(setup),
        **used,
        "aims_percent": agreement.AIMS_PERCENT[setup.kind],
        "cases": [case.as_json() for case in cases],
    }


def report(case: Comparison, kind: str) -> str:
    """Returns one comparison as text, judged by the aims for this kind of engine."""
    cores = ", ".join(f"{who} {busy:.2f}" for who, busy in case.cores.items())
    late = case.client_late_ms
    return (
        f"\n{case.name}: {len(case.live)} requests; the client sent them {late['p50']:.2f} ms late (p95 "
        f"{late['p95']:.2f}); disturbed and done again: {len(case.disturbed_ms)}; cores busy: {cores}\n\n"
        f"{agreement.table(agreement.compare(case.live, case.simulated), kind)}\n"
    )


def _pair(text: str) -> tuple[str, str]:
    prefill, slash, decode = text.partition("/")
    if not slash:
        raise argparse.ArgumentTypeError(f"{text!r}: give PREFILL/DECODE, join_shortest_queue/netkv say")
    return prefill, decode


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status (module docstring)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments.validate_live", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--engines", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--seconds", type=float, help="length of a replay (60, vllm: 150)")
    parser.add_argument("--policies", type=_pair, action="append", default=[], metavar="PREFILL/DECODE")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts")
    parser.add_argument("--seeds", type=int, default=10, help="simulations, each with ties drawn anew")
    parser.add_argument("--attempts", type=int, default=3, help="replays at most, while they are disturbed")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (default %(default)s)")
    args = parser.parse_args(argv)
    machine, say = facts("benchmarks.experiments.validate_live"), teller()

    make, seconds = (sim_setup, 60.0) if args.engines == "sim" else (vllm_setup, 150.0)
    setup = make(tuple(args.policies), args.seconds or seconds)
    options = {name: getattr(args, name) for name in ("seed", "seeds", "attempts")}
    kept = Parts(f"validate-{args.engines}", machine, asdict(setup) | options)
    try:
        cases, used = run(setup, args, say, kept)
    except (ServerError, ValidationError, CalibrationError) as error:
        print(f"validate_live: {error}", file=sys.stderr)
        return 1
    whole = document(setup, cases, used) | {"seed": args.seed, "machine": machine, "parts": kept.ends()}
    whole["command"] = command("benchmarks.experiments.validate_live", argv)
    if not save(args.out / f"{args.engines}.json", whole, levels=4):
        return 1
    kept.forget()
    figure = agreement.figure({case.name: (case.live, case.simulated) for case in cases})
    plots.save(args.out, args.engines, figure)
    for case in cases:
        print(report(case, setup.kind))
    missed = any(
        line.met(setup.kind) is False for case in whole["cases"] for line in agreement.lines_of(case)
    )
    print(f"written to {args.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
