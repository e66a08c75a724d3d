"""The dispatcher takes one event and returns actions. The live router and the simulator use the same class.

It owns the reducer, the queue before prefill and the rules of docs/design.md 2. The policies choose among the workers
that these rules allow:

- Any work: a worker must be READY, its status fresh (`status_stale_s`), and it must not be quarantined
  (`policies.state.outliers`). A quarantined worker gets single requests as probes (`probes`). A WARM worker gets
  nothing, but requests wait for it to be activated where no other worker could serve them.
- Prefill: a prefill worker must compute fewer prompts than it has slots, its KV use with this prompt must stay within
  `kv_high_water` (a worker with no charge of ours is exempt), and its group must have a usable decode worker. A
  colocated worker must have room to decode the request instead, by the rule for decode. Without any prefill or
  colocated worker, decode workers compute prompts themselves (`RoutePrefill.degraded`), so that the loss of all prefill
  workers slows serving instead of ending it. A request with a `mode` goes only to workers that serve this mode; where
  there is none, it is rejected with 503. Where no worker is ready at all, it is rejected as well, but not before
  `absence_s` after the last one was lost.
- Sleep (`policies.state.standby`): in a fleet that is asleep or wakes, requests wait for the workers that come because
  of them, and `queue_timeout_s` begins when it has woken. A request whose mode none of those roles serves is rejected
  at once; all are when the wake fails.
- Decode: a worker must be of the KV's group, with free KV for what the prompt adds to its own plus `reserve_tokens`
  for each sequence (a worker without any sequence is exempt). It may have `overcommit_slots` sequences more than slots,
  if the policy weighs the queue that they form in the engine; for any other policy it must have the free slots
  (`feasibility`).
- Rescue: a pool entry whose lease is renewed no more and ends within `lease_margin_s` goes to the least loaded decode
  worker with KV room for what the prompt adds, even if that has no free slot, but only if it has fewer than
  `overcommit_slots` sequences beyond its slots. Without such a worker it is prefilled once more (at most `max_prefills`
  times in all) or rejected with 503.
- A queue that is full, of sequences or of prompt tokens, rejects with 429 what would be served last (for `none` the
  newest of the least urgent class), but no committed request (`ClusterState.is_committed`): a retry, one that migrates,
  or one that comes back after a preemption. A request that waited longer than `queue_timeout_s` is rejected with 503,
  whatever it is.
- Fairness (`sharing`): where requests of several tenants wait in a class, the one with the least counter has its turn,
  and the decode policy sees the pool entries of tenants within their share only, unless none of them fits anywhere. So
  it is with classes if they have counters (`class_ratio`). With the policy `vtc` a request of several choices begins
  with the slots that are free. The policy `none` does none of this.
- Ageing (`ageing`): with `class_ageing_s` a request that has waited for this time in the queue, or in the pool, is
  raised to the next more urgent class in which something waits there.
- Admission (`gate`): the admission policy may refuse a request with 429, at its arrival, at its turn, or in the pool.
  While the head of the queue is refused at its turn, because it is late, the newest request of its tenant and priority
  that is not refused goes first. A request that the policy holds keeps its turn: nobody passes it, of whatever tenant
  or class. It is sent in spite of that when it has waited for `HELD_SHARE` of `queue_timeout_s`, so that no hold ends
  in a rejection. At each tick all queued requests are judged as at their turn. The policy `open` does none of this, and
  no other one does while no request has an objective (`Gate.is_awake`).

Entries are served by (priority or counter of the class, tenant's counter, arrival), in the pool those first whose
prefill worker drains.
Nothing overtakes the head of the prefill queue, unless no ready worker serves its mode, or with `vtc`, unless only some
workers do: then it waits aside, and is tried again at each tick and each change of the workers, and with `vtc` when
room was freed. In the pool an entry that fits nowhere is passed over until it starves (`starvation_s`); then nothing
behind it is sent before it, for as long as it starves. Leases are renewed while entries wait (`policies.request.life`).

Most events change nothing for waiting requests, so each event wakes only the part that it may have helped:

    wakes                               the queue (`_queue_wakes`)            the pool (`_pool_wakes`)
    Tick, PoliciesChanged,              the head                              the whole pool
    StandbyChanged, workers came,
    went or changed
    slots or KV were given back         the head, if it fits that worker      the whole pool, if that worker decodes
                                                                              and may take a sequence
    an engine reported                  the head, if it fits that worker      the whole pool, if the last report was
                                                                              stale
    a request or entry came             the head, if it is new                the new entries (`PoolScan`)
    a starving entry left, or has
    missed its TTFT objective           -                                     the whole pool

Progress, forecasts, the network and its flows never make room, so they wake nothing; they count in the next decision,
as does a prompt that has become cached. A tick tries again where only time has passed, or where a policy declined. An
event scans at most `tick_entries` entries and sends or rescues at most `tick_admissions`. The next event of any kind
resumes where this one stopped (`pool_scan`).

A request at which a policy raises an unexpected exception is rejected with 500, because it would stop every request
behind it, and all others are decided as if it were not there.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from policies.admission.base import ADMITTED, AdmissionPolicy, Judgement, Verdict
from policies.admission.open import Open
from policies.admission.registry import admission_policy
from policies.dispatch.actions import Action, Aged, Reject, RouteDecode, RoutePrefill
from policies.dispatch.ageing import AgeWatch
from policies.dispatch.config import DispatchConfig
from policies.dispatch.feasibility import (
    FeasibleEntries,
    Room,
    WorkerPools,
    fresh,
    is_fresh,
    may_prefill,
    rooms_of,
)
from policies.dispatch.gate import Fleet, Gate
from policies.dispatch.kv_deadline import kv_due_s
from policies.dispatch.lease_watch import LeaseWatch, rescue
from policies.dispatch.lending import Lending
from policies.dispatch.pool_scan import Placement, PoolScan
from policies.dispatch.probes import first_probe, probe_decision
from policies.dispatch.sharing import Sharing
from policies.fairness.base import FairnessPolicy
from policies.fairness.none import NoFairness
from policies.fairness.registry import fairness_policy
from policies.routing.base import (
    Assignment,
    DecodePolicy,
    LooksAhead,
    Needs,
    PolicyError,
    PrefillPolicy,
    assign,
    check_overcommit,
    needs_of,
)
from policies.routing.netkv.network_term import transfer_intent
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.standby import AWAKE, Phase
from policies.state.views import Health, PoolEntry, Request, RequestId, Role, Snapshot, Worker, WorkerId

Judged = TypeVar("Judged")

_RETRY_ALL = (ev.Tick, ev.PoliciesChanged, ev.StandbyChanged)

WAKE_MARGIN_S = 10.0
"""Time beyond the limit of a wake for which requests wait for the autoscaler's word. ASSUMPTION: a restart of it."""

