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
from collections.abc import Iterable, Sequence

EPSILON = 1e-9  # of a capacity or a rate; below it two are equal
_ROUNDS = 4  # then the whole component is filled


class Bundle:
    """Flows of one path and level. `rate` is bytes/s per weight; `weight` the sum of the flows' weights."""

    __slots__ = ("bottleneck", "id", "level", "links", "rate", "weight")

    def __init__(self, bundle_id: int, links: tuple[int, ...], level: int) -> None:
        self.id, self.links, self.level = bundle_id, links, level
        self.weight = 0.0
        self.rate = 0.0
        self.bottleneck: int | None = None

    def set_rate(self, rate: float, now_s: float) -> None:
        """`now_s` is for those who integrate the rate."""
        self.rate = rate


class FairShare:
    """Rates of bundles over links of given capacity (bytes/s; index = link)."""

    def __init__(self, capacity: Sequence[float]) -> None:
        self.capacity = list(capacity)
        self._on: dict[int, dict[int, dict[int, Bundle]]] = {}  # level -> link -> id -> bundle
        self._taken: dict[int, dict[int, float]] = {}  # level -> link -> bytes/s
        self._dirty_links: dict[int, None] = {}  # capacity changed (dicts: they keep the order, sets do not)
        self._dirty: dict[int, dict[int, None]] = {}  # level -> links of bundles that changed
        self._fresh: dict[int, dict[int, Bundle]] = {}  # level -> bundles that changed

    def add(self, bundle: Bundle) -> None:
        links = self._on.setdefault(bundle.level, {})
        self._taken.setdefault(bundle.level, {})
        for link in bundle.links:
            links.setdefault(link, {})[bundle.id] = bundle
        self.reweigh(bundle)

    def remove(self, bundle: Bundle) -> None:
        for link in bundle.links:
            del self._on[bundle.level][link][bundle.id]
        self._dirty.setdefault(bundle.level, {}).update(dict.fromkeys(bundle.links))
        self._fresh.get(bundle.level, {}).pop(bundle.id, None)

    def reweigh(self, bundle: Bundle) -> None:
        """The bundle's weight has changed."""
        self._dirty.setdefault(bundle.level, {}).update(dict.fromkeys(bundle.links))
        self._fresh.setdefault(bundle.level, {})[bundle.id] = bundle

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        self.capacity[link] = bytes_per_s
        self._dirty_links[link] = None

    def taken(self, link: int) -> float:
        """Bytes/s that all levels together send over a link."""
        return sum(on.get(link, 0.0) for on in self._taken.values())

    def rebalance(self, now_s: float) -> list[Bundle]:
        """Gives every bundle its rate; returns those whose rate has changed."""
        moved = self._dirty_links
        changed: list[Bundle] = []
        for level in sorted(self._on):
            dirty = {**moved, **self._dirty.get(level, {})}
            if dirty:
                changed += self._rebalance_level(level, dirty, moved, now_s)
        self._dirty_links, self._dirty, self._fresh = {}, {}, {}
        return changed

    def _rebalance_level(
        self, level: int, dirty: dict[int, None], moved: dict[int, None], now_s: float
    ) -> list[Bundle]:
        """Adds to `moved` the links on which the level takes another amount than before."""
        on = self._on[level]
        todo = dict(self._fresh.get(level, {}))
        for link in dirty:
            for bundle in on.get(link, {}).values():
                if bundle.bottleneck is None or bundle.bottleneck in dirty:
                    todo[bundle.id] = bundle
        higher = [self._taken[above] for above in sorted(self._taken) if above < level]
        room = _Room(self.capacity, higher)
        rates, bottlenecks = _fill(todo.values(), on, room)
        rounds = 1
        while more := self._violated(todo, dirty, rates, bottlenecks, on, room):
            todo.update(more)
            rounds += 1
            if rounds > _ROUNDS:
                _add_component(todo, on)
            rates, bottlenecks = _fill(todo.values(), on, room)
        changed = []
        for bundle in todo.values():
            bundle.bottleneck = bottlenecks[bundle.id]
            rate = rates[bundle.id]
            if rate != bundle.rate:
                bundle.set_rate(rate, now_s)
                changed.append(bundle)
        taken = self._taken[level]
        for link in dirty | {link: None for bundle in changed for link in bundle.links}:
            amount = sum(b.weight * b.rate for b in on.get(link, {}).values())
            if amount != taken.get(link, 0.0):
                moved[link] = None
                taken[link] = amount
        return changed

    def _violated(
        self,
        todo: dict[int, Bundle],
        dirty: dict[int, None],
        rates: dict[int, float],
        bottlenecks: dict[int, int],
        on: dict[int, dict[int, Bundle]],
        room: "_Room",
    ) -> dict[int, Bundle]:
        """Bundles held fixed whose condition, or whose neighbour's, no longer holds."""
        more: dict[int, Bundle] = {}
        for link in dirty | {link: None for bundle in todo.values() for link in bundle.links}:
            members = on.get(link, {})
            fixed = [b for b in members.values() if b.id not in todo]
            if not fixed:
                continue
            total, highest, lowest_here = 0.0, 0.0, None
            for b in members.values():
                rate = rates.get(b.id, b.rate) if b.id in todo else b.rate
                total += b.weight * rate
                highest = max(highest, rate)
                if b.id in todo and bottlenecks[b.id] == link:
                    lowest_here = rate
            free, slack = room[link], EPSILON * self.capacity[link]
            if total > free + slack:
                more.update((b.id, b) for b in fixed)
                continue
            for b in fixed:
                unfounded = b.bottleneck == link and (
                    total < free - slack or highest > b.rate * (1 + EPSILON)
                )
                if unfounded or (lowest_here is not None and b.rate > lowest_here * (1 + EPSILON)):
                    more[b.id] = b
        return more


