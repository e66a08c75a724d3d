"""The clients of many streams, in a process of their own: each reads one stream that does not end by itself.

    python -m benchmarks.live.streams.clients --port PORT --streams 5000 --rate 200 --step-ms 500

Streams are begun at `--rate` a second. When all have had an event, or `PATIENCE_S` after the last was begun, the
process prints a line, {"open": N, "failed": {...}}. It then obeys lines of its standard input: `begin` forgets the gaps
seen so far, and `end` prints a `Counted` as a line and ends the process. A gap is the time between two events of a
stream, and is counted when it ends by how much longer than a step it was, in bins of `BIN_MS`. Two events that come in
one read have no gap between them. A read that cuts an event's first bytes would lose this event; the answers' frames
are some 250 bytes, so that the kernel splits none of them for a client that reads at once.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from benchmarks.hostile.clients import LONG_TOKENS, SPARE_FILES, allow_files
from benchmarks.live.load import body_of, request_bytes, run_fast
from benchmarks.live.measure import CHAT

BIN_MS = 0.1
PATIENCE_S = 30.0
TURN_S = 0.05
"""Time between two looks at how many streams are due to begin."""
TICK_S = 0.01
"""Period of the timer whose delay is that of this process."""

_EVENT = b"data: "
_GOOD = b"HTTP/1.1 200"


@dataclass(slots=True)
class Counted:
    """The counts of the clients since `begin`: gaps and delays of their own timer by bin of excess, events, and what
    failed.
    """

    gaps: Counter[int] = field(default_factory=Counter)
    late: Counter[int] = field(default_factory=Counter)
    events: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(told: Mapping[str, object]) -> "Counted":
        """Returns what a process printed."""
        gaps, late, failed = (cast(dict[str, int], told[name]) for name in ("gaps", "late", "failed"))
        return Counted(_bins(gaps), _bins(late), cast(int, told["events"]), Counter(failed))

    def told(self) -> dict[str, object]:
        """Returns what a process prints, of which `of` makes it again."""
        return {"gaps": self.gaps, "late": self.late, "events": self.events, "failed": self.failed}

    def add(self, other: "Counted") -> None:
        """Adds what another process saw."""
        self.gaps += other.gaps
        self.late += other.late
        self.events += other.events
        self.failed += other.failed


def _bins(told: Mapping[str, int]) -> Counter[int]:
    return Counter({int(place): n for place, n in told.items()})


def quantile_ms(bins: Mapping[int, int], q: float) -> float:
    """Returns the upper edge, in ms, of the bin that holds the q-quantile (q in 0..1). Raises ValueError if all are
    empty.
    """
    total = sum(bins.values())
    if not total:
        raise ValueError("no gaps: no stream had two events")
    seen = 0
    for place in sorted(bins):
        seen += bins[place]
        if seen >= q * total:
            return (place + 1) * BIN_MS
    raise AssertionError(f"a quantile lies between 0 and 1, not at {q}")


class Streams:
    """All `count` streams of this process, and what they saw. `settled` is set when each has begun or failed."""

    def __init__(self, step_s: float, count: int) -> None:
        self._step_s, self._count = step_s, count
        self.counted = Counted()
        self.begun = 0
        self.settled = asyncio.Event()

    def first(self) -> None:
        """Counts the first event of a stream."""
        self.begun += 1
        self._look()

    def begin(self) -> None:
        """Forgets what was seen so far, except failures."""
        self.counted = Counted(failed=self.counted.failed)

    def gap(self, seconds: float, events: int) -> None:
        """Counts a read of `events` events, `seconds` after the one before."""
        counted = self.counted
        counted.events += events
        counted.gaps[max(0, int((seconds - self._step_s) * 1e3 / BIN_MS))] += 1
        if events > 1:
            counted.gaps[0] += events - 1

    def late(self, seconds: float) -> None:
        """Counts a delay of this process's own timer."""
        self.counted.late[max(0, int(seconds * 1e3 / BIN_MS))] += 1

    def failed(self, why: str) -> None:
        """Counts a stream that failed or ended."""
        self.counted.failed[why] += 1
        self._look()

    def _look(self) -> None:
        if self.begun + self.counted.failed.total() >= self._count:
            self.settled.set()


