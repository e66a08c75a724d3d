"""The reader: an engine that starts reads its weights from another one, piece by piece, into its landing.

Sources are tried in turn: those that the router named, and before the next of them those to whom one of them points.
A new source goes on behind the pieces that are there. Whatever goes wrong, of which each step has a bound in time, the
next source is tried, and after the last one the loader takes the rest from disk.

    connect, answer      ANSWER_S each
    a piece is offered   OFFER_S: the source may read itself, or reads its disk
    a piece is read      `chunks.limit_s`
    a source is silent   `actors.wire.channel.SILENT_S`
"""

import asyncio
import collections
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from actors.engine.weights.chunks import ChunkReads
from actors.engine.weights.landing import Landing
from actors.engine.weights.pages import PagesAgent, PagesError, digest
from actors.flow.chunks import FLOOR_BYTES_PER_S
from actors.flow.client import ReadsClient
from actors.flow.reader import SILENT_S, ReaderConfig
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
from actors.wire.sockets import connect
from policies.weights.checkpoint import BadCheckpoint, Layout, WeightFile, difference

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Seconds for a source to take the connection, and again to answer. ASSUMPTION: it reads a fingerprint from its disk,
2 MiB in 512 places, in less."""

OFFER_S = 15.0
"""Seconds for a source to offer the next piece. ASSUMPTION: a source that reads itself has it by then, or its own
source is gone."""

STEP_S = 0.2
"""Seconds between two looks at the flow agent while nothing is read; it gives up a worker that is silent for 3 s."""

SLACK_S = 30.0
"""Seconds that all weights may take beside the time for their bytes at `FLOOR_BYTES_PER_S`; then disk is as good."""

MOST_TRIES = 16
"""Sources that are asked, referrals included."""


class NoWeights(Exception):
    """A source does not have the weights, or no source has. The message says why."""


class Referred(NoWeights):
    """A source has named others in its place."""


@dataclass(frozen=True, slots=True)
class Mine:
    """The identity of this engine's files (`checkpoint.difference`): a fingerprint, empty without files, and the hash
    of the model's configuration.
    """

    fingerprint: str
    config: str


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """The node's flow agent: its address (empty: none), the name of the node, and how long the agent may be silent."""

    agent: str = ""
    node: str = ""
    silent_s: float = SILENT_S


NO_AGENT = FlowSettings()


class Link:
    """A connection to one source, as messages that are waited for."""

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.channel: Channel
        self.ended = ""

    async def open(self, addresses: tuple[str, ...]) -> None:
        """Connects. Raises OSError, WireError, or NoWeights if that takes too long."""
        try:
            async with asyncio.timeout(ANSWER_S):
                self.channel = await connect(addresses, self._new_channel, self._me.tls)
        except TimeoutError:
            raise NoWeights(f"no connection within {ANSWER_S:g} s") from None

    async def next(self, kind: Any, limit_s: float, meanwhile: Callable[[], object]) -> Any:
        """Returns the next message, which must be of this type, or one of these. `meanwhile` runs several times a
        second. Raises NoWeights if it does not come within `limit_s`, or is another one.
        """
        until_s = time.monotonic() + limit_s
        while True:
            meanwhile()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise NoWeights(f"it did not answer within {limit_s:g} s")
            try:
                async with asyncio.timeout(min(left_s, STEP_S)):
                    message = await self._messages.get()
            except TimeoutError:
                continue
            if message is None:
                raise NoWeights(f"the connection ended: {self.ended}")
            if isinstance(message, kind):
                return message
            if isinstance(message, WeightsRefused):
                raise NoWeights(message.reason)
            raise NoWeights(f"it sent {type(message).__name__}")

    def _new_channel(self) -> Channel:
        return Channel(self._me, self._took, None, self._closed)

    def _took(self, channel: Channel, message: Message) -> None:
        self._messages.put_nowait(message)

    def _closed(self, channel: Channel, reason: str) -> None:
        self.ended = reason
        self._messages.put_nowait(None)


