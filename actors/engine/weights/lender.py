"""The lender: it serves its weights, or what it has read of them, piece by piece to engines that start.

A piece is mapped, hashed and registered with NIXL when a reader asks for it, and given up when the reader has it: at
most `FAN_OUT` readers hold `WINDOW` pieces each, whatever the size of the model. A lender that still reads, itself,
answers with a piece as soon as it has it. It feeds few readers and sends the others to these (`policies.weights.tree`).

All of this runs on the event loop of a thread of its own (`exchange`), which does nothing else and gives way to others.
"""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.engine.weights.checkpoint import Shelf
from actors.engine.weights.pages import Held, PagesAgent, PagesError, digest
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import (
    AskWeights,
    Message,
    PieceLent,
    PieceRead,
    WantPiece,
    WeightsLent,
    WeightsRefused,
)
from actors.wire.messages.weights import WINDOW
from actors.wire.sockets import listen, remove_sockets
from policies.weights.checkpoint import Piece, difference
from policies.weights.tree import Reader, instead

log = logging.getLogger(__name__)

MOST_ASKERS = 64
"""Most connections at once. ASSUMPTION: nobody starts more engines in the moment in which each learns where to go."""

QUIET_S = 60.0
"""Seconds without a message after which a reader loses its place. A reader that waits for pieces which its lender does
not have yet is not quiet. ASSUMPTION: longer than the longest read of a piece (`chunks.limit_s`)."""

IDLE_S = 10.0
"""Seconds without readers after which the agent ends. ASSUMPTION: engines that start together come within these."""


@dataclass(frozen=True, slots=True)
class Lot:
    """A lot that is lent: the memory, and its identity (`checkpoint.difference`). `path` are the ids of those from whom
    it comes; nobody for files on disk.
    """

    shelf: Shelf
    fingerprint: str
    config: str
    path: tuple[str, ...] = ()


class _Loan(NamedTuple):
    """A piece that a reader holds."""

    held: Held
    shelf: Shelf
    piece: Piece


@dataclass(eq=False, slots=True)
class _Reader:
    """One reader that is fed: what it wants, in order, and what it holds."""

    channel: Channel
    name: str
    addresses: tuple[str, ...]
    heard_s: float
    referred: int = 0
    wanted: collections.deque[int] = field(default_factory=collections.deque)
    held: dict[int, _Loan] = field(default_factory=dict)


