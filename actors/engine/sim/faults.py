"""Faults that a failure test orders from a running sim engine, through files in a folder of its own.

An engine obeys only if its option `faults` names a folder, which no shipped configuration does. The order for an engine
is the file FOLDER/ENGINE_ID, which holds the JSON of an `Order`; without the file there is no fault. The engine reads
it every `POLL_S`. A prompt that begins with `POISON[task]` kills the process that takes it as this task.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from policies.request.stage import Task

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks at the order. ASSUMPTION: short against the seconds for which a fault lasts."""

POISON: dict[Task, tuple[int, ...]] = {
    "prefill": (31_001, 31_001, 31_001),
    "decode": (31_002, 31_002, 31_002),
}
"""The first tokens of a prompt that kills an engine which has the option `faults`, by the task in which it does so."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of an engine: new work fails at once with code `fail`, steps take `slow` times as long, or, if it is
    `stalled`, no step begins while all else goes on. While it is `cut` nothing passes between it and the engines whose
    KV it reads. With `expire` its leases that nobody reads end at once, and with `lapse` so does each new one; with
    `swap` the handles of its new leases are those of other prompts. With `hoard` the process holds all memory that it
    is allowed to have, so that whatever it does next gets none; who orders it sets a limit first.
    """

    fail: Literal["internal", "kv_load"] | None = None
    slow: float = 1.0
    stalled: bool = False
    cut: bool = False
    expire: bool = False
    lapse: bool = False
    swap: bool = False
    hoard: bool = False


HOARD_SIZES = (2**20, 2**16, 2**12, 2**9 - 40)
"""Bytes of the pieces in which memory is hoarded. The last, with the head of their object, are the largest for which an
interpreter keeps pools; larger ones alone would leave it those."""
MOST_HOARDED = 200_000
"""Pieces after which hoarding ends: nothing limits this process. They are 200 GB of addresses that nobody touches."""

HEALTHY = Order()
_orders = msgspec.json.Decoder(Order)


class Faults:
    """The present order of one engine; `changed` is called after each change, on the event loop."""

    def __init__(self, folder: str, engine_id: str, changed: Callable[[], None]) -> None:
        self.order = HEALTHY
        # The ranks of an engine share its order.
        self._path = Path(folder) / engine_id.partition("#")[0]
        self._changed = changed
        self._last = b""
        self._hoard: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to look at the order. Must be called in the event loop."""
        log.warning("this engine obeys orders to fail: its option `faults` names %s", self._path.parent)
        self._look()

    def stop(self) -> None:
        """Ends the looks at the order."""
        if self._timer is not None:
            self._timer.cancel()

    def take(self, tokens: Sequence[int], task: Task) -> None:
        """Kills this process if the prompt is poison for `task`."""
        poison = POISON[task]
        if tuple(tokens[: len(poison)]) == poison:
            os.kill(os.getpid(), signal.SIGKILL)

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(POLL_S, self._look)
        try:
            found = self._path.read_bytes()
        except FileNotFoundError:
            found = b""
        if found == self._last:
            return
        self._last = found
        try:
            self.order = _orders.decode(found) if found else HEALTHY
        except msgspec.DecodeError:
            log.exception("%s: no order of a fault; the one before holds", self._path)
            return
        log.warning("ordered fault: %s", self.order)
        self._hoard = hoarded() if self.order.hoard else []
        self._changed()


def hoarded() -> list[bytes]:
    """Takes memory until there is no more, and returns it."""
    found: list[bytes] = []
    for size in HOARD_SIZES:
        try:
            while len(found) < MOST_HOARDED:
                found.append(bytes(size))
        except MemoryError:
            continue
    return found


def give(folder: Path, engine_id: str, order: Order | None) -> None:
    """Orders a fault from an engine, or ends the present one with `order` None."""
    path = folder / engine_id
    if order is None:
        path.unlink(missing_ok=True)
        return
    half = path.with_name(f".{engine_id}")
    half.write_bytes(msgspec.json.encode(order))
    half.replace(path)


__all__ = ["HEALTHY", "POISON", "Faults", "Order", "give"]
