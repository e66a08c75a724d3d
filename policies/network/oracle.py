"""The network cost oracle (NetKV III-E): the operator's knowledge of the network, as one frozen value.

    tier_map        tau(p, d) in {0: node, 1: rack, 2: pod, 3: beyond}   -> Oracle.tier_map, else Oracle.places
    tier_bandwidth  B_tau                                                -> Oracle.bandwidth_bytes_per_s
    tier_latency    L_tau                                                -> Oracle.latency_s
    congestion      c_tau in [0, 1), own KV flows excluded               -> Oracle.congestion, as of congestion_at_s
    (ours)          the product B*(1-c) of a pair, learned from its own  -> Oracle.pairs; a fresh one overrides its tier
                    transfers (which do not tell B and c apart)
    (ours)          U_tau: how many flows of B_tau fit at once into the links that a sender's flows leave by (ECMP
                    spreads them), 1 where it is not given               -> Oracle.uplinks
    (ours)          how much our transfers slow each other down, learnt  -> Oracle.contention
    (ours)          the tiers whose c was learnt from our own transfers  -> Oracle.congestion_learnt

Where data are stale or missing, `Oracle.path` takes the next best: pair estimate -> tier with congestion -> static tier
-> None, with which the policies leave the network term out. A pair whose nodes have no place counts as the farthest
tier that has a bandwidth. Where the operator cannot tell own flows from others, `own_flows_excluded` is False: the
caller then takes the number of own transfers as 0 and relies on c alone (NetKV III-D).

What is learnt from our own transfers, the estimates of pairs and a learnt c, has a part of the time in it that they
cost each other. So `contention` is the slowdown on the tier's path without it (`tier_path` with `estimates=False`).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from policies.network.contention import Contention
from policies.record import record

TIERS = (0, 1, 2, 3)


class OracleError(ValueError):
    """The oracle's data contradict themselves or are out of range; the message names the key and what is allowed."""


class PathSource(StrEnum):
    """The source of a path's bandwidth; the members are listed best first."""

    PAIR = "pair"
    CONGESTION = "congestion"
    STATIC = "static"


@record
class NodePlace:
    """The rack and pod of a node. An empty label means that the rack or pod is not known; it matches nothing."""

    rack: str = ""
    pod: str = ""


@record
class PairEstimate:
    """The residual bandwidth B*(1-c) of a pair in bytes/s, learned until `at_s`, before own transfers share it.

    `latency_s` was learned with it; None means that the tier's latency holds.
    """

    bytes_per_s: float
    at_s: float
    latency_s: float | None = None


@record
class Path:
    """One pair's path: its tier, its residual bandwidth before own flows share it (bytes/s), its base latency (s), and
    the source of the bandwidth.
    """

    tier: int
    residual_bytes_per_s: float
    latency_s: float
    source: PathSource


class Receiver(Protocol):
    """A worker that receives KV: its id, and the name of its node."""

    @property
    def id(self) -> str: ...

    @property
    def node(self) -> str: ...


@dataclass(slots=True)
class _Source:
    """Remembered answers for one sender, by the receiver's (worker, node); those of `node_tiers` by its node alone.

    `learned` holds the path and the time of its estimate.
    """

    named: bool
    """Whether `tier_map` names the sending worker itself and not only its node."""
    tiers: dict[tuple[str, str], int | None] = field(default_factory=dict)
    node_tiers: dict[str, int | None] = field(default_factory=dict)
    learned: dict[tuple[str, str], tuple[Path, float] | None] = field(default_factory=dict)


