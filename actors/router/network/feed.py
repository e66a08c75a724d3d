"""The feed of the network oracle: it turns the facts of the sources and the estimator's estimates into events.

    bandwidth, latency, tiers of pairs    from `sources` (file, announcements, labels)
    congestion of a tier                  the file's while that is fresh, else learned from the tier's transfers
    B*(1-c) of a pair of nodes            learned; overrides its tier while it is fresh
    contention of own transfers           learned, while the decode policy reads it (`policies.network.own_transfers`)

The ingresses observe transfers and report them (`Transferred`) only while the decode policy decides by the network, or
if the option `estimate` says so. If no tiers are known, a pair without an estimate counts as the median of the
estimated pairs. Candidates then stay comparable, and a pair that was not used for a long time is tried again. The
estimates then include the congestion by our own flows (`policies.network.bandwidth_estimator`). The dispatcher gets all
this as `OracleRefreshed` events. An event is fed only if a figure changed by more than `change_ratio`, if any other
fact changed, or if the data that the dispatcher has would soon count as stale.

The simulator learns contention from the same facts. The time of a transfer is the receiver's own figure, from the first
byte to the last, with the time for which a flow scheduler held it back: to its request both are one wait. The router
does not hear of the first byte, so a transfer counts as in flight from its decision on, as it does for the decision
that counts it. It ends with the request's admission. Transfers from before a restart of the router are not counted.
Not claimed: contention in the minute after bandwidths in the file have changed.
"""

import asyncio
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.router.clock import clock_s
from actors.router.network.sources import LabelNames, NetworkSources
from actors.router.worker_thread import WorkerThread
from actors.router.workers import place_of
from actors.wire.messages import EngineInfo, PathSeen, Transfer, Transferred
from policies.network.bandwidth_estimator import MAX_CONGESTION, SECONDS, BandwidthEstimator, EstimatorConfig
from policies.network.contention import Contention, ContentionEstimator
from policies.network.oracle import Oracle, OracleError, PairEstimate, TransferIntent
from policies.network.own_transfers import OwnTransfers
from policies.routing.base import Needs
from policies.state.events import OracleRefreshed

log = logging.getLogger(__name__)

LABELS_EVERY_S = 10.0
"""ASSUMPTION: seconds between two readings of the labels of Ray's nodes."""

NEWS_S = 0.05
"""ASSUMPTION: seconds between an engine's announcement and the refresh for it, so that engines that come up together
lead to one event."""

FARTHEST = 3
"""The tier that an oracle without tiers uses for every pair."""

MOST_PATHS = 256
"""Most pairs of nodes that observers are told of; more could not be looked at."""

MOST_SLOWDOWN = 1 / (1 - MAX_CONGESTION)
"""Largest slowdown of a transfer that is learnt, the one of the largest congestion that is learnt. One transfer that
hung then does not make its tier useless for a minute.
"""

MANY = 8
"""ASSUMPTION: transfers in flight, of each kind that a curve counts, at which two curves are compared and shown."""

