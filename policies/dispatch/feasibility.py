"""Which workers may take a request: the dispatcher's rules (`dispatcher`), without any choice among them."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from policies.request.terms import Mode
from policies.state.views import Health, PoolEntry, Request, RequestId, Role, Snapshot, Worker, WorkerId

Placeable = tuple[PoolEntry, Sequence[Worker]]


@dataclass(frozen=True, slots=True)
class Tiers:
    """Ids of the READY workers by what they may do, ascending. Fixed until a worker comes, goes or changes health.

    `split`: prefill workers with a decode worker in their group; `whole`: colocated ones; `either`: both.
    """

    split: tuple[WorkerId, ...]
    whole: tuple[WorkerId, ...]
    either: tuple[WorkerId, ...]
    decode: tuple[WorkerId, ...]
    decode_by_group: Mapping[str, tuple[WorkerId, ...]]
    any_ready: bool

    @staticmethod
    def of(workers: Mapping[WorkerId, Worker]) -> "Tiers":
        """The tiers of a snapshot's workers."""
        ready = [workers[worker] for worker in sorted(workers) if workers[worker].health is Health.READY]
        decode = [w for w in ready if w.role is Role.DECODE]
        members: dict[str, list[WorkerId]] = {}
        for w in decode:
            members.setdefault(w.group, []).append(w.id)
        groups = {group: tuple(ids) for group, ids in members.items()}
        split = [w.id for w in ready if w.role is Role.PREFILL and w.group in groups]
        whole = [w.id for w in ready if w.role is Role.COLOCATED]
        either = tuple(sorted(split + whole))
        return Tiers(tuple(split), tuple(whole), either, tuple(w.id for w in decode), groups, bool(ready))

    def for_prefill(self, request: Request) -> tuple[tuple[WorkerId, ...], bool]:
        """Who may compute `request`; True: only because there is no prefill or colocated worker at all."""
        if request.terms.local or request.terms.mode is Mode.COLOCATED:
            ids = () if request.terms.mode is Mode.DISAGGREGATED else self.whole
        else:
            ids = self.split if request.terms.mode is Mode.DISAGGREGATED else self.either
        degraded = not ids and request.terms.mode is None
        return (self.decode if degraded else ids), degraded and not request.terms.local

    def hopeless(self, request: Request) -> str | None:
        """Why waiting cannot help `request`: no READY worker, or none of its mode. None: it can."""
        if not self.any_ready:
            return "no_engine"
        if request.terms.mode is None:
            return None
        wanted = self.whole if request.terms.mode is Mode.COLOCATED else self.split
        return None if wanted else f"no_{request.terms.mode}_engine"


def has_room(request: Request, worker: Worker, reserve_tokens: int, overcommit_slots: int) -> bool:
    """Slots and KV for a request that decodes there; a worker without any sequence takes one of any size."""
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
    """A READY worker may compute the prompt now: it has reported lately, and has a turn and KV room left."""
    if worker.status_at_s is None or now_s - worker.status_at_s > status_stale_s:
        return False
    if worker.role is not Role.PREFILL:
        return has_room(request, worker, reserve_tokens, 0)
    if worker.prefilling >= worker.slots:
        return False
    used = worker.kv_tokens + worker.foreign_kv_tokens + request.prompt_tokens
    return worker.kv_tokens == 0 or used <= kv_high_water * worker.kv_capacity_tokens


