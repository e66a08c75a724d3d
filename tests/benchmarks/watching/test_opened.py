"""A page that stays open, over the development server: every sample has the page's own figures."""

import os

import pytest

from benchmarks.watching.chromium import browser, open_page
from benchmarks.watching.opened import Page, Setup, sampled
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.server import Server
from tests.dashboard.synthetic import Cluster

pytestmark = [pytest.mark.browser, needs_chromium, pytest.mark.timeout(120)]


def test_samples_have_heap_nodes_and_the_time_of_an_update() -> None:
    server, said = Server(Cluster(16), period_s=0.2), list[str]()
    server.start()
    try:
        with browser() as chromium:
            opened = open_page(chromium, server.url)
            opened.go("overview")
            setup = Setup(minutes=0.15, every_s=1.5)
            samples = list(sampled(setup, Page(opened), os.getpid(), said.append))
            problems = [*opened.said, *opened.foreign]
            opened.close()
    finally:
        server.stop()
    assert problems == []
    assert len(samples) == 6 and len(said) == 1
    assert all(one["heap_bytes"] > 1e6 and one["nodes"] > 100 for one in samples)
    # five updates a second, of which each takes the main thread some CPU time
    assert sum(one["updates"] for one in samples) >= 6
    assert all(one["update_ms"] > 0 for one in samples if one["updates"])
    assert all(one["rss_bytes"] > 0 and one["share"] >= 0 for one in samples)
