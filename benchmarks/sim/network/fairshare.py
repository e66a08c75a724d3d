"""Exact max-min fair rates with strict priority levels, recomputed only where a change has an effect.

Flows with the same path and level have the same rate per weight. They form one *bundle*, and the cost of a change does
not grow with the number of flows in it.

A bundle's rate is right if the bundle has a bottleneck: a link that its level fills, on which no bundle of the level
has a higher rate per weight. If every bundle has a bottleneck, the rates are the max-min rates, which are unique
(Bertsekas and Gallager, Data Networks, 6.5.2). So after a change it is enough to
  1. compute new rates (by progressive filling) for the changed bundles and those whose bottleneck changed, while the
     rates of all others stay fixed;
  2. search the links that these use for fixed bundles that have lost their bottleneck, for links that carry too much,
     and for fixed bundles with a higher rate than a new one on the same link; add the bundles found, and repeat from 1
     until none is found.
After a few rounds the rest of the connected component is added at once. Levels are computed one after another, the most
urgent first. A level is visited only where its links changed, or where higher levels take another amount than before.
A link knows the levels on it. So the cost of a change grows with the levels that share links with it, not with all
levels, of which a policy may use as many as there are flows.
"""

import heapq
from bisect import insort
from collections.abc import Iterable, Sequence

# Relative difference of two capacities or rates below which they are equal.
EPSILON = 1e-9
# Rounds of local repair before the whole component is filled. At 512 flows on 1,024 GPUs (`cost`) more or fewer
# rounds cost more.
_ROUNDS = 8
# After this many rebalances, sums that are updated by differences are computed anew, to remove rounding errors.
_RESUM = 1000


class Bundle:
    """All flows of one path and level. `rate` is in bytes/s per weight; `weight` is the sum of the flows' weights."""

    __slots__ = ("bottleneck", "cells", "id", "level", "links", "load", "new_rate", "rate", "stamp", "weight")

    def __init__(self, bundle_id: int, links: tuple[int, ...], level: int) -> None:
        self.id, self.links, self.level = bundle_id, links, level
        self.weight = 0.0
        self.rate = 0.0
        self.cells: tuple[_Cell, ...] = ()
        self.bottleneck: _Cell | None = None
        # `load` is rate * weight as last added to the cells' `taken`.
        self.load = 0.0
        # The next two belong to the filling in progress.
        self.stamp, self.new_rate = 0, 0.0

    def set_rate(self, rate: float, now_s: float) -> None:
        """Sets the bundle's rate; `now_s` is for subclasses that integrate the rate over time."""
        self.rate = rate


class _Cell:
    """One level on one link, while it has members. It is the bottleneck of the bundles `held`; `taken` is the sum of
    its members' loads.
    """

    __slots__ = ("held", "left", "level", "link", "members", "stamp", "taken", "users", "waiting", "weight")

    def __init__(self, level: int, link: int) -> None:
        self.level, self.link = level, link
        # These are dicts because the order of a set may differ from run to run.
        self.members: dict[int, Bundle] = {}
        self.held: dict[int, Bundle] = {}
        self.taken = 0.0
        # These belong to the filling in progress: `left` is the bytes/s not yet given away, `users` are the bundles
        # being filled, `waiting` is the number of them without a new rate, and `weight` is the sum of their weights.
        self.stamp, self.left, self.weight, self.waiting = 0, 0.0, 0.0, 0
        self.users: list[Bundle] = []


