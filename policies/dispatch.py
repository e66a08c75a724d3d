"""The dispatcher: one event in, actions out. The same object is for the live router and the simulator.

It owns the reducer, the queue before prefill and the rules of DESIGN section 2; the policies choose among the workers
that these rules leave:

- prefill: READY, status fresh (a stale or missing one counts as 100 % KV use), KV use with this prompt within
  `kv_high_water` (a worker with no charge of ours always may), fewer than its slots computing, and a decode worker of
  its group alive. Colocated workers need a free slot and room as well. Without any prefill or colocated worker,
  decode workers compute prompts themselves (`Route.degraded`), so that a lost prefill tier slows serving instead of
  ending it. A request with a `mode` gets workers of that kind only, else 503.
- decode: READY, of the KV's group, enough free slots, and free KV for the prompt plus `reserve_tokens` a sequence.
- a pool entry whose lease ends within `lease_margin_s`: the least loaded decode worker with KV room, even without a
  slot; else prefilled once more (at most `max_prefills` in all); else rejected with 503.
- a full queue rejects the least urgent request with 429; one that waited longer than `queue_timeout_s` gets 503.

Entries are served by (priority, arrival). Nothing overtakes the head of the prefill queue; in the pool an entry that
fits nowhere is passed over, until it is older than `starvation_s`: then nothing younger of its priority is sent
before it.
"""

import dataclasses
import heapq
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.routing.base import (
    Assignment,
    Decision,
    DecodePolicy,
    PolicyError,
    PrefillPolicy,
    Ranked,
    Reason,
)
from policies.routing.network import transfer_intent
from policies.routing.oracle import TransferIntent
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.reducer import ClusterState, LiveStage
from policies.state.views import Health, Mode, PoolEntry, Request, RequestId, Role, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Limits of the dispatcher. Times in s. Raises ValueError for a value out of range."""

    max_queue: int = 1024
    queue_timeout_s: float = 60.0
    kv_high_water: float = (
        0.9  # ASSUMPTION: BalanceRoute D.1 has "a configurable threshold" and gives no value
    )
    status_stale_s: float = 3.0
    lease_margin_s: float = 8.0  # ASSUMPTION: the slowest pull we want to survive, of vLLM's 30 s lease
    starvation_s: float = 2.0  # ASSUMPTION
    reserve_tokens: int = 16
    overcommit_slots: int = 0  # sequences that a decode worker may get above its slots (BalanceRoute D.6)
    max_prefills: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        checks = [
            (self.max_queue >= 1, "max_queue must be >= 1"),
            (self.queue_timeout_s > 0, "queue_timeout_s must be > 0"),
            (0 < self.kv_high_water <= 1, "kv_high_water must be in (0, 1]"),
            (self.status_stale_s > 0, "status_stale_s must be > 0"),
            (self.lease_margin_s >= 0, "lease_margin_s must be >= 0"),
            (self.starvation_s >= 0, "starvation_s must be >= 0"),
            (self.reserve_tokens >= 0, "reserve_tokens must be >= 0"),
            (self.overcommit_slots >= 0, "overcommit_slots must be >= 0"),
            (self.max_prefills >= 1, "max_prefills must be >= 1"),
        ]
        for ok, message in checks:
            if not ok:
                raise ValueError(f"dispatch: {message}")

    def changed(self, fields: Mapping[str, Any]) -> "DispatchConfig":
        """A copy with these fields. Raises ValueError naming what is unknown, of the wrong type or out of range."""
        now = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "seed"}
        for name, value in fields.items():
            if name not in now:
                raise ValueError(f"dispatch: {name!r} cannot be changed at run time; {', '.join(now)} can")
            kinds = (int,) if type(now[name]) is int else (int, float)
            if type(value) not in kinds:
                wanted = "a whole number" if kinds == (int,) else "a number"
                raise ValueError(f"dispatch: {name} is {value!r}: it must be {wanted}")
        return dataclasses.replace(self, **fields)


@dataclass(frozen=True, slots=True)
class RoutePrefill:
    """Compute `rid` on the chosen worker. `colocated`: decode there as well. `degraded`: by a decode worker."""

    rid: RequestId
    decision: Decision
    colocated: bool
    degraded: bool
    waited_s: float


@dataclass(frozen=True, slots=True)
class RouteDecode:
    """Decode `rid` on the chosen worker, which pulls the KV. `intent`: what that puts on the network."""

    rid: RequestId
    decision: Decision
    waited_s: float
    intent: TransferIntent


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not serve `rid` now; its charges are given back already."""

    rid: RequestId
    status: int
    reason: str
    retry_after_s: float


