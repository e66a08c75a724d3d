"""Pictures of every view, in both themes and both widths, and of some states that one must look at.

python -m tests.dashboard.screenshots FOLDER                         over the development server
python -m tests.dashboard.screenshots FOLDER --url URL --key KEY     over a running application
"""

import argparse
from pathlib import Path

from benchmarks.watching.chromium import VIEWS, Opened, browser, open_page
from tests.dashboard.server import Server
from tests.dashboard.synthetic import Cluster

SETTLE_MS = 1500


def shoot(opened: Opened, folder: Path, name: str) -> None:
    """Saves what the page shows now."""
    opened.page.wait_for_timeout(SETTLE_MS)
    opened.page.screenshot(path=folder / f"{name}.png")


def first_request(opened: Opened) -> None:
    """Chooses the worst request of the list."""
    opened.page.get_by_role("tab", name="Worst").click()
    opened.page.locator(".request-list a").first.click()
    opened.page.wait_for_selector(".waterfall, .request-detail .message")


def views(url: str, key: str, folder: Path, widths: tuple[int, ...], themes: tuple[str, ...]) -> None:
    """Saves every view of the page at `url`."""
    with browser() as chromium:
        for theme in themes:
            for width in widths:
                opened = open_page(chromium, url, key, theme, width)
                for view in VIEWS:
                    opened.go(view)
                    if view == "requests":
                        first_request(opened)
                    shoot(opened, folder, f"{view}-{theme}-{width}")
                opened.close()


def states(server: Server, folder: Path) -> None:
    """Saves states of the development server's page: login, dialog, plan, comparison, viewer, stale."""
    with browser() as chromium:
        opened = open_page(chromium, server.url, None)
        opened.page.goto(server.url)
        shoot(opened, folder, "login")
        opened.close()
        opened = open_page(chromium, server.url)
        page = opened.page
        opened.go("control")
        page.get_by_role("tab", name="Decode").click()
        page.get_by_label("Policy", exact=True).select_option("netkv")
        page.get_by_role("button", name="Review the change").click()
        shoot(opened, folder, "dialog")
        page.get_by_role("dialog").get_by_role("button", name="Change", exact=True).click()
        page.get_by_label("engines of decode").fill("9")
        page.get_by_role("button", name="Plan only").click()
        shoot(opened, folder, "plan")
        opened.go("experiments")
        page.get_by_role("button", name="Check", exact=True).click()
        shoot(opened, folder, "experiment-checked")
        opened.go("experiments", "runs")
        page.locator(".run-rows a").first.click()
        shoot(opened, folder, "run")
        page.locator(".run-rows input").nth(0).check()
        page.locator(".run-rows input").nth(1).check()
        page.get_by_role("button", name="Compare 2").click()
        shoot(opened, folder, "compare")
        opened.go("whatif")
        page.get_by_label("Set").fill("cluster.engines.prefill.count = 7")
        page.get_by_role("button", name="Simulate").click()
        page.wait_for_selector(".message.ok")
        shoot(opened, folder, "whatif-done")
        opened.go("overview")
        server.paused = True
        page.wait_for_selector(".stale-line")
        shoot(opened, folder, "stale")
        server.paused = False
        opened.close()
        opened = open_page(chromium, server.url, "viewer", "dark")
        opened.go("control")
        shoot(opened, folder, "viewer")
        opened.close()


def main() -> None:
    """Saves the pictures in a folder."""
    options = argparse.ArgumentParser(description="Pictures of the dashboard's page.")
    options.add_argument("folder", type=Path)
    options.add_argument("--url", help="a running dashboard; without it the development server")
    options.add_argument("--key", default="admin")
    options.add_argument("--widths", type=int, nargs="+", default=[1280, 1920])
    options.add_argument("--themes", nargs="+", default=["light", "dark"])
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.url:
        views(given.url, given.key, given.folder, tuple(given.widths), tuple(given.themes))
        return
    for size in (16, 1024):
        server = Server(Cluster(size))
        server.start()
        try:
            if size == 16:
                views(server.url, given.key, given.folder, tuple(given.widths), tuple(given.themes))
                states(server, given.folder)
            else:
                with browser() as chromium:
                    for theme in given.themes:
                        opened = open_page(chromium, server.url, given.key, theme, 1920)
                        opened.go("engines")
                        shoot(opened, given.folder, f"engines-1024-{theme}")
                        opened.close()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