class FairShare:
    """The rates of all bundles over links with the given capacities (bytes/s, by link index)."""

    def __init__(self, capacity: Sequence[float]) -> None:
        self.capacity = list(capacity)
        # Cells by level and link, and by link in the order of their levels, most urgent first.
        self._levels: dict[int, dict[int, _Cell]] = {}
        self._on_link: list[list[_Cell]] = [[] for _ in self.capacity]
        # Changes since the last rebalance: links with another capacity, and by level the links of changed bundles and
        # the changed bundles themselves.
        self._dirty_links: dict[int, None] = {}
        self._dirty: dict[int, dict[int, None]] = {}
        self._fresh: dict[int, dict[int, Bundle]] = {}
        self._stamp = 0
        self._rebalances = 0

    def add(self, bundle: Bundle) -> None:
        cells = self._levels.setdefault(bundle.level, {})
        for link in bundle.links:
            if link not in cells:
                cells[link] = _Cell(bundle.level, link)
                insort(self._on_link[link], cells[link], key=_level)
            cells[link].members[bundle.id] = bundle
        bundle.cells = tuple(cells[link] for link in bundle.links)
        self.reweigh(bundle)

    def add_link(self, bytes_per_s: float) -> int:
        """Adds a link and returns its index."""
        self.capacity.append(bytes_per_s)
        self._on_link.append([])
        return len(self.capacity) - 1

    def remove(self, bundle: Bundle) -> None:
        for cell in bundle.cells:
            del cell.members[bundle.id]
            cell.taken -= bundle.load
            if not cell.members:
                self._drop(cell)
        if bundle.bottleneck is not None:
            del bundle.bottleneck.held[bundle.id]
        self._dirty.setdefault(bundle.level, {}).update(dict.fromkeys(bundle.links))
        self._fresh.get(bundle.level, {}).pop(bundle.id, None)

    def reweigh(self, bundle: Bundle) -> None:
        """Notes that the bundle's weight has changed; the next `rebalance` recomputes its rate."""
        self._dirty.setdefault(bundle.level, {}).update(dict.fromkeys(bundle.links))
        self._fresh.setdefault(bundle.level, {})[bundle.id] = bundle

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        self.capacity[link] = bytes_per_s
        self._dirty_links[link] = None

    def taken(self, link: int) -> float:
        """Returns the bytes/s that all levels together send over a link."""
        return sum(cell.taken for cell in self._on_link[link])

    def rebalance(self, now_s: float) -> list[Bundle]:
        """Sets the rates after all changes since the last call; returns the bundles whose rate has changed."""
        self._rebalances += 1
        if self._rebalances % _RESUM == 0:
            self._sum_anew()
        moved, dirty = self._dirty_links, self._dirty
        changed: list[Bundle] = []
        # A heap of levels to visit, some of them twice, and the links whose levels are in it.
        waiting, known, last = list(dirty), set[int](), -1
        heapq.heapify(waiting)
        self._await_levels(moved, known, waiting, last)
        while waiting:
            level = heapq.heappop(waiting)
            if level == last:
                continue
            last, own = level, dirty.get(level, {})
            todo = self._settle_level(level, {**moved, **own})
            changed += _apply(todo, moved, now_s)
            moved.update(own)
            self._await_levels(moved, known, waiting, last)
        self._dirty_links, self._dirty, self._fresh = {}, {}, {}
        return changed

    def _await_levels(self, links: Iterable[int], known: set[int], waiting: list[int], above: int) -> None:
        """Adds the levels below `above` on the links that are not `known` to the heap `waiting`."""
        for link in links:
            if link not in known:
                known.add(link)
                for cell in self._on_link[link]:
                    if cell.level > above:
                        heapq.heappush(waiting, cell.level)

    def _drop(self, cell: _Cell) -> None:
        """Forgets a cell without members."""
        self._on_link[cell.link].remove(cell)
        cells = self._levels[cell.level]
        del cells[cell.link]
        if not cells:
            del self._levels[cell.level]

    def _settle_level(self, level: int, dirty: dict[int, None]) -> dict[int, Bundle]:
        """Computes `new_rate` and the bottleneck of every bundle of the level that the changes affect.

        `dirty` are the links on which something has changed. Returns the bundles.
        """
        cells = self._levels.get(level, {})
        touched = [cells[link] for link in dirty if link in cells]
        todo = dict(self._fresh.get(level, {}))
        for cell in touched:
            todo.update(cell.held)
        filled = self._fill(todo)
        rounds = 1
        while more := self._violated(touched, filled):
            todo.update(more)
            rounds += 1
            if rounds > _ROUNDS:
                _add_component(todo)
            filled = self._fill(todo)
        return todo

    def _room(self, cell: _Cell) -> float:
        """Returns the bytes/s of the cell's link that the more urgent levels leave."""
        free = self.capacity[cell.link]
        for other in self._on_link[cell.link]:
            if other is cell:
                break
            free -= other.taken
        return free if free > 0.0 else 0.0

    def _fill(self, todo: dict[int, Bundle]) -> list[_Cell]:
        """Fills `todo` progressively into the capacity that the fixed bundles leave; returns the cells that it uses."""
        self._stamp = stamp = self._stamp + 1
        filled: list[_Cell] = []
        for bundle in todo.values():
            weight, load = bundle.weight, bundle.load
            _let_go(bundle)
            for cell in bundle.cells:
                if cell.stamp != stamp:
                    cell.stamp, cell.weight, cell.users = stamp, 0.0, []
                    cell.left = self._room(cell) - cell.taken
                    filled.append(cell)
                cell.left += load
                cell.weight += weight
                cell.users.append(bundle)
        heap = []
        for cell in filled:
            cell.waiting = len(cell.users)
            heap.append((max(0.0, cell.left) / cell.weight, cell.link, cell))
        heapq.heapify(heap)
        while heap:
            share, link, cell = heapq.heappop(heap)
            if not cell.waiting:
                continue
            now = max(0.0, cell.left) / cell.weight
            # Other bundles of the link were stopped elsewhere, below its share, so the share has grown. It never falls.
            if now > share:
                heapq.heappush(heap, (now, link, cell))
                continue
            for bundle in cell.users:
                if bundle.stamp == stamp:
                    continue
                bundle.stamp, bundle.new_rate, bundle.bottleneck = stamp, share, cell
                cell.held[bundle.id] = bundle
                weight, used = bundle.weight, share * bundle.weight
                for other in bundle.cells:
                    other.left -= used
                    other.weight -= weight
                    other.waiting -= 1
        return filled

    def _violated(self, touched: list[_Cell], filled: list[_Cell]) -> dict[int, Bundle]:
        """Returns the fixed bundles that must be filled again, because they or their neighbours lack a bottleneck."""
        stamp, more = self._stamp, dict[int, Bundle]()
        for cell in touched:
            full = self._room(cell) + EPSILON * self.capacity[cell.link]
            if cell.stamp != stamp and cell.taken > full:
                more.update(cell.members)
        for cell in filled:
            if len(cell.members) == len(cell.users):
                continue
            highest = None
            for held in cell.held.values():
                # The link stopped this bundle, so no other bundle on it may have a higher rate.
                if held.stamp == stamp:
                    most = held.new_rate * (1 + EPSILON)
                    more.update(
                        (b.id, b) for b in cell.members.values() if b.stamp != stamp and b.rate > most
                    )
                    break
            for held in cell.held.values():
                if held.stamp != stamp:
                    highest = max(b.new_rate for b in cell.users) if highest is None else highest
                    if cell.left > EPSILON * self.capacity[cell.link] or highest > held.rate * (1 + EPSILON):
                        more[held.id] = held
        return more

    def _sum_anew(self) -> None:
        for cells in self._levels.values():
            for cell in cells.values():
                cell.taken = sum(bundle.load for bundle in cell.members.values())


