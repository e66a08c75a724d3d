"""The page's modules that draw nothing, run in a browser: feed, parser of the stream, formulas, figures."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from benchmarks.watching.chromium import browser
from policies.routing.registry import DECODE, PREFILL
from sluice.cli.explain import _numbers, _valued
from sluice.types import Choice, Policy, Ranked
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.server import Server
from tests.dashboard.synthetic import Cluster

pytestmark = [pytest.mark.browser, needs_chromium, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of the development server that runs none of the application: modules are imported by the tests."""
    server = Server(Cluster(3))
    server.start()
    with browser() as opened:
        made: Browser = opened
        page = made.new_page()
        page.goto(f"{server.url}/static/icon.svg")
        yield page
    server.stop()


def run(page: Page, module: str, script: str, given: Any = None) -> Any:
    """Returns what the function `script` makes of a module's names and of `given`."""
    source = f"async (given) => ({script})(await import('/static/js/{module}.js'), given)"
    return page.evaluate(source, given)


SNAPSHOT = {
    "seq": 100,
    "at": 1000.0,
    "keep": 3,
    "line": {},
    "series": {"t": [998, 999, 1000], "queued": [1, 2, 3]},
    "engines": {"a-0": {"id": "a-0", "group": "a"}, "a-1": {"id": "a-1", "group": "a"}},
}


def test_a_feed_takes_the_next_delta_only(page: Page) -> None:
    """Deltas 101 and 100 (which a snapshot has already) are taken; a gap, and a server that counts anew, are not."""
    script = """({ Feed }, snapshot) => {
      const f = new Feed(), before = f.delta({ seq: 1 });
      f.snapshot(snapshot);
      const taken = [101, 100, 103, 3].map((seq) => f.delta({ seq, at: seq }));
      return [before, ...taken, f.seq, f.at]; }"""
    assert run(page, "feed", script, SNAPSHOT) == [False, True, True, False, False, 101, 101]


def test_a_feed_keeps_its_bound_and_fills_what_nobody_knew(page: Page) -> None:
    script = """({ Feed }, snapshot) => { const f = new Feed(); f.snapshot(snapshot);
      const engines = { "a-1": null, "a-10": { id: "a-10", group: "a" }, "a-2": { id: "a-2", group: "a" } };
      f.delta({ seq: 101, at: 1001, series: { t: 1001, pool: 7 }, engines });
      return [f.series, f.groups(), f.window(["pool", "nothing"], 1)]; }"""
    series, groups, window = run(page, "feed", script, SNAPSHOT)
    assert series == {"t": [999, 1000, 1001], "queued": [2, 3, None], "pool": [None, None, 7]}
    assert groups == [{"name": "a", "ids": ["a-0", "a-2", "a-10"]}]
    assert window == [[1000, 1001], [None, 7], [None, None]]


def test_series_below_a_prefix_are_in_the_order_that_a_person_counts_in(page: Page) -> None:
    script = """({ Feed }, snapshot) => { const f = new Feed(); f.snapshot(snapshot);
      f.delta({ seq: 101, at: 1001, series: { t: 1001, "level/12": 1, "level/2": 1, "level/1": 1, "levels": 1 } });
      return f.below("level/"); }"""
    assert run(page, "feed", script, SNAPSHOT) == ["level/1", "level/2", "level/12"]


def test_events_are_the_same_however_the_stream_is_cut(page: Page) -> None:
    text = 'retry: 2000\n\nid: 7\nevent: snapshot\ndata: {"a": 1}\n\n: still here\n\n'
    text += "id: 8\r\nevent: delta\r\ndata: x\ndata: y\n\ndata: z"
    script = """({ parser }, [text, cuts]) => { const found = [], feed = parser((...event) => found.push(event));
      let at = 0; for (const cut of [...cuts, text.length]) { feed(text.slice(at, cut)); at = cut; } return found; }"""
    draw = random.Random(3)
    for n in range(20):
        cuts = sorted(draw.sample(range(len(text)), n))
        events = run(page, "stream", script, [text, cuts])
        assert events == [["snapshot", "7", '{"a": 1}'], ["delta", "8", "x\ny"]]


@pytest.mark.parametrize("kind", [*PREFILL.values(), *DECODE.values()], ids=lambda kind: kind.__name__)
def test_formulas_with_numbers_are_those_of_the_command(page: Page, kind: Any) -> None:
    """`sluice explain` and the page replace the same names of a formula by the same numbers."""
    from actors.router.decisions import described

    about = described(kind())
    draw = random.Random(kind.__name__)
    names = sorted(
        {word for word in about["formula"].replace("(", " ").replace(",", " ").split() if word.isidentifier()}
    )
    ranking = [
        {
            "worker": f"engine-{n}",
            "cost": draw.choice((-1.5, 0.0, 1e-7, 12345.678)),
            "terms": {
                name: draw.choice((-0.25, 3.0, 0.123456789))
                for name in draw.sample(names, len(names) // (n + 1))
            },
        }
        for n in range(3)
    ]
    policy = Policy.model_validate(about)
    choice = Choice(
        worker="engine-0", reason="policy", ranking=[Ranked.model_validate(one) for one in ranking]
    )
    expected = [_numbers(ranked, policy).partition(": ")[2] for ranked in choice.ranking]
    script = """({ withNumbers, valued }, [ranking, policy]) => [ranking.map((one) => withNumbers(one, policy)),
      valued({ worker: "engine-0", ranking }, policy).map((one) => one.worker)]"""
    shown, workers = run(page, "explain", script, [ranking, about])
    assert [plain(text) for text in shown] == [plain(text) for text in expected]
    assert workers == [ranked.worker for ranked in _valued(choice, policy)]


def plain(text: str) -> str:
    """Returns a text with 1e-07 as JavaScript writes it, 1e-7."""
    return text.replace("e-0", "e-")


FIGURES = [
    ("number", 0, "0"),
    ("number", 0.01234, "0.0123"),
    ("number", 12.34, "12.3"),
    ("number", 1234.5, "1,235"),
    ("number", None, "–"),
    ("seconds", 0.00085, "850 µs"),
    ("seconds", 0.0123, "12.3 ms"),
    ("seconds", 1.5, "1.50 s"),
    ("seconds", 245, "4 min 05 s"),
    ("seconds", 7380, "2 h 03 min"),
    ("bytes", 31_457_280, "31.5 MB"),
    ("percent", 0.953, "95.3 %"),
    ("percent", 1, "100 %"),
    ("count", 1024, "1,024"),
    ("count", None, "–"),
    ("rate", None, "–"),
]


@pytest.mark.parametrize(("name", "value", "text"), FIGURES)
def test_figures_as_text(page: Page, name: str, value: float | None, text: str) -> None:
    assert run(page, "format", f"(module, value) => module.{name}(value)", value) == text


def test_what_a_change_changes(page: Page) -> None:
    before = {"name": "netkv", "params": {"a": 1, "b": [1, 2], "c": None}}
    after = {"name": "netkv", "params": {"a": 2, "b": [1, 3], "c": None, "d": True}}
    found = run(page, "forms", "({ differences }, [a, b]) => differences(a, b)", [before, after])
    assert found == [["params.a", 1, 2], ["params.b", [1, 2], [1, 3]], ["params.d", None, True]]
