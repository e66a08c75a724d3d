"""The router's end of the engines' KV events: it keeps the feed of each worker into the prefix index complete.

While some policy reads hits (`want`), the router asks each engine that announces the feature for the content that the
index lacks. After a lost connection these are all batches from the next one on. After a restart of the router, or for
an engine that was forgotten, it is everything that the engine holds. The engine then sends all later batches unasked.
While no policy reads hits, engines send nothing and the index does not change.

If numbers are missing in the sequence of batches, the router asks for them. If the engine no longer keeps these
batches, it sends a snapshot in parts. A question without an answer is repeated after `ASK_AGAIN_S`. Batches that arrive
in the meantime go to the index, which puts them in order (`policies.state.prefix_index`). Everything reaches the index
as events, so that a journal can replay it.
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
from policies.state.prefix_index import PrefixIndex, bytes_of
from policies.state.reducer import ClusterState
from policies.state.views import Request, WorkerId

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
"""ASSUMPTION: seconds until a question without an answer is repeated for the first time."""

ASK_AGAIN_MOST_S = 60.0
"""Most seconds between two repetitions. The time doubles with each, since an answer may cost the engine a whole
snapshot."""


@dataclass(slots=True)
class _Source:
    """The engine behind one worker: its connection, the worker's rank there, the question that it has not answered yet
    with the time it was sent, and the parts of a snapshot that have arrived, with their bytes.
    """

    channel: Channel
    rank: int
    asked: KvReplay | None = None
    asked_s: float = 0.0
    ask_again_s: float = 0.0
    parts: list[Change] = field(default_factory=list)
    parts_bytes: int = 0


class KvFeed:
    """The feeds of all workers. `apply` takes the events for the reducer whose state is `state`. A message that did not
    come over a worker's present connection is ignored.
    """

    def __init__(self, state: ClusterState, apply: Callable[[ev.Event], None]) -> None:
        self._state, self._apply = state, apply
        self._sources: dict[WorkerId, _Source] = {}
        self._batches = self._gaps = self._replays = self._snapshots = 0
        self._predicted_tokens = self._reported_tokens = self._refused_blocks = 0
        self._wanted = False

    # ------------------------------------------------------------------------------------------------- workers

    def want(self, wanted: bool) -> None:
        """Sets whether some policy reads hits, and asks the engines to start or to stop sending their events."""
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
        """Takes in the connection of a worker's engine. The reducer must already know the worker."""
        known = self._sources.get(worker)
        if known is not None and known.channel is channel:
            return  # announced again for a new state
        source = self._sources[worker] = _Source(channel, rank)
        if self._wanted:
            self._catch_up(worker, source)

    def _catch_up(self, worker: WorkerId, source: _Source) -> None:
        """Asks for the worker's content that the index lacks, and for all later batches."""
        index, rank = self._index(worker), source.rank
        position = index.position(worker) if index is not None else None
        if position is None:
            self._ask(source, KvReplay("", None, None, rank))
        else:
            self._ask(source, KvReplay(position[0], position[1], None, rank))

    def gone(self, worker: WorkerId) -> None:
        """Forgets a worker whose content the reducer has removed from the index."""
        self._sources.pop(worker, None)

    # ------------------------------------------------------------------------------------------------ messages

    def events(self, worker: WorkerId, channel: Channel, message: KvEvents) -> None:
        """Takes in one batch of changes. Raises ValueError if the bytes of a hash are incomplete."""
        source = self._source(worker, channel)
        if source is None:
            return
        self._batches += 1
        changes = from_wire(message.changes)
        self._apply(ev.KvBatch(clock_s(), worker, message.epoch, message.seq, changes))
        self._look(worker, source)

    def state(self, worker: WorkerId, channel: Channel, message: KvState) -> None:
        """Takes in one part of a snapshot; the last part completes it. Parts for which no index has room are left out,
        so an engine that sends parts without end costs no more memory than one that sends a full index. Raises
        ValueError if the bytes of a hash are incomplete.
        """
        source = self._source(worker, channel)
        if source is None:
            return
        if message.part == 0:
            source.parts, source.parts_bytes = [], 0
        chains = from_wire(message.chains)
        source.parts_bytes += bytes_of(chains)
        if source.parts_bytes <= self._state.index_memory.content_max_bytes:
            source.parts += chains
        else:
            self._refused_blocks += sum(len(chain.hashes) for chain in chains if isinstance(chain, Stored))
        if message.part < message.parts - 1:
            source.asked_s = time.monotonic()  # the next part is on its way
            return
        stored = tuple(chain for chain in source.parts if isinstance(chain, Stored))
        source.parts, source.parts_bytes, source.asked = [], 0, None
        self._snapshots += 1
        self._apply(ev.KvSnapshot(clock_s(), worker, message.epoch, message.next_seq, stored))
        self._look(worker, source)

    def prefill_routed(self, request: Request, worker: WorkerId) -> None:
        """Counts the cached tokens that the index predicts for a request's prefill on the chosen worker."""
        if request.block_hashes:
            self._predicted_tokens += self._state.hits.tokens(request).get(worker, 0)

    def prefilled(self, request: Request | None, cached_tokens: int) -> None:
        """Counts the cached tokens that the prefill engine reports for a request."""
        if request is not None and request.block_hashes:
            self._reported_tokens += cached_tokens

    def tick(self) -> None:
        """Repeats the questions that have had no answer for too long; to be called a few times a second."""
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
        """Asks for the batches that the index lacks, unless a question is open already."""
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
        """Returns the size of the indexes of all groups and the number of feeds, for the router's metrics."""
        indexes = self._state.prefix_indexes
        return {
            "prefix_index_blocks": float(sum(index.blocks for index in indexes)),
            "prefix_index_bytes": float(self._state.index_memory.taken_bytes),
            "prefix_index_feeds": float(len(self._sources)),
        }

    def totals(self) -> dict[str, float]:
        """Returns the totals since the start, for the router's metrics. For requests with hashes they include the
        prompt tokens that prefill engines were predicted to have cached, and those that they reported as cached.
        """
        return {
            "kv_event_batches": float(self._batches),
            "kv_event_gaps": float(self._gaps),
            "kv_event_replays": float(self._replays),
            "kv_event_snapshots": float(self._snapshots),
            "prefill_hit_tokens_predicted": float(self._predicted_tokens),
            "prefill_hit_tokens_reported": float(self._reported_tokens),
            "prefix_index_refused_blocks": float(
                self._refused_blocks + sum(index.refused for index in self._state.prefix_indexes)
            ),
        }