MOST_RETRY_AFTER_S = 60.0
"""Longest wait that a refusal names. ASSUMPTION: the load will have changed by then."""

# ASSUMPTION: a third of it is left to wait for a prefill worker, and for those that are before it in the queue
HELD_SHARE = 2.0 / 3.0
"""Share of `queue_timeout_s` for which an admission policy may hold a request."""

TAKE_ALL = Open()
AS_THEY_COME = NoFairness()


class Dispatcher:
    """The decisions of one router, by the rules of this module's docstring.

    Callers change it through `handle` only: everything that the dispatcher needs to know comes as an event. The
    constructor raises ValueError where the decode policy and the limits contradict each other.
    """

    def __init__(
        self,
        config: DispatchConfig,
        prefill: PrefillPolicy,
        decode: DecodePolicy,
        admission: AdmissionPolicy = TAKE_ALL,
        fairness: FairnessPolicy = AS_THEY_COME,
    ) -> None:
        check_overcommit(decode, config.overcommit_slots_of(decode))
        self.config = config
        self.prefill = prefill
        self.decode = decode
        self.admission = admission
        self.fairness = fairness
        self._settle()
        self.state = ClusterState()
        self._sharing = Sharing(self.state, fairness)
        self._queue = self._sharing.queue
        self._gate = Gate(self.state, admission)
        self.state.limit_outliers(config.outlier_limits)
        self.state.limit_indexes(config.prefix_index_bytes)
        self._rng = random.Random(config.seed)
        self._stuck_head: Request | None = None
        """The queue's head that fitted nowhere when it was last tried."""
        self._leases = LeaseWatch(self.state)
        self.raised = 0
        """Number of changes of a request's priority because it had waited long."""
        self._queue_ages, self._pool_ages = AgeWatch(self._queued_since), AgeWatch(self._pooled_since)
        self._lending = Lending(self.state)
        self._rescuing = False
        """Whether `tick_admissions` stopped the rescue of leases; the next event then resumes it."""
        self._scan = PoolScan(self.state, self._sharing.front)
        self._pools = WorkerPools.of({})
        self._pools_version = 0
        self._standby = AWAKE
        self._woken_s = -math.inf
        """When the fleet has woken, the latest time that this happened; waiting before it counts for no limit."""
        self._absent_since_s = -math.inf
        """When the last ready worker was lost, the latest time that this happened; minus infinity if it never did."""
        self._gap_s: float | None = None
        """Smoothed seconds between the ends of two requests, for Retry-After, without the time in which nothing was
        under way; None before the second end.
        """
        self._closed_at_s: float | None = None
        self._faults: list[PolicyError] = []
        """The unexpected exceptions of policies during the present event."""

    @property
    def sharing(self) -> Sharing:
        """How service is shared out, which the caller must not change."""
        return self._sharing

    @property
    def queue_size(self) -> int:
        """Number of requests that wait for a prefill worker."""
        return len(self._queue)

    @property
    def queued_sequences(self) -> int:
        """Number of sequences of the requests that wait for a prefill worker."""
        return self._queue.sequences

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens of the requests that wait for a prefill worker."""
        return self._queue.prompt_tokens

    @property
    def oldest_queued_s(self) -> float | None:
        """When the request that has waited longest for a prefill worker arrived; None when none waits."""
        return self._queue.oldest_s()

    @property
    def overcommit_slots(self) -> int:
        """Number of sequences that a decode worker may get beyond its slots, by the limits and the present policy."""
        return self._overcommit_slots

    @property
    def needs(self) -> Needs:
        """The inputs that the present policies read; the caller need not provide any others (`Needs`)."""
        return self._needs

    def judges(self, now_s: float) -> bool:
        """Whether the admission policy is asked about requests now (`Gate.is_awake`)."""
        return self._gate.is_awake(now_s)

    @property
    def horizon(self) -> int | None:
        """The decode steps for which the decode policy wants forecasts of departures; None if it reads no forecasts."""
        return self.decode.horizon if isinstance(self.decode, LooksAhead) else None

    def handle(self, event: ev.Event) -> list[Action]:
        """Applies one event and returns what is to be done now.

        Raises StaleEvent for an event that does not fit the state, and ValueError for a refused PoliciesChanged; then
        nothing has changed. Raises PolicyError when a policy breaks its contract or raises any other exception; its
        `decided` holds the actions that were decided, which are valid. A MemoryError is passed on: it says nothing
        about the policy or the request, and the state may be half changed.
        """
        if isinstance(event, ev.PoliciesChanged):
            self._change_policies(event)
        elif isinstance(event, ev.StandbyChanged):
            self._stand_by(event)
        revived = isinstance(event, ev.EngineStatus) and self._is_stale(event.worker, event.now_s)
        sharing = self._sharing
        if sharing.counts:
            sharing.settle(event)
        self.state.apply(event)
        if isinstance(event, ev.Tick) and self._gate.watches:
            self._gate.look(event.now_s)
        if isinstance(event, ev.PrefillDone):
            self._lending.prefilled(event.attempt_id)
            if sharing.counts:
                sharing.prefilled(event.attempt_id, event.cached_tokens)
        actions: list[Action] = []
        self._faults.clear()
        try:
            self._decide(event, revived, actions)
        except PolicyError as error:
            error.decided = tuple(actions)
            raise
        except MemoryError:
            raise
        except Exception as error:
            failed = PolicyError(f"the dispatcher failed: {error!r}")
            failed.decided = tuple(actions)
            raise failed from error
        if self._faults:
            fault = self._faults[0]
            fault.decided = tuple(actions)
            raise fault from fault.__cause__
        return actions

    def _decide(self, event: ev.Event, revived: bool, actions: list[Action]) -> None:
        """Decides what the event made possible. `revived` says that a report ended the silence of its worker."""
        now_s = event.now_s
        age_s = self.config.class_ageing_s
        if age_s is not None and isinstance(event, ev.Tick):
            self._age(now_s, age_s)
        entered = self.state.take_entered()
        if entered:
            self._leases.add(entered, self.config.lease_margin_s)
            if age_s is not None:
                self._watch_pool(entered, now_s, age_s)
        changed = self._workers_changed(now_s)
        retry_all = changed or revived or isinstance(event, _RETRY_ALL)
        self._take_in(event, now_s, actions)
        if self._rescuing or isinstance(event, ev.Tick):
            self._rescue_leases(now_s, actions)
        freed_workers = self.state.take_freed_workers()
        if retry_all or (self._gang is not None and freed_workers):
            self._queue.call_back()
        if not self._queue:
            self._stuck_head = None
        elif retry_all or self._queue_wakes(event, freed_workers):
            self._dispatch_prefill(now_s, actions)
        if self._sharing.counts:
            self._sharing.look_at_pool()
        if self.state.pool_size:
            room_came = retry_all or self._pool_wakes(freed_workers, now_s)
            self._scan.scan(
                room_came, entered, now_s, self.config, lambda some: self._place(some, now_s, actions)
            )

    def _age(self, now_s: float, age_s: float) -> None:
        """Raises requests that have waited long. Time for which the fleet slept does not count."""
        if self._standby.wakes:
            return
        most, queued, pooled = self.config.tick_entries, self._queue_ages, self._pool_ages
        for request, since_s, priority in queued.due(now_s, self._queue.priorities, most):
            if now_s < self._woken_s + age_s:
                queued.add(request, since_s, self._woken_s + age_s)
                continue
            raised = self._raise(request, now_s, priority)
            self._sharing.change_class(raised)
            queued.add(raised, since_s, now_s + age_s)
        for request, _, priority in pooled.due(now_s, self.state.pooled_priorities, most):
            # it comes into the pool anew, and is watched as such
            self._raise(request, now_s, priority)
        queued.tidy(len(self._queue))
        pooled.tidy(self.state.pool_size)

    def _watch_pool(self, entered: list[PoolEntry], now_s: float, age_s: float) -> None:
        """Watches the age of entries that came into the pool. One that was raised before is raised again later."""
        for entry in entered:
            since_s = entry.entered_s if self._aged(entry.request) is None else now_s
            self._pool_ages.add(entry.request, entry.entered_s, since_s + age_s)

    def _raise(self, request: Request, now_s: float, priority: int) -> Request:
        """Changes the priority of a request that waits, and returns the request as it is from now on."""
        self.raised += 1
        self.state.apply(ev.Aged(now_s, request.attempt_id, priority))
        raised = self.state.request(request.attempt_id)
        assert raised is not None
        return raised

    def _queued_since(self, attempt_id: RequestId) -> tuple[Request, float] | None:
        request = self._queue.find(attempt_id)
        return None if request is None else (request, request.arrived_s)

    def _pooled_since(self, attempt_id: RequestId) -> tuple[Request, float] | None:
        entry = self.state.find_waiting(attempt_id)
        return None if entry is None else (entry.request, entry.entered_s)

    def _aged(self, request: Request) -> Aged | None:
        """Returns how the priority of a request has changed by ageing."""
        asked = self.state.asked_priority(request.attempt_id)
        return None if asked is None else Aged(asked, request.terms.priority)

    def _take_in(self, event: ev.Event, now_s: float, actions: list[Action]) -> None:
        """Changes the queue by the event: by a request that came or ended, or by the time that has passed."""
        if isinstance(event, ev.Arrived):
            if self._closed_at_s is not None and self.state.in_flight == 1:
                # nothing could end while nothing was under way
                self._closed_at_s = now_s
            self._enqueue(event.request, now_s, actions)
        elif isinstance(event, ev.Closed):
            self._queue.remove(event.attempt_id)
            self._measure_closing(now_s)
        elif isinstance(event, ev.Tick):
            self._expire_queue(now_s, actions)
            if self._gate.is_awake(now_s):
                self._shed(now_s, actions)
        elif isinstance(event, ev.Adopted):
            self._sharing.saw(event.request)

    def _change_policies(self, event: ev.PoliciesChanged) -> None:
        """Replaces policies and limits, all or nothing: a wrong value raises before anything is replaced."""
        prefill, decode = self.prefill, self.decode
        if event.prefill is not None:
            prefill = prefill_policy(event.prefill.name, event.prefill.params)
        if event.decode is not None:
            decode = decode_policy(event.decode.name, event.decode.params)
        admission = self.admission
        if event.admission is not None:
            admission = admission_policy(event.admission.name, event.admission.params)
        fairness = self.fairness
        if event.fairness is not None:
            fairness = fairness_policy(event.fairness.name, event.fairness.params)
        config = self.config.changed(event.dispatch)
        check_overcommit(decode, config.overcommit_slots_of(decode))
        ageing = config.class_ageing_s != self.config.class_ageing_s
        self.config, self.prefill, self.decode, self.admission = config, prefill, decode, admission
        self._gate.change(admission)
        if fairness != self.fairness:
            self.fairness = fairness
            self._sharing.change(fairness)
        self._settle()
        self._leases.restart(self.config.lease_margin_s)
        if ageing:
            queued, pooled = self._queue.waiting(), self.state.waiting()
            self._queue_ages.restart([(one, one.arrived_s) for one in queued], config.class_ageing_s)
            self._pool_ages.restart([(one.request, one.entered_s) for one in pooled], config.class_ageing_s)
        self.state.limit_outliers(self.config.outlier_limits)
        self.state.limit_indexes(self.config.prefix_index_bytes)

    def _settle(self) -> None:
        """Settles what the policies read, what the decode policy is offered, and when entries starve."""
        lending = Needs.HITS | Needs.NETWORK | Needs.FLOWS if self.config.lend_prefixes else Needs.NONE
        self._needs = needs_of(self.prefill) | needs_of(self.decode) | self.admission.needs | lending
        self._needs |= self.fairness.needs
        self._overcommit = self.config.overcommit_for(self.decode)
        self._overcommit_slots = self.config.overcommit_slots_of(self.decode)
        self._starves_from_s = self.config.starves_from_s
        self._gang = self.fairness.gang_slots

    def _stand_by(self, event: ev.StandbyChanged) -> None:
        """Notes the fleet's phase; the limit of the queue begins when it has woken."""
        if self._standby.phase is not Phase.AWAKE and event.standby.phase is Phase.AWAKE:
            self._woken_s = event.now_s
        self._standby = event.standby

    # -------------------------------------------------------------------------------------------------- wake-ups

    def _workers_changed(self, now_s: float) -> bool:
        """Returns whether workers came, went or changed since the last event, and rebuilds the worker pools if so."""
        if self._pools_version == self.state.fleet_version:
            return False
        had_ready = self._pools.any_ready or not self._pools_version
        self._pools_version = self.state.fleet_version
        self._pools = WorkerPools.of(self.state.snapshot(now_s, ()).workers)
        if had_ready and not self._pools.any_ready:
            self._absent_since_s = now_s
        return True

    def _queue_wakes(self, event: ev.Event, freed_workers: set[WorkerId]) -> bool:
        """Whether to try the queue: its head was not tried yet, or fits a worker that has freed room or reported."""
        head = self._queue.head()
        if head is None or head is not self._stuck_head:
            return True
        reported = {event.worker} if isinstance(event, ev.EngineStatus) else set()
        return any(
            self._prefill_fits(head, worker, event.now_s) for worker in self._ready(freed_workers | reported)
        )

    def _pool_wakes(self, freed_workers: set[WorkerId], now_s: float) -> bool:
        """Whether to scan the whole pool: a decode worker has freed room and may take a sequence, or entries were not
        tried behind a starving one, and it starves no more or an entry has left since.
        """
        extra = self._overcommit_slots
        return self._scan.unblocked(now_s) or any(
            self.state.may_decode_more(worker, extra) for worker in freed_workers
        )

    def _is_stale(self, worker: WorkerId, now_s: float) -> bool:
        at_s = self.state.status_at_s(worker)
        return at_s is None or now_s - at_s > self.config.status_stale_s

    def _ready(self, workers: set[WorkerId]) -> list[Worker]:
        found = [self.state.worker(worker) for worker in workers]
        return [worker for worker in found if worker is not None and worker.health is Health.READY]

    # ----------------------------------------------------------------------------------------------------- queue

    def _enqueue(self, request: Request, now_s: float, actions: list[Action]) -> None:
        self._gate.came(request, now_s)
        self._sharing.push(request)
        most_tokens = self.config.max_queue_tokens
        limit = math.inf if most_tokens is None else most_tokens
        if self._queue.sequences > self.config.max_queue or self._queue.prompt_tokens > limit:
            refused = self._queue.beyond(self.config.max_queue, limit, request, self.state.is_committed)
            actions.extend([self._reject(one, 429, "queue_full", now_s) for one in refused])
            if request.attempt_id in refused:
                return
        if self.config.class_ageing_s is not None:
            due_s = request.arrived_s + self.config.class_ageing_s
            self._queue_ages.add(request, request.arrived_s, due_s)
        if self._gate.is_awake(now_s):
            judgement = self._judged(self._gate.arrived, request, request, self._fleet(), now_s, actions)
            if judgement is None:
                return
            if judgement.verdict is Verdict.REFUSE:
                actions.append(self._refuse(request.attempt_id, judgement, now_s))
                return
        if self._gate.watches:
            self._gate.admitted(request, now_s)

    def _fleet(self) -> Fleet:
        return Fleet(self._pools, self._standby, self._woken_s, self.config.status_stale_s, self._gang)

    def _judged(
        self,
        judge: Callable[[Judged, Snapshot, Fleet], Judgement],
        judged: Judged,
        request: Request,
        fleet: Fleet,
        now_s: float,
        actions: list[Action],
    ) -> Judgement | None:
        """Returns the judgement on a request, or on its entry in the pool. Returns None if the policy raised an
        exception at it; the request is rejected then.
        """
        try:
            return judge(judged, self.state.snapshot(now_s, ()), fleet)
        except (PolicyError, MemoryError):
            raise
        except Exception as error:
            actions.append(self._isolate(request.attempt_id, self.admission.name, error, now_s))
            return None

    def _refuse(self, attempt_id: RequestId, judgement: Judgement, now_s: float) -> Reject:
        """Rejects a request as the admission policy has judged; its wait is when another try may succeed."""
        rejected = self._reject(attempt_id, 429, judgement.reason, now_s, judgement.detail)
        retry_after_s = min(MOST_RETRY_AFTER_S, max(1.0, judgement.wait_s))
        return dataclasses.replace(rejected, retry_after_s=retry_after_s, admission=judgement)

    def _shed(self, now_s: float, actions: list[Action]) -> None:
        """Rejects what has become late while it waited, in the queue and among the first entries of the pool."""
        fleet = self._fleet()
        for request in self._queue.waiting():
            if request.terms.ttft_slo_s is not None:
                judgement = self._judged(self._gate.has_turn, request, request, fleet, now_s, actions)
                if judgement is not None and judgement.verdict is Verdict.REFUSE:
                    actions.append(self._refuse(request.attempt_id, judgement, now_s))
        for entry in self.state.waiting(None, self.config.tick_entries):
            if entry.request.terms.ttft_slo_s is not None:
                judgement = self._judged(self._gate.pooled, entry, entry.request, fleet, now_s, actions)
                if judgement is not None and judgement.verdict is Verdict.REFUSE:
                    actions.append(self._refuse(entry.request.attempt_id, judgement, now_s))

    def _expire_queue(self, now_s: float, actions: list[Action]) -> None:
        limit_s, reason = self.config.queue_timeout_s, "queue_timeout"
        if self._standby.wakes:
            # the autoscaler ends a wake that fails; this limit is for one that has died
            limit_s, reason = max(limit_s, self._standby.wake_limit_s + WAKE_MARGIN_S), "wake_timeout"
        for attempt_id in self._queue.overdue(now_s, limit_s, self._woken_s):
            actions.append(self._reject(attempt_id, 503, reason, now_s))

    def _reject(
        self, attempt_id: RequestId, status: int, reason: str, now_s: float, detail: str = ""
    ) -> Reject:
        turn, request = self._sharing.refused(attempt_id), self.state.request(attempt_id)
        aged = None if request is None else self._aged(request)
        self._queue.remove(attempt_id)
        if self._sharing.counts:
            self._sharing.closed(attempt_id, 0, finished=False)
        self.state.apply(ev.Closed(now_s, attempt_id, "rejected"))
        wait_s = (self._gap_s or 1.0) * max(1, len(self._queue))
        return Reject(attempt_id, status, reason, min(30.0, max(1.0, wait_s)), detail, turn=turn, aged=aged)

    def _isolate(self, attempt_id: RequestId, policy: str, error: Exception, now_s: float) -> Reject:
        """Rejects the request at which a policy raised an exception, and keeps the exception for `handle`."""
        fault = PolicyError(f"policy {policy} raised {error!r} at request {attempt_id}, which is rejected")
        fault.__cause__ = error
        self._faults.append(fault)
        return self._reject(attempt_id, 500, "policy_error", now_s)

    def _measure_closing(self, now_s: float) -> None:
        if self._closed_at_s is not None:
            gap_s = max(0.0, now_s - self._closed_at_s)
            self._gap_s = gap_s if self._gap_s is None else 0.9 * self._gap_s + 0.1 * gap_s
        self._closed_at_s = now_s

    # --------------------------------------------------------------------------------------------------- prefill

    def _dispatch_prefill(self, now_s: float, actions: list[Action]) -> None:
        self._stuck_head = None
        while (turn := self._next_turn(now_s, actions)) is not None:
            request, judgement = turn
            try:
                route = self._route_prefill(request, self.state.snapshot(now_s, ()), judgement)
            except (PolicyError, MemoryError):
                raise
            except Exception as error:
                actions.append(self._isolate(request.attempt_id, self.prefill.name, error, now_s))
                continue
            if route is None:
                reason = self._hopeless(request, now_s)
                if reason is None and self._pools.served(request) and not self._lets_pass(request):
                    break
                if reason is None:
                    self._queue.set_aside(request)
                    continue
                detail = self._standby.reason if reason == "wake_failed" else ""
                actions.append(self._reject(request.attempt_id, 503, reason, now_s, detail))
                continue
            self._queue.remove(request.attempt_id)
            actions.append(route)
        self._stuck_head = self._queue.head()

    def _next_turn(self, now_s: float, actions: list[Action]) -> tuple[Request, Judgement | None] | None:
        """Returns the request to be sent to a prefill worker now, with the judgement on it: the head of the queue, or
        the newest of its tenant and priority if the head is late and refused. None where none is to be sent now.
        """
        request = self._queue.head()
        if not self._gate.is_awake(now_s):
            return None if request is None else (request, None)
        fleet = self._fleet()
        while request is not None:
            judgement = self._judged(self._gate.has_turn, request, request, fleet, now_s, actions)
            if judgement is None:
                request = self._queue.head()
                continue
            if judgement.verdict is Verdict.HOLD and not self._held_for_long(request, now_s):
                return None
            if judgement.verdict is not Verdict.REFUSE:
                return request, None if judgement is ADMITTED else judgement
            actions.append(self._refuse(request.attempt_id, judgement, now_s))
            tenant = self._queue.tenant(request)
            request = self._queue.newest(request.terms.priority, tenant) or self._queue.head()
        return None

    def _held_for_long(self, request: Request, now_s: float) -> bool:
        """Whether a request has waited for longer than it may be held."""
        waited_s = now_s - max(request.arrived_s, self._woken_s)
        return waited_s > HELD_SHARE * self.config.queue_timeout_s

    def _lets_pass(self, request: Request) -> bool:
        """Whether a request that fits nowhere lets others pass: others may go where it may not."""
        restricted = request.terms.local or request.terms.mode is not None
        return restricted and self._gang is not None

    def _hopeless(self, request: Request, now_s: float) -> str | None:
        """Returns why waiting cannot help `request`, or None when it can: workers that were lost may be back soon.
        Those that sleep or do not wake were not lost.
        """
        lost = self._standby.phase is Phase.AWAKE
        back_soon = lost and now_s - self._absent_since_s < self.config.absence_s
        return None if back_soon else self._pools.hopeless(request, self._standby)

    def _route_prefill(
        self, request: Request, snapshot: Snapshot, judgement: Judgement | None = None
    ) -> RoutePrefill | None:
        probed = self._prefill_probe(request, snapshot)
        if probed is not None:
            worker, decision, degraded = probed, probe_decision(probed, snapshot.now_s), False
        else:
            candidates, degraded = self._prefill_candidates(request, snapshot)
            if not candidates:
                return None
            decision = self.prefill.choose_prefill(request, candidates, snapshot, self._rng)
            chosen = next((w for w in candidates if w.id == decision.worker), None)
            if chosen is None:
                raise PolicyError(
                    f"policy {self.prefill.name} chose {decision.worker}, which is no candidate"
                )
            worker = chosen
        colocated = worker.role is not Role.PREFILL
        prefix = None
        # a request that was failed before may have done it, and is not given to one more engine
        if self.config.lend_prefixes and probed is None and not colocated and not request.avoid:
            lenders = self._pools.lenders(worker)
            alive = fresh(snapshot, lenders, self.config.status_stale_s)
            prefix = self._lending.decide(request, worker, alive, snapshot, self.config.fetch_config)
        fetches = prefix is not None and prefix.fetch
        turn = self._sharing.prefill_routed(request, worker.id) if self._sharing.counts else None
        self.state.apply(ev.PrefillRouted(snapshot.now_s, request.attempt_id, worker.id, colocated, fetches))
        waited_s = snapshot.now_s - request.arrived_s
        aged = self._aged(request)
        return RoutePrefill(
            request.attempt_id, decision, colocated, degraded, waited_s, prefix, judgement, turn, aged
        )

    def _prefill_probe(self, request: Request, snapshot: Snapshot) -> Worker | None:
        """Returns a quarantined worker that this prompt is to try, or None."""
        for worker_id in self.state.probes_due(snapshot.now_s):
            worker = snapshot.workers[worker_id]
            if self._pools.may_probe(request, worker) and self._prefill_fits(request, worker, snapshot.now_s):
                return worker
        return None

    def _prefill_candidates(self, request: Request, snapshot: Snapshot) -> tuple[list[Worker], bool]:
        ids, degraded = self._pools.for_prefill(request)
        if request.avoid:
            ids = tuple(worker for worker in ids if worker not in request.avoid) or ids
        workers = [snapshot.workers[worker] for worker in ids]
        return self._prefill_fitting(request, workers, snapshot.now_s), degraded

    def _prefill_fits(self, request: Request, worker: Worker, now_s: float) -> bool:
        return bool(self._prefill_fitting(request, [worker], now_s))

    def _prefill_fitting(self, request: Request, workers: list[Worker], now_s: float) -> list[Worker]:
        """Returns the workers that may compute this prompt now."""
        if self._gang is not None and request.slots > self._gang:
            request = dataclasses.replace(request, slots=self._gang)
        if self._sharing.counts:
            workers = [w for w in workers if w.role is not Role.PREFILL or self._is_behind(w)]
        config, hits = self.config, self.state.hits
        stale_s, high_water, reserve = config.status_stale_s, config.kv_high_water, config.reserve_tokens
        return [w for w in workers if may_prefill(request, w, now_s, stale_s, high_water, reserve, hits)]

    def _is_behind(self, worker: Worker) -> bool:
        """Whether a prefill worker has so little in work that it gets more while several tenants share it."""
        if worker.prefilling_tokens < self.fairness.ahead_tokens:
            return True
        token_s = self.state.prefill_s_per_token(worker.id)
        return token_s is not None and worker.prefilling_tokens * token_s < self.fairness.ahead_s

    # ---------------------------------------------------------------------------------------------------- decode

    def _place(self, entries: list[PoolEntry], now_s: float, actions: list[Action]) -> Placement:
        """Sends entries to the workers that the policy chooses, until nothing fits or `tick_admissions` is reached."""
        left, blocked_by = self.config.tick_admissions, None
        entries = self._send_probes(entries, now_s, actions)
        sharing, kept_back = self._sharing, True
        while True:
            entries, others, limits = sharing.within(entries, all_of_them=not kept_back)
            snapshot = self._shown(entries, now_s)
            rooms = self._rooms(snapshot)
            begun = self._begun(entries, rooms)
            feasible = FeasibleEntries(begun, rooms, self._starves_from_s, now_s)
            try:
                assigned = self._assign(feasible, snapshot)[:left] if feasible.placeable() else ()
            except (PolicyError, MemoryError):
                raise
            except Exception:
                left = self._place_singly(entries, now_s, left, actions)
                return Placement(not left, any(self._rooms(snapshot).values()), blocked_by)
            if limits and not kept_back:
                limits = sharing.limits([self.state.pool_entry(one.attempt_id).request for one in assigned])
            sent = set()
            for assignment in assigned:
                if not limits or sharing.may_send(self.state.pool_entry(assignment.attempt_id), limits):
                    actions.append(self._route_decode(assignment, snapshot))
                    sent.add(assignment.attempt_id)
            left -= len(sent)
            blocked_by = blocked_by or feasible.blocked_by
            if not sent and others and not blocked_by and any(rooms.values()):
                # nothing of those within their share fits, or is wanted: room is not left to nobody
                entries, kept_back = others, False
                continue
            left_here = feasible.left(sent)
            if begun is not entries:
                left_here = [self.state.pool_entry(entry.request.attempt_id) for entry in left_here]
            entries = left_here if blocked_by or not others else [*left_here, *others]
            if not (sent and entries and left):
                return Placement(not left, any(rooms.values()), blocked_by)

    def _begun(self, entries: Sequence[PoolEntry], rooms: Mapping[str, Room]) -> Sequence[PoolEntry]:
        """Returns the entries as a decode policy sees them: a request of several choices with as many of them as there
        are free slots at one worker, if it may begin with these (`FairnessPolicy.gang_slots`).
        """
        gang = self._gang
        if gang is None or all(entry.request.slots <= gang for entry in entries):
            return entries
        shown = []
        for entry in entries:
            request, room = entry.request, rooms.get(entry.group)
            slots = min(request.slots, max(gang, 0 if room is None else room.most_slots))
            if slots < request.slots:
                entry = dataclasses.replace(entry, request=dataclasses.replace(request, slots=slots))
            shown.append(entry)
        return shown

    def _place_singly(self, entries: list[PoolEntry], now_s: float, left: int, actions: list[Action]) -> int:
        """Sends at most `left` entries after the policy has raised at some of them, and rejects those at which it
        raises alone. Returns how many more may be sent.
        """
        for entry in entries:
            if not left:
                break
            snapshot = self._shown((entry,), now_s)
            rooms = self._rooms(snapshot)
            feasible = FeasibleEntries(self._begun((entry,), rooms), rooms, self._starves_from_s, now_s)
            if not feasible.placeable():
                continue
            try:
                assigned = self._assign(feasible, snapshot)
            except (PolicyError, MemoryError):
                raise
            except Exception as error:
                actions.append(self._isolate(entry.request.attempt_id, self.decode.name, error, now_s))
                continue
            actions.extend(self._route_decode(assignment, snapshot) for assignment in assigned)
            left -= len(assigned)
        return left

    def _send_probes(self, entries: list[PoolEntry], now_s: float, actions: list[Action]) -> list[PoolEntry]:
        """Sends one entry to each quarantined decode worker that is to be tried; returns the entries that are left."""
        config = self.config
        for worker_id in self.state.probes_due(now_s):
            snapshot = self.state.snapshot(now_s, entries)
            worker = snapshot.workers[worker_id]
            if worker.role is not Role.DECODE or not is_fresh(worker, now_s, config.status_stale_s):
                continue
            probe = first_probe(entries, worker, config.reserve_tokens, snapshot.hits)
            if probe is not None:
                decision = probe_decision(worker, now_s)
                actions.append(self._route_decode(Assignment(probe.request.attempt_id, decision), snapshot))
                entries = [entry for entry in entries if entry is not probe]
        return entries

    def _shown(self, entries: Sequence[PoolEntry], now_s: float) -> Snapshot:
        """Returns the snapshot on which a policy places `entries`."""
        return self.state.snapshot(now_s, entries, self._overcommit_slots, self.config.overdue_by_slo)

    def _rooms(self, snapshot: Snapshot) -> dict[str, Room]:
        config = self.config
        return rooms_of(snapshot, self._pools, config.reserve_tokens, config.status_stale_s, self._overcommit)

    def _assign(self, feasible: FeasibleEntries, snapshot: Snapshot) -> tuple[Assignment, ...]:
        """Returns the policy's assignments. Raises PolicyError when one of them is not feasible."""
        assigned = assign(self.decode, feasible, snapshot, self._rng)
        for assignment in assigned:
            worker = assignment.decision.worker
            if not feasible.allows(assignment.attempt_id, worker):
                raise PolicyError(
                    f"policy {self.decode.name} sent {assignment.attempt_id} to {worker}: not feasible"
                )
        return assigned

    def _route_decode(self, assignment: Assignment, snapshot: Snapshot) -> RouteDecode:
        """Carries out an assignment. `snapshot` is the one on which the policy decided, so the transfer intents of one
        round do not count each other's transfers.
        """
        entry, now_s = self.state.pool_entry(assignment.attempt_id), snapshot.now_s
        intent = transfer_intent(entry, snapshot.workers[assignment.decision.worker], snapshot)
        turn = self._sharing.decode_routed(entry.request) if self._sharing.counts else None
        self.state.apply(ev.DecodeRouted(now_s, assignment.attempt_id, assignment.decision.worker))
        decision, waited_s = assignment.decision, now_s - entry.entered_s
        due_s = kv_due_s(entry, decision, now_s, self.config.lease_margin_s)
        aged = self._aged(entry.request)
        return RouteDecode(assignment.attempt_id, decision, waited_s, intent, due_s, turn, aged)

    # ---------------------------------------------------------------------------------------------------- leases

    def _rescue_leases(self, now_s: float, actions: list[Action]) -> None:
        left = self.config.tick_admissions
        while left and (entry := self._leases.due(now_s)) is not None:
            # in either case the entry leaves the pool
            try:
                actions.append(self._rescue(entry, now_s))
            except (PolicyError, MemoryError):
                raise
            except Exception as error:
                actions.append(self._isolate(entry.request.attempt_id, self.prefill.name, error, now_s))
            left -= 1
        self._rescuing = self._leases.due(now_s) is not None

    def _rescue(self, entry: PoolEntry, now_s: float) -> Action:
        snapshot, request = self.state.snapshot(now_s, (entry,)), entry.request
        if now_s < request.deadline_s:
            ids = self._pools.decode_by_group.get(entry.group, ())
            workers = fresh(snapshot, ids, self.config.status_stale_s)
            decision = rescue(entry, workers, self.config.overcommit_slots, snapshot.hits)
            if decision is not None and now_s < entry.lease_until_s:
                return self._route_decode(Assignment(request.attempt_id, decision), snapshot)
            if self.state.prefills(request.attempt_id) < self.config.max_prefills:
                again = self._route_prefill(request, snapshot)
                if again is not None:
                    return again
        return self._reject(request.attempt_id, 503, "pool_timeout", now_s)


__all__ = ["Action", "DispatchConfig", "Dispatcher", "Reject", "RouteDecode", "RoutePrefill"]
