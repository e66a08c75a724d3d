"""A walk through the dashboard of a live application, as a person would make it in a browser (Chromium).

    python -m benchmarks.watching.walk                          a quarter of an hour
    python -m benchmarks.watching.walk --pictures FOLDER        keeps a picture of each view there, too
    python -m benchmarks.watching.walk --only views burst       some of its parts

The application has 16 sim engines and two ingresses. The parts:

views     under a steady load, every view in both themes and both widths: axe-core looks through each, none may be wider
          than the window, and the worst request's waterfall is opened.
burst     the shipped experiment is chosen, checked, started and watched to its end; then "Run again" with another
          decode policy, both compared, and the report saved and opened from the disk in a page of its own, which may
          ask nobody for anything.
shipped   each of the other shipped experiments is started and watched to its end; the one that kills an engine is, too.
whatif    the running cluster is read as a file for the simulator, and simulated with one decode engine more.

A part that fails is written down with what went wrong and a picture of the page, and the walk goes on. The exit status
is 1 if one failed, if a request of an experiment failed, if the page said something on its console or asked another
host, or if axe found something serious.
"""

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import Browser, BrowserContext, Page, expect

from benchmarks.live.machine import command, facts, save
from benchmarks.live.measure import first_answer
from benchmarks.live.servers import ADMIN_KEY, Server, running
from benchmarks.live.targets import SimTiming
from benchmarks.progress import teller
from benchmarks.watching.app import Watched
from benchmarks.watching.chromium import HEIGHTS, VIEWS, Opened, axe, browser, open_page
from benchmarks.watching.cost import CODE, OUT, TOKENS, loaded
from benchmarks.watching.walk_report import rows

PARTS = ("views", "burst", "shipped", "whatif")
THEMES = ("light", "dark")
SETTLE_MS = 1500
"""Time that a view has to draw what it reads, before it is looked at."""
BEGIN_S, RUN_S, SIMULATE_S = 60.0, 400.0, 300.0
"""Longest time until an experiment runs, until it has ended, and of a simulation."""
OTHER_POLICY = "round_robin"
"""The decode policy of the burst that is run again."""
BURST = "burst"


@dataclass(frozen=True, slots=True)
class Setup:
    """The application and its load."""

    prefill: int = 6
    decode: int = 10
    ingresses: int = 2
    connections: int = 8
    prefill_base_s: float = 0.01
    decode_base_s: float = 0.02
    load_s: float = 30.0
    seed: int = 0


@dataclass
class Walk:
    """The findings of a walk. `steps` have a name, seconds, what went wrong ("" if nothing), and further facts."""

    url: str
    folder: Path
    pictures: Path | None
    say: Callable[[str], None]
    steps: list[dict[str, Any]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str, page: Page) -> Iterator[dict[str, Any]]:
        """A context for one step, which puts its facts into the yielded dict. An error ends the step, not the walk."""
        made: dict[str, Any] = {"name": name, "wrong": ""}
        begun_s = time.monotonic()
        try:
            yield made
        except Exception as error:
            made["wrong"] = f"{type(error).__name__}: {error}"[:2000]
            with contextlib.suppress(Exception):
                page.screenshot(path=self.folder / f"failed-{len(self.steps)}.png")
        made["seconds"] = round(time.monotonic() - begun_s, 3)
        self.steps.append(made)
        self.say(f"{name}: {made['wrong'] or 'done'} after {made['seconds']:.1f} s")

    @contextlib.contextmanager
    def page(self, chromium: Browser, theme: str = "light", width: int = 1280) -> Iterator[Opened]:
        """A context with a page of the dashboard, of which all that it says is kept."""
        opened = open_page(chromium, self.url, ADMIN_KEY, theme, width)
        try:
            yield opened
        finally:
            self.said += opened.said
            self.foreign += opened.foreign
            opened.close()

    def look(self, page: Page, name: str) -> None:
        """Has axe-core look through what the page shows, and keeps a picture of it where pictures are kept."""
        page.wait_for_timeout(SETTLE_MS)
        self.findings += [f"{name}: {one}" for one in axe(page)]
        too_wide = page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        if too_wide > 0:
            raise AssertionError(f"{name} is {too_wide} pixels wider than the window")
        if self.pictures is not None:
            page.screenshot(path=self.pictures / f"{name}.png")


# --------------------------------------------------------------------------------------------------------------- parts


def views(walk: Walk, chromium: Browser) -> None:
    """Opens every view in both themes and both widths."""
    for theme in THEMES:
        for width in HEIGHTS:
            with walk.page(chromium, theme, width) as opened:
                for view in VIEWS:
                    name = f"{view}-{theme}-{width}"
                    with walk.step(f"view {name}", opened.page):
                        opened.go(view)
                        if view == "requests":
                            opened.page.get_by_role("tab", name="Worst").click()
                            opened.page.locator(".request-list a").first.click()
                            opened.page.locator(".waterfall").wait_for(timeout=20_000)
                        walk.look(opened.page, name)


