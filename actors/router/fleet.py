"""The router's two reports to every ingress and observer: the fleet, sent at each change, and the figures, sent every
second.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from actors.router.clock import clock_s
from actors.router.decisions import DECISION_BOUNDS_S, DecisionLog
from actors.router.engines import Engines
from actors.router.flows import FlowAgents
from actors.router.forecasts import Forecasts
from actors.router.journal import RouterJournal
from actors.router.kv_feed import KvFeed
from actors.router.network.feed import RouterNetwork
from actors.router.workers import place_of, workers_of
from actors.wire.messages import (
    KV_EVENTS,
    EngineInfo,
    Fleet,
    FleetLoad,
    FleetStatus,
    ObserverInfo,
    Quarantined,
    Standby,
)
from policies.dispatch.dispatcher import Dispatcher
from policies.routing.base import Needs
from policies.routing.flowkv.regimes import Regime, RegimeThresholds, RegimeWatch
from policies.state.views import PoolEntry, WorkerId


class FleetReport:
    """Builds the reports from the parts of a router, without changing them.

    It also watches the load regime of the fleet by `thresholds`, each time that it reports the figures.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        decisions: DecisionLog,
        engines: Engines,
        kv_feed: KvFeed,
        network: RouterNetwork,
        forecasts: Forecasts | None,
        journal: RouterJournal | None,
        thresholds: RegimeThresholds | None = None,
        flows: FlowAgents | None = None,
    ) -> None:
        self._dispatcher, self._decisions, self._engines = dispatcher, decisions, engines
        self._kv_feed, self._network = kv_feed, network
        self._forecasts, self._journal = forecasts, journal
        self._flows = FlowAgents() if flows is None else flows
        self._regime = RegimeWatch(thresholds or RegimeThresholds())

    def fleet(self, standby: Standby | None = None, observers: tuple[ObserverInfo, ...] = ()) -> Fleet:
        """Returns the engines, the names of the policies, what the policies need from the ingresses, `standby`, and the
        `observers`.
        """
        infos, needs = self._infos(), self._dispatcher.needs
        return Fleet(
            infos,
            self._dispatcher.prefill.name,
            self._dispatcher.decode.name,
            wants_hints=self._forecasts is not None,
            block_tokens=block_tokens(infos) if Needs.HITS in needs else None,
            wants_transfers=self._network.wants_transfers(needs),
            standby=standby,
            observers=observers,
        )

    def _infos(self) -> list[EngineInfo]:
        """Returns the facts of all engines. An engine is "quarantined" if it is ready and all its workers are."""
        infos, quarantined = self._engines.infos(), self._dispatcher.state.quarantined
        if not quarantined:
            return infos
        return [
            replace(info, state="quarantined")
            if info.state == "ready" and all(worker in quarantined for worker in workers_of(info))
            else info
            for info in infos
        ]

    def quarantine_reasons(self) -> tuple[tuple[WorkerId, str], ...]:
        """Returns the quarantined workers, each with its reason, by id."""
        standings = self._dispatcher.state.quarantined
        return tuple(
            (worker, standing.quarantine.reason)
            for worker, standing in sorted(standings.items())
            if standing.quarantine is not None
        )

    def _quarantined(self) -> list[Quarantined]:
        """Returns what ingresses learn of each quarantined worker, by id."""
        now_s, told = clock_s(), list[Quarantined]()
        for worker, standing in sorted(self._dispatcher.state.quarantined.items()):
            quarantine = standing.quarantine
            assert quarantine is not None
            told.append(
                Quarantined(
                    *place_of(worker),
                    reason=quarantine.reason,
                    for_s=now_s - quarantine.since_s,
                    probe_in_s=max(0.0, quarantine.probe_at_s - now_s),
                    probing=standing.probe is not None,
                    failure_rate=standing.failure_rate,
                    times=standing.times,
                )
            )
        return told

    def _load(self) -> FleetLoad:
        """Returns how loaded the fleet is now, and remembers since when it has been overloaded."""
        seen = self._regime.look(self._dispatcher.state.snapshot(clock_s(), ()))
        return FleetLoad(seen.regime.value, seen.prefill_mean, seen.decode_mean, seen.idle)

    def _waits(self) -> dict[str, float]:
        """Returns the figures of what waits: the sizes of the queue and their bounds, the age of the oldest pool entry,
        and the largest share of an entry's lease that has passed since it was granted or last renewed.
        """
        now_s, entries = clock_s(), self._dispatcher.state.waiting()
        dispatcher = self._dispatcher
        most_tokens = dispatcher.config.max_queue_tokens
        used = (_used_share(entry, now_s) for entry in entries)
        tokens = {} if most_tokens is None else {"queue_limit_tokens": float(most_tokens)}
        return tokens | {
            "queued_sequences": float(dispatcher.queued_sequences),
            "queued_tokens": float(dispatcher.queued_tokens),
            "queue_limit": float(dispatcher.config.max_queue),
            "pool_oldest_seconds": max((now_s - entry.entered_s for entry in entries), default=0.0),
            "pool_lease_used_ratio": max(used, default=0.0),
        }

    def status(
        self, ingresses: int, own_totals: Mapping[str, float], own_gauges: Mapping[str, float]
    ) -> FleetStatus:
        """Returns the router's figures and the engines' last statuses. `ingresses` is the number of connected
        ingresses; `own_totals` and `own_gauges` are the figures that the server itself has.
        """
        state = self._dispatcher.state
        totals = {f"decisions_{name}": float(count) for name, count in self._decisions.totals.items()}
        totals |= own_totals
        totals |= {name: float(count) for name, count in state.outlier_totals.items()}
        totals |= self._kv_feed.totals() | self._network.totals()
        gauges = self._kv_feed.gauges() | self._network.gauges(clock_s())
        totals |= self._flows.totals()
        gauges |= self._flows.gauges(self._engines.statuses())
        gauges |= own_gauges
        gauges |= self._waits() | {"engine_silence_seconds_max": self._engines.longest_silence_s()}
        sharing = self._dispatcher.sharing
        totals |= {"turns_among_tenants": float(sharing.turns)}
        totals |= {"raised_by_age": float(self._dispatcher.raised)}
        gauges |= {f"tenants_waiting_{place}": float(n) for place, n in sharing.tenants.items()}
        load = self._load()
        gauges |= {f"load_regime_{regime}": float(regime == load.regime) for regime in Regime}
        gauges |= {"load_idle_workers": float(len(load.idle))}
        means = {"load_score_prefill": load.prefill, "load_score_decode": load.decode}
        gauges |= {name: mean for name, mean in means.items() if mean is not None}
        if self._forecasts is not None:
            totals |= self._forecasts.totals()
            gauges |= self._forecasts.gauges()
        if self._journal is not None:
            totals |= self._journal.totals()
        return FleetStatus(
            statuses=self._engines.statuses(),
            queued=self._dispatcher.queue_size,
            pool=state.pool_size,
            in_flight=state.in_flight,
            leases=state.leases,
            totals=totals,
            decision_bounds_s=DECISION_BOUNDS_S,
            decision_buckets=self._decisions.cumulative(),
            decision_sum_s=self._decisions.sum_s,
            gauges=gauges,
            ingresses=ingresses,
            quarantined=self._quarantined(),
            load=load,
            flows=self._flows.status(),
        )


def _used_share(entry: PoolEntry, now_s: float) -> float:
    since_s = entry.entered_s if entry.renewed_s is None else entry.renewed_s
    lease_s = entry.lease_until_s - since_s
    return 1.0 if lease_s <= 0 else max(0.0, (now_s - since_s) / lease_s)


def block_tokens(infos: list[EngineInfo]) -> int | None:
    """Returns the size, in tokens, of the blocks in which ingresses hash prompts, or None if no engine reports its
    prefix cache. It is the block size of most of the engines that do; a prompt never hits in blocks of another size.
    """
    sizes = Counter(info.block_size_tokens for info in infos if KV_EVENTS in info.features)
    return max(sizes, key=lambda size: (sizes[size], size), default=None)