class Room:
    """Which workers of one group have room for a pool entry (`has_room`), each list made once: entries that fit the
    same workers share one object, so that a pool of P and G workers cost P log G and not P * G.
    """

    def __init__(self, workers: Sequence[Worker], reserve_tokens: int, overcommit_slots: int) -> None:
        self._reserve, self._extra = reserve_tokens, overcommit_slots
        self._open: list[tuple[Worker, int, float]] = []  # with its free slots, and its room in KV tokens
        for w in workers:
            used = w.slots_used
            slots = w.slots + overcommit_slots - used
            if slots > 0:
                free = w.kv_capacity_tokens - w.kv_tokens - w.foreign_kv_tokens if used else math.inf
                self._open.append((w, slots, free))
        self._fewest_slots = min([w.slots for w, _, _ in self._open], default=0)
        self._rooms = sorted([room for _, _, room in self._open])
        self._lists: dict[tuple[int, int], list[Worker]] = {}
        self.most_tokens = self._rooms[-1] if self._rooms else -1.0  # a longer prompt fits nowhere

    def __bool__(self) -> bool:
        """Some worker has a free slot."""
        return bool(self._open)

    def for_request(self, request: Request) -> list[Worker]:
        """The workers that have room for it, in the order given."""
        if request.slots > self._fewest_slots:  # its need differs from worker to worker
            return [w for w, _, _ in self._open if has_room(request, w, self._reserve, self._extra)]
        need = request.prompt_tokens + self._reserve * request.slots
        key = (bisect_left(self._rooms, need), request.slots)  # equal for all needs between two rooms
        fits = self._lists.get(key)
        if fits is None:
            fits = [w for w, slots, room in self._open if room >= need and slots >= request.slots]
            self._lists[key] = fits
        return fits


class FeasibleEntries(Sequence[Placeable]):
    """The pool entries that fit somewhere, in the order given, with the workers that they fit on; looked for when asked
    for, because a policy that places one entry at a time asks for the first only.

    It ends at an entry that fits nowhere and entered before `starved_before_s`: nothing may overtake that one.
    """

    def __init__(
        self, entries: Sequence[PoolEntry], rooms: Mapping[str, Room], starved_before_s: float
    ) -> None:
        self._entries, self._rooms, self._starved_before_s = entries, rooms, starved_before_s
        self._made: list[Placeable] = []
        self._looked = 0  # entries looked at
        self._by_attempt: dict[RequestId, Sequence[Worker]] | None = None
        self._ids: dict[int, set[WorkerId]] = {}  # of each list of workers, by the list's identity
        self.blocked = False  # a starving entry was met

    def placeable(self) -> bool:
        """Some entry fits somewhere."""
        return any(self._rooms.values()) and (bool(self._made) or self._make(1))

    def allows(self, attempt_id: RequestId, worker: WorkerId) -> bool:
        """The request is one of those looked at, and fits the worker."""
        if self._by_attempt is None:
            self._by_attempt = {entry.request.attempt_id: workers for entry, workers in self._made}
        workers = self._by_attempt.get(attempt_id, ())
        if id(workers) not in self._ids:
            self._ids[id(workers)] = {w.id for w in workers}
        return worker in self._ids[id(workers)]

    def left(self, assigned: set[RequestId]) -> list[PoolEntry]:
        """What may still be placed when room has only shrunk: not assigned, and not seen to fit nowhere."""
        kept = [entry for entry, _ in self._made if entry.request.attempt_id not in assigned]
        return kept if self.blocked else kept + list(self._entries[self._looked :])

    def _make(self, most: int) -> bool:
        """Looks on until so many more entries that fit are found; False: there are not so many."""
        if self.blocked:
            return False
        made, rooms, starved_before_s = self._made, self._rooms, self._starved_before_s
        enough = len(made) + most
        for at in range(self._looked, len(self._entries)):
            entry = self._entries[at]
            room, request = rooms.get(entry.group), entry.request
            if room is not None and request.prompt_tokens <= room.most_tokens:
                fits = room.for_request(request)
                if fits:
                    if request.avoid:
                        fits = [w for w in fits if w.id not in request.avoid] or fits
                    made.append((entry, fits))
                    if len(made) == enough:
                        self._looked = at + 1
                        return True
                    continue
            if entry.entered_s < starved_before_s:
                self.blocked = True
                break
        self._looked = len(self._entries)
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


def rooms_of(snapshot: Snapshot, tiers: Tiers, reserve_tokens: int, overcommit_slots: int) -> dict[str, Room]:
    """The room of every group that has READY decode workers."""
    workers = snapshot.workers
    return {
        group: Room([workers[worker] for worker in ids], reserve_tokens, overcommit_slots)
        for group, ids in tiers.decode_by_group.items()
    }
