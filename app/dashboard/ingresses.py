"""The ingress replicas as they report: rates from what they count, and windows of the requests that have ended.

A rate is that between two reports of one replica by its own clock, so it does not matter when reports arrive. A replica
that has not reported for `STALE_S` has no rates.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.wire.messages import Figures, IngressObserved
from app.dashboard.registry import total
from app.dashboard.requests import Shown
from app.dashboard.rings import Value, quantile

STALE_S = 3.5
"""Age of a report from which it does not count: three are missing."""
WINDOW_S = 15.0
"""Quantiles and attainment are over the requests that ended in this time, and rates of transfers over what replicas
have counted in it.
"""


def _refused(labels: dict[str, str]) -> bool:
    return labels["code"] == "429" or labels["code"].startswith("5")


COUNTED: dict[str, tuple[str, Callable[[dict[str, str]], bool] | None]] = {
    "requests_per_s": ("sluice_requests_total", None),
    "errors_per_s": ("sluice_requests_total", _refused),
    "retries_per_s": ("sluice_retries_total", None),
    "migrations_per_s": ("sluice_migrations_total", None),
    "transfer_failures_per_s": ("sluice_kv_transfer_failures_total", None),
    "fallbacks_per_s": ("sluice_fallback_decisions_total", None),
}
"""Series by name: the counter whose rate it is, and which of its series count."""


class Objectives(NamedTuple):
    """Prompts with an objective that ended in some time, and those of them that met it, by class."""

    met: dict[str, float]
    all: dict[str, float]


@dataclass(slots=True)
class _Ingress:
    message: IngressObserved
    at_s: float
    counts: dict[str, float]
    objectives: Objectives
    rates: dict[str, float] = field(default_factory=dict)


class Ended(NamedTuple):
    """A request that has ended, as far as the quantiles need it."""

    at_s: float
    request_class: str
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


class Ingresses:
    """All ingress replicas that are connected to this observer."""

    def __init__(self) -> None:
        self._ingresses: dict[str, _Ingress] = {}
        self._objectives: deque[tuple[float, Objectives]] = deque()
        self._ended: deque[Ended] = deque()

    def __len__(self) -> int:
        return len(self._ingresses)

    def take(self, ingress: str, message: IngressObserved, now_s: float) -> None:
        """Takes in a report. The first one of a replica is what later ones are compared with."""
        counts = {name: total(message.figures, *counted) for name, counted in COUNTED.items()}
        present = _Ingress(message, now_s, counts, objectives_of(message.figures))
        before = self._ingresses.get(ingress)
        if before is not None:
            took_s = message.now_s - before.message.now_s
            if took_s > 0:
                present.rates = {
                    name: max(0.0, count - before.counts[name]) / took_s for name, count in counts.items()
                }
            self._objectives.append((now_s, _since(before.objectives, present.objectives)))
        self._ingresses[ingress] = present

    def lost(self, ingress: str) -> None:
        """Forgets a replica whose connection has ended."""
        self._ingresses.pop(ingress, None)

    def ended(self, request: Shown, at_s: float) -> None:
        """Counts a request that ended at `at_s`. Times of requests that were not answered well do not count."""
        whole = request if request["status"] == 200 else dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"))
        self._ended.append(Ended(at_s, request["class"], whole["ttft_s"], whole["tpot_s"], whole["e2e_s"]))

    def tick(self, now_s: float) -> None:
        """Forgets what is older than the window."""
        while self._objectives and self._objectives[0][0] < now_s - WINDOW_S:
            self._objectives.popleft()
        while self._ended and self._ended[0].at_s < now_s - WINDOW_S:
            self._ended.popleft()

    def present(self, now_s: float) -> list[IngressObserved]:
        """Returns the last report of each replica that still reports."""
        return [one.message for one in self._ingresses.values() if now_s - one.at_s < STALE_S]

    def rates(self, now_s: float) -> dict[str, Value]:
        """Returns the rates of `COUNTED`, added up over the replicas; None where no replica has one."""
        fresh = [one.rates for one in self._ingresses.values() if one.rates and now_s - one.at_s < STALE_S]
        return {name: sum(rates[name] for rates in fresh) if fresh else None for name in COUNTED}

    def attainment(self) -> dict[str, Value]:
        """Returns the share of prompts that met their objectives by class; a class without any is left out."""
        met, of = dict[str, float](), dict[str, float]()
        for _, one in self._objectives:
            for name, count in one.all.items():
                of[name] = of.get(name, 0.0) + count
                met[name] = met.get(name, 0.0) + one.met.get(name, 0.0)
        return {name: met[name] / count for name, count in of.items() if count}

    def quantiles(self, classes: Iterable[str]) -> dict[str, Value]:
        """Returns the series `ttft_p50_s/CLASS` and so on."""
        ended = list(self._ended)
        found: dict[str, Value] = {}
        for name in classes:
            own = [one for one in ended if one.request_class == name]
            for what in ("ttft", "tpot", "e2e"):
                values = sorted(v for one in own if (v := getattr(one, f"{what}_s")) is not None)
                found[f"{what}_p50_s/{name}"] = quantile(values, 0.5)
                found[f"{what}_p95_s/{name}"] = quantile(values, 0.95)
        return found

    def classes(self) -> set[str]:
        """Returns the classes of the requests in the window."""
        return {one.request_class for one in self._ended}


def objectives_of(figures: Iterable[Figures]) -> Objectives:
    """Returns the prompts with objectives that a replica has counted."""
    met, of = dict[str, float](), dict[str, float]()
    for one in figures:
        if one.name == "sluice_slo_requests_total":
            for (name, result), (count,) in one.series:
                of[name] = of.get(name, 0.0) + count
                if result == "met":
                    met[name] = met.get(name, 0.0) + count
    return Objectives(met, of)


def _since(before: Objectives, present: Objectives) -> Objectives:
    """Returns what has been counted since `before`; none where the counts have fallen."""

    def grown(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
        return {name: max(0.0, count - then.get(name, 0.0)) for name, count in now.items()}

    return Objectives(grown(present.met, before.met), grown(present.all, before.all))