def burst(walk: Walk, chromium: Browser) -> None:
    """Runs the burst twice, under two decode policies, and compares the runs."""
    with walk.page(chromium) as opened:
        page = opened.page
        with walk.step("burst, as shipped", page) as made:
            choose(opened, BURST)
            page.get_by_role("button", name="Check", exact=True).click()
            page.get_by_text("The file is in order.").wait_for(timeout=20_000)
            walk.look(page, "experiment-checked")
            made["summary"] = start(walk, opened, "experiment-running")
        with walk.step(f"burst again, decode by {OTHER_POLICY}", page) as made:
            page.get_by_role("button", name="Run again…").click()
            editor = page.get_by_role("textbox", name="Experiment file")
            changed = yaml.safe_load(editor.input_value())
            changed["name"] = f"{BURST} {OTHER_POLICY}"
            changed["actions"] = [
                *changed.get("actions", ()),
                {"at_s": 0, "policy": {"decode": OTHER_POLICY}},
            ]
            editor.fill(yaml.safe_dump(changed, sort_keys=False))
            made["summary"] = start(walk, opened)
        with walk.step("both bursts compared", page) as made:
            opened.go("experiments", "runs")
            boxes = page.locator(".run-rows input")
            boxes.nth(0).check()
            boxes.nth(1).check()
            page.get_by_role("button", name="Compare 2").click()
            table = page.get_by_role("group", name="Figures of the runs")
            table.get_by_role("row", name="SLO attainment").or_(
                table.get_by_role("row", name="attainment")
            ).first.wait_for(timeout=30_000)
            made["figures"] = table.get_by_role("row").count() - 1
            walk.look(page, "compare")
        with walk.step("the report, opened from the disk", page) as made:
            opened.go("experiments", "runs")
            page.locator(".run-rows a").first.click()
            with page.expect_download() as saved:
                page.get_by_role("link", name="Report").click()
            file = walk.folder / "report.html"
            saved.value.save_as(file)
            made |= read_report(walk, chromium, file)


def shipped(walk: Walk, chromium: Browser) -> None:
    """Runs every other shipped experiment to its end."""
    with walk.page(chromium) as opened:
        opened.go("experiments")
        picker = opened.page.get_by_label("Begin with")
        names = [name for name in picker.locator("option").all_inner_texts()[1:] if name != BURST]
        for name in names:
            with walk.step(f"shipped experiment {name}", opened.page) as made:
                choose(opened, name)
                made["summary"] = start(walk, opened)


def whatif(walk: Walk, chromium: Browser) -> None:
    """Simulates what runs, and with one decode engine more."""
    with walk.page(chromium) as opened, walk.step("what if, one decode engine more", opened.page) as made:
        page = opened.page
        opened.go("whatif")
        editor = page.get_by_role("textbox", name="Base file")
        expect(editor).to_have_value(re.compile("cluster:"), timeout=60_000)
        engines = yaml.safe_load(editor.input_value())["cluster"]["engines"]
        decode = next(one for one in engines if one["role"] == "decode")
        page.get_by_label("Name").fill("one decode engine more")
        page.get_by_label("Set").fill(f"cluster.engines.{decode['name']}.count = {decode['count'] + 1}")
        page.get_by_role("button", name="Simulate").click()
        table = page.get_by_role("group", name="Figures side by side")
        table.wait_for(timeout=1e3 * SIMULATE_S)
        made["columns"] = table.get_by_role("columnheader").count()
        made["trust"] = page.locator(".message.ok, .message.warn").last.inner_text()
        walk.look(page, "whatif-done")


def choose(opened: Opened, name: str) -> None:
    """Puts a shipped experiment into the editor."""
    opened.go("experiments")
    opened.page.get_by_label("Begin with").select_option(name)


