"""The rules that say which workers may take a request (`dispatcher` lists them). A policy chooses among them.

Decode workers are feasible by memory, as in NetKV (IV-A, algorithm 1 line 1):

    m_d >= b_eff(d) + m_min      m_d    KV that is free for the request         -> Worker.free_kv_tokens
                                 b_eff  KV that the request adds on d, in tokens: its prompt less the hits there
                                        that need no memory                    -> PrefixHits.tokens_in_use
                                 m_min  `reserve_tokens` for each sequence

Free KV includes cached blocks that nothing uses, because the engine evicts them. A hit on such blocks must not count
twice, as free KV and as KV that is not needed, so only hits on blocks in use lower the need. The slots bound a worker
too: at most `overcommit_slots` sequences may be sent to it beyond them, and wait there in the engine's queue
(BalanceRoute D.6: slightly above beta_max). Only policies that weigh that queue are offered such a worker.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from policies.dispatch.config import StarvesFrom
from policies.record import record
from policies.request.terms import Mode
from policies.routing.base import Overcommit
from policies.state.standby import AWAKE, Phase, Standby
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

Placeable = tuple[PoolEntry, Sequence[Worker]]

_ROLE_OF: dict[Mode | None, Role] = {Mode.COLOCATED: Role.COLOCATED, Mode.DISAGGREGATED: Role.PREFILL}
"""The role of the workers that compute the prompts of a mode."""

# ASSUMPTION: a lookup takes up to 0.2 ms (`python -m benchmarks.decisions`), and a round 10 ms at most for all of them.
MOST_LOOKUPS = 50
"""Most entries of a round for which hits are looked up because a worker lacks free KV for the whole prompt. Later ones
fit where the whole prompt fits. A look that finds nothing counts too, unless no worker can cache that much.
"""


@dataclass(slots=True)
class Lookups:
    """The hits that one round may still look up, in all groups together: `left` entries."""

    hits: PrefixHits = NO_HITS
    left: int = MOST_LOOKUPS

    def take(self, request: Request, tokens: int) -> bool:
        """Returns whether hits of at least `tokens` tokens may be looked up for the request, and then counts it."""
        if not self.left or not self.hits.may_be_cached(request, tokens):
            return False
        self.left -= 1
        return True


@record
class WorkerPools:
    """Ids of the READY workers that are not quarantined by what they may do, each tuple in ascending order.

    The pools are made again when a worker comes, goes, or changes its facts or health, and when a quarantine begins or
    ends.
    """

    prefill: tuple[WorkerId, ...]
    """Prefill workers with a decode worker in their group."""
    colocated: tuple[WorkerId, ...]
    either: tuple[WorkerId, ...]
    """Prefill and colocated workers together."""
    decode: tuple[WorkerId, ...]
    decode_by_group: Mapping[str, tuple[WorkerId, ...]]
    by_group: Mapping[str, tuple[WorkerId, ...]]
    """Workers of any role by their group."""
    any_ready: bool
    any_warm: bool
    """Whether some worker is WARM: it takes no work, and could once it is activated."""

    @staticmethod
    def of(workers: Mapping[WorkerId, Worker]) -> "WorkerPools":
        """Returns the worker pools of a snapshot's workers."""
        ready = [
            workers[worker]
            for worker in sorted(workers)
            if workers[worker].health is Health.READY and workers[worker].quarantine is None
        ]
        decode = [w for w in ready if w.role is Role.DECODE]
        members: dict[str, list[WorkerId]] = {}
        for w in decode:
            members.setdefault(w.group, []).append(w.id)
        groups = {group: tuple(ids) for group, ids in members.items()}
        everyone: dict[str, list[WorkerId]] = {}
        for w in ready:
            everyone.setdefault(w.group, []).append(w.id)
        prefill = [w.id for w in ready if w.role is Role.PREFILL and w.group in groups]
        colocated = [w.id for w in ready if w.role is Role.COLOCATED]
        return WorkerPools(
            prefill=tuple(prefill),
            colocated=tuple(colocated),
            either=tuple(sorted(prefill + colocated)),
            decode=tuple(w.id for w in decode),
            decode_by_group=groups,
            by_group={group: tuple(ids) for group, ids in everyone.items()},
            any_ready=bool(ready),
            any_warm=any(worker.health is Health.WARM for worker in workers.values()),
        )

    def for_prefill(self, request: Request) -> tuple[tuple[WorkerId, ...], bool]:
        """Returns the ids of the workers that may compute the prompt of `request`, and whether service is degraded.

        Service is degraded when decode workers compute prompts because no prefill or colocated worker is READY.
        """
        if request.terms.local or request.terms.mode is Mode.COLOCATED:
            ids = () if request.terms.mode is Mode.DISAGGREGATED else self.colocated
        else:
            ids = self.prefill if request.terms.mode is Mode.DISAGGREGATED else self.either
        degraded = not ids and request.terms.mode is None
        return (self.decode if degraded else ids), degraded and not request.terms.local

    def served(self, request: Request) -> bool:
        """Whether some READY worker may compute prompts such as that of `request`.

        Only a request that names a mode or a place can be one of few that nobody serves; the others are served alike.
        """
        restricted = request.terms.local or request.terms.mode is not None
        return not restricted or bool(self.for_prefill(request)[0])

    def lenders(self, reader: Worker) -> tuple[WorkerId, ...]:
        """Returns the ids of the workers of a prefill worker's group, of any role, without itself."""
        return tuple(worker for worker in self.by_group.get(reader.group, ()) if worker != reader.id)

    def may_probe(self, request: Request, worker: Worker) -> bool:
        """Whether the prompt of `request` may be computed on a quarantined worker, to try the worker.

        A request that has failed before is not put at risk again.
        """
        if request.avoid or worker.role is Role.DECODE:
            return False
        mode = request.terms.mode
        if worker.role is Role.COLOCATED:
            return mode is not Mode.DISAGGREGATED
        return worker.group in self.decode_by_group and not (request.terms.local or mode is Mode.COLOCATED)

    def hopeless(self, request: Request, standby: Standby = AWAKE) -> str | None:
        """Returns why waiting cannot help `request`: no worker is READY, or none serves its mode. None when it can.

        It can as long as there is a WARM worker, which may be activated in whatever role is needed, or while workers
        come because of it (`Standby.wakes`), if one of the roles that they have then serves its mode.
        """
        if self.any_warm:
            return None
        if not self.decode and not self.colocated:
            if standby.wakes:
                needs = _ROLE_OF.get(request.terms.mode)
                return None if needs is None or needs in standby.roles else f"no_{request.terms.mode}_engine"
            if standby.phase is Phase.FAILED:
                return "wake_failed"
        if not self.any_ready:
            return "no_engine"
        if request.terms.mode is None:
            return None
        wanted = self.colocated if request.terms.mode is Mode.COLOCATED else self.prefill
        return None if wanted else f"no_{request.terms.mode}_engine"


