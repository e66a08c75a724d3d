"""The cost of the page to a browser over a feed of many engines: main-thread time of an update, and the heap over time.

    python -m tests.dashboard.cost                             1,024 engines, some four minutes
    python -m tests.dashboard.cost --engines 16 --minutes 1    to see that it works

For each view: CPU milliseconds of the page's main thread for an update, which are all its tasks divided by the number
of updates, and the longest task in CPU time. Other programs on the machine lengthen neither. Then the heap after a
collection and the number of DOM nodes, for each turn through the views. The result is `page.json`, and the aims are in
`benchmarks.watching.page_report`. The exit status is 1 if the page said something on its console or asked another host,
or the code changed meanwhile.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page

from benchmarks.checkout import PRODUCT, ROOT
from benchmarks.live.machine import command, facts, save
from benchmarks.watching.chromium import browser, open_page
from benchmarks.watching.page_report import rows
from tests.dashboard.server import Server
from tests.dashboard.synthetic import Cluster

MODULE = "tests.dashboard.cost"
CODE = (*PRODUCT, "benchmarks/watching", "tests/dashboard")
"""The folders that decide what is found: the page, the server that feeds it, and the browser's driver."""
OUT = ROOT / "benchmarks" / "results" / "watching"

VIEWS = ("overview", "engines", "transfers", "requests")
TASK = "ThreadControllerImpl::RunTask"
SETTLE_MS, TRACED_MS, STAY_MS = 3000, 8000, 5000


def figures(cdp: CDPSession) -> dict[str, float]:
    """Returns the browser's own counters for the page."""
    return {one["name"]: one["value"] for one in cdp.send("Performance.getMetrics")["metrics"]}


def tasks_ms(trace: bytes) -> list[float]:
    """Returns the CPU milliseconds of each task of the busiest page's main thread in a trace."""
    events = json.loads(trace)["traceEvents"]
    mains = {
        (one["pid"], one["tid"])
        for one in events
        if one.get("name") == "thread_name" and one["args"].get("name") == "CrRendererMain"
    }
    tasks = [
        ((one["pid"], one["tid"]), one.get("tdur", 0) / 1000)
        for one in events
        if one.get("name") == TASK and one.get("ph") == "X" and (one["pid"], one["tid"]) in mains
    ]
    total: Counter[tuple[int, int]] = Counter()
    for thread, took_ms in tasks:
        total[thread] += took_ms
    busiest = total.most_common(1)[0][0]
    return [took_ms for thread, took_ms in tasks if thread == busiest]


def update_cost(chromium: Browser, page: Page, server: Server) -> dict[str, float]:
    """Returns the cost of an update of the view that the page shows."""
    page.wait_for_timeout(SETTLE_MS)
    first = server.cluster.seq
    chromium.start_tracing(page=page, categories=["toplevel"])
    page.wait_for_timeout(TRACED_MS)
    tasks = tasks_ms(chromium.stop_tracing())
    updates = server.cluster.seq - first
    return {"update_ms": round(sum(tasks) / updates, 1), "longest_task_ms": round(max(tasks), 1)}


def measure(server: Server, minutes: float) -> dict[str, Any]:
    """Returns the cost of an update in each view, and heap and nodes while views take turns for some minutes."""
    found: dict[str, Any] = {"engines": server.cluster.size, "views": {}, "heap_mb": [], "nodes": []}
    with browser() as chromium:
        opened = open_page(chromium, server.url, width=1920)
        cdp = opened.context.new_cdp_session(opened.page)
        cdp.send("Performance.enable")
        for view in VIEWS:
            opened.go(view)
            found["views"][view] = update_cost(chromium, opened.page, server)
        end, first = time.monotonic() + 60 * minutes, server.cluster.seq
        while time.monotonic() < end:
            for view in VIEWS:
                opened.go(view)
                opened.page.wait_for_timeout(STAY_MS)
            cdp.send("HeapProfiler.collectGarbage")
            now = figures(cdp)
            found["heap_mb"].append(round(now["JSHeapUsedSize"] / 1e6, 2))
            found["nodes"].append(int(now["Nodes"]))
        found["updates"] = server.cluster.seq - first
        found |= {"said": opened.said, "foreign": opened.foreign}
        opened.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if the page complained, asked another host, or the code changed."""
    options = argparse.ArgumentParser(
        prog="python -m tests.dashboard.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--engines", type=int, default=1024, help="default: %(default)s")
    options.add_argument("--minutes", type=float, default=3.0, help="of the turns (default: %(default)s)")
    options.add_argument("--period", type=float, default=1.0, help="seconds between updates")
    options.add_argument("--out", type=Path, default=OUT, help="folder of the result")
    given = options.parse_args(argv)
    machine = facts(MODULE, CODE)
    server = Server(Cluster(given.engines), period_s=given.period)
    server.start()
    try:
        found = measure(server, given.minutes)
    finally:
        server.stop()
    result = {"command": command(MODULE, argv), "machine": machine, "period_s": given.period, **found}
    for row in rows(result):
        print(f"{row.name}: {row.ours:.4g} {row.unit}{f' ({row.aim})' if row.aim else ''}")
    for problem in (*found["said"], *found["foreign"]):
        print(problem)
    kept = save(given.out / "page.json", result)
    return 0 if kept and not found["said"] and not found["foreign"] else 1


if __name__ == "__main__":
    sys.exit(main())
