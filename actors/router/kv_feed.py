"""The router's end of the engines' KV events: it keeps the feed of each worker into the prefix index complete.

While some policy reads hits (`want`), the router asks each engine that announces the feature for the missing part of
its content. After a lost link that is everything from the next batch on; after a restart of the router, or for an
engine that was forgotten, it is all that the engine holds. The engine then goes on sending by itself. While no policy
reads hits, engines send nothing and the index does not change.

Where a number is missing, the router asks for the missing batches. If the engine no longer keeps these, it sends a
snapshot in parts. A question without an answer is repeated after `ASK_AGAIN_S`. Batches that arrive meanwhile go to the
index, which puts them in order (`policies.state.prefix_index`). Everything reaches the index as events, so that a
journal can replay it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.router.clock import clock_s
from actors.wire.channel import Channel
from actors.wire.kv import from_wire
from actors.wire.messages import KvEvents, KvReplay, KvState, KvStop
from policies.engine_model.blocks import Change, Stored
from policies.state import events as ev
from policies.state.prefix_index import PrefixIndex
from policies.state.reducer import ClusterState
from policies.state.views import Request, WorkerId

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
"""ASSUMPTION: seconds after which a question without an answer is repeated the first time."""

ASK_AGAIN_MOST_S = 60.0
"""Most seconds between two repetitions. Each one doubles the time: a question may cost the engine a whole snapshot."""


@dataclass(slots=True)
class _Source:
    """The engine behind one worker: its connection, the worker's rank there, and the open question with its time."""

    channel: Channel
    rank: int
    asked: KvReplay | None = None
    asked_s: float = 0.0
    ask_again_s: float = 0.0
    parts: list[Change] = field(default_factory=list)