def is_fresh(worker: Worker, now_s: float, status_stale_s: float) -> bool:
    """Whether the worker's last report is young enough for new work. A worker that never reported is not fresh."""
    return worker.status_at_s is not None and now_s - worker.status_at_s <= status_stale_s


def has_room(
    request: Request,
    worker: Worker,
    reserve_tokens: int,
    overcommit_slots: int,
    hits: PrefixHits = NO_HITS,
) -> bool:
    """Whether a worker has the slots and KV to decode a request. A worker without sequences takes any prompt."""
    slots = min(request.slots, worker.slots)
    if worker.slots + overcommit_slots - worker.slots_used < slots:
        return False
    return worker.slots_used == 0 or has_kv(request, worker, reserve_tokens * slots, hits)


def has_kv(request: Request, worker: Worker, reserve_tokens: int, hits: PrefixHits) -> bool:
    """Whether the free KV of a worker suffices for what a prompt adds there and `reserve_tokens` more."""
    need = request.prompt_tokens + reserve_tokens
    missing = need - (worker.kv_capacity_tokens - worker.kv_tokens_in_use)
    if missing <= 0:
        return True
    if not hits.may_be_cached(request, missing):
        return False
    return hits.tokens_in_use_on(worker.id, request) >= missing


def may_prefill(
    request: Request,
    worker: Worker,
    now_s: float,
    status_stale_s: float,
    kv_high_water: float,
    reserve_tokens: int,
    hits: PrefixHits = NO_HITS,
) -> bool:
    """Whether a READY worker may compute the prompt now. Its last report must be fresh. A prefill worker must compute
    fewer prompts than it has slots and have KV room; a worker of another role must have room to decode the request, in
    which `hits` count.
    """
    if not is_fresh(worker, now_s, status_stale_s):
        return False
    if worker.role is not Role.PREFILL:
        return has_room(request, worker, reserve_tokens, 0, hits)
    if worker.prefilling >= worker.slots:
        return False
    used = worker.kv_tokens_in_use + request.prompt_tokens
    return worker.kv_tokens == 0 or used <= kv_high_water * worker.kv_capacity_tokens