def _level(cell: _Cell) -> int:
    return cell.level


def _let_go(bundle: Bundle) -> None:
    """Removes a bundle from its bottleneck; the filling finds a new one."""
    if bundle.bottleneck is not None:
        del bundle.bottleneck.held[bundle.id]
        bundle.bottleneck = None


def _apply(todo: dict[int, Bundle], moved: dict[int, None], now_s: float) -> list[Bundle]:
    """Puts the new rates into effect and returns the bundles whose rate has changed.

    Links that now carry another amount are added to `moved`.
    """
    changed = []
    for bundle in todo.values():
        load = bundle.new_rate * bundle.weight
        if load != bundle.load:
            more, bundle.load = load - bundle.load, load
            for cell in bundle.cells:
                cell.taken += more
                moved[cell.link] = None
        if bundle.new_rate != bundle.rate:
            bundle.set_rate(bundle.new_rate, now_s)
            changed.append(bundle)
    return changed


def _add_component(todo: dict[int, Bundle]) -> None:
    """Adds to `todo` all bundles that share links with its bundles, directly or through other bundles."""
    seen: set[int] = set()
    stack = list(todo.values())
    while stack:
        for cell in stack.pop().cells:
            if cell.link in seen:
                continue
            seen.add(cell.link)
            for other in cell.members.values():
                if other.id not in todo:
                    todo[other.id] = other
                    stack.append(other)