class Stream(asyncio.Protocol):
    """One connection with its stream; it is dropped by `drop`."""

    __slots__ = ("_dropped", "_head", "_last_s", "_request", "_streams", "_transport")

    def __init__(self, streams: Streams, request: bytes) -> None:
        self._streams, self._request = streams, request
        self._transport: asyncio.Transport | None = None
        self._last_s: float | None = None
        self._head = True
        self._dropped = False

    def drop(self) -> None:
        """Ends the connection, which then counts as no failure."""
        self._dropped = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        if self._head:
            self._head = False
            if not data.startswith(_GOOD):
                self._dropped = True
                self._streams.failed(f"answer {data[:12].decode('ascii', 'replace')}")
                self._transport_abort()
                return
        events = data.count(_EVENT)
        if events:
            self.took(events, time.monotonic())

    def took(self, events: int, now_s: float) -> None:
        """Counts events that were read at `now_s`."""
        if self._last_s is None:
            self._streams.first()
        else:
            self._streams.gap(now_s - self._last_s, events)
        self._last_s = now_s

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._dropped:
            self._streams.failed(f"ended: {type(exc).__name__ if exc else 'by the server'}")

    def _transport_abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()


def request_of(port: int, number: int) -> bytes:
    """Returns the request of a stream that goes on for longer than any measurement."""
    body = body_of("sim", f"story {number}", LONG_TOKENS, chat=True)
    return request_bytes("127.0.0.1", port, CHAT, body)


async def _begun(streams: Streams, port: int, first: int, count: int, rate_per_s: float) -> list[Stream]:
    """Begins `count` streams at a rate, and waits until all have had an event, for `PATIENCE_S` at most."""
    loop, start_s = asyncio.get_running_loop(), time.monotonic()
    made: list[Stream] = []
    connecting: set[asyncio.Task[object]] = set()

    async def connect(stream: Stream) -> None:
        try:
            await loop.create_connection(lambda: stream, "127.0.0.1", port)
        except OSError as error:
            streams.failed(f"not connected: {type(error).__name__}")

    while len(made) < count:
        due = min(count, int((time.monotonic() - start_s) * rate_per_s) + 1)
        while len(made) < due:
            made.append(Stream(streams, request_of(port, first + len(made))))
            task: asyncio.Task[object] = loop.create_task(connect(made[-1]))
            connecting.add(task)
            task.add_done_callback(connecting.discard)
        await asyncio.sleep(TURN_S)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(streams.settled.wait(), PATIENCE_S)
    return made


async def _lateness(streams: Streams) -> None:
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        streams.late(time.monotonic() - due_s)


async def _orders() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def _run(args: argparse.Namespace) -> None:
    streams = Streams(args.step_ms / 1e3, args.streams)
    orders, timer = await _orders(), asyncio.create_task(_lateness(streams))
    made = await _begun(streams, args.port, args.first, args.streams, args.rate)
    print(json.dumps({"open": streams.begun, "failed": dict(streams.counted.failed)}), flush=True)
    while order := (await orders.readline()).strip():
        if order == b"begin":
            streams.begin()
        elif order == b"end":
            break
    timer.cancel()
    print(json.dumps(streams.counted.told()), flush=True)
    for stream in made:
        stream.drop()


def main(argv: Sequence[str] | None = None) -> int:
    """Reads streams until `end`, or until the standard input ends."""
    parser = argparse.ArgumentParser(prog="benchmarks.live.streams.clients", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first stream, of which its prompt tells"
    )
    parser.add_argument("--rate", type=float, required=True, help="streams that are begun in a second")
    parser.add_argument("--step-ms", type=float, required=True)
    args = parser.parse_args(argv)
    allow_files(args.streams + SPARE_FILES)
    run_fast(_run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
