"""Measures the cost of Sluice around an engine: latency, requests/s, CPU by process, memory (`make bench-overhead`).

    python -m benchmarks.live.overhead                 all of it (some 15 minutes, most of it engines that start)
    python -m benchmarks.live.overhead --only sim      without real engines (about 5 minutes)
    python -m benchmarks.live.overhead --only sim --quick --profile

Starts the servers of benchmarks.live.targets one after the other, loads each over HTTP with two clients (a lean Python
one, and wrk where it is installed), and writes JSON, Markdown and a picture: overhead.*, or overhead-sim.* with --only
sim. On sim engines Sluice decides by the shortest queue, then by its default policies. The report has the issue's aims
for CPU time; nothing is asserted about times. The exit status is 1 when requests failed or a server did not start or
stop. The peers are no part of this command: `make bench-overhead` runs their comparisons behind it.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.live import measure, profile, targets, wrk
from benchmarks.live.kept import Parts
from benchmarks.live.machine import command, facts, told
from benchmarks.live.measure import COMPLETIONS, Measurement, Plan, TreeState
from benchmarks.live.report import Results, markdown, summary, write
from benchmarks.live.servers import ROOT, Command, Server, ServerError, running
from benchmarks.progress import teller

TOKENS = 16
SIM_REQUESTS = {1: 300, 8: 2000, 32: 6000, 128: 8000}
VLLM_REQUESTS = {1: 12, 8: 48, 32: 96}
LONG_STREAMS, LONG_TOKENS = 8, (500, 2000)
REST_S, QUICK_REST_S = 15.0, 3.0
"""Seconds for which a server without load is watched. CPU times are in ticks of 10 ms, which many processes lose."""
SIM_MAX_S = 20.0
VLLM_MAX_S = 90.0
WRK_S = 8.0
WRK_CONCURRENCY = (32, 128)
PROFILE_S = 10


class Bench:
    """One run of the benchmark: its options, its results so far, and its progress."""

    def __init__(self, args: argparse.Namespace, folder: Path, said: str) -> None:
        self.args = args
        self.folder = folder
        self.results = Results(_config(args), facts("benchmarks.live.overhead"), said)
        options = {k: v for k, v in self.results.config["argv"].items() if k != "out"}
        known = self.results.config | {"argv": options, "started_at": None}
        self.kept = Parts("overhead", self.results.machine, known)
        self.wrk = wrk.find(args.wrk)
        self.say = teller()
        if self.wrk is None:
            self.note("wrk is not installed (Debian: apt install wrk): no rows of that client")

    def note(self, text: str) -> None:
        self.results.notes.append(text)
        self.say(text)

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Measures one target, or takes its results if they are kept. With --profile nothing is kept."""
        results = self.results
        cases, trees, notes = len(results.cases), len(results.trees), len(results.notes)
        if self.args.profile:
            run()
            return
        if self.kept.get(name) is not None:
            found = self.kept.once(name, dict, self.say)
            results.cases += [Measurement(**case) for case in found["cases"]]
            results.trees += [TreeState(**tree) for tree in found["trees"]]
            results.notes += found["notes"]
            return
        run()
        new = {
            "cases": [asdict(case) for case in results.cases[cases:]],
            "trees": [asdict(tree) for tree in results.trees[trees:]],
            "notes": results.notes[notes:],
        }
        self.kept.put(name, new)

    def plan(self, concurrency: int, requests: int, max_s: float) -> Plan:
        """Returns the plan of a row of short answers, as large as the options allow."""
        requests = min(requests, self.args.requests or requests)
        if self.args.quick:
            requests, max_s = max(2 * concurrency, requests // 10), max_s / 4
        return Plan(concurrency, requests, TOKENS, max_s)

    def add(self, case: Measurement) -> Measurement:
        self.results.cases.append(case)
        ttft = f", TTFT p50 {case.ttft_ms['p50']:.2f} ms" if case.ttft_ms else ""
        failed = f", FAILED {case.failures}" if case.failures else ""
        self.say(
            f"  {case.client} c={case.concurrency} {case.path.rpartition('v1/')[2]} {case.tokens} tokens: "
            f"{case.requests_per_s:,.1f} req/s{ttft}, server CPU {case.server_cpu_ms_per_request:.3f} ms/req "
            f"{case.server_cpu_ms_per_token:.4f} ms/token{failed}"
        )
        return case

    def first_answer(self, server: Server, model: str) -> dict[str, Any]:
        """Returns the usage of the first request that succeeds, and notes the errors of those before it."""
        usage, problem = measure.first_answer(server, model, TOKENS)
        if problem is not None:
            self.note(problem)
        return usage

    def rest(self, server: Server) -> None:
        """Records memory and idle CPU of a server after its load, when late processes and growth are included."""
        self.results.trees.append(measure.tree_state(server, QUICK_REST_S if self.args.quick else REST_S))

    def streams(self, server: Server, model: str, after: Callable[[Measurement], None]) -> None:
        """Measures 16-token answers with Python and wrk, on a server that makes a token every millisecond."""
        seed = self.args.seed
        for concurrency in self.args.concurrency or SIM_REQUESTS:
            plan = self.plan(concurrency, SIM_REQUESTS.get(concurrency, 4000), SIM_MAX_S)
            after(self.add(measure.with_python(server, model, plan, seed)))
        if self.wrk is None:
            return
        for concurrency in [c for c in self.args.concurrency or WRK_CONCURRENCY if c in WRK_CONCURRENCY]:
            plan = replace(self.plan(concurrency, 64, WRK_S), max_s=2.0 if self.args.quick else WRK_S)
            self.add(measure.with_wrk(server, model, plan, seed, self.wrk))

    def floor(self) -> None:
        """Measures the bare listener."""
        with running(targets.bare(), self.say) as server:
            self.streams(server, "bare", lambda case: None)

    def sim(self) -> None:
        """Measures Sluice on sim engines, by the shortest queue; with --profile, its processes as well."""
        timing = targets.SimTiming()
        app = targets.sim(self.folder, timing, self.args.prefill, self.args.decode)
        self.on_sim(app, timing, profiled=self.args.profile)

    def sim_defaults(self) -> None:
        """Measures Sluice on sim engines with its default policies."""
        timing = targets.SimTiming()
        app = targets.sim_defaults(self.folder, timing, self.args.prefill, self.args.decode)
        self.on_sim(app, timing, profiled=False)

    def on_sim(self, app: Command, timing: targets.SimTiming, *, profiled: bool) -> None:
        """Measures one Sluice on sim engines with this timing."""
        args = self.args
        with running(app, self.say) as server:
            usage = self.first_answer(server, "sim")
            ttft_s = timing.ttft_s(int(usage["prompt_tokens"]))
            self.streams(server, "sim", lambda case: measure.add_modelled(case, ttft_s, timing.step_s()))
            plan = replace(self.plan(32, 4000, SIM_MAX_S), path=COMPLETIONS)
            case = self.add(measure.with_python(server, "sim", plan, args.seed))
            measure.add_modelled(case, ttft_s, timing.step_s())
            for tokens in LONG_TOKENS[:1] if args.quick else LONG_TOKENS:
                long = Plan(LONG_STREAMS, LONG_STREAMS * 2, tokens, 60.0)
                case = self.add(measure.with_python(server, "sim", long, args.seed))
                measure.add_modelled(case, ttft_s, timing.step_s())
            self.rest(server)
            if profiled:
                self.profile(server)

    def profile(self, server: Server) -> None:
        """Samples the processes during one more run at c=32, whose figures are not reported because py-spy slows it."""
        seconds = 4 if self.args.quick else PROFILE_S
        self.say(f"profiling for {seconds} s at c=32")
        recordings = profile.start(server, seconds, self.folder, native=self.args.native)
        plan = Plan(32, 100_000, TOKENS, seconds + 1.0)
        try:
            measure.with_python(server, "sim", plan, self.args.seed)
        finally:
            self.results.profiles = profile.finish(recordings, timeout_s=60.0)

    def vllm(self) -> None:
        """Measures vLLM's own server, then Sluice around the same engine."""
        model_dir, options = targets.model_directory(), targets.EngineOptions()
        apps = [
            targets.bare_engine(options, model_dir),
            targets.sluice_vllm(self.folder, options, disaggregated=False),
            targets.sluice_vllm(self.folder, options, disaggregated=True),
        ]
        for app in apps:
            self.part(app.name, partial(self.engine, app, apps[0].name))

    def engine(self, app: Command, base: str) -> None:
        """Measures one server of a real engine, and what it takes beyond the server `base`."""
        self.say(f"{app.name}: starting")
        with running(app, self.say) as server:
            self.first_answer(server, targets.MODEL)
            for concurrency in self.args.concurrency or VLLM_REQUESTS:
                plan = self.plan(concurrency, VLLM_REQUESTS.get(concurrency, 96), VLLM_MAX_S)
                case = self.add(measure.with_python(server, targets.MODEL, plan, self.args.seed))
                same = (one for one in self.results.cases if one.target == base)
                measure.add_difference(case, next(one for one in same if one.concurrency == concurrency))
            self.rest(server)

    def run(self) -> None:
        """Runs all measurements that the options select."""
        if self.args.only != "vllm":
            self.part("floor", self.floor)
            self.part("sim", self.sim)
            self.part("sim, default policies", self.sim_defaults)
        if self.args.only != "sim":
            self.vllm()

    def report(self) -> bool:
        """Prints and writes the results so far; returns False if the code has changed since the beginning."""
        if not self.results.cases:
            return True
        print("\n" + markdown(self.results) + "\n")
        for line in summary(self.results):
            self.say(line)
        self.results.parts = self.kept.ends()
        name = f"overhead-{self.args.only}" if self.args.only else "overhead"
        files = write(self.results, Path(self.args.out), name)
        self.say("written: " + ", ".join(map(str, files)))
        return bool(files)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 when requests failed or a server misbehaved, or 130 after Ctrl-C."""
    args = _arguments(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with tempfile.TemporaryDirectory(prefix="sluice-overhead-") as folder:
        bench, status, whole = Bench(args, Path(folder), command("benchmarks.live.overhead", argv)), 1, False
        try:
            bench.run()
            whole = True
            status = 1 if any(case.failures for case in bench.results.cases) else 0
        except (ServerError, measure.MeasureError, profile.ProfileError, wrk.WrkError) as error:
            bench.note(f"ended early: {error}")
        except KeyboardInterrupt:
            bench.note("interrupted")
            status = 130
        finally:
            # The report is also written when the run ended early.
            written = bench.report()
            status = status if written else 1
            if whole and written:
                bench.kept.forget()
    return status


def _leave(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)


def _policies() -> dict[str, dict[str, str]]:
    """Returns the names of the routing policies of each target on sim engines."""
    shortest = targets.sim_args(targets.SimTiming(), 1, 1)["router"]
    default = json.loads(told("from app.config import RouterConfig; print(RouterConfig().model_dump_json())"))
    return {
        target: {stage: router[stage]["name"] for stage in ("prefill", "decode")}
        for target, router in {targets.SIM: shortest, targets.SIM_DEFAULTS: default}.items()
    }


def _config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "argv": vars(args) | {"out": Path(args.out).name, "wrk": bool(args.wrk)},
        "seed": args.seed,
        "tokens": TOKENS,
        "policies": _policies(),
        "sim_requests": SIM_REQUESTS,
        "vllm_requests": VLLM_REQUESTS,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("sim", "vllm"), help="only the sim engines, or only the real ones")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--requests", type=int, help="at most so many requests a row")
    parser.add_argument("--concurrency", type=int, nargs="+", help="instead of 1 8 32 128 (vllm: 1 8 32)")
    parser.add_argument("--prefill", type=int, default=1, help="sim prefill engines (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="sim decode engines (default: %(default)s)")
    parser.add_argument(
        "--profile", action="store_true", help="print where the CPU goes at c=32 (needs py-spy)"
    )
    parser.add_argument("--native", action="store_true", help="with C frames in the profile (slower)")
    parser.add_argument("--wrk", help="path of wrk, where it is not on PATH")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument(
        "--out", default=str(ROOT / "benchmarks" / "results" / "overhead"), help="folder of the results"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
