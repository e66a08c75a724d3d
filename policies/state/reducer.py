"""The only memory of the cluster, for the live router and the simulator: it takes events and gives snapshots
(docs/design.md 1).

The `ledger` holds what is remembered and what each request charges. `request_events` says how the events of a request's
life change it, `worker_events` how the events of workers, caches and network do. This module answers the dispatcher's
queries and passes each event to its handler.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.request.stage import Stage
from policies.state import events as ev
from policies.state import request_events, worker_events
from policies.state.charges import view_of
from policies.state.ledger import Handlers, Ledger
from policies.state.outliers import OutlierLimits
from policies.state.pool import Line, PoolKey, pool_key
from policies.state.prefix_index import IndexHits, IndexMemory, PrefixIndex
from policies.state.standing import Figure, Standing, Work
from policies.state.views import (
    NO_HITS,
    Health,
    PoolEntry,
    PrefixHits,
    Request,
    RequestId,
    Role,
    Snapshot,
    Worker,
    WorkerId,
)
from policies.state.waiting import Backlog


@dataclass(slots=True)
class ClusterState:
    """The cluster as the router knows it: `apply(event)` changes it, `snapshot(now_s)` shows it.

    An event that does not fit raises `StaleEvent` and changes nothing. `take_freed_workers`, `take_entered` and
    `fleet_version` report what changed since they were last read, so that a caller can skip decisions that would come
    out as before.
    """

    _ledger: Ledger = field(default_factory=Ledger)
    _views: dict[WorkerId, Worker] = field(default_factory=dict)

    # --------------------------------------------------------------------------------------------------- queries

    def snapshot(
        self,
        now_s: float,
        pool: Sequence[PoolEntry] | None = None,
        overcommit_slots: int = 0,
        overdue_by_slo: bool = False,
    ) -> Snapshot:
        """Returns a frozen view of the cluster; it shares unchanged workers with the view before.

        `pool` limits the view to these pool entries (None: all entries), so that its cost does not grow with a backlog.
        `overcommit_slots` and `overdue_by_slo` are passed on to the policies.
        """
        ledger = self._ledger
        if ledger.dirty:
            views, joined = dict(self._views), not ledger.dirty <= self._views.keys()
            for worker in ledger.dirty:
                load = ledger.loads.get(worker)
                if load is None:
                    views.pop(worker, None)
                else:
                    views[worker] = view_of(load)
            # workers are sorted by id: in another order sums over them would differ in a replay's last digits
            self._views = dict(sorted(views.items())) if joined else views
            ledger.dirty.clear()
        shown = tuple(self.waiting()) if pool is None else tuple(pool)
        return Snapshot(
            now_s,
            self._views,
            shown,
            dict(ledger.last_chosen),
            ledger.oracle,
            self.hits,
            ledger.pool.typical,
            overcommit_slots,
            ledger.departures.tokens_each,
            overdue_by_slo,
        )

    @property
    def hits(self) -> PrefixHits:
        """The prefix cache hits of the present state; the view is valid until the next event."""
        ledger = self._ledger
        return IndexHits(ledger.prefix, ledger.loads, ledger.hit_memo) if ledger.prefix else NO_HITS

    def worker(self, worker: WorkerId) -> Worker | None:
        """Returns the present view of one worker; None when the worker is gone."""
        load = self._ledger.loads.get(worker)
        if load is None:
            return None
        return view_of(load) if worker in self._ledger.dirty else self._views[worker]

    def may_decode_more(self, worker: WorkerId, overcommit_slots: int) -> bool:
        """Whether a worker is a READY decode worker with a sequence less than its slots and `overcommit_slots` more."""
        load = self._ledger.loads.get(worker)
        if load is None or load.up.role is not Role.DECODE or load.health is not Health.READY:
            return False
        return load.up.slots + overcommit_slots > load.slots_used

    def status_at_s(self, worker: WorkerId) -> float | None:
        """Returns the time of a worker's last report; None before the first, and for an unknown worker."""
        load = self._ledger.loads.get(worker)
        return None if load is None or load.status is None else load.status.now_s

    def flow_report(self, node: str, now_s: float) -> ev.FlowsReported | None:
        """Returns the latest report of a node's flow agent; None where there is none, or none that is fresh."""
        report = self._ledger.flow_reports.get(node)
        return None if report is None or now_s - report.now_s > worker_events.FLOWS_STALE_S else report

    def waiting(self, after: PoolKey | None = None, most: int | None = None) -> list[PoolEntry]:
        """Returns the first `most` pool entries (None: all) behind the key `after` (None: from the front), in the order
        in which they should be served.
        """
        return self._ledger.pool.waiting(after, most)

    def first_of(self, line: Line, most: int) -> list[PoolEntry]:
        """Returns the first `most` pool entries of one tenant in one class, in the order in which they should be
        served.
        """
        return self._ledger.pool.first_of(line, most)

    def tell_tenants_apart(self, by_tenant: bool, class_ratio: float | None = None) -> None:
        """Sets whether the state knows what waits by tenant as well, for `first_of`, `take_turned_lines`,
        `queued_before` and `without_slot_before`, and how service is shared among classes, for the last two. At first
        it does not, and more urgent classes get all.
        """
        self._ledger.tell_tenants_apart(by_tenant, class_ratio)

    @property
    def shares_among_classes(self) -> bool:
        """Whether a less urgent class gets service while a more urgent one waits."""
        return self._ledger.queued.class_ratio is not None

    def requests(self) -> list[Request]:
        """Returns all requests, in the order in which they came."""
        return [live.request for live in self._ledger.live.values()]

    def take_turned_lines(self) -> list[tuple[Line, bool]]:
        """Returns the tenants that began (True) or ceased to have entries in a class of the pool since the last call,
        in this order. The first call after `tell_tenants_apart` has all that have entries.
        """
        return self._ledger.pool.take_turned()

    def take_freed_workers(self) -> set[WorkerId]:
        """Returns the ids of the workers where slots or KV were given back since the last call."""
        freed, self._ledger.freed_workers = self._ledger.freed_workers, set()
        return freed

    def take_entered(self) -> list[PoolEntry]:
        """Returns the entries that came into the pool since the last call and are still in it, oldest first."""
        return self._ledger.pool.take_entered()

    def prefix_index(self, group: str) -> PrefixIndex | None:
        """Returns the prefix index of an engine group; None before the group's first KV event."""
        return self._ledger.prefix.get(group)

    def prefix_index_of(self, worker: WorkerId) -> PrefixIndex | None:
        """Returns the prefix index of a worker's group; None before the group's first KV event, and for an unknown
        worker.
        """
        load = self._ledger.loads.get(worker)
        return None if load is None else self._ledger.prefix.get(load.up.group)

    @property
    def prefix_indexes(self) -> tuple[PrefixIndex, ...]:
        """The prefix indexes of all engine groups."""
        return tuple(self._ledger.prefix.values())

    @property
    def index_memory(self) -> IndexMemory:
        """The memory of the prefix indexes."""
        return self._ledger.index_memory

    def limit_indexes(self, max_bytes: int) -> None:
        """Sets the memory that the prefix indexes of all groups may take. Content beyond it stays until its engines
        evict it.
        """
        self._ledger.index_memory.max_bytes = max_bytes

    def request(self, attempt_id: RequestId) -> Request | None:
        live = self._ledger.live.get(attempt_id)
        return live.request if live else None

    def asked_priority(self, attempt_id: RequestId) -> int | None:
        """Returns the priority with which a request came, if it has changed since (`Aged`); else None."""
        live = self._ledger.live.get(attempt_id)
        return live.asked_priority if live else None

    def stage(self, attempt_id: RequestId) -> Stage | None:
        live = self._ledger.live.get(attempt_id)
        return live.stage if live else None

    def generated(self, attempt_id: RequestId) -> int:
        """Returns the tokens that a request is known to have generated; 0 for an unknown request."""
        live = self._ledger.live.get(attempt_id)
        return live.tokens if live else 0

    @property
    def usual_output_tokens(self) -> float | None:
        """Output tokens that the workers generate for each sequence that ends, of late; None: none has ended."""
        return self._ledger.departures.tokens_each

    def decode_worker(self, attempt_id: RequestId) -> WorkerId | None:
        """Returns the worker that decodes a request, or is to; None for an unknown request and before the decision."""
        live = self._ledger.live.get(attempt_id)
        return live.decode_worker if live else None

    def prefills(self, attempt_id: RequestId) -> int:
        """Returns how often the request was sent to a prefill worker; 0 for an unknown request."""
        live = self._ledger.live.get(attempt_id)
        return live.prefills if live else 0

    def is_committed(self, request: Request, prefills: int = 0) -> bool:
        """Whether a request must not be refused: an earlier attempt of it was served, at least in part, or this one was
        sent to a prefill worker more often than `prefills` times.
        """
        return request.again or self.prefills(request.attempt_id) > prefills

    def pool_entry(self, attempt_id: RequestId) -> PoolEntry:
        """Returns the pool's entry of `attempt_id`. Raises KeyError when it is not in the pool."""
        return self._ledger.pool.entries[attempt_id]

    def find_waiting(self, attempt_id: RequestId) -> PoolEntry | None:
        """Returns the pool's entry of `attempt_id`; None when it is not in the pool."""
        return self._ledger.pool.entries.get(attempt_id)

    @property
    def in_flight(self) -> int:
        """Number of requests that have not been closed, queued ones included."""
        return len(self._ledger.live)

    @property
    def pool_size(self) -> int:
        return len(self._ledger.pool.entries)

    @property
    def pooled_priorities(self) -> list[int]:
        """The priorities of the pool's entries, ascending."""
        return self._ledger.pool.priorities()

    @property
    def objectives_wait(self) -> bool:
        """Whether a request with an objective waits, in the queue or for a decode slot."""
        return self._ledger.queued.objectives > 0 or self._ledger.without_slot.objectives > 0

    @property
    def left_pool(self) -> int:
        """Number of entries that have left the pool, since the start."""
        return self._ledger.pool.left

    @property
    def leases(self) -> int:
        """Number of requests whose KV is held under a lease: those in the pool or in transfer."""
        return sum(live.stage in (Stage.POOLED, Stage.TRANSFERRING) for live in self._ledger.live.values())

    @property
    def fleet_version(self) -> int:
        """A counter that grows when a worker comes, goes, or changes its facts or health, and when a quarantine begins
        or ends.
        """
        return self._ledger.fleet_version + self._ledger.outliers.version

    @property
    def refused_items(self) -> int:
        """Number of items of ProgressedMany that did not fit, since the start."""
        return self._ledger.refused_items

    def take_refused(self) -> list[RequestId]:
        """Returns the requests of the items that the last ProgressedMany had to refuse, once."""
        refused, self._ledger.refused = self._ledger.refused, []
        return refused

    # -------------------------------------------------------------------------------------------------- outliers

    def prefill_s_per_token(self, worker: WorkerId) -> float | None:
        """Returns the seconds that a worker took for a prompt token of late; None if it has computed too few."""
        load = self._ledger.loads.get(worker)
        speed = None if load is None else load.standing.speeds[Figure.PREFILL]
        return None if speed is None or not speed.samples else math.exp(speed.mean_log)

    def works(self, now_s: float) -> dict[WorkerId, tuple[Role, Work]]:
        """Returns what each worker has done until now, with its role, by id."""
        return {
            worker: (load.up.role, load.standing.work(load.generated_tokens, now_s))
            for worker, load in sorted(self._ledger.loads.items())
        }

    def computing_for_s(self, worker: WorkerId, now_s: float) -> float:
        """Returns for how long a worker has computed since it has finished a prompt, or since it was idle."""
        standing = self._ledger.loads[worker].standing
        if standing.busy_from_s is None:
            return 0.0
        return now_s - max(standing.idle_until_s, standing.computed_at_s)

    def queued_before(self, request: Request, coming: Mapping[int, Backlog] | None = None) -> Backlog:
        """Returns the sums over the queued requests that are expected to be served before one that is queued, by the
        order of their arrival or, if tenants are told apart, by their shares (`Waiting.before`). Where classes share,
        `coming` counts as well, which is expected to come, by priority.
        """
        return self._ledger.queued.before(request, True, coming)

    def without_slot_before(self, request: Request, coming: Mapping[int, Backlog] | None = None) -> Backlog:
        """Returns the sums over the requests whose prompt is computed now, or waits in the pool, and that are expected
        to get a slot before one that is queued; `coming` is as in `queued_before`.
        """
        return self._ledger.without_slot.before(request, False, coming)

    def limit_outliers(self, limits: OutlierLimits) -> None:
        """Sets the limits of outlier detection. Those for the share of a tier hold from the next PoliciesChanged on."""
        self._ledger.outliers.limits = limits

    def probes_due(self, now_s: float) -> list[WorkerId]:
        """Returns the quarantined workers that may get a request as a probe now, by id."""
        outliers = self._ledger.outliers
        return outliers.due(now_s) if outliers.quarantined else []

    @property
    def quarantined(self) -> dict[WorkerId, Standing]:
        """The standings of the quarantined workers, which the caller must not change."""
        return self._ledger.outliers.quarantined

    @property
    def quarantine_version(self) -> int:
        """A counter that grows when a quarantine begins or ends."""
        return self._ledger.outliers.version

    @property
    def outlier_totals(self) -> dict[str, int]:
        """The number of quarantines that began, by reason, and of probes that failed, since the start."""
        outliers = self._ledger.outliers
        begun = {f"quarantines_{reason}": n for reason, n in sorted(outliers.quarantines.items())}
        return {**begun, "quarantine_probes_failed": outliers.probes_failed}

    # ---------------------------------------------------------------------------------------------------- events

    def apply(self, event: ev.Event) -> None:
        """Changes the state by one event. Raises StaleEvent (state unchanged) when the event does not fit."""
        self._ledger.now_s = event.now_s
        _HANDLERS[type(event)](self._ledger, event)


def _policies_changed(ledger: Ledger, event: ev.PoliciesChanged) -> None:
    """Applies new limits of outlier detection, which `limit_outliers` has set; the dispatcher changes the policies."""
    ledger.outliers.fit(event.now_s)


def _standby_changed(ledger: Ledger, event: ev.StandbyChanged) -> None:
    """Changes nothing: the dispatcher keeps the standby."""


_HANDLERS: Handlers = {
    **request_events.HANDLERS,
    **worker_events.HANDLERS,
    ev.PoliciesChanged: _policies_changed,
    ev.StandbyChanged: _standby_changed,
}


def role_of(name: str) -> Role:
    """Returns the Role of a name from the wire or a config. Raises ValueError naming the allowed roles."""
    try:
        return Role(name)
    except ValueError:
        raise ValueError(f"role {name!r}: allowed are {', '.join(role.value for role in Role)}") from None


__all__ = ["ClusterState", "PoolKey", "pool_key", "role_of"]