@record
class Oracle:
    """The network cost oracle; the module's docstring explains its fields. Keys of pairs are (sender, receiver), given
    as worker ids or as node names; an entry by worker ids takes precedence.

    Raises OracleError for tiers outside 0..3, a bandwidth that is not above 0, a farther tier with more bandwidth than
    a nearer one, congestion outside [0, 1), a mapped tier without bandwidth, and less than one uplink.
    """

    bandwidth_bytes_per_s: Mapping[int, float] = field(default_factory=dict)
    latency_s: Mapping[int, float] = field(default_factory=dict)
    tier_map: Mapping[tuple[str, str], int] = field(default_factory=dict)
    places: Mapping[str, NodePlace] = field(default_factory=dict)
    congestion: Mapping[int, float] = field(default_factory=dict)
    congestion_at_s: float | None = None
    pairs: Mapping[tuple[str, str], PairEstimate] = field(default_factory=dict)
    # NetKV's experiment 4: with refreshes as rare as one every 60 s the results do not change
    stale_after_s: float = 60.0
    own_flows_excluded: bool = True
    uplinks: Mapping[int, int] = field(default_factory=dict)
    contention: Contention = field(default_factory=dict)
    congestion_learnt: tuple[int, ...] = ()
    _sources: dict[tuple[str, str], "_Source"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _check_tiers("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, low=0.0, open_low=True)
        _check_tiers("latency_s", self.latency_s, low=0.0)
        _check_tiers("congestion", self.congestion, low=0.0, below=1.0)
        _check_tiers("uplinks", self.uplinks, low=1.0)
        known = sorted(self.bandwidth_bytes_per_s)
        for near, far in itertools.pairwise(known):
            if self.bandwidth_bytes_per_s[far] > self.bandwidth_bytes_per_s[near]:
                raise OracleError(
                    f"oracle: tier {far} has more bandwidth than the nearer tier {near}; "
                    f"order the tiers by distance, nearest = 0"
                )
        for pair, tier in self.tier_map.items():
            if tier not in self.bandwidth_bytes_per_s:
                raise OracleError(
                    f"oracle: tier_map puts {pair[0]} -> {pair[1]} on tier {tier}, which has no bandwidth; "
                    f"tiers with one: {known}"
                )
        for pair, estimate in self.pairs.items():
            if not (math.isfinite(estimate.bytes_per_s) and estimate.bytes_per_s > 0):
                raise OracleError(
                    f"oracle: pair {pair[0]} -> {pair[1]} has {estimate.bytes_per_s} bytes/s: must be > 0"
                )
            if estimate.latency_s is not None and not 0 <= estimate.latency_s < math.inf:
                raise OracleError(
                    f"oracle: pair {pair[0]} -> {pair[1]} has latency_s {estimate.latency_s}: allowed is [0, inf)"
                )
        if not self.stale_after_s > 0:
            raise OracleError(f"oracle: stale_after_s is {self.stale_after_s}: must be > 0")

    def tier(self, worker: str, node: str, to_worker: str, to_node: str) -> int | None:
        """Returns the tier of a pair of workers and remembers it; None if no tier has a bandwidth."""
        known, to = self._source(worker, node).tiers, (to_worker, to_node)
        if to not in known:
            known[to] = self._find_tier(worker, node, to_worker, to_node)
        return known[to]

    def tiers(self, worker: str, node: str, to: Sequence[Receiver]) -> list[int | None]:
        """Returns the tier of each receiver in `to`, in order.

        Tiers are looked up by the receiver's node alone, unless `tier_map` has a pair with the sending worker.
        """
        source = self._source(worker, node)
        if source.named:
            return [self.tier(worker, node, receiver.id, receiver.node) for receiver in to]
        known = source.node_tiers
        try:
            return [known[receiver.node] for receiver in to]
        except KeyError:  # the tier of some node is not known yet
            known.update({r.node: self._find_tier(worker, node, r.id, r.node) for r in to})
            return [known[receiver.node] for receiver in to]

    def pair_paths(self, worker: str, node: str, to: Sequence[Receiver], now_s: float) -> dict[str, Path]:
        """Returns the paths from pair estimates that are fresh at `now_s`, by the receiver's worker id."""
        found: dict[str, Path] = {}
        for receiver in to if self.pairs else ():
            learned = self._learned(worker, node, receiver.id, receiver.node)
            if learned is not None and now_s - learned[1] <= self.stale_after_s:
                found[receiver.id] = learned[0]
        return found

    def _source(self, worker: str, node: str) -> "_Source":
        key = (worker, node)
        if key not in self._sources:
            self._sources[key] = _Source(any(sender == worker for sender, _ in self.tier_map))
        return self._sources[key]

    def _learned(self, worker: str, node: str, to_worker: str, to_node: str) -> tuple[Path, float] | None:
        """Returns the path by a pair's estimate, with the estimate's time; None without an estimate. Remembers it."""
        known, to = self._source(worker, node).learned, (to_worker, to_node)
        if to not in known:
            estimate = self.pairs.get((worker, to_worker)) or self.pairs.get((node, to_node))
            known[to] = None
            if estimate is not None:
                tier = self.tier(worker, node, to_worker, to_node)
                at = 3 if tier is None else tier
                learned_s = estimate.latency_s
                latency_s = self.latency_s.get(at, 0.0) if learned_s is None else learned_s
                known[to] = Path(at, estimate.bytes_per_s, latency_s, PathSource.PAIR), estimate.at_s
        return known[to]

    def _find_tier(self, worker: str, node: str, to_worker: str, to_node: str) -> int | None:
        for pair in ((worker, to_worker), (node, to_node)):
            if pair in self.tier_map:
                return self.tier_map[pair]
        if node == to_node and 0 in self.bandwidth_bytes_per_s:
            return 0
        here, there = self.places.get(node), self.places.get(to_node)
        if here is not None and there is not None:
            labels = (
                1 if here.rack and here.rack == there.rack else 2 if here.pod and here.pod == there.pod else 3
            )
            return next((t for t in range(labels, 4) if t in self.bandwidth_bytes_per_s), self._farthest())
        return self._farthest()

    def path(
        self, worker: str, node: str, to_worker: str, to_node: str, now_s: float, live: bool = True
    ) -> Path | None:
        """Returns the path of a pair by the best data that are fresh at `now_s`; with `live=False` by the static tiers
        only. None if no tier has a bandwidth.
        """
        learned = self._learned(worker, node, to_worker, to_node) if live and self.pairs else None
        if learned is not None and now_s - learned[1] <= self.stale_after_s:
            return learned[0]
        tier = self.tier(worker, node, to_worker, to_node)
        return None if tier is None else self.tier_path(tier, now_s, live)

    def tier_path(self, tier: int, now_s: float, live: bool = True, estimates: bool = True) -> Path:
        """Returns the path of any pair on `tier`, without pair estimates; with `estimates=False` also without a
        congestion that was learnt from our own transfers. The tier must have a bandwidth (KeyError).
        """
        bandwidth, latency_s = self.bandwidth_bytes_per_s[tier], self.latency_s.get(tier, 0.0)
        fresh = self.congestion_at_s is not None and now_s - self.congestion_at_s <= self.stale_after_s
        if live and fresh and tier in self.congestion and (estimates or tier not in self.congestion_learnt):
            return Path(tier, bandwidth * (1.0 - self.congestion[tier]), latency_s, PathSource.CONGESTION)
        return Path(tier, bandwidth, latency_s, PathSource.STATIC)

    def _farthest(self) -> int | None:
        return max(self.bandwidth_bytes_per_s, default=None)


@record
class TransferIntent:
    """A transfer to come, from worker to worker, as the scheduler announces it to the operator (NetKV III-E).

    `n_bytes` is NetKV's b_eff, and a lower `priority` goes first. `predicted_s` is the expected duration in seconds,
    with own flows counted. `tier` and `predicted_s` are None where the network is not known.
    """

    attempt_id: str
    source: str
    destination: str
    n_bytes: int
    priority: int
    tier: int | None = None
    predicted_s: float | None = None


def _check_tiers(
    key: str, values: Mapping[int, float], low: float, below: float = math.inf, open_low: bool = False
) -> None:
    for tier, value in values.items():
        if tier not in TIERS:
            raise OracleError(f"oracle: {key} names tier {tier}: allowed are 0, 1, 2, 3")
        if not (low <= value < below) or (open_low and value == low):
            allowed = f"{'(' if open_low else '['}{low}, {below})"
            raise OracleError(f"oracle: {key}[{tier}] is {value}: allowed is {allowed}")