class KvFeed:
    """The feeds of all workers. `apply(event)` feeds the reducer whose state is `state`. Messages over any
    other connection than the worker's present one are ignored.
    """

    def __init__(self, state: ClusterState, apply: Callable[[ev.Event], None]) -> None:
        self._state, self._apply = state, apply
        self._sources: dict[WorkerId, _Source] = {}
        self._batches = self._gaps = self._replays = self._snapshots = 0
        self._predicted_tokens = self._reported_tokens = 0
        self._wanted = False

    # ------------------------------------------------------------------------------------------------- workers

    def want(self, wanted: bool) -> None:
        """Sets whether some policy reads hits from now on."""
        if wanted == self._wanted:
            return
        self._wanted = wanted
        for worker, source in self._sources.items():
            if wanted:
                self._catch_up(worker, source)
            else:
                source.asked = None
                source.channel.send(KvStop(source.rank))

    def announced(self, worker: WorkerId, rank: int, channel: Channel) -> None:
        """Takes in the connection of a worker's engine; the reducer must know the worker already."""
        known = self._sources.get(worker)
        if known is not None and known.channel is channel:
            return  # announced again: its state changed
        source = self._sources[worker] = _Source(channel, rank)
        if self._wanted:
            self._catch_up(worker, source)

    def _catch_up(self, worker: WorkerId, source: _Source) -> None:
        """Asks for the content of the worker that the index lacks, and for all later batches."""
        index, rank = self._index(worker), source.rank
        position = index.position(worker) if index is not None else None
        if position is None:
            self._ask(source, KvReplay("", None, None, rank))
        else:
            self._ask(source, KvReplay(position[0], position[1], None, rank))

    def gone(self, worker: WorkerId) -> None:
        """Forgets a worker; the reducer has removed its content from the index."""
        self._sources.pop(worker, None)

    # ------------------------------------------------------------------------------------------------ messages

    def events(self, worker: WorkerId, channel: Channel, message: KvEvents) -> None:
        """Takes in one batch. Raises ValueError where the bytes of a hash are incomplete."""
        source = self._source(worker, channel)
        if source is None:
            return
        self._batches += 1
        changes = from_wire(message.changes)
        self._apply(ev.KvBatch(clock_s(), worker, message.epoch, message.seq, changes))
        self._look(worker, source)

    def state(self, worker: WorkerId, channel: Channel, message: KvState) -> None:
        """Takes in a part of a snapshot; the last part completes it. Raises ValueError as `events` does."""
        source = self._source(worker, channel)
        if source is None:
            return
        if message.part == 0:
            source.parts = []
        source.parts += from_wire(message.chains)
        if message.part < message.parts - 1:
            source.asked_s = time.monotonic()  # the answer is on its way
            return
        chains = tuple(chain for chain in source.parts if isinstance(chain, Stored))
        source.parts, source.asked = [], None
        self._snapshots += 1
        self._apply(ev.KvSnapshot(clock_s(), worker, message.epoch, message.next_seq, chains))
        self._look(worker, source)

    def prefill_routed(self, request: Request, worker: WorkerId, now_s: float) -> None:
        """Counts the hit that the index predicts for the prefill of a request on its chosen worker."""
        if request.block_hashes:
            hits = self._state.snapshot(now_s, ()).hits.tokens(request)
            self._predicted_tokens += hits.get(worker, 0)

    def prefilled(self, request: Request | None, cached_tokens: int) -> None:
        """Counts the hit that the prefill engine reports."""
        if request is not None and request.block_hashes:
            self._reported_tokens += cached_tokens

    def tick(self) -> None:
        """Repeats questions that were not answered; to be called a few times a second."""
        now_s = time.monotonic()
        for worker, source in self._sources.items():
            if source.asked is not None and now_s - source.asked_s > source.ask_again_s:
                asked, source.asked = source.asked, None
                ask_again_s = min(ASK_AGAIN_MOST_S, 2 * source.ask_again_s)
                if asked.first is None:
                    self._ask(source, asked)
                else:
                    self._look(worker, source)
                source.ask_again_s = ask_again_s

    def _look(self, worker: WorkerId, source: _Source) -> None:
        """Asks for the missing batches, unless a question is open already."""
        index = self._index(worker) if self._wanted else None
        hole = index.wants(worker) if index is not None else None
        if hole is None:
            if source.asked is not None and source.asked.first is not None:
                source.asked = None
        elif source.asked is None:
            self._gaps += 1
            log.info("KV events of %s: asking for %s", worker, hole)
            self._ask(source, KvReplay(hole.epoch, hole.first, hole.last, source.rank))

    def _ask(self, source: _Source, message: KvReplay) -> None:
        source.asked, source.asked_s, source.ask_again_s = message, time.monotonic(), ASK_AGAIN_S
        self._replays += message.first is not None
        source.channel.send(message)

    def _source(self, worker: WorkerId, channel: Channel) -> _Source | None:
        source = self._sources.get(worker)
        return source if source is not None and source.channel is channel else None

    def _index(self, worker: WorkerId) -> PrefixIndex | None:
        return self._state.prefix_index_of(worker)

    # ------------------------------------------------------------------------------------------------- figures

    def gauges(self) -> dict[str, float]:
        """Returns the size of the indexes of all groups."""
        indexes = self._state.prefix_indexes
        return {
            "prefix_index_blocks": float(sum(index.blocks for index in indexes)),
            "prefix_index_bytes": float(sum(index.memory_bytes() for index in indexes)),
            "prefix_index_feeds": float(len(self._sources)),
        }

    def totals(self) -> dict[str, float]:
        """Returns the totals since the start. They include, for requests with hashes, the prompt tokens that prefill
        engines were predicted to have cached, and those that they reported.
        """
        return {
            "kv_event_batches": float(self._batches),
            "kv_event_gaps": float(self._gaps),
            "kv_event_replays": float(self._replays),
            "kv_event_snapshots": float(self._snapshots),
            "prefill_hit_tokens_predicted": float(self._predicted_tokens),
            "prefill_hit_tokens_reported": float(self._reported_tokens),
            "prefix_index_refused_blocks": float(sum(i.refused for i in self._state.prefix_indexes)),
        }
