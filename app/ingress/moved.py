"""The KV that the requests of an ingress have moved between engines, by network tier and by pair of nodes."""

from collections.abc import Set
from typing import NamedTuple

from app.fleet.moved import MOST_PAIRS, OTHER, UNKNOWN
from app.ingress.loop_metrics import Count, LoopCounter


class _Moved(NamedTuple):
    transfers: Count
    n_bytes: Count


class MovedCounts:
    """Counts every transfer once by its tier and once by its pair of nodes. The first `MOST_PAIRS` pairs have names; a
    name is free again when a node of its pair has gone.
    """

    def __init__(
        self,
        tier_transfers: LoopCounter,
        tier_bytes: LoopCounter,
        pair_transfers: LoopCounter,
        pair_bytes: LoopCounter,
    ) -> None:
        self._by_tier, self._by_pair = (tier_transfers, tier_bytes), (pair_transfers, pair_bytes)
        self._tiers: dict[int | None, _Moved] = {}
        self._pairs: dict[tuple[str, str], _Moved] = {}

    def add(self, tier: int | None, source: str | None, target: str | None, n_bytes: int) -> None:
        """Counts a transfer of `n_bytes` between two nodes; None: the tier or the node is not known."""
        of_tier = self._tiers.get(tier)
        if of_tier is None:
            of_tier = self._new_tier(tier)
        if source is None or target is None:
            source = target = OTHER
        of_pair = self._pairs.get((source, target))
        if of_pair is None:
            of_pair = self._new_pair(source, target)
        for moved in (of_tier, of_pair):
            moved.transfers.value += 1
            moved.n_bytes.value += n_bytes

    def forget_others(self, nodes: Set[str]) -> None:
        """Ends the series of every pair of which a node is not among `nodes`."""
        for source, target in list(self._pairs):
            if source not in nodes or target not in nodes:
                del self._pairs[source, target]
                for counter in self._by_pair:
                    counter.forget(source, target)

    def _new_tier(self, tier: int | None) -> _Moved:
        label = UNKNOWN if tier is None else str(tier)
        made = self._tiers[tier] = _Moved(*(counter.labels(label) for counter in self._by_tier))
        return made

    def _new_pair(self, source: str, target: str) -> _Moved:
        """Returns the counts of a pair that has had none; those of all others if it gets no name."""
        if source == OTHER or len(self._pairs) >= MOST_PAIRS:
            return _Moved(*(counter.labels(OTHER, OTHER) for counter in self._by_pair))
        made = self._pairs[source, target] = _Moved(
            *(counter.labels(source, target) for counter in self._by_pair)
        )
        return made
