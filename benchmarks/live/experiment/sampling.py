"""One sample a second of an application under an experiment, from `/sluice/status` and `/metrics`.

With several ingress replicas on one port a scrape meets one of them, so their counters jump; the dashboard adds them up
and is asked instead where there is one. A figure that nobody reports is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from benchmarks.live.experiment.control import Control
from sluice import SluiceError
from sluice._metrics import Metrics, parse_metrics
from sluice.types import EngineStatus, Status

COUNTERS = {
    "kv_bytes_per_s": "sluice_kv_transfer_bytes_total",
    "retries_per_s": "sluice_retries_total",
    "migrations_per_s": "sluice_migrations_total",
    "server_tokens_per_s": "sluice_generation_tokens_total",
}
"""Names of series that are rates, and the counters of which they are rates."""

GAUGES = (
    "queued",
    "pool",
    "in_flight",
    "leases",
    "kv_usage",
    "kv_usage_max",
    "engines_active",
    "engines_warm",
    "engines_held",
)


class Sampler:
    """Samples of one application. Each call of `sample` returns the figures now; rates count since the call before."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._http = control.of_dashboard()
        self._before: tuple[float, dict[str, float]] | None = None

    def close(self) -> None:
        """Ends the connection to the dashboard."""
        self._http.close()

    def sample(self, now_s: float) -> dict[str, Any]:
        """Returns the figures at `now_s`, seconds of any clock that runs evenly. What cannot be asked is missing."""
        found: dict[str, Any] = dict.fromkeys((*GAUGES, *COUNTERS))
        try:
            found |= gauges(self._control.client.status())
        except SluiceError as error:
            found["error"] = str(error)
        try:
            metrics = self._metrics()
        except (SluiceError, httpx.HTTPError) as error:
            # httpx adds a line with the address of a page about the status
            found["error"] = str(error).partition("\n")[0]
            return found
        totals = {name: _total(metrics, counter) for name, counter in COUNTERS.items()}
        if self._before is not None:
            then_s, before = self._before
            found |= rates(before, totals, now_s - then_s)
        self._before = (now_s, totals)
        return found

    def _metrics(self) -> Metrics:
        if self._control.dashboard is None:
            return self._control.client.metrics()
        return parse_metrics(self._http.get(f"{self._control.dashboard}/metrics").raise_for_status().text)


def _total(metrics: Metrics, counter: str) -> float:
    """Returns a counter's sum over its labels; 0 while it has no sample yet."""
    return sum(sample.value for sample in metrics.select(counter))


def rates(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> dict[str, float | None]:
    """Returns the growth of each counter a second; None for one that fell, since its process began anew."""
    if seconds <= 0:
        return dict.fromkeys(now)
    return {
        name: (value - before[name]) / seconds if name in before and value >= before[name] else None
        for name, value in now.items()
    }


def gauges(status: Status) -> dict[str, Any]:
    """Returns the figures in a status."""
    serving = [e for e in status.engines if _serves(e)]
    usage = [e.kv_usage for e in serving if e.kv_usage is not None]
    requests = status.requests
    return {
        "queued": None if requests is None else requests.queued,
        "pool": None if requests is None else requests.pool,
        "in_flight": None if requests is None else requests.in_flight,
        "leases": status.leases,
        "kv_usage": sum(usage) / len(usage) if usage else None,
        "kv_usage_max": max(usage, default=None),
        "engines_active": len(serving),
        "engines_warm": sum(e.duty == "warm" and e.state == "ready" for e in status.engines),
        "engines_held": sum(e.state != "down" for e in status.engines),
    }


def _serves(engine: EngineStatus) -> bool:
    return engine.state in (None, "ready", "quarantined") and (engine.duty or "active") == "active"
