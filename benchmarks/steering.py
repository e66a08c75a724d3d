"""Steers and reads a live app from within, by Sluice's own protocol, journal and configuration.

`HandGiven` connects to the router as an autoscaler does, so that an engine can be given any role and duty at a chosen
moment. `first_routes` reads from the router's journal which engine decoded a request. Modules of `benchmarks.live` only
speak HTTP themselves. Times are seconds of `time.perf_counter`.
"""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import Assign, Message
from actors.wire.sockets import connect
from benchmarks.live.servers import ServerError
from policies.journal.codec import CodecError, loads

HAND_GENERATION = 1_000_000
"""The generation of an autoscaler whose orders a benchmark gives by hand: the router obeys no earlier one after it."""


class HandGiven:
    """An autoscaler of a later generation than any other, which gives the roles and duties that a benchmark asks for.

    While it is connected, and after it, the router takes no orders from the app's own autoscaler. `folder` is the app's
    `wire.socket_dir`. Raises ServerError if there is no router there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop: asyncio.AbstractEventLoop
        self._channel: Channel
        self._opened, self._problem = threading.Event(), "no answer"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)
        self._thread.start()
        self._opened.wait(30.0)
        if not hasattr(self, "_channel"):
            raise ServerError(f"no connection to the router in {folder}: {self._problem}")

    def assign(self, engine: str, role: str, duty: str = "active") -> float:
        """Has the engine serve this role with this duty. Returns when the order was given."""
        given_s = time.perf_counter()
        order = Assign(engine, role, duty)  # type: ignore[arg-type]  # names of roles and duties
        self._loop.call_soon_threadsafe(self._channel.send, order)
        return given_s

    def close(self) -> None:
        """Ends the connection."""
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10.0)

    async def _live(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        me = Identity("autoscaler", "autoscaler-by-hand", generation=HAND_GENERATION)
        addresses = tuple(f"unix:{path}" for path in sorted(self._folder.glob("router-*.sock")))
        try:
            self._channel = await connect(addresses, lambda: Channel(me, self._heard))
        except (OSError, WireError) as error:
            self._problem = repr(error)
            return
        finally:
            self._opened.set()
        await self._done.wait()
        self._channel.close()
        await asyncio.wait([self._channel.closed], timeout=5.0)

    def _heard(self, channel: Channel, message: Message) -> None:
        """Ignores the router's observations: the benchmark decides by what the API says."""


def first_routes(journal: Path) -> dict[str, str]:
    """Returns the engine that was first chosen to decode each request, by the request's id, from the router's journal
    in this folder. The last line may be half written.
    """
    found: dict[str, str] = {}
    for file in sorted(journal.glob("journal-*.jsonl")):
        with file.open() as lines:
            for line in lines:
                if '"Route' not in line:
                    continue
                try:
                    action: Any = loads(line)
                except CodecError:
                    continue
                # a request of a colocated engine is routed once, for both
                if action.get("action") != "RouteDecode" and not action.get("colocated"):
                    continue
                request = str(action["attempt_id"]).rpartition("-")[0]
                found.setdefault(request, str(action["decision"]["worker"]).partition("#")[0])
    return found
