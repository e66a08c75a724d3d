"""Readers of a dashboard's event stream, or pages of it in a browser, until the standard input ends.

    python -m benchmarks.watching.readers --port PORT --count 3             readers, which take what a page takes
    python -m benchmarks.watching.readers --port PORT --count 3 --browser   pages in headless Chromium

A reader does what the page's own stream does (`app/dashboard/static/js/stream.js`): it reads every byte, splits the
events, parses each one's JSON, and looks whether one is missing. It draws nothing, so it costs the machine of the
dashboard what a page on another machine would. The key is in SLUICE_ADMIN_KEY. When all have their first snapshot, a
line `ready` is printed, and at the end one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

FIRST_S = 60.0
"""Seconds in which the first snapshot must come."""


@dataclass(slots=True)
class Taken:
    """All that the readers took: events and bytes, and sentences about what went wrong."""

    snapshots: int = 0
    deltas: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


class Reader:
    """One reader: it takes events in their order and adds them to `taken`."""

    def __init__(self, taken: Taken) -> None:
        self._taken, self._seq = taken, -1
        self.begun = asyncio.Event()

    async def read(self, client: httpx.AsyncClient) -> None:
        """Reads the stream until it ends, which is a problem, or until it is cancelled."""
        async with client.stream("GET", "/api/stream", headers={"accept": "text/event-stream"}) as answer:
            if answer.status_code != 200:
                self._taken.problems.append(f"the stream was answered with status {answer.status_code}")
                self.begun.set()
                return
            kind = ""
            async for line in answer.aiter_lines():
                self._taken.bytes += len(line) + 1
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self._event(kind, json.loads(line.removeprefix("data: ")))
        self._taken.problems.append("the server ended a stream")

    def _event(self, kind: str, value: dict[str, Any]) -> None:
        seq = int(value["seq"])
        if kind == "snapshot":
            if self._seq >= 0:
                self._taken.problems.append(f"a snapshot replaced the deltas after {self._seq}")
            self._taken.snapshots += 1
        else:
            if seq > self._seq + 1:
                self._taken.problems.append(f"delta {seq} came after {self._seq}")
            self._taken.deltas += 1
        # around a snapshot a delta may come once more, which a page passes over
        self._seq = max(seq, self._seq)
        self.begun.set()


async def read(url: str, key: str, count: int) -> Taken:
    """Reads with `count` readers until the standard input ends."""
    taken = Taken()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        # as the page does, which has a session afterwards
        await client.post("/api/login", json={"key": key})
        readers = [Reader(taken) for _ in range(count)]
        tasks = [asyncio.create_task(one.read(client)) for one in readers]
        async with asyncio.timeout(FIRST_S):
            await asyncio.gather(*(one.begun.wait() for one in readers))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        taken.problems += [repr(one) for one in ended if isinstance(one, Exception)]
    return taken


def look(url: str, key: str, count: int) -> Taken:
    """Keeps `count` pages open in a browser until the standard input ends."""
    from benchmarks.watching.chromium import browser, open_page

    taken = Taken()
    with browser() as chromium:
        pages = [open_page(chromium, url, key) for _ in range(count)]
        for page in pages:
            page.go("overview")
        print("ready", flush=True)
        sys.stdin.read()
        for page in pages:
            taken.deltas += page.seq() or 0
            taken.problems += [*page.said, *page.foreign]
            page.close()
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    """Reads until the standard input ends, and prints what was taken."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.watching.readers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, required=True, help="that of the dashboard")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--browser", action="store_true", help="pages in a browser, which draw")
    args = parser.parse_args(argv)
    url, key = f"http://127.0.0.1:{args.port}", os.environ["SLUICE_ADMIN_KEY"]
    taken = look(url, key, args.count) if args.browser else asyncio.run(read(url, key, args.count))
    print(json.dumps(asdict(taken)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
