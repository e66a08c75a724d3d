"""Pages for observers are made once for many requests, and are never older than the bound."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.ingress import asgi
from app.ingress.kept_page import KeptPage
from app.ingress.metrics import IngressMetrics
from tests.app.ingress.rig import pair, raw, rig
from tests.app.ingress.test_http import talk


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def numbered() -> Iterator[bytes]:
    n = 0
    while True:
        n += 1
        yield b"%d" % n


@pytest.mark.parametrize(
    ("cpu_s", "max_age_s", "kept_s"),
    [
        # twice 0.02 s
        (0.02, 1.0, 0.04),
        # twice 0.6 s is more than the bound
        (0.6, 1.0, 1.0),
        (0.6, 0.0, 0.0),
    ],
)
def test_a_page_is_kept_as_long_as_its_making_asks_for(cpu_s: float, max_age_s: float, kept_s: float) -> None:
    clock, cpu, pages = Clock(), Clock(), numbered()

    def make() -> bytes:
        cpu.now_s += cpu_s
        return next(pages)

    page = KeptPage(make, max_age_s, clock, cpu)
    assert page.get() == b"1"
    if kept_s:
        clock.now_s = 100.0 + kept_s - 0.001
        assert page.get() == b"1"
    clock.now_s = 100.0 + kept_s + 0.001
    assert page.get() == b"2"


def test_a_page_that_cannot_be_made_is_tried_again() -> None:
    pages = iter([ValueError("a bug"), b"well"])

    def make() -> bytes:
        page = next(pages)
        if isinstance(page, ValueError):
            raise page
        return page

    kept = KeptPage(make, 1.0, Clock(), Clock())
    with pytest.raises(ValueError, match="a bug"):
        kept.get()
    assert kept.get() == b"well"


@pytest.mark.parametrize("path", ["/metrics", "/sluice/status"])
async def test_fifty_pipelined_requests_make_a_page_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    made_pages = []
    render, status_of = IngressMetrics.render, asgi.status_of

    def counted_render(metrics: IngressMetrics) -> bytes:
        made_pages.append("/metrics")
        return render(metrics)

    def counted_status(*given: object) -> object:
        made_pages.append("/sluice/status")
        return status_of(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(IngressMetrics, "render", counted_render)
    monkeypatch.setattr(asgi, "status_of", counted_status)
    async with rig(tmp_path, pair(tmp_path), status_max_age_s=1.0) as made:
        for page in (made.app.metrics_page, made.app.status_page):
            monkeypatch.setattr(page, "_clock_s", Clock())
        got = await talk(made, raw("GET", path) * 50 + raw("GET", "/version", b"", "connection: close"))
        assert got.count(b"HTTP/1.1 200 OK") == 51
        assert made_pages == [path]
