"""The cost of the page to a browser over a feed of many engines: main-thread time of an update, and the heap over time.

    python -m tests.dashboard.cost --engines 1024 --minutes 3

Prints one JSON object: for each view the milliseconds of main thread for an update (all tasks of the page, divided by
the number of updates) and its longest task, and the heap after a collection, turn by turn.
"""

import argparse
import json
import time
from typing import Any

from playwright.sync_api import CDPSession, Page

from tests.dashboard.browsing import browser, open_page
from tests.dashboard.server import Server
from tests.dashboard.synthetic import Cluster

VIEWS = ("overview", "engines", "transfers", "requests")
LONGEST = """() => {
  window.longest = 0;
  const longer = (entry) => { window.longest = Math.max(window.longest, entry.duration); };
  new PerformanceObserver((list) => list.getEntries().forEach(longer)).observe({ type: "longtask" });
}"""


def figures(cdp: CDPSession) -> dict[str, float]:
    """Returns the browser's own counters for the page."""
    return {one["name"]: one["value"] for one in cdp.send("Performance.getMetrics")["metrics"]}


def heap_mb(page: Page, cdp: CDPSession) -> float:
    """Returns the size of the heap after a collection, in MB."""
    cdp.send("HeapProfiler.collectGarbage")
    return round(figures(cdp)["JSHeapUsedSize"] / 1e6, 2)


def measure(server: Server, minutes: float, period_s: float) -> dict[str, Any]:
    """Returns the cost of an update in each view, and the heap over some minutes of the first ones in turn."""
    found: dict[str, Any] = {
        "engines": server.cluster.size,
        "period_s": period_s,
        "update_ms": {},
        "longest_task_ms": {},
        "heap_mb": [],
    }
    with browser() as chromium:
        opened = open_page(chromium, server.url, width=1920)
        cdp = opened.context.new_cdp_session(opened.page)
        cdp.send("Performance.enable")
        for view in VIEWS:
            opened.go(view)
            opened.page.wait_for_timeout(3000)
            opened.page.evaluate(LONGEST)
            before, first = figures(cdp), server.cluster.seq
            opened.page.wait_for_timeout(10_000)
            after, last = figures(cdp), server.cluster.seq
            found["update_ms"][view] = round(
                1000 * (after["TaskDuration"] - before["TaskDuration"]) / (last - first), 1
            )
            found["longest_task_ms"][view] = opened.page.evaluate("window.longest")
        began, updates = time.monotonic(), server.cluster.seq
        while time.monotonic() - began < 60 * minutes:
            for view in VIEWS:
                opened.go(view)
                opened.page.wait_for_timeout(7000)
            found["heap_mb"].append(heap_mb(opened.page, cdp))
        found["updates"] = server.cluster.seq - updates
        found["nodes"] = figures(cdp)["Nodes"]
        found["said"] = opened.said
        opened.close()
    return found


def main() -> None:
    """Prints the figures."""
    options = argparse.ArgumentParser(description="What the dashboard's page costs a browser.")
    options.add_argument("--engines", type=int, default=1024)
    options.add_argument("--minutes", type=float, default=3.0)
    options.add_argument("--period", type=float, default=1.0, help="seconds between updates")
    given = options.parse_args()
    server = Server(Cluster(given.engines), period_s=given.period)
    server.start()
    try:
        print(json.dumps(measure(server, given.minutes, given.period)))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
