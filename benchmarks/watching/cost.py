"""Measures what it costs to watch: a dashboard, pages that are open on it, and traces (`make bench-watching`).

    python -m benchmarks.watching.cost                ten rounds (some 40 minutes)
    python -m benchmarks.watching.cost --rounds 20    narrower intervals
    python -m benchmarks.watching.cost --quick        two short rounds, to see that it works

In every round an application of sim engines, as the overhead benchmark has it, serves without traces, and after it (or
before it, in turn) one whose traces go to a collector on this machine, which keeps 1 %. On the first the load is
measured while nobody watches, with a dashboard, and with a dashboard that three readers read; their order changes from
round to round. The dashboard comes and goes on the running application, so that these three states have the same
processes. A reader takes, splits and parses the whole event stream as the page does, but draws nothing: pages in a
browser (`--browser`) need cores of their own, which a watcher elsewhere has. All comparisons are paired by round.

An application of 64 engines is watched under load: the CPU time and memory of the dashboard's process in windows
without a page and with three, in turn. They begin when the dashboard has run for as long as it remembers, because its
memory grows until then. The aims are in `benchmarks.watching.cost_report`. A finished round is kept
(`benchmarks.live.kept`), and the same command goes on after it. The exit status is 1 if a request failed.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from app.dashboard.rings import KEEP
from benchmarks.live import measure, proctree
from benchmarks.live.collector import collector
from benchmarks.live.kept import Parts
from benchmarks.live.load import Load, LoadResult, drive
from benchmarks.live.machine import LIVE_CODE, command, facts, save
from benchmarks.live.measure import CHAT, Plan, bodies, prompts
from benchmarks.live.servers import ROOT, Server, running
from benchmarks.progress import teller
from benchmarks.watching.app import DASHBOARD, Watched, pids, tracing
from benchmarks.watching.cost_report import BOARD, NOBODY, PAGES, TRACED, draw, rows, table

CODE = (*LIVE_CODE, "benchmarks/watching")
"""The folders that decide what is measured; a part of this folder runs in processes of its own."""
OUT = ROOT / "benchmarks" / "results" / "watching"
TOKENS = 16
OPEN_PAGES = 3
ORDERS = (
    (NOBODY, BOARD, PAGES),
    (BOARD, PAGES, NOBODY),
    (NOBODY, PAGES, BOARD),
    (PAGES, BOARD, NOBODY),
)
"""The orders of the states of one application, round by round: in each the dashboard comes or goes once."""


ROWS = {
    plan.concurrency: plan
    for plan in (Plan(1, 120, 16, 4.0), Plan(32, 6000, 16, 4.0), Plan(128, 12_000, 16, 4.0))
}
"""The load of each row by its number of connections. A row ends after its requests or its seconds."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The number of rounds, the load of each row, and the windows at many engines.

    `many_connections` load the application of many engines. Its dashboard is observed, after `history_s` of this load,
    for `windows` windows of `window_s` without a page, and as many with pages.
    """

    rounds: int = 10
    seed: int = 0
    browser: bool = False
    plans: Mapping[int, Plan] = field(default_factory=lambda: dict(ROWS))
    many_prefill: int = 24
    many_decode: int = 40
    many_connections: int = 8
    history_s: float = float(KEEP)
    windows: int = 10
    window_s: float = 8.0

    @property
    def many(self) -> int:
        return self.many_prefill + self.many_decode


def quick(setup: Setup) -> Setup:
    """Returns a short form of the setup, whose figures say nothing."""
    return replace(
        setup,
        rounds=min(setup.rounds, 2),
        plans={number: replace(plan, requests=20 + 2 * number) for number, plan in setup.plans.items()},
        many_prefill=2,
        many_decode=2,
        history_s=0.0,
        windows=2,
        window_s=1.5,
    )


Say = Callable[[str], None]


class Rounds:
    """The rounds of one measurement, whose applications' files lie in `folder`."""

    def __init__(self, setup: Setup, folder: Path, say: Say) -> None:
        self.setup, self.folder, self.say = setup, folder, say

    def one(self, number: int) -> dict[str, Any]:
        """Measures all states of one round and returns the samples, as the result keeps them."""
        parts = [self.untraced, self.traced]
        samples = [one for part in parts[:: -1 if number % 2 else 1] for one in part(number)]
        return {"samples": samples}

    def untraced(self, number: int) -> Iterator[dict[str, Any]]:
        """Yields the samples of the application without traces, in the round's order of states."""
        order = ORDERS[number % len(ORDERS)]
        app, there = Watched(self.folder / f"untraced-{number}"), order[0] != NOBODY
        with running(app.command(there), self.say) as server:
            measure.first_answer(server, "sim", TOKENS)
            if there:
                app.wait_board()
            for state in order:
                if there is not (state != NOBODY):
                    there = not there
                    app.switch(server, there)
                if state == PAGES:
                    with app.pages(OPEN_PAGES, self.setup.browser):
                        yield from self.samples(server, number, state)
                else:
                    yield from self.samples(server, number, state)

    def traced(self, number: int) -> Iterator[dict[str, Any]]:
        """Yields the samples of the application that sends traces. Raises MeasureError if none came."""
        with collector() as to:
            app = Watched(self.folder / f"traced-{number}", env=tracing(to.endpoint))
            with running(app.command(False), self.say) as server:
                measure.first_answer(server, "sim", TOKENS)
                yield from self.samples(server, number, TRACED)
        served = sum(span.name.startswith("POST ") for span in to.spans)
        if not served:
            raise measure.MeasureError("the collector got no trace of a request")
        self.say(f"the collector got traces of {served} requests")

    def samples(self, server: Server, number: int, state: str) -> Iterator[dict[str, Any]]:
        """Yields a sample of each row."""
        for connections, plan in self.setup.plans.items():
            case = measure.with_python(server, "sim", plan, self.setup.seed + number)
            yield sample_of(case, number, f"c={connections}", state)
        self.say(f"round {number + 1} of {self.setup.rounds}, {state}: measured")

    def many(self) -> dict[str, Any]:
        """Watches the application of many engines and returns its windows, as the result keeps them."""
        setup = self.setup
        app = Watched(self.folder / "many", setup.many_prefill, setup.many_decode)
        windows = []
        with running(app.command(True), self.say) as server:
            measure.first_answer(server, "sim", TOKENS)
            app.wait_board()
            with loaded(server, setup.many_connections, setup.seed) as load:
                self.say(f"the dashboard fills its memory of {setup.history_s:g} s")
                time.sleep(setup.history_s)
                for number in range(setup.windows):
                    for pages in (0, OPEN_PAGES) if number % 2 else (OPEN_PAGES, 0):
                        windows.append(self.window(app, server, pages))
                    self.say(f"windows {number + 1} of {setup.windows} are measured")
        return {
            "engines": setup.many,
            "windows": windows,
            "served": load.served,
            "failures": dict(load.failures),
        }

    def window(self, app: Watched, server: Server, pages: int) -> dict[str, Any]:
        """Observes the dashboard's process for one window."""
        if not pages:
            return {"pages": 0, **observed(server, self.setup.window_s)}
        with app.pages(pages, self.setup.browser):
            return {"pages": pages, **observed(server, self.setup.window_s)}


