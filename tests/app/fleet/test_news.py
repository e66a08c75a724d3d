"""The watch on a connected router: what is given up, and what is not."""

from collections.abc import Callable
from typing import ClassVar

import pytest

from app.fleet import news
from app.fleet.news import RouterNews


class Ticks:
    """The ticks of a watch, which the test makes."""

    made: ClassVar["list[Ticks]"] = []

    def __init__(self, period_s: float, tick: Callable[[bool], None]) -> None:
        self.period_s, self.tick, self.cancelled = period_s, tick, False
        Ticks.made.append(self)

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticks.made = []
    monkeypatch.setattr(news, "LoopTicks", Ticks)


def test_a_router_is_given_up_after_six_ticks_without_a_status() -> None:
    lost: list[str] = []
    watch = RouterNews(lost.append)
    watch.begin()
    (ticks,) = Ticks.made
    for _ in range(5):
        ticks.tick(True)
    watch.heard()
    # the first one after it takes it in
    for _ in range(6):
        ticks.tick(True)
    assert lost == []
    ticks.tick(True)
    # six of half a second
    assert (ticks.period_s, lost) == (0.5, ["router sent no status for 3 s"])


def test_the_next_connection_is_watched_anew_and_none_after_the_end() -> None:
    lost: list[str] = []
    watch = RouterNews(lost.append)
    watch.end()
    watch.begin()
    for _ in range(5):
        Ticks.made[0].tick(True)
    watch.end()
    assert Ticks.made[0].cancelled
    watch.begin()
    for _ in range(5):
        Ticks.made[1].tick(True)
    assert lost == []
    watch.end()
    watch.end()
    assert Ticks.made[1].cancelled