class Lender:
    """The lender of one engine. All calls belong to its event loop. `lot` is lent once it is set; before that askers
    wait if `expecting`, else they are refused.
    """

    def __init__(
        self,
        me: Identity,
        node: str,
        new_agent: Callable[[str], PagesAgent] = PagesAgent,
        expecting: bool = True,
    ) -> None:
        self.addresses: tuple[str, ...] = ()
        self.lent_bytes = 0
        self.lent_pieces = 0
        self._me, self._node, self._new_agent = me, node, new_agent
        self._expecting = expecting
        self._lot: Lot | None = None
        self._there = 0
        self._digests: dict[int, bytes] = {}
        self._agent: PagesAgent | None = None
        self._servers: list[asyncio.Server] = []
        self._channels: set[Channel] = set()
        self._readers: dict[Channel, _Reader] = {}
        self._askers: dict[Channel, AskWeights] = {}
        self._making: asyncio.Task[None] | None = None
        self._tick: asyncio.Task[None] | None = None
        self._idle_since_s = 0.0
        self._nobody = asyncio.Event()
        self._nobody.set()

    async def start(self, addresses: tuple[str, ...]) -> None:
        """Listens. Raises OSError if an address is taken."""
        for address in addresses:
            server, bound = await listen(address, self._new_channel, self._me.tls)
            self._servers.append(server)
            self.addresses += (bound,)
        self._tick = asyncio.create_task(self._look(), name="readers of weights")

    async def stop(self) -> None:
        """Closes all connections and gives up all memory. Idempotent."""
        for task in (self._tick, self._making):
            if task is not None:
                task.cancel()
        for server in self._servers:
            server.close()
        for channel in list(self._channels):
            channel.abort("the lender stops")
        await asyncio.gather(*(channel.closed for channel in self._channels))
        remove_sockets(self.addresses)
        self.addresses = ()
        self._end_agent()
        self._lot = None

    # ------------------------------------------------------------------------------------------------- what is lent

    def lend(self, lot: Lot, there: int) -> None:
        """Lends this from now on, of which the first `there` pieces are there. What follows another lot is the same
        checkpoint, in other memory.
        """
        self._lot, self._there, self._expecting = lot, there, False
        self._ask_again()
        self._serve_all()

    def arrived(self, there: int, hashed: bytes) -> None:
        """Notes that one more piece is there, with its hash."""
        self._digests[there - 1] = hashed
        self._there = there
        self._serve_all()

    def end(self, reason: str) -> None:
        """Lends nothing any more, for this reason. Readers look elsewhere."""
        self._lot, self._expecting = None, False
        self._refuse_all(reason)
        for reader in list(self._readers.values()):
            self._part(reader, reason)

    async def readers_left(self, limit_s: float) -> None:
        """Waits until nobody is fed any more, but at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._nobody.wait()

    @property
    def readers(self) -> int:
        """Number of engines that are fed."""
        return len(self._readers)

    @property
    def registered(self) -> int:
        """Number of pieces that are registered with NIXL."""
        return 0 if self._agent is None else self._agent.held

    # ---------------------------------------------------------------------------------------------------- connections

    def _new_channel(self) -> Channel:
        return Channel(self._me, self._received, self._opened, self._closed)

    def _opened(self, channel: Channel) -> None:
        assert channel.peer is not None
        if channel.peer.kind != "engine":
            channel.abort(f"a {channel.peer.kind} reads no weights")
        elif len(self._channels) >= MOST_ASKERS:
            channel.abort(f"{MOST_ASKERS} engines ask already")
        else:
            self._channels.add(channel)

    def _closed(self, channel: Channel, reason: str) -> None:
        self._channels.discard(channel)
        self._askers.pop(channel, None)
        reader = self._readers.pop(channel, None)
        if reader is not None:
            log.info("%s reads no more weights here: %s", reader.name, reason)
            self._drop_all(reader)
            self._idle_since_s = asyncio.get_running_loop().time()
            if not self._readers:
                self._nobody.set()

    def _received(self, channel: Channel, message: Message) -> None:
        reader = self._readers.get(channel)
        if reader is not None:
            reader.heard_s = asyncio.get_running_loop().time()
        if isinstance(message, AskWeights) and reader is None:
            self._asked(channel, message)
        elif isinstance(message, WantPiece) and reader is not None and len(reader.wanted) < WINDOW:
            reader.wanted.append(message.piece)
            self._serve(reader)
        elif isinstance(message, PieceRead) and reader is not None and message.piece in reader.held:
            self._drop(reader.held.pop(message.piece))
            self._serve(reader)
        else:
            raise WireError(f"a reader of weights does not send {type(message).__name__} now")

    # --------------------------------------------------------------------------------------------------------- readers

    def _asked(self, channel: Channel, message: AskWeights) -> None:
        lot = self._lot
        if lot is None:
            if self._expecting:
                self._askers[channel] = message
            else:
                channel.send(WeightsRefused("it lends none"))
            return
        other = difference((message.fingerprint, message.config), (lot.fingerprint, lot.config))
        if other is not None:
            channel.send(WeightsRefused(other))
            return
        others = instead([Reader(one.name, one.addresses, one.referred) for one in self._readers.values()])
        if others is not None:
            for one in self._readers.values():
                one.referred += bool(others) and one.name == others[0].name
            channel.send(WeightsRefused("it feeds others", tuple(other.addresses for other in others)))
            return
        if self._agent is None:
            self._askers[channel] = message
            if self._making is None:
                self._making = asyncio.create_task(self._make_agent(), name="agent that lends weights")
            return
        try:
            connection = self._agent.connection()
        except PagesError as error:
            channel.send(WeightsRefused(str(error)))
            return
        assert channel.peer is not None
        now_s = asyncio.get_running_loop().time()
        self._readers[channel] = _Reader(channel, channel.peer.id, message.addresses, now_s)
        self._nobody.clear()
        layout = lot.shelf.layout
        files = tuple((file.name, file.size) for file in layout.files)
        path = (*lot.path, self._me.id)
        channel.send(
            WeightsLent(connection, self._node, files, layout.piece_bytes, lot.fingerprint, lot.config, path)
        )
        log.info(
            "%s reads its weights here, %.1f MB in %d pieces",
            channel.peer.id,
            layout.bytes / 1e6,
            layout.pieces,
        )

    def _ask_again(self) -> None:
        """Answers those who wait, as far as that is possible now."""
        askers, self._askers = self._askers, {}
        for channel, message in askers.items():
            self._asked(channel, message)

    def _refuse_all(self, reason: str) -> None:
        """Refuses those who wait."""
        for channel in self._askers:
            channel.send(WeightsRefused(reason))
        self._askers.clear()

    def _serve_all(self) -> None:
        for reader in list(self._readers.values()):
            self._serve(reader)

    def _serve(self, reader: _Reader) -> None:
        """Lends a reader what it wants, as far as it is there and the reader has not too much."""
        while reader.wanted and reader.wanted[0] < self._there and len(reader.held) < WINDOW:
            number = reader.wanted.popleft()
            try:
                self._lend(reader, number)
            except (PagesError, IndexError, OSError) as error:
                log.warning("piece %d of the weights cannot be lent: %s", number, error)
                self._part(reader, f"piece {number} cannot be lent: {error}")
                return

    def _part(self, reader: _Reader, reason: str) -> None:
        """Ends a reader's loans, and tells it why. Its memory stays registered until the connection has ended."""
        reader.channel.send(WeightsRefused(reason))
        reader.channel.close(reason)

    def _lend(self, reader: _Reader, number: int) -> None:
        assert self._lot is not None
        assert self._agent is not None
        if number in reader.held or number < 0:
            raise IndexError("it is no piece, or is lent already")
        shelf = self._lot.shelf
        piece = shelf.layout.piece(number)
        view = shelf.view(piece)
        hashed = self._digests.get(number)
        if hashed is None:
            hashed = self._digests[number] = digest(view)
        held = self._agent.hold(view)
        reader.held[number] = _Loan(held, shelf, piece)
        reader.channel.send(PieceLent(number, held.address, self._agent.describe(held), hashed))
        self.lent_bytes += len(view)
        self.lent_pieces += 1

    # ---------------------------------------------------------------------------------------------------------- memory

    async def _make_agent(self) -> None:
        """Makes the agent for those who wait. That takes part of a second, in which nobody may hear nothing of us."""
        try:
            self._agent = await asyncio.to_thread(self._new_agent, self._me.id)
        except PagesError as error:
            self._refuse_all(str(error))
        else:
            self._idle_since_s = asyncio.get_running_loop().time()
            self._ask_again()
        finally:
            self._making = None

    def _drop(self, loan: _Loan) -> None:
        if self._agent is not None and self._agent.drop(loan.held):
            loan.shelf.returned(loan.piece)

    def _drop_all(self, reader: _Reader) -> None:
        for loan in reader.held.values():
            self._drop(loan)
        reader.held.clear()

    def _end_agent(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    async def _look(self) -> None:
        """Ends readers that are quiet while they hold something, and the agent once there have been no readers for a
        while.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            for reader in list(self._readers.values()):
                if not reader.wanted and loop.time() - reader.heard_s > QUIET_S:
                    reader.channel.abort(f"nothing was heard for {QUIET_S:g} s")
            if not self._readers and loop.time() - self._idle_since_s > IDLE_S:
                self._end_agent()
