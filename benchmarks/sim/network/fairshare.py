"""Max-min fair rates with strict levels, exact, recomputed only where a change reaches.

Flows with the same path and level have the same rate per weight, so they are one *bundle*, and the cost of a change
does not grow with the flows in it.

A bundle's rate is right if it has a bottleneck: a link that its level fills, on which no bundle of the level has a
higher rate per weight. Rates for which this holds for all are the max-min rates, and they are unique (Bertsekas and
Gallager, Data Networks, 6.5.2). So after a change it is enough to
  1. fill anew (progressive filling) the changed bundles and those whose bottleneck changed, the others held fixed;
  2. look on the links these use for others whose condition no longer holds, and for a link that is overfull or where a
     bundle held fixed has more than one that is not: add those, and fill again until nobody is left to be added.
After a few rounds the rest of the connected component is added at once. Levels follow one another, most urgent first; a
level is visited only where links of it changed or where higher levels take another amount than before.
"""

import heapq
from collections.abc import Sequence

# Relative difference of two capacities or rates below which they are equal.
EPSILON = 1e-9
# Rounds of local repair; then the whole component is filled. At 512 flows on 1,024 GPUs (`cost`) more or fewer
# rounds cost more.
_ROUNDS = 8
# Rebalances after which sums that are kept by differences are formed anew.
_RESUM = 1000


class Bundle:
    """Flows of one path and level. `rate` is bytes/s per weight; `weight` the sum of the flows' weights."""

    __slots__ = ("bottleneck", "cells", "id", "level", "links", "load", "new_rate", "rate", "stamp", "weight")

    def __init__(self, bundle_id: int, links: tuple[int, ...], level: int) -> None:
        self.id, self.links, self.level = bundle_id, links, level
        self.weight = 0.0
        self.rate = 0.0
        self.cells: tuple[_Cell, ...] = ()
        self.bottleneck: _Cell | None = None
        self.load = 0.0  # rate * weight as its cells count it
        self.stamp, self.new_rate = 0, 0.0  # of the filling under way

    def set_rate(self, rate: float, now_s: float) -> None:
        """Gives the bundle a rate; `now_s` is for subclasses that integrate it."""
        self.rate = rate


class _Cell:
    """One level on one link. `held`: the bundles whose bottleneck it is; `taken`: the sum of its members' loads."""

    __slots__ = ("held", "left", "link", "members", "stamp", "taken", "users", "waiting", "weight")

    def __init__(self, link: int) -> None:
        self.link = link
        # Dicts and not sets, which would not keep their order from run to run.
        self.members: dict[int, Bundle] = {}
        self.held: dict[int, Bundle] = {}
        self.taken = 0.0
        # of the filling under way: bytes/s left, the bundles filled, how many wait for a rate and their weight
        self.stamp, self.left, self.weight, self.waiting = 0, 0.0, 0.0, 0
        self.users: list[Bundle] = []


