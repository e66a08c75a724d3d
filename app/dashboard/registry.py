"""The counts of all ingress replicas, added up, so that one scrape shows the application.

What a replica that has gone had counted stays in the sums, because a sum that falls looks like a restart. A gauge is
added up over the replicas that are connected. Series of a pair of nodes end when a node of it has no engine any more.

A dashboard that starts knows nothing of replicas that went before, so its sums are smaller than its predecessor's, and
Prometheus would take the difference for a restart and count everything again. Therefore counters and histograms have
the label `observer`, which names the process that has added them up: sums that begin anew are series of their own. They
are shown once all replicas that the router knows have told what they count (`Registry.missing`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from actors.wire.messages import Figures
from app.fleet.figures import FleetCollector, Seen
from app.fleet.metric import cumulative
from app.fleet.moved import OTHER, PAIR

OBSERVER = "observer"
STEADY_S = 5.0
"""Seconds for which all replicas must have been there, before the sums are shown for the first time: those that look
for a new router are not known to it yet. ASSUMPTION: each finds it within its longest back-off and an answer of Serve.
"""
WAIT_S = 30.0
"""Seconds after which the sums are shown without those that are missing, which may never come. ASSUMPTION: a replica
that can reach the dashboard has done so by then.
"""
MOST_GONE = 64
"""Most replicas that have gone whose figures are kept apart, for the case that they come back."""

Labels = tuple[str, ...]
Numbers = tuple[float, ...]


class Registry(Collector):
    """The figures of all ingress replicas by the ids of their processes. `nodes` returns those that have engines, and
    `name` is that of the process that adds them up. `missing` says why the sums must not be shown yet, and is None from
    the time on when they may.
    """

    def __init__(self, nodes: Callable[[], Set[str]], name: str = "dashboard") -> None:
        self._nodes, self._name = nodes, name
        self._live: dict[str, list[Figures]] = {}
        self._gone: OrderedDict[str, list[Figures]] = OrderedDict()
        self._past: list[Figures] = []
        self.missing: str | None = "the dashboard has just started"
        self._began_s: float | None = None
        self._steady: tuple[int, int | None, float] = (0, None, 0.0)
        """Replicas that have told their counts, those that the router knows, and since when it is these numbers."""
        self._was_whole = False
        self._beginnings = 1

    def tick(self, now_s: float, known: int | None) -> None:
        """Looks whether the sums may be shown; `known` is the number of replicas at the router, None without one."""
        if self._was_whole:
            return
        if self._began_s is None:
            self._began_s = now_s
        told = len(self._live)
        if self._steady[:2] != (told, known):
            self._steady = told, known, now_s
        if known is not None and told >= max(1, known) and now_s - self._steady[2] >= STEADY_S:
            self._was_whole, self.missing = True, None
        elif self.missing is not None:
            of = "" if known is None else f" of {known}"
            late = now_s - self._began_s >= WAIT_S
            self.missing = None if late else f"{told}{of} ingress replicas have told what they count so far"

    def take(self, ingress: str, figures: list[Figures]) -> None:
        """Takes in what a replica counts now."""
        is_new = ingress not in self._live and ingress not in self._gone
        if is_new and self.missing is None and not self._was_whole:
            # it may have counted for days, and these counts would look like requests of this second
            self._beginnings += 1
        self._gone.pop(ingress, None)
        self._live[ingress] = figures

    def lost(self, ingress: str) -> None:
        """Notes that a replica is not connected any more."""
        figures = self._live.pop(ingress, None)
        if figures is None:
            return
        self._gone[ingress] = [one for one in figures if one.kind != "gauge"]
        if len(self._gone) > MOST_GONE:
            _, oldest = self._gone.popitem(last=False)
            # nodes come and go for as long as an application runs, so their series are not kept for good
            self._past = self._present(summed([self._past, oldest]).values())

    def sums(self) -> dict[str, Figures]:
        """Returns every metric by its name, with the sums of its series."""
        sums = summed([self._past, *self._gone.values(), *self._live.values()]).values()
        return {one.name: one for one in self._present(sums)}

    def _present(self, figures: Iterable[Figures]) -> list[Figures]:
        """Returns the figures without the series of pairs of nodes of which one has no engine."""
        nodes = {OTHER, *self._nodes()}
        return [
            one
            if one.labels != PAIR
            else replace(one, series=[series for series in one.series if nodes.issuperset(series[0])])
            for one in figures
        ]

    def collect(self) -> Iterable[Family]:
        """Yields the metric families of one scrape."""
        observer = self._name if self._beginnings == 1 else f"{self._name}-{self._beginnings}"
        for one in self.sums().values():
            yield _family(one if one.kind == "gauge" else _labelled(one, OBSERVER, observer))


def summed(all_figures: Iterable[list[Figures]]) -> dict[str, Figures]:
    """Returns the figures of several processes added up, by name. Of a metric whose buckets or labels differ between
    versions, those of the first process count.
    """
    heads: dict[str, Figures] = {}
    sums: dict[str, dict[Labels, Numbers]] = {}
    for figures in all_figures:
        for one in figures:
            head = heads.setdefault(one.name, one)
            if (head.kind, head.labels, head.bounds) != (one.kind, one.labels, one.bounds):
                continue
            series = sums.setdefault(one.name, {})
            for labels, numbers in one.series:
                before = series.get(labels)
                series[labels] = (
                    numbers if before is None else tuple(map(sum, zip(before, numbers, strict=True)))
                )
    return {
        name: Figures(head.name, head.kind, head.help, head.labels, head.bounds, list(sums[name].items()))
        for name, head in heads.items()
    }


def total(
    figures: Iterable[Figures], name: str, wanted: Callable[[dict[str, str]], bool] | None = None
) -> float:
    """Returns the sum of a metric's series whose labels are `wanted` (None: of all)."""
    for one in figures:
        if one.name == name:
            return sum(
                numbers[0]
                for labels, numbers in one.series
                if wanted is None or wanted(dict(zip(one.labels, labels, strict=True)))
            )
    return 0.0


def _labelled(one: Figures, label: str, value: str) -> Figures:
    series = [((*labels, value), numbers) for labels, numbers in one.series]
    return replace(one, labels=(*one.labels, label), series=series)


def _family(one: Figures) -> Family:
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if one.kind == "histogram":
        family = HistogramMetricFamily(one.name, one.help, labels=one.labels)
        for labels, (whole, *counts) in one.series:
            family.add_metric(labels, cumulative(one.bounds, counts), whole)
        return family
    make = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
    family = make(one.name, one.help, labels=one.labels)
    for labels, (value,) in one.series:
        family.add_metric(labels, value)
    return family


def exposition(registry: Registry, seen: Callable[[], Seen]) -> bytes:
    """Returns Prometheus's text of the replicas' sums and of the figures of router and engines."""
    collectors = CollectorRegistry()
    collectors.register(registry)
    collectors.register(FleetCollector(seen))
    return generate_latest(collectors)
