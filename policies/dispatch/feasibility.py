"""The rules that say which workers may take a request (`dispatcher` lists them). A policy chooses among them."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from policies.request.terms import Mode
from policies.state.views import Health, PoolEntry, Request, RequestId, Role, Snapshot, Worker, WorkerId

Placeable = tuple[PoolEntry, Sequence[Worker]]


@dataclass(frozen=True, slots=True)
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
    any_ready: bool

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
        prefill = [w.id for w in ready if w.role is Role.PREFILL and w.group in groups]
        colocated = [w.id for w in ready if w.role is Role.COLOCATED]
        return WorkerPools(
            prefill=tuple(prefill),
            colocated=tuple(colocated),
            either=tuple(sorted(prefill + colocated)),
            decode=tuple(w.id for w in decode),
            decode_by_group=groups,
            any_ready=bool(ready),
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

    def hopeless(self, request: Request) -> str | None:
        """Returns why waiting cannot help `request`: no worker is READY, or none serves its mode. None when it can."""
        if not self.any_ready:
            return "no_engine"
        if request.terms.mode is None:
            return None
        wanted = self.colocated if request.terms.mode is Mode.COLOCATED else self.prefill
        return None if wanted else f"no_{request.terms.mode}_engine"


def is_fresh(worker: Worker, now_s: float, status_stale_s: float) -> bool:
    """Whether the worker's last report is young enough for new work. A worker that never reported is not fresh."""
    return worker.status_at_s is not None and now_s - worker.status_at_s <= status_stale_s


def has_room(request: Request, worker: Worker, reserve_tokens: int, overcommit_slots: int) -> bool:
    """Whether a worker has the slots and KV to decode a request. A worker without sequences takes any prompt."""
    slots = min(request.slots, worker.slots)
    if worker.slots + overcommit_slots - worker.slots_used < slots:
        return False
    need = request.prompt_tokens + reserve_tokens * slots
    return worker.slots_used == 0 or worker.free_kv_tokens >= need


def may_prefill(
    request: Request,
    worker: Worker,
    now_s: float,
    status_stale_s: float,
    kv_high_water: float,
    reserve_tokens: int,
) -> bool:
    """Whether a READY worker may compute the prompt now. Its last report must be fresh. A prefill worker must compute
    fewer prompts than it has slots and have KV room; a worker of another role must have room to decode the request.
    """
    if not is_fresh(worker, now_s, status_stale_s):
        return False
    if worker.role is not Role.PREFILL:
        return has_room(request, worker, reserve_tokens, 0)
    if worker.prefilling >= worker.slots:
        return False
    used = worker.kv_tokens + worker.foreign_kv_tokens + request.prompt_tokens
    return worker.kv_tokens == 0 or used <= kv_high_water * worker.kv_capacity_tokens


class Room:
    """The workers of one group that have room for a pool entry (`has_room`).

    Entries that fit the same workers share one list, made once, so P entries and G workers cost P log G, not P * G.
    """

    def __init__(self, workers: Sequence[Worker], reserve_tokens: int, overcommit_slots: int) -> None:
        self._reserve, self._extra = reserve_tokens, overcommit_slots
        # workers with a free slot: worker, free slots, free KV in tokens
        self._open: list[tuple[Worker, int, float]] = []
        for w in workers:
            used = w.slots_used
            slots = w.slots + overcommit_slots - used
            if slots > 0:
                free = w.kv_capacity_tokens - w.kv_tokens - w.foreign_kv_tokens if used else math.inf
                self._open.append((w, slots, free))
        self._fewest_slots = min([w.slots for w, _, _ in self._open], default=0)
        self._rooms = sorted([room for _, _, room in self._open])
        self._lists: dict[tuple[int, int], list[Worker]] = {}
        self.most_tokens = self._rooms[-1] if self._rooms else -1.0
        """Prompt tokens above which no worker has room."""

    def __bool__(self) -> bool:
        """Whether some worker has a free slot."""
        return bool(self._open)

    def for_request(self, request: Request) -> list[Worker]:
        """Returns the workers that have room for the request, in the order given."""
        if request.slots > self._fewest_slots:  # the need differs by worker
            return [w for w, _, _ in self._open if has_room(request, w, self._reserve, self._extra)]
        need = request.prompt_tokens + self._reserve * request.slots
        # needs that lie between the same two amounts of free KV fit the same workers
        key = (bisect_left(self._rooms, need), request.slots)
        fits = self._lists.get(key)
        if fits is None:
            fits = [w for w, slots, room in self._open if room >= need and slots >= request.slots]
            self._lists[key] = fits
        return fits


class FeasibleEntries(Sequence[Placeable]):
    """The pool entries that fit somewhere, in the order given, each with the workers that it fits on.

    Entries are examined on demand, because an EntryPolicy reads only the first. The sequence ends at an entry that fits
    nowhere and has begun to starve (`starves_from_s`) by `now_s`, because nothing may overtake it.
    """

    def __init__(
        self,
        entries: Sequence[PoolEntry],
        rooms: Mapping[str, Room],
        starves_from_s: Callable[[PoolEntry], float],
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
            if room is not None and request.prompt_tokens <= room.most_tokens:
                fits = room.for_request(request)
                if fits:
                    if request.avoid:
                        fits = [w for w in fits if w.id not in request.avoid] or fits
                    made.append((entry, fits))
                    if len(made) == enough:
                        self._examined = at + 1
                        return True
                    continue
            if starves_from_s(entry) < now_s:
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
    snapshot: Snapshot, pools: WorkerPools, reserve_tokens: int, overcommit_slots: int, status_stale_s: float
) -> dict[str, Room]:
    """Returns the room of every group that has usable decode workers, by group. Only workers with a fresh report have
    room.
    """
    return {
        group: Room(fresh(snapshot, ids, status_stale_s), reserve_tokens, overcommit_slots)
        for group, ids in pools.decode_by_group.items()
    }


def fresh(snapshot: Snapshot, ids: Sequence[WorkerId], status_stale_s: float) -> list[Worker]:
    """Returns the workers of these ids whose last report is fresh, in the order given."""
    workers, now_s = [snapshot.workers[worker] for worker in ids], snapshot.now_s
    # as `is_fresh`, without a call for each worker
    return [w for w in workers if w.status_at_s is not None and now_s - w.status_at_s <= status_stale_s]