class _Room(dict[int, float]):
    """Link -> capacity left by the higher levels, worked out when it is first asked for."""

    def __init__(self, capacity: Sequence[float], higher: Sequence[dict[int, float]]) -> None:
        super().__init__()
        self._capacity, self._higher = capacity, higher

    def __missing__(self, link: int) -> float:
        free = self._capacity[link]
        for taken in self._higher:
            free -= taken.get(link, 0.0)
        self[link] = free = max(0.0, free)
        return free


def _fill(
    todo: Iterable[Bundle], on: dict[int, dict[int, Bundle]], room: "_Room"
) -> tuple[dict[int, float], dict[int, int]]:
    """Progressive filling of `todo` into what the bundles held fixed leave: rate and bottleneck of each."""
    waiting = {bundle.id: bundle for bundle in todo}
    weight: dict[int, float] = {}
    left: dict[int, float] = {}
    users: dict[int, list[Bundle]] = {}
    for bundle in waiting.values():
        for link in bundle.links:
            users.setdefault(link, []).append(bundle)
            weight[link] = weight.get(link, 0.0) + bundle.weight
    for link, mine in users.items():
        free = room[link]
        members = on[link]
        if len(members) > len(mine):
            free -= sum(b.weight * b.rate for b in members.values() if b.id not in waiting)
        left[link] = free if free > 0.0 else 0.0
    rates: dict[int, float] = {}
    bottlenecks: dict[int, int] = {}
    heap = [(left[link] / weight[link], link) for link in users]
    heapq.heapify(heap)
    count = {link: len(mine) for link, mine in users.items()}
    while heap:
        share, link = heapq.heappop(heap)
        if not count[link]:
            continue
        now = max(0.0, left[link]) / weight[link]
        if now > share:  # others on the link stopped below their part of it; shares only grow
            heapq.heappush(heap, (now, link))
            continue
        for bundle in users[link]:
            if bundle.id in rates:
                continue
            rates[bundle.id], bottlenecks[bundle.id] = share, link
            for other in bundle.links:
                left[other] -= share * bundle.weight
                weight[other] -= bundle.weight
                count[other] -= 1
    return rates, bottlenecks


def _add_component(todo: dict[int, Bundle], on: dict[int, dict[int, Bundle]]) -> None:
    """Adds to `todo` all that share links with it, directly or through others."""
    seen: set[int] = set()
    stack = list(todo.values())
    while stack:
        for link in stack.pop().links:
            if link in seen:
                continue
            seen.add(link)
            for other in on[link].values():
                if other.id not in todo:
                    todo[other.id] = other
                    stack.append(other)
