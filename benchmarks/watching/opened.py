"""One page of the dashboard, open for half an hour on a live application: heap, DOM nodes, main thread (Chromium).

    python -m benchmarks.watching.opened               30 minutes
    python -m benchmarks.watching.opened --minutes 2   to see that it works

An application of sim engines serves a moderate load. A page in headless Chromium shows one view of its dashboard, which
is updated once a second. Every ten seconds the page's garbage is collected, and its heap, its DOM nodes and listeners
are read by Chromium's own protocol. The main thread's time of an update is the CPU time of all tasks of the page
between two samples (a sample's own work is left out) divided by the updates. The page keeps 15 minutes of history, so
the heap must grow until then; what counts is the slope after that. With it go CPU time and memory of the dashboard's
own process, whose memory fills for as long. The exit status is 1 if the page said something on its console or asked
another host, or the code changed meanwhile.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import CDPSession

from benchmarks.live import proctree
from benchmarks.live.machine import command, facts, save
from benchmarks.live.measure import first_answer
from benchmarks.live.servers import ADMIN_KEY, running
from benchmarks.live.targets import SimTiming
from benchmarks.progress import teller
from benchmarks.watching.app import DASHBOARD, Watched, pids
from benchmarks.watching.chromium import Opened, browser, open_page
from benchmarks.watching.cost import CODE, OUT, TOKENS, loaded
from benchmarks.watching.opened_report import draw, rows


@dataclass(frozen=True, slots=True)
class Setup:
    """The application, its load, the page, and the time."""

    minutes: float = 30.0
    every_s: float = 10.0
    view: str = "overview"
    prefill: int = 6
    decode: int = 10
    connections: int = 16
    prefill_base_s: float = 0.01
    decode_base_s: float = 0.02
    width: int = 1920
    seed: int = 0


class Page:
    """A page and the session in which Chromium tells about it."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._cdp: CDPSession = opened.context.new_cdp_session(opened.page)
        self._cdp.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._cdp.send("HeapProfiler.enable")
        self._task_s, self._seq = self._busy()

    def sample(self) -> dict[str, Any]:
        """Collects garbage and returns the page's figures now, and those of the updates since the last sample."""
        task_s, seq = self._busy()
        updates, took_s = seq - self._seq, task_s - self._task_s
        self._cdp.send("HeapProfiler.collectGarbage")
        heap = self._cdp.send("Runtime.getHeapUsage")
        counted = self._metrics()
        self._task_s, self._seq = self._busy()
        return {
            "heap_bytes": round(heap["usedSize"]),
            "nodes": int(counted["Nodes"]),
            "listeners": int(counted["JSEventListeners"]),
            "updates": updates,
            "update_ms": round(1e3 * took_s / updates, 3) if updates else None,
        }

    def _busy(self) -> tuple[float, int]:
        """Returns the CPU seconds of the main thread's tasks, and the number of the latest update."""
        return self._metrics()["TaskDuration"], self._opened.seq() or 0

    def _metrics(self) -> dict[str, float]:
        found = self._cdp.send("Performance.getMetrics")["metrics"]
        return {one["name"]: float(one["value"]) for one in found}


def measured(setup: Setup, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what was found, as the result keeps it. Raises MeasureError and ServerError."""
    timing = SimTiming(prefill_base_s=setup.prefill_base_s, decode_base_s=setup.decode_base_s)
    with tempfile.TemporaryDirectory(prefix="sluice-opened-") as name:
        app = Watched(Path(name), setup.prefill, setup.decode, timing)
        with running(app.command(True), say) as server:
            first_answer(server, "sim", TOKENS)
            app.wait_board()
            [pid] = pids(server, DASHBOARD)
            with loaded(server, setup.connections, setup.seed) as load, browser() as chromium:
                opened = open_page(chromium, f"http://127.0.0.1:{app.board}", ADMIN_KEY, width=setup.width)
                opened.go(setup.view)
                samples = list(sampled(setup, Page(opened), pid, say))
                said, foreign = opened.said, opened.foreign
                opened.close()
    failures = dict(load.failures)
    return {"samples": samples, "said": said, "foreign": foreign, "served": load.served, "failures": failures}


def sampled(setup: Setup, page: Page, pid: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yields a sample every `every_s`. `pid` is that of the dashboard's process."""
    start_s = time.monotonic()
    before, at_s = proctree.usage_of(pid), start_s
    for number in range(1, round(60.0 * setup.minutes / setup.every_s) + 1):
        time.sleep(max(0.0, start_s + number * setup.every_s - time.monotonic()))
        one = page.sample()
        after, now_s = proctree.usage_of(pid), time.monotonic()
        one |= {"at_s": round(now_s - start_s, 3), "rss_bytes": after.rss_bytes, "pss_bytes": after.pss_bytes}
        one["share"] = round((after.cpu_s - before.cpu_s) / (now_s - at_s), 5)
        before, at_s = after, now_s
        if number % 6 == 0:
            say(
                f"{one['at_s'] / 60:.0f} min: heap {one['heap_bytes'] / 1e6:.2f} MB, {one['nodes']} nodes,"
                f" {one['update_ms']} ms an update"
            )
        yield one


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if the page complained, asked another host, or the code changed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching.opened",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=Setup().minutes, help="default: %(default)s")
    parser.add_argument("--view", default=Setup().view, help="of the page (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    args = parser.parse_args(argv)
    setup = Setup(minutes=args.minutes, view=args.view)
    machine, say = facts("benchmarks.watching.opened", CODE), teller()

    found = measured(setup, say)
    result = {
        "command": command("benchmarks.watching.opened", argv),
        "config": asdict(setup),
        "machine": machine,
        **found,
    }
    for row in rows(result):
        half = "" if row.half_width is None else f" ± {row.half_width:.3g}"
        print(f"{row.name}: {row.ours:.4g}{half} {row.unit}{f' ({row.aim})' if row.aim else ''}")
    for problem in [*found["said"], *found["foreign"], *map(str, found["failures"].items())]:
        print(problem)
    if not save(args.out / "opened.json", result, levels=2):
        return 1
    draw(result, args.out)
    return 1 if found["said"] or found["foreign"] or found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