Pairs = Mapping[tuple[str, str], PairEstimate]
ReadNodes = Callable[[], Sequence[Mapping[str, Any]]]
"""Function that returns the nodes as `ray.nodes()` lists them. It blocks, so it runs in a thread for which the process
does not wait when it ends."""


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Settings of the oracle. `file` is the path of a network file (`actors.router.network.file`). `estimate` says
    whether bandwidths are estimated from transfers; with None they are while the decode policy decides by the network.

    Congestion and estimates older than `stale_after_s` do not count, and older transfers do not enter an estimate.
    `window` (transfers a pair), `min_samples` and `settle_s` are the estimator's. Of the label names in `rack_labels`
    and `pod_labels` the first that a node has counts. The constructor raises ValueError that names the option and its
    range.
    """

    file: str | None = None
    refresh_s: float = 1.0
    stale_after_s: float = 60.0
    change_ratio: float = 0.1
    estimate: bool | None = None
    window: int = 9
    min_samples: int = 3
    settle_s: float = 2.0
    rack_labels: tuple[str, ...] = ("sluice.io/rack", "topology.kubernetes.io/rack")
    pod_labels: tuple[str, ...] = (
        "sluice.io/pod",
        "topology.kubernetes.io/zone",
        "ray.io/availability-zone",
        "topology.kubernetes.io/region",
        "ray.io/availability-region",
    )

    def __post_init__(self) -> None:
        for name in ("refresh_s", "stale_after_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"router.network.{name} is {getattr(self, name)}: it must be above 0 seconds"
                )
        if not 0 <= self.change_ratio < math.inf:
            raise ValueError(f"router.network.change_ratio is {self.change_ratio}: it must be at least 0")
        self.estimator()

    def estimator(self) -> EstimatorConfig:
        return EstimatorConfig(self.window, self.min_samples, self.stale_after_s, self.settle_s)


class RouterNetwork:
    """The network as one router knows it. All times are on the router's clock. `start` begins to refresh the oracle;
    the other methods take in what happens. The constructor raises OracleError if the network file is missing or faulty.
    """

    def __init__(self, config: NetworkConfig, read_nodes: ReadNodes | None = None) -> None:
        self.config = config
        self.estimator = BandwidthEstimator(config.estimator())
        self.sources = NetworkSources(config.file, LabelNames(config.rack_labels, config.pod_labels))
        self.sources.read_file()
        self._read_nodes = read_nodes
        self._control_plane = WorkerThread("node labels")
        self._own: OwnTransfers | None = None
        self._told: Oracle | None = None
        self._pairs: Pairs = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._errors = self._refreshes = self._descriptors = 0
        # attempts that were closed between the last two refreshes, and since the last one
        self._closed: tuple[list[str], list[str]] = ([], [])

    def wants_transfers(self, needs: Needs) -> bool:
        """Returns whether ingresses have to report the transfers that they observe, under policies with these needs."""
        estimate = self.config.estimate
        return Needs.NETWORK in needs if estimate is None else estimate

    def want(self, needs: Needs) -> None:
        """Learns contention from now on if policies with these needs read it and transfers are reported. Otherwise what
        was learnt is forgotten.
        """
        learns = Needs.CONTENTION in needs and self.wants_transfers(needs)
        if learns != (self._own is not None):
            self._own = OwnTransfers(ContentionEstimator(MOST_SLOWDOWN)) if learns else None

    # ------------------------------------------------------------------------------------------ what happens

    def engine(self, info: EngineInfo) -> None:
        """Takes in an engine's node and labels. If they are new, the oracle is refreshed soon, not only after
        `refresh_s`.
        """
        known = self.sources.engines.get(info.id)
        self.sources.engines[info.id] = info
        if known is None or (known.node, known.labels) != (info.node, info.labels):
            self._news.set()

    def forget(self, engine_id: str) -> None:
        """Forgets an engine that has gone."""
        self.sources.engines.pop(engine_id, None)

    def routed(self, intent: TransferIntent, now_s: float) -> None:
        """Takes in the transfer of a decode that was just routed, which will begin soon."""
        source = self.sources.engines.get(place_of(intent.source)[0])
        destination = self.sources.engines.get(place_of(intent.destination)[0])
        if source is None or destination is None or intent.n_bytes <= 0:
            return
        file, tier = self.sources.file, self.configured(intent.tier)
        latency_s = None if tier is None else file.latency_s.get(tier)
        pair = (source.node, destination.node)
        uplinks = 1 if tier is None else file.uplinks.get(tier, 1)
        self.estimator.routed(intent.attempt_id, intent.source, pair, tier, latency_s, now_s, uplinks)
        if self._own is not None:
            self._own.began(intent.attempt_id, intent.source, intent.destination, tier, self._told, now_s)

    def admitted(self, attempt_id: str) -> None:
        """Takes in that a decode engine has the KV of an attempt. Its transfer may be reported after that."""
        if self._own is not None:
            self._own.stopped(attempt_id)

    def configured(self, tier: int | None) -> int | None:
        """Returns `tier` if the operator has given tiers, else None: an oracle without tiers uses `FARTHEST` for every
        pair.
        """
        return tier if tier in self.sources.file.bandwidth_bytes_per_s else None

    def transferred(self, message: Transferred, now_s: float) -> None:
        """Takes in finished transfers that an ingress observed."""
        for one in message.items:
            self._descriptors += one.descriptors
            self.estimator.transferred(one.attempt_id, one.n_bytes, one.seconds, now_s - one.ended_ago_s)
            if self._own is not None:
                _learn(self._own, one, now_s)

    def closed(self, attempt_id: str) -> None:
        """Takes in the end of an attempt. Its transfer is kept until the next refresh but one, since ingresses report
        in batches.
        """
        self._closed[1].append(attempt_id)
        if self._own is not None:
            self._own.stopped(attempt_id)

    # ----------------------------------------------------------------------------------------------- refresh

    def start(self, feed: Callable[[OracleRefreshed], None]) -> None:
        """Starts to refresh the oracle every `refresh_s`; `feed` takes the events."""
        self._tasks = [asyncio.create_task(self._run(feed), name="network oracle")]
        if self._read_nodes is not None:
            self._tasks += [asyncio.create_task(self._poll_labels(self._read_nodes), name="node labels")]

    def stop(self) -> None:
        """Stops refreshing; no more events are fed. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._control_plane.close()

    async def _run(self, feed: Callable[[OracleRefreshed], None]) -> None:
        while True:
            try:
                event = self.refresh(clock_s())
                if event is not None:
                    feed(event)
            except Exception:
                # a bug; the loop must go on, or everything known would grow stale
                self._errors += 1
                log.exception("the network oracle cannot be refreshed; it is tried again")
            await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self.config.refresh_s):
                await self._news.wait()
        except TimeoutError:
            return
        await asyncio.sleep(NEWS_S)
        self._news.clear()

    async def _poll_labels(self, read_nodes: ReadNodes) -> None:
        """Reads the labels of Ray's nodes, in a task of its own because an answer may take minutes without Ray's
        control plane.
        """
        while True:
            try:
                self.sources.set_nodes(await self._control_plane.call(read_nodes))
                self._news.set()
            except Exception:
                self._errors += 1
                log.exception("cannot read the labels of the Ray nodes; those known stay in use")
            await asyncio.sleep(LABELS_EVERY_S)

    def refresh(self, now_s: float) -> OracleRefreshed | None:
        """Reads all sources. Returns the event to feed if the dispatcher needs a new oracle, else None."""
        try:
            self.sources.read_file()
        except OracleError as error:
            self._errors += 1
            log.error("the last good network file stays in use: %s", error)
        for attempt_id in self._closed[0]:
            self.estimator.dropped(attempt_id)
            if self._own is not None:
                self._own.dropped(attempt_id)
        self._closed = (self._closed[1], [])
        self._pairs = self.estimator.pairs(now_s)
        oracle = self._oracle(now_s)
        if self._own is not None and oracle is not None and oracle.own_flows_excluded:
            oracle = self._own.taught(oracle, now_s)
        if not _differs(self._told, oracle, now_s, self.config.change_ratio):
            return None
        self._told = oracle
        self._refreshes += 1
        return OracleRefreshed(now_s, oracle)

    def _oracle(self, now_s: float) -> Oracle | None:
        file, pairs, stale_s = self.sources.file, self._pairs, self.config.stale_after_s
        if not file.bandwidth_bytes_per_s:
            return _without_tiers(pairs, stale_s)
        congestion = self.estimator.congestion(pairs, file.bandwidth_bytes_per_s)
        at_s = max(estimate.at_s for estimate in pairs.values()) if congestion else None
        learnt = set(congestion)
        file_at_s = min(now_s, self.sources.file_at_s)
        if file.congestion and now_s - file_at_s <= stale_s:
            learnt -= file.congestion.keys()
            congestion |= file.congestion
            at_s = file_at_s if at_s is None else min(at_s, file_at_s)
        return Oracle(
            bandwidth_bytes_per_s=file.bandwidth_bytes_per_s,
            latency_s=file.latency_s,
            tier_map=self.sources.pairs(),
            places=self.sources.places(),
            congestion=congestion,
            congestion_at_s=at_s,
            pairs=pairs,
            stale_after_s=stale_s,
            uplinks=file.uplinks,
            congestion_learnt=tuple(sorted(learnt)),
        )

    # ----------------------------------------------------------------------------------------------- reports

    def paths(self, infos: Sequence[EngineInfo]) -> list[PathSeen]:
        """Returns what is known of the network between nodes over which KV may move, for at most `MOST_PATHS` pairs:
        from engines that compute prompts to those of the same group that decode.
        """
        # one engine stands for all of its role, group and node
        ends = {
            role: {(i.group, i.node): i.id for i in infos if i.role == role} for role in ("prefill", "decode")
        }
        pairs = (
            (source, from_node, target, to_node)
            for (group, from_node), source in ends["prefill"].items()
            for (other, to_node), target in ends["decode"].items()
            if group == other
        )
        return [self._path(*pair) for pair in itertools.islice(pairs, MOST_PATHS)]

    def tier(self, source: EngineInfo, to_node: str) -> int | None:
        """Returns how far a node is from an engine's: 0 on the same one, None where it is not known."""
        if source.node == to_node:
            return 0
        return None if self._told is None else self._told.tier(source.id, source.node, "", to_node)

    def _path(self, source: str, from_node: str, target: str, to_node: str) -> PathSeen:
        oracle, learnt = self._told, self._pairs.get((from_node, to_node))
        tier = None if oracle is None else self.configured(oracle.tier(source, from_node, target, to_node))
        return PathSeen(
            from_node,
            to_node,
            tier,
            None if learnt is None else learnt.bytes_per_s,
            None if tier is None else self.sources.file.bandwidth_bytes_per_s.get(tier),
        )

    # ----------------------------------------------------------------------------------------------- metrics

    def told(self, now_s: float) -> dict[str, Any]:
        """Returns what is known of the network as plain data: the tiers and places of the operator, and what was
        learnt of pairs of nodes, whether or not a policy asks for it.
        """
        file = self.sources.file
        return {
            "tiers": {
                str(tier): {"bytes_per_s": value, "latency_s": file.latency_s.get(tier)}
                for tier, value in sorted(file.bandwidth_bytes_per_s.items())
            },
            "places": {
                node: {"rack": place.rack, "pod": place.pod}
                for node, place in sorted(self.sources.places().items())
            },
            "pairs": [
                {
                    "sender": source,
                    "receiver": destination,
                    "bytes_per_s": one.bytes_per_s,
                    "latency_s": one.latency_s,
                    "age_s": now_s - one.at_s,
                }
                for (source, destination), one in sorted(self._pairs.items())
            ],
        }

    def totals(self) -> dict[str, float]:
        """Returns the totals since the start, for the router's metrics."""
        estimator = self.estimator
        return {
            "network_transfers": float(estimator.transfers),
            "network_transfer_bytes": float(estimator.n_bytes),
            "network_transfer_descriptors": float(self._descriptors),
            "network_transfers_unusable": float(estimator.unusable),
            "network_refreshes": float(self._refreshes),
            "network_errors": float(self._errors),
        }

    def gauges(self, now_s: float) -> dict[str, float]:
        """Returns the present figures, for the router's metrics. `network_source` is the best data in use: 0 none, 1
        static tiers, 2 congestion, 3 estimates of pairs.
        """
        oracle = self._told
        if oracle is None:
            return {"network_source": 0.0}
        ages_s = [max(0.0, now_s - estimate.at_s) for estimate in oracle.pairs.values()]
        fresh_s = [age_s for age_s in ages_s if age_s <= oracle.stale_after_s]
        known = oracle.congestion_at_s is not None and now_s - oracle.congestion_at_s <= oracle.stale_after_s
        found = {"network_source": 3.0 if fresh_s else 2.0 if known else 1.0}
        found["network_pairs"] = float(len(fresh_s))
        if fresh_s:
            found["network_pair_age_seconds_min"] = min(fresh_s)
            found["network_pair_age_seconds_max"] = max(fresh_s)
        for tier, bytes_per_s in oracle.bandwidth_bytes_per_s.items():
            found[f"network_tier{tier}_bytes_per_second"] = bytes_per_s
        for tier, c in oracle.congestion.items():
            found[f"network_tier{tier}_congestion"] = c
        for tier, bytes_per_s in self.estimator.by_tier(self._pairs).items():
            found[f"network_tier{tier}_estimated_bytes_per_second"] = bytes_per_s
        for (form, tier, flying), slowdown in _slowdowns(oracle.contention).items():
            found[f"network_tier{tier}_slowdown_{form}_{flying}"] = slowdown
            found[f"network_tier{tier}_slowdown_transfers"] = float(oracle.contention[form][tier].transfers)
        return found


