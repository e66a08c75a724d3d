"""The pool of finished prefills that wait for a decode worker, kept in the order in which they should be served."""

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field, replace

from policies.state.views import PoolEntry, Request, RequestId, TypicalEntry, WorkerId

TYPICAL_OF = 64  # ASSUMPTION
"""Number of entries over which `TypicalEntry` averages."""

PoolKey = tuple[bool, int, float, RequestId]
"""(stays, priority, entered_s, attempt_id). Entries are served in ascending order of their keys: those whose prefill
worker drains come first."""


Line = tuple[int, str]
"""(priority, tenant): the entries of one tenant in one class, whose order is that of their keys."""


def pool_key(entry: PoolEntry) -> PoolKey:
    """Returns the key by which the pool sorts an entry."""
    return not entry.leaving, entry.request.terms.priority, entry.entered_s, entry.request.attempt_id


def line_of(entry: PoolEntry) -> Line:
    """Returns the line that an entry is in."""
    return entry.request.terms.priority, entry.request.terms.tenant


@dataclass(slots=True)
class Pool:
    """The mutable pool, private to the reducer. `left` counts the entries that have left it since the start."""

    # it keeps each line beside the whole order, so that the first entries of a tenant are found without looking at all

    entries: dict[RequestId, PoolEntry] = field(default_factory=dict)
    left: int = 0
    typical: TypicalEntry | None = None
    _came: int = 0
    _predicted: int = 0
    _order: list[PoolKey] = field(default_factory=list)  # ascending
    _entered: list[RequestId] = field(default_factory=list)
    by_tenant: bool = False
    """Whether `lines` are kept."""
    lines: dict[Line, list[PoolKey]] = field(default_factory=dict)
    """The keys of each line that has entries, ascending."""
    _turned: list[tuple[Line, bool]] = field(default_factory=list)

    def add(self, entry: PoolEntry) -> None:
        self._put(entry)
        self._note_typical(entry)

    def leave(self, worker: WorkerId, leaving: bool) -> None:
        """Notes whether a prefill worker drains. Its entries change their places, and count as having come anew."""
        for entry in list(self.entries.values()):
            if entry.prefill_worker == worker and entry.leaving != leaving:
                self._take_out(entry)
                self._put(replace(entry, leaving=leaving))

    def _put(self, entry: PoolEntry) -> None:
        self.entries[entry.request.attempt_id] = entry
        key = pool_key(entry)
        insort(self._order, key)
        if self.by_tenant:
            self._line_up(line_of(entry), key)
        self._entered.append(entry.request.attempt_id)

    def renew(self, attempt_id: RequestId, lease_until_s: float, now_s: float) -> None:
        """Changes the end of an entry's lease; an id that is not in the pool is no error."""
        entry = self.entries.get(attempt_id)
        if entry is not None:
            self.entries[attempt_id] = replace(entry, lease_until_s=lease_until_s, renewed_s=now_s)

    def change(self, request: Request) -> None:
        """Replaces the request of an entry, whose place becomes that of the new one, and which counts as having come
        anew; an id that is not in the pool is no error.
        """
        entry = self.entries.get(request.attempt_id)
        if entry is not None:
            self._take_out(entry)
            self._put(replace(entry, request=request))

    def priorities(self) -> list[int]:
        """Returns the priorities of the entries, ascending, in O(priorities * log entries)."""
        found: set[int] = set()
        at = 0
        while at < len(self._order):
            stays, priority, _, _ = self._order[at]
            found.add(priority)
            at = bisect_left(self._order, (stays, priority + 1, -math.inf, ""))
        return sorted(found)

    def remove(self, attempt_id: RequestId) -> None:
        """Removes an entry; an id that is not in the pool is no error."""
        entry = self.entries.pop(attempt_id, None)
        if entry is not None:
            self._take_out(entry)
            self.left += 1

    def _take_out(self, entry: PoolEntry) -> None:
        key = pool_key(entry)
        del self._order[bisect_left(self._order, key)]
        if not self.by_tenant:
            return
        line = line_of(entry)
        keys = self.lines[line]
        if len(keys) > 1:
            del keys[bisect_left(keys, key)]
        else:
            del self.lines[line]
            self._turned.append((line, False))

    def _line_up(self, line: Line, key: PoolKey) -> None:
        if line in self.lines:
            insort(self.lines[line], key)
        else:
            self.lines[line] = [key]
            self._turned.append((line, True))

    def tell_tenants_apart(self, by_tenant: bool) -> None:
        """Sets whether lines are kept. Those of the entries that wait begin now."""
        self.by_tenant, self.lines, self._turned = by_tenant, {}, []
        if by_tenant:
            for key in self._order:
                self._line_up(line_of(self.entries[key[-1]]), key)

    def first_of(self, line: Line, most: int) -> list[PoolEntry]:
        """Returns the first `most` entries of a line, in the order in which they should be served."""
        return [self.entries[attempt_id] for *_, attempt_id in self.lines.get(line, ())[:most]]

    def take_turned(self) -> list[tuple[Line, bool]]:
        """Returns the lines that have begun (True) or ended since the last call, in this order."""
        if not self._turned:
            return []
        turned, self._turned = self._turned, []
        return turned

    def waiting(self, after: PoolKey | None = None, most: int | None = None) -> list[PoolEntry]:
        """Returns the first `most` entries (None: all) behind the key `after` (None: from the front), in the order in
        which they should be served.
        """
        start = 0 if after is None else bisect_right(self._order, after)
        keys = self._order[start:] if most is None else self._order[start : start + most]
        return [self.entries[attempt_id] for *_, attempt_id in keys]

    def take_entered(self) -> list[PoolEntry]:
        """Returns the entries that came since the last call and are still in the pool, oldest first."""
        if not self._entered:
            return []
        entered, self._entered = self._entered, []
        return [
            self.entries[attempt_id] for attempt_id in dict.fromkeys(entered) if attempt_id in self.entries
        ]

    def _note_typical(self, entry: PoolEntry) -> None:
        """Updates `typical`. Its means are plain means over the first `TYPICAL_OF` entries, later exponential means."""
        before, tokens = self.typical, entry.request.predicted_tokens
        self._came += 1
        kv_bytes = _moved(before.kv_bytes if before else 0.0, entry.kv_bytes, self._came)
        mean_tokens = before.output_tokens if before else None
        if tokens is not None:
            self._predicted += 1
            mean_tokens = _moved(mean_tokens or 0.0, tokens, self._predicted)
        self.typical = TypicalEntry(kv_bytes, mean_tokens)


def _moved(mean: float, value: float, seen: int) -> float:
    """Returns the new mean when `value` is number `seen` of the values; after `TYPICAL_OF` values old ones fade."""
    return mean + (value - mean) / min(seen, TYPICAL_OF)
