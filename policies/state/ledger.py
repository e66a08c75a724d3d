"""The ledger of requests and workers, with the only way to change what a request charges.

Every charge (prefill in progress, KV tokens, decode slots, pool entry) belongs to exactly one `LiveRequest` record and
is a function of that record (`_book`). A change of stage takes the old charges back and adds the new ones, so a counter
cannot drift, whatever ends the request.

    stage         charged to the prefill worker                     charged to the decode worker
    QUEUED        -                                                 -
    PREFILLING    1 prefilling, its tokens, prompt KV tokens        (colocated: slots, on the same worker)
    POOLED        prompt KV tokens                                  -
    TRANSFERRING  prompt KV tokens                                  slots, prompt KV tokens
    DECODING      -                                                 slots, prompt + generated KV tokens

A prefill worker is also charged `sending` from POOLED to TRANSFERRING, and the transfer itself while TRANSFERRING. A
decode worker is also charged the departure of every request that has a forecast. KV tokens are charged for every
request, because each reads its own. The tokens in blocks that requests of the worker share are counted beside them
(`held_blocks`), because these blocks are in memory once. A request shares those that its worker has cached when it is
sent there, and on a prefill worker those that the engine reports as cached when the prompt is done.

At every moment a worker's charges are those of the requests that name it. A request may name a worker that is not
known: a router that has restarted learns of requests before it learns of their engines, and a link may break and come
back. Nothing is charged then, and everything when the worker comes (`appeared`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from policies.network.oracle import Oracle
from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.charges import Held, LiveRequest, Load, SlotDepartures
from policies.state.outliers import Outliers
from policies.state.pool import Pool
from policies.state.prefix_index import IndexMemory, PrefixIndex
from policies.state.views import Health, PoolEntry, Request, RequestId, WorkerId
from policies.state.waiting import Waiting


@dataclass(slots=True)
class Ledger:
    """The mutable memory behind `ClusterState`: the handlers of events change it, queries read it.

    `dirty` holds the workers that changed since the last snapshot, `freed_workers` the workers where slots or KV were
    given back since the last `take_freed_workers`.
    """

    live: dict[RequestId, LiveRequest] = field(default_factory=dict)
    loads: dict[WorkerId, Load] = field(default_factory=dict)
    dirty: set[WorkerId] = field(default_factory=set)
    freed_workers: set[WorkerId] = field(default_factory=set)
    pool: Pool = field(default_factory=Pool)
    last_chosen: dict[str, WorkerId] = field(default_factory=dict)
    oracle: Oracle | None = None
    flow_reports: dict[str, ev.FlowsReported] = field(default_factory=dict)
    """The latest reports of flow agents, by node; old ones are dropped when another one comes."""
    prefix: dict[str, PrefixIndex] = field(default_factory=dict)
    """Prefix indexes by engine group."""
    index_memory: IndexMemory = field(default_factory=IndexMemory)
    """The memory of all of them."""
    queued: Waiting = field(default_factory=Waiting)
    """Requests in stage QUEUED, in sums."""
    without_slot: Waiting = field(default_factory=Waiting)
    """Requests whose prompt is computed now or waits in the pool, and that hold no decode slot, in sums."""
    hit_memo: dict[RequestId, tuple[int, dict[WorkerId, int]]] = field(default_factory=dict)
    refused_items: int = 0
    """Number of items of ProgressedMany that did not fit, since the start."""
    refused: list[RequestId] = field(default_factory=list)
    """Requests of the items of the last ProgressedMany that did not fit."""
    departures: SlotDepartures = field(default_factory=SlotDepartures)
    fleet_version: int = 0
    now_s: float = 0.0
    """Time of the present event."""
    outliers: Outliers = field(init=False)

    def __post_init__(self) -> None:
        self.outliers = Outliers(self.loads, self.dirty)

    def need(self, attempt_id: RequestId, *stages: Stage) -> LiveRequest:
        """Returns the request. Raises StaleEvent when it is unknown or in none of `stages` (none given: any stage)."""
        live = self.live.get(attempt_id)
        if live is None:
            raise ev.StaleEvent(f"request {attempt_id} is not known (closed, or from before a restart)")
        if stages and live.stage not in stages:
            raise ev.StaleEvent(
                f"request {attempt_id} is in stage {live.stage.value}: the event does not fit"
            )
        return live

    def need_worker(self, worker: WorkerId) -> Load:
        """Returns the worker's record. Raises StaleEvent when the worker is unknown."""
        load = self.loads.get(worker)
        if load is None:
            raise ev.StaleEvent(f"worker {worker} is not known")
        return load

    def move(
        self,
        live: LiveRequest,
        stage: Stage,
        prefill_worker: WorkerId | None = None,
        decode_worker: WorkerId | None = None,
    ) -> None:
        """Changes a request's stage and workers: takes its old charges back and adds the new ones.

        A request's stage is changed nowhere else.
        """
        if live.prefill_worker and (live.stage is Stage.PREFILLING or prefill_worker != live.prefill_worker):
            self.freed_workers.add(live.prefill_worker)
        if live.decode_worker and decode_worker != live.decode_worker:
            self.freed_workers.add(live.decode_worker)
        self._book(live, -1)
        before, waited_in = (live.prefill_worker, live.decode_worker), self._waiting_in(live)
        if live.stage is Stage.POOLED:
            self.pool.remove(live.request.attempt_id)
        if stage is Stage.QUEUED or stage is Stage.PREFILLING:
            live.tokens, live.finishes_at_tokens, live.held = 0, None, None
        live.stage, live.prefill_worker, live.decode_worker = stage, prefill_worker, decode_worker
        if prefill_worker is not None or decode_worker is not None:
            self._book(live, +1)
        waits_in = self._waiting_in(live)
        if waits_in is not waited_in:
            if waited_in is not None:
                waited_in.count(live.request, -1)
            if waits_in is not None:
                waits_in.count(live.request, +1)
        if live.request.block_hashes:
            self._book_blocks(live, before)

    def _waiting_in(self, live: LiveRequest) -> Waiting | None:
        """Returns the sums that count a request which waits in the queue or for a decode slot; None: it waits for
        neither.
        """
        stage = live.stage
        if stage is Stage.QUEUED:
            return self.queued
        if stage is Stage.POOLED or (stage is Stage.PREFILLING and live.decode_worker is None):
            return self.without_slot
        return None

    def tell_tenants_apart(self, by_tenant: bool, class_ratio: float | None = None) -> None:
        """Sets whether what waits is also known by tenant, which costs time with each request, and how service is
        shared among classes (`Waiting`); counts it anew.
        """
        self.queued, self.without_slot = Waiting(by_tenant, class_ratio), Waiting(by_tenant, class_ratio)
        for live in self.live.values():
            waits_in = self._waiting_in(live)
            if waits_in is not None:
                waits_in.count(live.request, +1)
        self.pool.tell_tenants_apart(by_tenant)

    def shared(self, live: LiveRequest, worker: WorkerId, blocks: int) -> None:
        """Notes that the engine of a worker that the request names has found its first `blocks` blocks in its cache."""
        load, before = self.loads.get(worker), live.hit_blocks.get(worker, 0)
        blocks = min(blocks, len(live.request.block_hashes))
        if load is None or blocks <= before:
            return
        load.blocks.share(live.request, before, blocks)
        live.hit_blocks[worker] = blocks
        self.dirty.add(worker)
        self.freed_workers.add(worker)

    def cache_known(self, worker: WorkerId) -> None:
        """Counts the blocks that requests of a worker share by its cache, which has become known as a whole. Before,
        each request that was adopted had copies of its own.
        """
        index = self.prefix[self.loads[worker].up.group]
        for live in self.live.values():
            at_sender = live.prefill_worker == worker and live.stage is not Stage.PREFILLING
            if at_sender or (live.decode_worker == worker and live.stage is Stage.DECODING):
                self.shared(live, worker, index.blocks_held(worker, live.request.block_hashes))

    def appeared(self, load: Load) -> None:
        """Adds a worker that was not known, with the charges and pool entries of the requests that name it."""
        worker = load.up.worker
        self.loads[worker] = load
        named = [live for live in self.live.values() if worker in (live.prefill_worker, live.decode_worker)]
        for live in named:
            self._book(live, +1, worker)
            self.enter_pool(live)
            if live.decode_worker == worker:
                self._book_transfer(live, +1)
        # a request shares the blocks of one that shares less
        for live in sorted(named, key=lambda live: live.hit_blocks.get(worker, 0)):
            live.hit_blocks[worker] = load.blocks.add(live.request, live.hit_blocks.get(worker, 0))

    def vanished(self, worker: WorkerId) -> None:
        """Removes a worker with its charges and pool entries. The requests go on naming it, as it may come back."""
        for live in self.live.values():
            if live.prefill_worker == worker:
                self.pool.remove(live.request.attempt_id)
            if live.decode_worker == worker:
                self._book_transfer(live, -1)
        self.outliers.forget(worker)
        del self.loads[worker]

    def enter_pool(self, live: LiveRequest) -> None:
        """Puts a request that is in stage POOLED into the pool, where it waits for a decode worker.

        Nothing happens in another stage, and as long as the worker that holds the KV is not known.
        """
        sender = self.loads.get(live.prefill_worker) if live.prefill_worker else None
        if live.stage is Stage.POOLED and live.held is not None and sender is not None:
            entry = PoolEntry(live.request, sender.up.worker, sender.up.group, *live.held)
            self.pool.add(replace(entry, leaving=True) if sender.health is Health.DRAINING else entry)

    def set_health(self, load: Load, health: Health) -> None:
        """Changes a worker's health. The KV that a draining worker holds for others goes first."""
        load.health = health
        self.pool.leave(load.up.worker, health is Health.DRAINING)

    def hold(self, live: LiveRequest, held: Held) -> None:
        """Notes what a request in stage POOLED holds, and puts it into the pool."""
        live.held = held
        self.enter_pool(live)

    def renew(self, live: LiveRequest, lease_until_s: float, now_s: float) -> None:
        """Notes a longer lease on what a request in stage POOLED holds. Its place in the pool stays."""
        assert live.held is not None
        live.held = live.held._replace(lease_until_s=lease_until_s, renewed_s=now_s)
        self.pool.renew(live.request.attempt_id, lease_until_s, now_s)

    def serve_as(self, live: LiveRequest, priority: int) -> None:
        """Changes the priority of a request that waits in the queue or in the pool."""
        before, waits_in = live.request, self._waiting_in(live)
        if live.asked_priority is None:
            live.asked_priority = before.terms.priority
        live.request = replace(before, terms=before.terms._replace(priority=priority))
        if waits_in is not None:
            waits_in.count(before, -1)
            waits_in.count(live.request, +1)
        if live.stage is Stage.POOLED:
            self.pool.change(live.request)

    def forecast(self, live: LiveRequest, finishes_at_tokens: float | None) -> None:
        """Sets the generated tokens of one sequence at which the request is expected to end; None: it stays."""
        load = self.loads.get(live.decode_worker) if live.decode_worker else None
        if load is not None and live.finishes_at_tokens is not None:
            load.departures.book(live, -1)
        live.finishes_at_tokens = finishes_at_tokens
        if load is not None:
            if finishes_at_tokens is not None:
                load.departures.book(live, +1)
            self.dirty.add(load.up.worker)

    def _book(self, live: LiveRequest, sign: int, only: WorkerId | None = None) -> None:
        """Adds (+1) or takes back (-1) the present charges of `live`, by the table in the module's docstring.

        With `only` nothing but this worker's charges change.
        """
        stage, request = live.stage, live.request
        prefill = self.loads.get(live.prefill_worker) if live.prefill_worker else None
        decode = self.loads.get(live.decode_worker) if live.decode_worker else None
        if prefill is not None and (only is None or live.prefill_worker == only):
            prefill.kv_tokens += sign * request.prompt_tokens
            prefill.booked_kv_tokens += sign * request.prompt_tokens
            if stage is Stage.PREFILLING:
                prefill.prefilling += sign
                prefill.prefilling_tokens += sign * request.prompt_tokens
                prefill.fetching += sign * live.fetches
                prefill.standing.prefills(prefill.computing, self.now_s)
            elif stage is Stage.POOLED or stage is Stage.TRANSFERRING:
                prefill.sending += sign
                self._book_transfer(live, sign)
            self.dirty.add(prefill.up.worker)
        if decode is not None and (only is None or live.decode_worker == only):
            decode.slots_used += sign * request.slots
            if stage is not Stage.PREFILLING:
                decode.decoding += sign * request.slots
            if decode is not prefill:  # a colocated prompt is charged once
                decode.kv_tokens += sign * (request.prompt_tokens + live.tokens)
                decode.booked_kv_tokens += sign * (request.prompt_tokens + live.tokens)
            if stage is Stage.DECODING:
                decode.standing.decodes(sign * request.slots, self.now_s)
            if live.finishes_at_tokens is not None:
                decode.departures.book(live, sign)
            self.dirty.add(decode.up.worker)

    def _book_blocks(self, live: LiveRequest, before: tuple[WorkerId | None, WorkerId | None]) -> None:
        """Moves the blocks of `live` from the workers `before` to those that it names now. Workers that it goes on to
        name keep them.
        """
        named, request = (live.prefill_worker, live.decode_worker), live.request
        for worker in dict.fromkeys(before):
            if worker is not None and worker not in named:
                hits = live.hit_blocks.pop(worker, 0)
                if worker in self.loads:
                    self.loads[worker].blocks.remove(request, hits)
        for worker in dict.fromkeys(named):
            load = self.loads.get(worker) if worker is not None and worker not in before else None
            if load is not None:
                live.hit_blocks[load.up.worker] = load.blocks.add(request, self._hits_in_use(load, request))

    def _hits_in_use(self, load: Load, request: Request) -> int:
        """Returns the number of blocks at the prompt's head that a worker has cached and a request there uses."""
        index, held = self.prefix.get(load.up.group), load.blocks.blocks_held(request)
        return index.blocks_held(load.up.worker, request.block_hashes, held) if index and held else 0

    def _book_transfer(self, live: LiveRequest, sign: int) -> None:
        """Adds (+1) or takes back (-1) the transfer of `live` at its sender, if both ends are known."""
        sender = self.loads.get(live.prefill_worker) if live.prefill_worker else None
        if sender is None or live.stage is not Stage.TRANSFERRING:
            return
        if live.decode_worker is None or live.decode_worker not in self.loads:
            return
        key = (live.decode_worker, live.request.terms.priority)
        count = sender.transfers.get(key, 0) + sign
        if count:
            sender.transfers[key] = count
        else:
            del sender.transfers[key]
        sender.transfers_view = None
        self.dirty.add(sender.up.worker)


Handlers = dict[type, Callable[[Ledger, Any], None]]
"""Handlers by type of event; each applies one event to a ledger."""