def _learn(own: OwnTransfers, one: Transfer, now_s: float) -> None:
    """Teaches contention by a reported transfer. An impossible duration teaches nothing."""
    took_s = one.seconds + one.held_s
    if SECONDS[0] <= took_s <= SECONDS[1]:
        own.arrived(one.attempt_id, one.n_bytes, took_s, now_s)
    else:
        own.dropped(one.attempt_id)


def _without_tiers(pairs: Pairs, stale_after_s: float) -> Oracle | None:
    """Returns an oracle of estimates alone, in which all other pairs count as the median of the estimated ones. Returns
    None without estimates.
    """
    if not pairs:
        return None
    latencies = [e.latency_s for e in pairs.values() if e.latency_s is not None]
    return Oracle(
        bandwidth_bytes_per_s={FARTHEST: statistics.median(e.bytes_per_s for e in pairs.values())},
        latency_s={FARTHEST: statistics.median(latencies)} if latencies else {},
        pairs=pairs,
        stale_after_s=stale_after_s,
        own_flows_excluded=False,
    )


def _differs(old: Oracle | None, new: Oracle | None, now_s: float, ratio: float) -> bool:
    """Returns whether the dispatcher needs `new` in place of `old`: facts differ, an estimate has changed by more than
    the share `ratio`, or `old` would soon be stale.
    """
    if old is None or new is None:
        return old is not new
    if (old.tier_map, old.places, old.own_flows_excluded, old.uplinks, old.congestion_learnt) != (
        new.tier_map,
        new.places,
        new.own_flows_excluded,
        new.uplinks,
        new.congestion_learnt,
    ):
        return True
    if old.pairs.keys() != new.pairs.keys() or old.congestion.keys() != new.congestion.keys():
        return True
    slow, slow_before = _slowdowns(new.contention), _slowdowns(old.contention)
    if slow.keys() != slow_before.keys():
        return True
    rates = [(e.bytes_per_s, old.pairs[pair].bytes_per_s) for pair, e in new.pairs.items()]
    rates += [(slowdown, slow_before[which]) for which, slowdown in slow.items()]
    if new.own_flows_excluded:  # these are the operator's exact figures
        if (old.bandwidth_bytes_per_s, old.latency_s) != (new.bandwidth_bytes_per_s, new.latency_s):
            return True
        rates += [(1.0 - c, 1.0 - old.congestion[tier]) for tier, c in new.congestion.items()]
    if any(abs(math.log(now / was)) > math.log1p(ratio) for now, was in rates):
        return True
    times = [(e.at_s, old.pairs[pair].at_s) for pair, e in new.pairs.items()]
    if new.congestion_at_s is not None and old.congestion_at_s is not None:
        times.append((new.congestion_at_s, old.congestion_at_s))
    return any(is_s > was_s and now_s - was_s > new.stale_after_s / 3 for is_s, was_s in times)


def _slowdowns(contention: Contention) -> dict[tuple[str, int, int], float]:
    """Returns the slowdowns that stand for each curve, by form, tier and number of transfers in flight."""
    return {
        (form, tier, flying): curve.slowdown([flying] * len(curve.slopes))
        for form, curves in contention.items()
        for tier, curve in curves.items()
        for flying in (0, MANY)
    }
