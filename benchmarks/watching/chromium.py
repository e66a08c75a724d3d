"""The dashboard's page in a headless Chromium: Debian's (`make setup-browser`), driven by Playwright.

Playwright's synchronous interface keeps an event loop in its thread, so modules that use it have no asynchronous test.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

CHROMIUM = shutil.which("chromium")
VIEWS = ("overview", "engines", "transfers", "requests", "control", "experiments", "whatif")
HEIGHTS = {1280: 800, 1920: 1080}
SERIOUS = ("serious", "critical")
"""The weights of axe-core's findings that count."""
# the page's own instance of the module that keeps its feed
_SEQ = "import('/static/js/live.js').then(live => live.feed.seq)"


@contextmanager
def browser() -> Iterator[Browser]:
    """Yields a browser that resolves no name, so that nothing outside this machine can be asked."""
    with sync_playwright() as playwright:
        arguments = [
            "--no-sandbox",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--js-flags=--expose-gc",
        ]
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield opened
        finally:
            opened.close()


@dataclass
class Opened:
    """One page with what went wrong in it: messages of the console, errors, and requests to other hosts."""

    page: Page
    context: BrowserContext
    url: str
    said: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def go(self, view: str, rest: str = "") -> None:
        """Opens a view and waits until it has drawn something."""
        self.page.goto(f"{self.url}/#/{view}{f'/{rest}' if rest else ''}")
        # not `wait_for_selector`, whose handle would keep the element alive for as long as the page is open
        self.page.locator("#view .panel, #view .absent").first.wait_for(timeout=20_000)

    def seq(self) -> int | None:
        """Returns the number of the latest update that the page has taken; None before the first."""
        found: int | None = self.page.evaluate(_SEQ)
        return found

    def close(self) -> None:
        self.context.close()


def open_page(
    browser: Browser, url: str, key: str | None = "admin", theme: str = "light", width: int = 1280
) -> Opened:
    """Opens a page of its own session, signed in with `key` unless that is None."""
    size = {"width": width, "height": HEIGHTS[width]}
    context = browser.new_context(viewport=size, color_scheme="dark" if theme == "dark" else "light")  # type: ignore[arg-type]
    page = context.new_page()
    opened = Opened(page, context, url)

    def console(message: ConsoleMessage) -> None:
        # an expired session and a refused key are answered 4xx, which the console reports by itself
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            opened.said.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            opened.foreign.append(request.url)

    page.on("console", console)
    page.on("pageerror", lambda error: opened.said.append(str(error)))
    page.on("request", asked)
    if key is not None:
        answer = context.request.post(f"{url}/api/login", data={"key": key})
        assert answer.ok, answer.text()
    return opened


def axe(page: Page) -> list[str]:
    """Returns the serious findings of axe-core about what the page shows now."""
    from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]}"
        for one in found
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]