class FairShare:
    """Rates of bundles over links of given capacity (bytes/s; index = link)."""

    def __init__(self, capacity: Sequence[float]) -> None:
        self.capacity = list(capacity)
        self._levels: dict[int, dict[int, _Cell]] = {}  # level -> link -> cell
        self._order: list[int] = []  # the levels, most urgent first
        self._dirty_links: dict[int, None] = {}  # whose capacity changed
        self._dirty: dict[int, dict[int, None]] = {}  # level -> links of bundles that changed
        self._fresh: dict[int, dict[int, Bundle]] = {}  # level -> bundles that changed
        self._stamp = 0
        self._rebalances = 0

    def add(self, bundle: Bundle) -> None:
        if bundle.level not in self._levels:
            self._levels[bundle.level] = {}
            self._order = sorted(self._levels)
        cells = self._levels[bundle.level]
        for link in bundle.links:
            if link not in cells:
                cells[link] = _Cell(link)
            cells[link].members[bundle.id] = bundle
        bundle.cells = tuple(cells[link] for link in bundle.links)
        self.reweigh(bundle)

    def remove(self, bundle: Bundle) -> None:
        for cell in bundle.cells:
            del cell.members[bundle.id]
            cell.taken = cell.taken - bundle.load if cell.members else 0.0
        if bundle.bottleneck is not None:
            del bundle.bottleneck.held[bundle.id]
        self._dirty.setdefault(bundle.level, {}).update(dict.fromkeys(bundle.links))
        self._fresh.get(bundle.level, {}).pop(bundle.id, None)

    def reweigh(self, bundle: Bundle) -> None:
        """Takes note that the bundle's weight has changed."""
        self._dirty.setdefault(bundle.level, {}).update(dict.fromkeys(bundle.links))
        self._fresh.setdefault(bundle.level, {})[bundle.id] = bundle

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        self.capacity[link] = bytes_per_s
        self._dirty_links[link] = None

    def taken(self, link: int) -> float:
        """Bytes/s that all levels together send over a link."""
        return sum(cells[link].taken for cells in self._levels.values() if link in cells)

    def rebalance(self, now_s: float) -> list[Bundle]:
        """Gives every bundle its rate; returns those whose rate has changed."""
        self._rebalances += 1
        if self._rebalances % _RESUM == 0:
            self._sum_anew()
        moved = self._dirty_links
        changed: list[Bundle] = []
        for level in self._order:
            dirty = {**moved, **self._dirty.get(level, {})}
            if dirty:
                todo = self._settle_level(level, dirty)
                changed += _apply(todo, moved, now_s)
                moved.update(self._dirty.get(level, {}))
        self._dirty_links, self._dirty, self._fresh = {}, {}, {}
        return changed

    def _settle_level(self, level: int, dirty: dict[int, None]) -> dict[int, Bundle]:
        """Finds `new_rate` and bottleneck of all bundles of the level that the change reaches; returns these."""
        cells = self._levels[level]
        touched = [cells[link] for link in dirty if link in cells]
        todo = dict(self._fresh.get(level, {}))
        for cell in touched:
            todo.update(cell.held)
        above = [self._levels[higher] for higher in self._order if higher < level]
        filled = self._fill(todo, above)
        rounds = 1
        while more := self._violated(touched, filled, above):
            todo.update(more)
            rounds += 1
            if rounds > _ROUNDS:
                _add_component(todo)
            filled = self._fill(todo, above)
        return todo

    def _room(self, cell: _Cell, above: list[dict[int, _Cell]]) -> float:
        """The link's capacity less what higher levels take."""
        free, link = self.capacity[cell.link], cell.link
        for cells in above:
            if link in cells:
                free -= cells[link].taken
        return free if free > 0.0 else 0.0

    def _fill(self, todo: dict[int, Bundle], above: list[dict[int, _Cell]]) -> list[_Cell]:
        """Progressive filling of `todo` into what bundles held fixed leave; returns the cells that they use."""
        self._stamp = stamp = self._stamp + 1
        filled: list[_Cell] = []
        for bundle in todo.values():
            weight, load = bundle.weight, bundle.load
            _let_go(bundle)
            for cell in bundle.cells:
                if cell.stamp != stamp:
                    cell.stamp, cell.weight, cell.users = stamp, 0.0, []
                    cell.left = self._room(cell, above) - cell.taken
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
            # Others on the link stopped below their part of it, so its share has grown; shares only grow.
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

    def _violated(
        self, touched: list[_Cell], filled: list[_Cell], above: list[dict[int, _Cell]]
    ) -> dict[int, Bundle]:
        """Bundles held fixed whose condition, or whose neighbour's, no longer holds."""
        stamp, more = self._stamp, dict[int, Bundle]()
        for cell in touched:
            full = self._room(cell, above) + EPSILON * self.capacity[cell.link]
            if cell.stamp != stamp and cell.taken > full:
                more.update(cell.members)
        for cell in filled:
            if len(cell.members) == len(cell.users):
                continue
            highest = None
            for held in cell.held.values():
                # This bundle is filled up to the link, so no other on it may have more.
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


def _let_go(bundle: Bundle) -> None:
    """Takes a bundle from its bottleneck; filling gives it one again."""
    if bundle.bottleneck is not None:
        del bundle.bottleneck.held[bundle.id]
        bundle.bottleneck = None


def _apply(todo: dict[int, Bundle], moved: dict[int, None], now_s: float) -> list[Bundle]:
    """Makes the new rates the rates; adds to `moved` the links that carry another amount. Returns who has changed."""
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
    """Adds to `todo` all that share links with it, directly or through others."""
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