def start(walk: Walk, opened: Opened, picture: str = "") -> dict[str, Any]:
    """Starts the experiment in the editor, watches it to its end, and returns its figures in short.

    Raises AssertionError if it does not end well, or if one of its requests failed.
    """
    page = opened.page
    page.get_by_role("button", name="Start…").click()
    page.get_by_role("dialog").get_by_role("button", name="Start").click(timeout=30_000)
    page.wait_for_url("**/#/experiments/runs/*", timeout=1e3 * BEGIN_S)
    state = page.locator(".progress-line .state")
    expect(state).to_contain_text("running", timeout=1e3 * BEGIN_S)
    if picture:
        page.locator(".charts .chart").first.wait_for(timeout=1e3 * BEGIN_S)
        walk.look(page, picture)
    expect(state).not_to_contain_text("running", timeout=1e3 * RUN_S)
    ran = page.url.rpartition("/")[2]
    answer = opened.context.request.get(f"{walk.url}/api/experiments/runs/{ran}").json()["run"]
    if answer["state"] != "done":
        raise AssertionError(f"the run is {answer['state']}: {answer.get('message')}")
    summary: dict[str, Any] = answer["summary"]
    if summary["failed"]:
        raise AssertionError(f"{summary['failed']} of {summary['requests']} failed: {summary['problems']}")
    return summary


def read_report(walk: Walk, chromium: Browser, file: Path) -> dict[str, Any]:
    """Opens a report from the disk in a page that has no network, and returns how much it shows.

    Raises AssertionError if it shows nothing, or asks for anything but itself.
    """
    context: BrowserContext = chromium.new_context(offline=True)
    try:
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda one: asked.append(one.url))
        page.on("console", lambda one: walk.said.append(f"report: {one.text}"))
        page.on("pageerror", lambda one: walk.said.append(f"report: {one}"))
        page.goto(file.as_uri())
        walk.look(page, "report")
        elsewhere = [one for one in asked if not one.startswith((file.as_uri(), "data:", "blob:"))]
        pictures = page.locator("svg, canvas, img").count()
        if elsewhere or not pictures or not page.locator("h1").count():
            raise AssertionError(f"the report asks for {elsewhere} and shows {pictures} pictures")
        return {"bytes": file.stat().st_size, "pictures": pictures}
    finally:
        context.close()


# ----------------------------------------------------------------------------------------------------------- the walk


def walked(
    setup: Setup, parts: Sequence[str], pictures: Path | None, folder: Path, say: Callable[[str], None]
) -> Walk:
    """Serves the application and walks through its dashboard. Raises MeasureError and ServerError."""
    timing = SimTiming(prefill_base_s=setup.prefill_base_s, decode_base_s=setup.decode_base_s)
    shortest = {"name": "join_shortest_queue"}
    args = {
        # the shipped experiments are to be answered, not refused where they cannot meet their objectives
        "router": {"prefill": shortest, "decode": shortest, "admission": {"name": "open"}},
        "ingress": {"replicas": setup.ingresses},
        "dashboard": {"experiments": {"may_kill": True}},
    }
    app = Watched(folder, setup.prefill, setup.decode, timing, args)
    with running(app.command(True), say) as server:
        # the browser's own loop runs in this thread as long as it is there, and the first request needs one, too
        first_answer(server, "sim", TOKENS)
        app.wait_board()
        walk = Walk(f"http://127.0.0.1:{app.board}", folder, pictures, say)
        with browser() as chromium:
            if "views" in parts:
                _under_load(walk, server, setup, lambda: views(walk, chromium))
            for part, walks in {"burst": burst, "shipped": shipped, "whatif": whatif}.items():
                if part in parts:
                    walks(walk, chromium)
    return walk


def _under_load(walk: Walk, server: Server, setup: Setup, look: Callable[[], None]) -> None:
    with loaded(server, setup.connections, setup.seed) as load:
        time.sleep(setup.load_s)
        look()
    walk.steps.append(
        {
            "name": "the load beside the views",
            "wrong": str(dict(load.failures)) if load.failures else "",
            "seconds": 0.0,
            "served": load.served,
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 as the module's docstring says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching.walk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="default: all parts")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each view")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result")
    args = parser.parse_args(argv)
    setup, machine, say = Setup(), facts("benchmarks.watching.walk", CODE), teller()
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="sluice-walk-"))
    walk = walked(setup, args.only, args.pictures, folder, say)
    result = {
        "command": command("benchmarks.watching.walk", argv),
        "config": asdict(setup) | {"parts": list(args.only)},
        "machine": machine,
        "steps": walk.steps,
        "findings": walk.findings,
        "said": walk.said,
        "foreign": walk.foreign,
    }
    for row in rows(result):
        print(f"{row.name}: {row.ours:.4g} {row.unit}{f' ({row.aim})' if row.aim else ''}")
    wrong = [f"{step['name']}: {step['wrong']}" for step in walk.steps if step["wrong"]]
    for problem in [*wrong, *walk.findings, *walk.said, *walk.foreign]:
        print(problem)
    if wrong:
        print(f"pictures of what failed lie in {folder}")
    kept = save(args.out / "walk.json", result, levels=2)
    return 1 if not kept or wrong or walk.findings or walk.said or walk.foreign else 0


if __name__ == "__main__":
    sys.exit(main())