Action = RoutePrefill | RouteDecode | Reject


class Dispatcher:
    """See the module's docstring. `handle` is the only entry; everything it needs to know comes as an event."""

    def __init__(self, config: DispatchConfig, prefill: PrefillPolicy, decode: DecodePolicy) -> None:
        self.config = config
        self.prefill = prefill
        self.decode = decode
        self.state = ClusterState()
        self._rng = random.Random(config.seed)
        self._heap: list[tuple[int, int, RequestId]] = []
        self._seq = 0
        self._queued: dict[RequestId, int] = {}  # rid -> its sequence number; the heap may hold dead entries
        self._gap_s: float | None = None  # smoothed time between two closings, for Retry-After
        self._closed_at_s: float | None = None

    @property
    def queue_size(self) -> int:
        """Requests that wait for a prefill worker."""
        return len(self._queued)

    def handle(self, event: ev.Event) -> list[Action]:
        """Applies one event and returns what is to be done now. Raises StaleEvent if it does not fit and ValueError for
        a refused PoliciesChanged (nothing changed), PolicyError (which carries what was decided before it).
        """
        if isinstance(event, ev.PoliciesChanged):
            self._change_policies(event)
        self.state.apply(event)
        now_s = event.now_s
        actions: list[Action] = []
        try:
            if isinstance(event, ev.Arrived):
                self._enqueue(event.request, now_s, actions)
            elif isinstance(event, ev.Closed):
                self._queued.pop(event.rid, None)
                self._measure_closing(now_s)
            elif isinstance(event, ev.Tick):
                self._expire_queue(now_s, actions)
                self._rescue_leases(now_s, actions)
            if self._queued:
                self._dispatch_prefill(now_s, actions)
            if self.state.pool_size:
                self._dispatch_decode(now_s, actions)
        except PolicyError as error:
            error.decided = tuple(actions)
            raise
        return actions

    def _change_policies(self, event: ev.PoliciesChanged) -> None:
        """All or nothing: what is wrong raises before anything is replaced."""
        prefill, decode = self.prefill, self.decode
        if event.prefill is not None:
            prefill = prefill_policy(event.prefill.name, event.prefill.params)
        if event.decode is not None:
            decode = decode_policy(event.decode.name, event.decode.params)
        self.config = self.config.changed(event.dispatch)
        self.prefill, self.decode = prefill, decode

    # ----------------------------------------------------------------------------------------------------- queue

    def _enqueue(self, request: Request, now_s: float, actions: list[Action]) -> None:
        self._seq += 1
        self._queued[request.rid] = self._seq
        heapq.heappush(self._heap, (request.priority, self._seq, request.rid))
        if len(self._queued) <= self.config.max_queue:
            return
        loser = max(self._queued, key=lambda rid: (self._request(rid).priority, self._queued[rid]))
        actions.append(self._reject(loser, 429, "queue_full", now_s))

    def _head(self) -> RequestId | None:
        while self._heap:
            _, seq, rid = self._heap[0]
            if self._queued.get(rid) == seq:
                return rid
            heapq.heappop(self._heap)
        return None

    def _expire_queue(self, now_s: float, actions: list[Action]) -> None:
        limit_s = self.config.queue_timeout_s
        late = [
            rid
            for rid in self._queued
            if now_s - (request := self._request(rid)).arrived_s > limit_s or now_s > request.deadline_s
        ]
        actions.extend(self._reject(rid, 503, "queue_timeout", now_s) for rid in late)

    def _reject(self, rid: RequestId, status: int, reason: str, now_s: float) -> Reject:
        self._queued.pop(rid, None)
        self.state.apply(ev.Closed(now_s, rid, "rejected"))
        wait_s = (self._gap_s or 1.0) * max(1, len(self._queued))
        return Reject(rid, status, reason, min(30.0, max(1.0, wait_s)))

    def _measure_closing(self, now_s: float) -> None:
        if self._closed_at_s is not None:
            gap_s = max(0.0, now_s - self._closed_at_s)
            self._gap_s = gap_s if self._gap_s is None else 0.9 * self._gap_s + 0.1 * gap_s
        self._closed_at_s = now_s

    def _request(self, rid: RequestId) -> Request:
        request = self.state.request(rid)
        assert request is not None, f"{rid} is queued but not live"
        return request

    # --------------------------------------------------------------------------------------------------- prefill

    def _dispatch_prefill(self, now_s: float, actions: list[Action]) -> None:
        while (rid := self._head()) is not None:
            snapshot = self.state.snapshot(now_s)
            request = self._request(rid)
            route = self._route_prefill(request, snapshot)
            if route is None:
                reason = _no_engine(request, snapshot)
                if reason is not None:
                    actions.append(self._reject(rid, 503, reason, now_s))
                    continue
                break
            heapq.heappop(self._heap)
            del self._queued[rid]
            actions.append(route)

    def _route_prefill(self, request: Request, snapshot: Snapshot) -> RoutePrefill | None:
        candidates, degraded = self._prefill_candidates(request, snapshot)
        if not candidates:
            return None
        decision = self.prefill.choose(request, candidates, snapshot, self._rng)
        worker = next((w for w in candidates if w.id == decision.worker), None)
        if worker is None:
            raise PolicyError(f"policy {self.prefill.name} chose {decision.worker}, which is no candidate")
        colocated = worker.role is not Role.PREFILL
        self.state.apply(ev.PrefillRouted(snapshot.now_s, request.rid, worker.id, colocated))
        waited_s = snapshot.now_s - request.arrived_s
        return RoutePrefill(request.rid, decision, colocated, degraded, waited_s)

    def _prefill_candidates(self, request: Request, snapshot: Snapshot) -> tuple[list[Worker], bool]:
        ready, split, whole = _ready_kinds(snapshot)
        if request.local or request.mode is Mode.COLOCATED:
            split = []
        if request.mode is Mode.DISAGGREGATED:
            whole = []
        degraded = not split and not whole and request.mode is None
        if degraded:
            whole = [w for w in ready if w.role is Role.DECODE]
        tier = split + whole
        kept = [w for w in tier if w.id not in request.avoid] or tier
        fits = [w for w in kept if self._prefill_fits(request, w, snapshot.now_s)]
        return sorted(fits, key=lambda w: w.id), degraded and not request.local

    def _prefill_fits(self, request: Request, worker: Worker, now_s: float) -> bool:
        if worker.status_at_s is None or now_s - worker.status_at_s > self.config.status_stale_s:
            return False
        if worker.role is not Role.PREFILL:
            return self._decode_fits(request, worker)
        if worker.prefilling >= worker.slots:
            return False
        used = worker.kv_tokens + worker.foreign_kv_tokens + request.prompt_tokens
        return worker.kv_tokens == 0 or used <= self.config.kv_high_water * worker.kv_capacity_tokens

    # ---------------------------------------------------------------------------------------------------- decode

    def _decode_fits(self, request: Request, worker: Worker) -> bool:
        return _has_room(request, worker, self.config.reserve_tokens, 0)

    def _dispatch_decode(self, now_s: float, actions: list[Action]) -> None:
        while self.state.pool_size:
            snapshot = self.state.snapshot(now_s)
            feasible = self._decode_feasible(snapshot)
            if not any(workers for _, workers in feasible):
                break
            assignments = self.decode.assign(feasible, snapshot, self._rng)
            if not assignments:
                break
            allowed = {entry.request.rid: workers for entry, workers in feasible}
            for assignment in assignments:
                if all(w.id != assignment.decision.worker for w in allowed.get(assignment.rid, ())):
                    raise PolicyError(
                        f"policy {self.decode.name} sent {assignment.rid} to {assignment.decision.worker}: not feasible"
                    )
                actions.append(self._route_decode(assignment, snapshot))

    def _decode_feasible(self, snapshot: Snapshot) -> list[tuple[PoolEntry, Sequence[Worker]]]:
        ready = [w for w in snapshot.workers.values() if w.health is Health.READY and w.role is Role.DECODE]
        ready.sort(key=lambda w: w.id)
        free = [w for w in ready if w.slots + self.config.overcommit_slots > w.slots_used]
        if not free:
            return []
        entries = sorted(snapshot.pool, key=lambda e: (e.request.priority, e.entered_s, e.request.rid))
        result: list[tuple[PoolEntry, Sequence[Worker]]] = []
        rooms: dict[str, _Room] = {}
        for entry in entries:
            if entry.group not in rooms:
                rooms[entry.group] = _Room([w for w in free if w.group == entry.group], self.config)
            fits = rooms[entry.group].for_request(entry.request)
            avoid = entry.request.avoid
            kept = ([w for w in fits if w.id not in avoid] or fits) if avoid else fits
            result.append((entry, kept))
            if not kept and snapshot.now_s - entry.entered_s > self.config.starvation_s:
                break
        return result

    def _route_decode(self, assignment: Assignment, snapshot: Snapshot) -> RouteDecode:
        """`snapshot`: what the decision saw; of a batch, the intents do not see each other."""
        entry, now_s = self.state.pool_entry(assignment.rid), snapshot.now_s
        intent = transfer_intent(entry, snapshot.workers[assignment.decision.worker], snapshot)
        self.state.apply(ev.DecodeRouted(now_s, assignment.rid, assignment.decision.worker))
        return RouteDecode(assignment.rid, assignment.decision, now_s - entry.entered_s, intent)

    # ---------------------------------------------------------------------------------------------------- leases

    def _rescue_leases(self, now_s: float, actions: list[Action]) -> None:
        pool = self.state.snapshot(now_s).pool
        due = [
            e
            for e in pool
            if now_s >= min(e.lease_until_s - self.config.lease_margin_s, e.request.deadline_s)
        ]
        for entry in due:
            actions.append(self._rescue(entry, now_s))

    def _rescue(self, entry: PoolEntry, now_s: float) -> Action:
        snapshot, request = self.state.snapshot(now_s), entry.request
        if now_s < request.deadline_s:
            room = [
                w
                for w in snapshot.workers.values()
                if w.role is Role.DECODE
                and w.health is Health.READY
                and w.group == entry.group
                and w.free_kv_tokens >= request.prompt_tokens
            ]
            if room and now_s < entry.lease_until_s:
                ranked = sorted(room, key=lambda w: (w.slots_used / w.slots, w.id))
                ranking = tuple(
                    Ranked(w.id, w.slots_used / w.slots, {"slot_usage": w.slots_used / w.slots})
                    for w in ranked
                )
                decision = Decision(ranked[0].id, ranking, Reason.LEASE_RESCUE)
                return self._route_decode(Assignment(request.rid, decision), snapshot)
            if self.state.prefills(request.rid) < self.config.max_prefills:
                again = self._route_prefill(request, snapshot)
                if again is not None:
                    return again
        return self._reject(request.rid, 503, "pool_timeout", now_s)