class WeightsReader:
    """One read of all weights. `opened` runs once the first source has promised them, with the layout and the ids of
    those from whom they come; `arrived` runs after each piece, with their number and the hash of the last one.
    """

    def __init__(
        self,
        me: Identity,
        mine: Mine,
        landing: Landing,
        flow: FlowSettings,
        opened: Callable[[WeightsLent], None],
        arrived: Callable[[int, bytes], None],
        lends_at: Callable[[], tuple[str, ...]],
        new_agent: Callable[[str], PagesAgent] = PagesAgent,
    ) -> None:
        self._me, self._mine, self._landing, self._flow = me, mine, landing, flow
        self._opened, self._arrived, self._lends_at, self._new_agent = opened, arrived, lends_at, new_agent
        self._lent: WeightsLent | None = None
        self._layout: Layout | None = None
        self._there = 0
        self._until_s = math.inf
        self._rests: set[asyncio.Task[None]] = set()
        self.read_bytes = 0
        self.peer = ""
        """The id of the last source."""
        name = f"{me.id}/weights"
        self._reads = ReadsClient(
            flow.agent, flow.node or me.id, name, me.secret, ReaderConfig(flow.silent_s)
        )

    async def run(self, sources: tuple[tuple[str, ...], ...]) -> None:
        """Reads everything. Raises NoWeights, with all reasons, if no source gives the rest."""
        todo, why = collections.deque(sources), []
        try:
            for _ in range(MOST_TRIES):
                if not todo:
                    break
                addresses = todo.popleft()
                try:
                    await self._from(addresses, todo)
                    return
                except (NoWeights, PagesError, BadCheckpoint, OSError, WireError) as error:
                    why.append(f"{' or '.join(addresses)}: {error}")
                    log.log(
                        logging.INFO if isinstance(error, Referred) else logging.WARNING,
                        "no weights from %s",
                        why[-1],
                    )
        finally:
            self._reads.close()
        raise NoWeights("; ".join(why) or "no engine is known that lends them")

    async def rest(self, limit_s: float | None) -> None:
        """Waits until nothing is read any more from sources that were given up, at most `limit_s`."""
        if self._rests:
            await asyncio.wait(self._rests, timeout=limit_s)

    async def _from(self, addresses: tuple[str, ...], todo: "collections.deque[tuple[str, ...]]") -> None:
        link = Link(self._me)
        await link.open(addresses)
        try:
            link.channel.send(AskWeights(self._mine.fingerprint, self._mine.config, self._lends_at()))
            answer = await link.next((WeightsLent, WeightsRefused), ANSWER_S, self._reads.step)
            if isinstance(answer, WeightsRefused):
                todo.extendleft(reversed(answer.instead))
                raise Referred(answer.reason) if answer.instead else NoWeights(answer.reason)
            self._take(answer)
            await self._all_pieces(link, answer)
        finally:
            link.channel.close("the reader of weights has ended")

    def _take(self, lent: WeightsLent) -> None:
        """Takes an offer, of which the first one makes room for the weights."""
        other = difference((self._mine.fingerprint, self._mine.config), (lent.fingerprint, lent.config))
        if other is not None:
            raise NoWeights(other)
        if self._me.id in lent.path:
            raise NoWeights("it reads from this engine")
        layout = Layout(tuple(WeightFile(*file) for file in lent.files), lent.piece_bytes)
        if self._lent is not None and (layout, lent.fingerprint) != (self._layout, self._lent.fingerprint):
            raise NoWeights("its checkpoint is not the one of which a part was read")
        if self._layout is None:
            free_bytes = psutil.virtual_memory().available
            if layout.bytes > free_bytes:
                raise NoWeights(
                    f"{layout.bytes / 1e9:.1f} GB of memory are needed, {free_bytes / 1e9:.1f} are free"
                )
            self._landing.open(layout)
            self._until_s = time.monotonic() + SLACK_S + layout.bytes / FLOOR_BYTES_PER_S
        self._lent, self._layout, self.peer = lent, layout, lent.path[-1] if lent.path else ""
        self._opened(lent)

    async def _all_pieces(self, link: Link, lent: WeightsLent) -> None:
        assert self._layout is not None
        # meanwhile the lender hears our pings
        agent = await asyncio.to_thread(self._new_agent, self._me.id)
        try:
            lender = agent.meet(lent.agent)
        except PagesError:
            agent.close()
            raise
        reads = ChunkReads(
            agent, lender, self._reads, (lent.node or self.peer, self._flow.node or self._me.id)
        )
        try:
            asked = self._there
            while self._there < self._layout.pieces:
                if time.monotonic() > self._until_s:
                    raise NoWeights("all of them would take too long")
                while asked < min(self._layout.pieces, self._there + WINDOW):
                    link.channel.send(WantPiece(asked))
                    asked += 1
                piece = await link.next(PieceLent, OFFER_S, self._reads.step)
                if piece.piece != self._there:
                    raise NoWeights(f"it offered piece {piece.piece} in place of {self._there}")
                view = self._landing.view(self._layout.piece(self._there))
                await reads.read(piece, view, lambda: link.ended)
                if digest(view) != piece.digest:
                    raise NoWeights(f"piece {piece.piece} is not what the lender has: its hash differs")
                link.channel.send(PieceRead(piece.piece))
                self._there += 1
                self.read_bytes += len(view)
                self._landing.arrived(self._there)
                self._arrived(self._there, piece.digest)
        finally:
            rest = asyncio.create_task(reads.rest(), name="rest of a read of weights")
            self._rests.add(rest)
            rest.add_done_callback(self._rests.discard)
