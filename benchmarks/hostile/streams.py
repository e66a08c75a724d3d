"""The well-behaved clients, in a process of their own: each reads one stream of small steps after another.

    python -m benchmarks.hostile.streams --port PORT --streams 6

The process prints a line as soon as as many answers have begun as there are clients. They go on until its standard
input ends. Then it prints one JSON object: `gaps` has (time, seconds) of each
gap between two events of a stream, `firsts` the same of each wait for the first event, `late` (time, seconds) of each
delay of this process's own timer, and `failed` what went wrong. Times are CLOCK_MONOTONIC at the end of the gap, which
all processes of the machine share.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.http import Connection, connect, post_bytes
from benchmarks.live.load import run_fast
from benchmarks.live.measure import CHAT

TOKENS = 100
"""Tokens of a stream."""
WORDS = 20
TICK_S = 0.01
PATIENCE_S = 30.0
"""Seconds for a connection to be made."""

Timed = tuple[float, float]
"""The time at which something ended, and how long it took, in seconds."""


@dataclass(slots=True)
class Seen:
    """The times that the clients saw, as the module's docstring says."""

    gaps: list[Timed] = field(default_factory=list)
    firsts: list[Timed] = field(default_factory=list)
    late: list[Timed] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Window:
    """The figures of the well-behaved clients from one moment to another, times in seconds.

    A gap that only ends in the window belongs to it. `late_s` is the longest delay of the clients' own process.
    """

    events: int
    longest_gap_s: float
    p99_gap_s: float
    longest_first_s: float
    late_s: float


def window(seen: Seen, start_s: float, end_s: float) -> Window:
    """Returns what was seen from `start_s` to `end_s`. Raises ValueError if no stream had two events there."""

    def within(of: Sequence[Timed]) -> list[float]:
        return sorted(seconds for at_s, seconds in of if start_s <= at_s < end_s)

    gaps = within(seen.gaps)
    if not gaps:
        raise ValueError("no well-behaved stream had two events in the window")
    p99_s = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    return Window(
        len(gaps), gaps[-1], p99_s, max(within(seen.firsts), default=0.0), max(within(seen.late), default=0.0)
    )


class Stream:
    """The events of one answer. `began_s` is the time at which it was asked for."""

    def __init__(self, seen: Seen, began_s: float) -> None:
        self._seen, self._last_s, self._first = seen, began_s, True

    def piece(self, data: bytes, now_s: float) -> None:
        """Takes a piece of the answer, which may hold events."""
        if b"data: " in data:
            self.gap(now_s)

    def gap(self, now_s: float) -> None:
        """Notes that the time since the last event is over."""
        (self._seen.firsts if self._first else self._seen.gaps).append((now_s, now_s - self._last_s))
        self._first, self._last_s = False, now_s


async def client(port: int, name: str, seen: Seen, ended: asyncio.Event) -> None:
    """Reads streams until `ended`, on one connection for as long as it lasts."""
    prompt = " ".join([name] * WORDS)
    body = {"model": "sim", "user": "well-behaved", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    request = post_bytes(CHAT, {**body, "messages": [{"role": "user", "content": prompt}]})
    connection: Connection | None = None
    while not ended.is_set():
        try:
            if connection is None or not connection.usable:
                connection = await connect(port, PATIENCE_S)
            stream = Stream(seen, time.monotonic())
            asking = asyncio.ensure_future(
                connection.ask(request, lambda data, of=stream: of.piece(data, time.monotonic()))  # type: ignore[misc]
            )
            ending = asyncio.ensure_future(ended.wait())
            await asyncio.wait([asking, ending], return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not asking.done():
                stream.gap(time.monotonic())
                asking.cancel()
                break
            if asking.result() != 200:
                seen.failed[f"status {asking.result()}"] += 1
                await asyncio.sleep(1.0)
        except (OSError, TimeoutError) as error:
            seen.failed[type(error).__name__] += 1
            await asyncio.sleep(1.0)
    if connection is not None:
        connection.drop()


async def _watch(seen: Seen, streams: int) -> None:
    """Notes each delay of this process's timer, and prints the line once as many answers have begun as `streams`."""
    begun = False
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        now_s = time.monotonic()
        seen.late.append((now_s, max(0.0, now_s - due_s)))
        if not begun and len(seen.firsts) >= streams:
            print("begun", flush=True)
            begun = True


async def _run(port: int, streams: int) -> Seen:
    seen, ended = Seen(), asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    watch = asyncio.create_task(_watch(seen, streams))
    await asyncio.gather(*(client(port, f"word{number}", seen, ended) for number in range(streams)))
    watch.cancel()
    return seen


def main() -> int:
    """Reads streams until the standard input ends, and prints what was seen."""
    parser = argparse.ArgumentParser(prog="benchmarks.hostile.streams", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    args = parser.parse_args()
    seen = run_fast(_run(args.port, args.streams))
    print(
        json.dumps({"gaps": seen.gaps, "firsts": seen.firsts, "late": seen.late, "failed": dict(seen.failed)})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