def _ready_kinds(snapshot: Snapshot) -> tuple[list[Worker], list[Worker], list[Worker]]:
    """READY workers: all, the prefill ones that some decode worker can pull from, the colocated ones."""
    ready = [worker for worker in snapshot.workers.values() if worker.health is Health.READY]
    decode_groups = {worker.group for worker in ready if worker.role is Role.DECODE}
    split = [w for w in ready if w.role is Role.PREFILL and w.group in decode_groups]
    return ready, split, [w for w in ready if w.role is Role.COLOCATED]


def _no_engine(request: Request, snapshot: Snapshot) -> str | None:
    """Why waiting cannot help `request`: no READY worker, or none of its mode. None: it can."""
    ready, split, whole = _ready_kinds(snapshot)
    if not ready:
        return "no_engine"
    if request.mode is None:
        return None
    return None if (whole if request.mode is Mode.COLOCATED else split) else f"no_{request.mode}_engine"


def _has_room(request: Request, worker: Worker, reserve_tokens: int, overcommit_slots: int) -> bool:
    """Slots and KV for a request that decodes there; a worker without any sequence takes one of any size."""
    slots = min(request.slots, worker.slots)
    if worker.slots + overcommit_slots - worker.slots_used < slots:
        return False
    need = request.prompt_tokens + reserve_tokens * slots
    return worker.slots_used == 0 or worker.free_kv_tokens >= need


class _Room:
    """Which workers of one group have room for a pool entry, each list made once: entries that fit the same workers
    share one object, so that a pool of P and G workers cost P log G and not P * G.
    """

    def __init__(self, workers: list[Worker], config: DispatchConfig) -> None:
        self._workers, self._config = workers, config
        self._fewest_slots = min((w.slots for w in workers), default=0)
        self._rooms = sorted(w.free_kv_tokens for w in workers if w.slots_used)
        self._lists: dict[tuple[int, int], list[Worker]] = {}

    def for_request(self, request: Request) -> list[Worker]:
        reserve, extra = self._config.reserve_tokens, self._config.overcommit_slots
        if request.slots > self._fewest_slots:  # its need differs from worker to worker
            return [w for w in self._workers if _has_room(request, w, reserve, extra)]
        need = request.prompt_tokens + reserve * request.slots
        key = (bisect_left(self._rooms, need), request.slots)  # equal for all needs between two rooms
        if key not in self._lists:
            self._lists[key] = [w for w in self._workers if _has_room(request, w, reserve, extra)]
        return self._lists[key]


__all__ = ["Action", "DispatchConfig", "Dispatcher", "LiveStage", "Reject", "RouteDecode", "RoutePrefill"]
