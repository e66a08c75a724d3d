"""The exchange: the thread of one engine that reads its weights from another engine, and lends them to others.

    start       listens for readers, and compares its own files
    imported    NIXL may be imported now: the read begins, while the engine's other processes import
    loaded      the loader has the weights; the landing is given back, and files on disk are lent from now on

A node without files lends its landing as long as it feeds others, at most for `LINGER_S`. What was lent of a landing
stays in memory until the lender's agent ends (`lender.IDLE_S`). Whatever fails here leaves the engine's start to the
disk, and nothing of it blocks the engine: its event loop and its steps know nothing of this.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from actors.engine.weights.checkpoint import Checkpoint, config_hash
from actors.engine.weights.chunks import END_S
from actors.engine.weights.landing import Landing
from actors.engine.weights.lender import Lender, Lot
from actors.engine.weights.pages import PagesAgent
from actors.engine.weights.reader import NO_AGENT, FlowSettings, Mine, NoWeights, WeightsReader
from actors.wire.channel import Identity
from actors.wire.messages import WeightsLent, WeightsRead
from policies.weights.checkpoint import PIECE_BYTES, BadCheckpoint

log = logging.getLogger(__name__)

NICE = 10
"""How far the thread's priority is lowered once it only lends."""

LINGER_S = 60.0
"""Longest time in seconds for which a node without files feeds others after its own start."""

START_S = 10.0
STOP_S = 10.0
"""Seconds in which the thread must listen, and must end. ASSUMPTION: neither waits for anybody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """One engine's exchange: the folder of its model, where it listens for readers, the addresses of each engine that
    may have its weights, the best first, and its flow agent.
    """

    folder: Path
    listen: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...]
    flow: FlowSettings = NO_AGENT
    piece_bytes: int = PIECE_BYTES


class WeightsExchange:
    """The exchange of the engine `me`. Its methods may be called from any thread."""

    def __init__(
        self, me: Identity, config: ExchangeConfig, new_agent: Callable[[str], PagesAgent] = PagesAgent
    ) -> None:
        self._me, self._config, self._new_agent = me, config, new_agent
        self.landing = Landing()
        self.read = WeightsRead("disk", reason="the read has not ended")
        """Where the weights came from, once the loader has them."""
        self._files: Checkpoint | None = None
        self._there = 0
        self._lender = Lender(me, config.flow.node, new_agent, bool(config.sources))
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._imported, self._loaded, self._stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-weights", daemon=True)

    def start(self) -> None:
        """Starts the thread and waits until it listens. Where it cannot, weights are read from disk, and none lent."""
        self._thread.start()
        self._listening.wait(START_S)

    def imported(self) -> None:
        """Notes that the owner has imported what NIXL imports, too."""
        self._set(self._imported)

    def loaded(self) -> None:
        """Notes that the engine has its weights."""
        self._set(self._loaded)

    def stop(self) -> None:
        """Ends reads and loans, and the thread. Idempotent."""
        self._set(self._stopping)
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        elif not self._loop.is_closed():
            self._loop.close()
        self.landing.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which this engine lends its weights."""
        return self._lender.addresses

    @property
    def lent_bytes(self) -> int:
        """Bytes of the pieces that were lent since the start."""
        return self._lender.lent_bytes

    def _set(self, event: asyncio.Event) -> None:
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            # the thread has ended, and its loop with it
            event.set()

    # ------------------------------------------------------------------------------------------------ this thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except Exception:
            log.exception("the exchange of weights has ended; weights are read from disk, and none are lent")
        finally:
            if self.read.source != "peer":
                self.landing.fail()
            self._listening.set()

    async def _live(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._lender.start(self._config.listen)
            self._listening.set()
            reading = asyncio.create_task(self._read(self._own()), name="weights from a peer")
            tasks += [reading, asyncio.create_task(self._lend_on(reading), name="weights for others")]
            await self._stopping.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._lender.stop()

    def _own(self) -> Mine:
        """Returns what this node's files are. Without a readable configuration nothing can be compared."""
        folder = self._config.folder
        try:
            self._files = Checkpoint(folder, self._config.piece_bytes)
            return Mine(self._files.fingerprint, self._files.config)
        except (BadCheckpoint, OSError) as error:
            log.info("this node has no weights to lend: %s", error)
        try:
            return Mine("", config_hash(folder))
        except BadCheckpoint:
            return Mine("", "")

    async def _read(self, mine: Mine) -> None:
        """Reads the weights into the landing, or leaves them to the disk."""
        if not self._config.sources:
            self._leave(WeightsRead("disk", reason="no engine is known that lends them"))
            return
        await self._imported.wait()
        began_s = time.monotonic()
        reader = WeightsReader(
            self._me, mine, self.landing, self._config.flow,
            self._opened, self._arrived, lambda: self._lender.addresses, self._new_agent,
        )  # fmt: skip
        reason = ""
        try:
            await reader.run(self._config.sources)
        except NoWeights as error:
            reason = str(error)
        except asyncio.CancelledError:
            await reader.rest(END_S)
            raise
        except Exception as error:
            log.exception("the read of weights has failed")
            reason = repr(error)
        took_s = time.monotonic() - began_s
        read = WeightsRead("disk" if reason else "peer", reader.read_bytes, took_s, reader.peer, reason)
        if reason:
            self._leave(read)
        else:
            self.read = read
            log.info("weights from %s: %.1f MB in %.2f s", reader.peer, reader.read_bytes / 1e6, took_s)
        # the landing stays until nothing is written into it any more
        await reader.rest(None)

    def _leave(self, read: WeightsRead) -> None:
        """Leaves the weights to the loader, which finds them on disk, and lends what is there."""
        self.read = read
        self.landing.fail()
        level = logging.WARNING if self._config.sources else logging.INFO
        log.log(level, "weights are read from disk: %s", read.reason)
        self._lend_files()

    def _lend_files(self) -> None:
        files = self._files
        if files is None:
            self._lender.end("it has no files")
        else:
            self._lender.lend(Lot(files, files.fingerprint, files.config), files.layout.pieces)

    def _opened(self, lent: WeightsLent) -> None:
        self._lender.lend(Lot(self.landing, lent.fingerprint, lent.config, lent.path), self._there)

    def _arrived(self, there: int, hashed: bytes) -> None:
        self._there = there
        self._lender.arrived(there, hashed)

    async def _lend_on(self, reading: "asyncio.Task[None]") -> None:
        """Lends what is on disk once the engine has its weights, with a lower priority, and gives the landing back."""
        await self._loaded.wait()
        await asyncio.wait([reading])
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICE)
        if self._files is None:
            await self._lender.readers_left(LINGER_S)
        self._lend_files()
        self.landing.close()