def observed(server: Server, seconds: float) -> dict[str, Any]:
    """Returns the share of a core that the dashboard's process takes for some seconds, and its memory after them."""
    [pid] = pids(server, DASHBOARD)
    before, start_s = proctree.usage_of(pid), time.monotonic()
    time.sleep(seconds)
    after, took_s = proctree.usage_of(pid), time.monotonic() - start_s
    share = (after.cpu_s - before.cpu_s) / took_s
    return {"share": share, "rss_bytes": after.rss_bytes, "pss_bytes": after.pss_bytes}


@contextmanager
def loaded(server: Server, connections: int, seed: int) -> Iterator[LoadResult]:
    """A context in which `connections` requests are always open. After it the yielded result is that of the load."""
    stop, whole = threading.Event(), LoadResult()
    sent = bodies("sim", prompts(seed), TOKENS, CHAT)
    load = Load(server.command.port, CHAT, sent, connections, 10**9, 3600.0)
    results: list[LoadResult] = []
    thread = threading.Thread(target=lambda: results.append(drive(load, stop.is_set)), daemon=True)
    thread.start()
    try:
        yield whole
    finally:
        stop.set()
        thread.join(60.0)
    if not results:
        raise measure.MeasureError("the load did not end")
    whole.e2e_s, whole.failures = results[0].e2e_s, results[0].failures


def sample_of(case: measure.Measurement, number: int, row: str, state: str) -> dict[str, Any]:
    """Returns one row in one state of one round, as the result keeps it."""
    assert case.ttft_ms is not None
    return {
        "round": number,
        "row": row,
        "state": state,
        "requests_per_s": case.requests_per_s,
        "ttft_mean_ms": case.ttft_ms["mean"],
        "ttft_p50_ms": case.ttft_ms["p50"],
        "hot_cpu_ms": sum(case.cpu_ms_per_request[role] for role in ("ingress", "router")),
        "cpu_ms": case.cpu_ms_per_request,
        "requests": case.requests,
        "failures": case.failures,
        "other_cores": case.other_cores,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if a request failed or the code changed meanwhile."""
    args = _arguments(argv)
    setup = Setup(rounds=args.rounds, seed=args.seed, browser=args.browser)
    setup = quick(setup) if args.quick else setup
    machine, begun_s, say = facts("benchmarks.watching.cost", CODE), time.monotonic(), teller()
    kept = Parts("watching", machine, asdict(setup))

    with tempfile.TemporaryDirectory(prefix="sluice-watching-") as folder:
        made = Rounds(setup, Path(folder), say)
        many = kept.once(f"{setup.many} engines", made.many, say)
        rounds = [
            kept.once(f"round {number + 1}", partial(made.one, number), say) for number in range(setup.rounds)
        ]
    result = {
        "command": command("benchmarks.watching.cost", argv),
        "config": asdict(setup),
        "machine": machine,
        "took_s": round(time.monotonic() - begun_s),
        "parts": kept.ends(),
        "rounds": rounds,
        "many": many,
    }
    print(table(list(rows(result))))
    samples = [one for part in rounds for one in part["samples"]]
    failed = many["failures"] or [one for one in samples if one["failures"]]
    other = statistics.median(one["other_cores"] for one in samples)
    say(
        f"requests that failed: {'some' if failed else 'none'}; other programs took {other:.2f} cores (median)"
    )
    if not save(args.out / "cost.json", result, levels=4):
        return 1
    kept.forget()
    draw(result, args.out, "cost")
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=Setup().rounds, help="alternations (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--browser", action="store_true", help="pages in headless Chromium, not readers")
    parser.add_argument("--quick", action="store_true", help="two short rounds, whose figures say nothing")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