class Room:
    """The workers of one group that have room for a pool entry (`has_room`).

    Entries that fit the same workers share one list, made once, so P entries and G workers cost P log G, not P * G.
    An entry that fits on further workers by its hits there has a list of its own. All groups of a round share
    `lookups`. With `beside_free_slots` there is no room anywhere unless some worker has a free slot.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        reserve_tokens: int,
        overcommit_slots: int,
        lookups: Lookups | None = None,
        beside_free_slots: bool = False,
    ) -> None:
        self._reserve, self._extra = reserve_tokens, overcommit_slots
        self._lookups = None if lookups is None or lookups.hits is NO_HITS else lookups
        # workers that may take a sequence: worker, how many, free KV in tokens
        self._open: list[tuple[Worker, int, float]] = []
        for w in workers:
            used = w.slots_used
            slots = w.slots + overcommit_slots - used
            if slots > 0:
                # as `kv_tokens_in_use`, without a call for each worker
                in_use = w.kv_tokens - w.shared_kv_tokens + w.foreign_kv_tokens
                self._open.append((w, slots, w.kv_capacity_tokens - in_use if used else math.inf))
        if beside_free_slots and all(slots <= overcommit_slots for _, slots, _ in self._open):
            self._open = []
        self._fewest_slots = min([w.slots for w, _, _ in self._open], default=0)
        self._rooms = sorted([room for _, _, room in self._open])
        self._lists: dict[tuple[int, int], list[Worker]] = {}
        self.most_tokens = self._rooms[-1] if self._rooms else -1.0
        """Largest free KV of a worker. No larger prompt fits but by its hits."""

    def __bool__(self) -> bool:
        """Whether some worker may take a sequence, in a free slot or beyond its slots."""
        return bool(self._open)

    @property
    def most_slots(self) -> int:
        """The largest number of sequences that a worker may take."""
        return max([slots for _, slots, _ in self._open], default=0)

    def may_fit(self, request: Request) -> bool:
        """Whether the request may fit on some worker. Only False is certain; it takes no look at hits."""
        if request.prompt_tokens <= self.most_tokens:
            return True
        return self._lookups is not None and self._lookups.left > 0 and bool(self._open)

    def for_request(self, request: Request) -> list[Worker]:
        """Returns the workers that have room for the request, in the order given."""
        if request.slots > self._fewest_slots:
            return self._for_many_slots(request)
        need = request.prompt_tokens + self._reserve * request.slots
        # needs that lie between the same two amounts of free KV fit the same workers
        smaller = bisect_left(self._rooms, need)
        key = (smaller, request.slots)
        fits = self._lists.get(key)
        if fits is None:
            fits = [w for w, slots, room in self._open if room >= need and slots >= request.slots]
            self._lists[key] = fits
        if self._lookups is None or not smaller:
            return fits
        # some workers have too little free KV for the whole prompt, the best of them by `missing`
        missing = math.ceil(need - self._rooms[smaller - 1])
        if not self._lookups.take(request, missing):
            return fits
        warm = self._lookups.hits.tokens_in_use(request, missing)
        more = [
            w for w, slots, room in self._open if slots >= request.slots and room + warm.get(w.id, 0) >= need
        ]
        return more if len(more) > len(fits) else fits

    def _for_many_slots(self, request: Request) -> list[Worker]:
        """Returns the workers for a request whose need differs by worker: its sequences exceed the slots of some."""
        lookups = self._lookups
        hits = lookups.hits if lookups is not None and lookups.take(request, 1) else NO_HITS
        return [w for w, _, _ in self._open if has_room(request, w, self._reserve, self._extra, hits)]


class FeasibleEntries(Sequence[Placeable]):
    """The pool entries that fit somewhere, in the order given, each with the workers that it fits on.

    Entries are examined on demand, because an EntryPolicy reads only the first. The sequence ends at an entry that fits
    nowhere and starves (`starves_from_s`) at `now_s`, because nothing may overtake it.
    """

    def __init__(
        self,
        entries: Sequence[PoolEntry],
        rooms: Mapping[str, Room],
        starves_from_s: StarvesFrom,
        now_s: float,
    ) -> None:
        self._entries, self._rooms, self._starves_from_s, self._now_s = entries, rooms, starves_from_s, now_s
        self._made: list[Placeable] = []
        self._examined = 0
        self._by_attempt: dict[RequestId, Sequence[Worker]] | None = None
        self._ids: dict[int, set[WorkerId]] = {}  # by the identity of a worker list
        self.blocked_by: PoolEntry | None = None
        """The starving entry at which the sequence ended, if it did."""

    def placeable(self) -> bool:
        """Whether some entry fits somewhere."""
        return any(self._rooms.values()) and (bool(self._made) or self._make(1))

    def allows(self, attempt_id: RequestId, worker: WorkerId) -> bool:
        """Whether the request was examined and fits the worker."""
        if self._by_attempt is None:
            self._by_attempt = {entry.request.attempt_id: workers for entry, workers in self._made}
        workers = self._by_attempt.get(attempt_id, ())
        if id(workers) not in self._ids:
            self._ids[id(workers)] = {w.id for w in workers}
        return worker in self._ids[id(workers)]

    def left(self, assigned: set[RequestId]) -> list[PoolEntry]:
        """Returns the entries still worth trying: those not yet assigned and not already found to fit nowhere.

        Room never grows within a round, so an entry that did not fit will not fit later.
        """
        kept = [entry for entry, _ in self._made if entry.request.attempt_id not in assigned]
        return kept if self.blocked_by else kept + list(self._entries[self._examined :])

    def _make(self, most: int) -> bool:
        """Examines entries until `most` more that fit are found. Returns False when there are fewer."""
        if self.blocked_by is not None:
            return False
        made, rooms, starves_from_s, now_s = self._made, self._rooms, self._starves_from_s, self._now_s
        enough = len(made) + most
        for at in range(self._examined, len(self._entries)):
            entry = self._entries[at]
            room, request = rooms.get(entry.group), entry.request
            if room is not None and room.may_fit(request):
                fits = room.for_request(request)
                if fits:
                    if request.avoid:
                        fits = [w for w in fits if w.id not in request.avoid] or fits
                    made.append((entry, fits))
                    if len(made) == enough:
                        self._examined = at + 1
                        return True
                    continue
            if starves_from_s(entry, now_s) < now_s:
                self.blocked_by = entry
                break
        self._examined = len(self._entries)
        return False

    def __iter__(self) -> Iterator[Placeable]:
        at = 0
        while at < len(self._made) or self._make(1):
            yield self._made[at]
            at += 1

    def __len__(self) -> int:
        self._make(len(self._entries))
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> Placeable: ...

    @overload
    def __getitem__(self, index: slice) -> list[Placeable]: ...

    def __getitem__(self, index: int | slice) -> Placeable | list[Placeable]:
        len(self)
        return self._made[index]


def rooms_of(
    snapshot: Snapshot, pools: WorkerPools, reserve_tokens: int, status_stale_s: float, overcommit: Overcommit
) -> dict[str, Room]:
    """Returns the room of every group that has usable decode workers, by group. Only workers with a fresh report have
    room.
    """
    extra, beside = snapshot.overcommit_slots, overcommit is Overcommit.BESIDE_FREE_SLOTS
    lookups = Lookups(snapshot.hits)
    return {
        group: Room(fresh(snapshot, ids, status_stale_s), reserve_tokens, extra, lookups, beside)
        for group, ids in pools.decode_by_group.items()
    }


def fresh(snapshot: Snapshot, ids: Sequence[WorkerId], status_stale_s: float) -> list[Worker]:
    """Returns the workers of these ids whose last report is fresh, in the order given."""
    workers, now_s = [snapshot.workers[worker] for worker in ids], snapshot.now_s
    # as `is_fresh`, without a call for each worker
    return [w for w in workers if w.status_at_s is not None and now_s - w.status_at_s <= status_stale_s]
