"""A limit counts the time for which the loop ran: a time in which it stood still does not use the limit up."""

import asyncio
import time
from unittest.mock import Mock

import pytest

from actors.loop_timeout import SLICES, LoopTicks, LoopTimeout, Silence, within


class Loop:
    """A loop's clock and timers, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, object]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, what: object) -> Mock:
        entry = (self.now_s + delay_s, what)
        self.timers.append(entry)

        def cancel() -> None:
            self.timers = [timer for timer in self.timers if timer is not entry]

        return Mock(cancel=cancel)

    def run_until(self, now_s: float, late_s: float = 0.0) -> None:
        """Fires the timers that are due by then, each `late_s` late."""
        while self.timers and self.timers[0][0] + late_s <= now_s:
            due_s, what = self.timers.pop(0)
            self.now_s = due_s + late_s
            what()  # type: ignore[operator]
        self.now_s = now_s


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


def test_on_a_loop_in_time_it_is_the_limit(loop: Loop) -> None:
    given_up: list[float] = []
    LoopTimeout(10.0, lambda: given_up.append(loop.now_s))
    loop.run_until(9.99)
    assert given_up == []
    loop.run_until(20.0)
    assert given_up == [pytest.approx(10.0)]


def test_a_minute_away_is_not_a_minute_waited(loop: Loop) -> None:
    given_up: list[float] = []
    LoopTimeout(10.0, lambda: given_up.append(loop.now_s))
    loop.run_until(9.5)
    # stopped for a minute, in the last slice
    loop.now_s = 69.5
    loop.timers.pop()[1]()  # type: ignore[operator]  # the timer fires at once, a minute late
    assert given_up == []
    loop.run_until(70.4)
    assert given_up == []
    loop.run_until(80.0)
    # one slice more, in which the messages that had come could be read
    assert given_up == [pytest.approx(70.5)]


def test_a_loop_that_is_always_late_gives_up_too(loop: Loop) -> None:
    given_up: list[float] = []
    LoopTimeout(10.0, lambda: given_up.append(loop.now_s))
    loop.run_until(1000.0, late_s=4.0)
    assert given_up == [pytest.approx(2 * SLICES * (1.0 + 4.0))]


def test_cancelled_it_says_nothing(loop: Loop) -> None:
    given_up: list[float] = []
    timeout = LoopTimeout(10.0, lambda: given_up.append(loop.now_s))
    loop.run_until(5.0)
    timeout.cancel()
    timeout.cancel()
    loop.run_until(50.0)
    assert given_up == []


async def test_within_tells_whether_it_came() -> None:
    loop = asyncio.get_running_loop()
    never: asyncio.Future[None] = loop.create_future()
    assert not await within(0.05, never)
    assert not never.done()
    soon: asyncio.Future[int] = loop.create_future()
    loop.call_later(0.01, soon.set_result, 3)
    assert await within(600.0, soon)
    assert soon.result() == 3


async def test_what_came_while_the_loop_was_away_counts() -> None:
    reader, writer = asyncio.open_connection, asyncio.start_server
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await writer(lambda _, w: accepted.set_result(w), "127.0.0.1", 0)
    (stream, out) = await reader(*server.sockets[0].getsockname())
    (await accepted).write(b"here")
    reading = asyncio.ensure_future(stream.readexactly(4))
    waiting = asyncio.ensure_future(within(0.2, reading))
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251  (the loop is away five times as long as the limit)
    assert await waiting
    assert reading.result() == b"here"
    for end in (out, accepted.result()):
        end.close()
    server.close()


def test_ticks_go_on_until_they_are_cancelled_and_say_when_the_loop_stood_still(loop: Loop) -> None:
    lived: list[bool] = []
    ticks = LoopTicks(1.0, lived.append)
    loop.run_until(2.5)
    # stopped for a minute
    loop.run_until(70.0, late_s=65.0)
    loop.run_until(69.5)
    assert lived == [True, True, False, True]
    ticks.cancel()
    loop.run_until(80.0)
    assert len(lived) == 4


def test_silence_is_counted_from_what_was_heard_last() -> None:
    silence = Silence(3)
    assert [silence.tick(True) for _ in range(2)] == [False, False]
    silence.heard = True
    assert [silence.tick(True) for _ in range(4)] == [False, False, False, True]


def test_silence_while_the_loop_stood_still_does_not_count_but_not_for_ever() -> None:
    silence = Silence(3)
    # 2 that count and 1 that does not; then 2 more are excused, and the next counts
    ticks = [True, True, False, False, False, False]
    assert [silence.tick(lived) for lived in ticks] == [False] * 5 + [True]
