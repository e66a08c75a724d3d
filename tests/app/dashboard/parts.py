"""Messages and a whole dashboard for the tests: real router, real sockets, real HTTP on loopback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from actors.router.server import RouterServer
from actors.telemetry.facts import Answered, Attempt, Kept
from actors.wire import messages as wire
from actors.wire.channel import Identity
from app.api.extensions import ClassSlo
from app.dashboard.audit import Audit
from app.dashboard.auth import Keys, Sessions
from app.dashboard.changes import Changes
from app.dashboard.config import Settings
from app.dashboard.engines import Happened
from app.dashboard.feed import Feed
from app.dashboard.observer import Observer
from app.dashboard.server import DashboardApp, DashboardServer
from app.dashboard.stream import Stream
from app.fleet.moved import PAIR, PAIR_BYTES, PAIR_TRANSFERS, TIER, TIER_BYTES, TIER_TRANSFERS
from app.ingress.metrics import Series
from policies.request.life import Times

ADMIN, VIEWER = "an admin key of the tests", "a viewer key of the tests"
SLO = {"interactive": ClassSlo(ttft_s=0.5, tpot_s=0.1)}


def engine(name: str = "decode-1", role: str = "decode", **more: object) -> wire.EngineInfo:
    facts = {
        "id": name, "role": role, "kind": "sim", "model": "m", "group": "g", "addresses": (), "slots": 8,
        "kv_blocks": 512, "block_size_tokens": 16, "max_model_len": 1024, "node": f"node of {role}", "pid": 1,
        "lease_s": 30.0,
    }  # fmt: skip
    return wire.EngineInfo(**(facts | more))  # type: ignore[arg-type]


def fleet(*engines: wire.EngineInfo, decode: str = "composition") -> wire.Fleet:
    return wire.Fleet(list(engines), "join_shortest_queue", decode)


def status(*statuses: wire.Status, **more: object) -> wire.FleetStatus:
    facts = {"queued": 0, "pool": 0, "in_flight": 0, "leases": 0, "totals": {}}
    return wire.FleetStatus(list(statuses), **(facts | more))  # type: ignore[arg-type]


def report(name: str = "decode-1", running: int = 0, **totals: float) -> wire.Status:
    return wire.Status(name, running, 0, 0, 0, 0.25, totals=totals)


def requests_total(count: float, code: str = "200") -> wire.Figures:
    series: Series = [((code, "interactive", "m"), (count,))]
    return wire.Figures("sluice_requests_total", "counter", "h", ("code", "class", "model"), (), series)


def objectives(met: float, missed: float) -> wire.Figures:
    series: Series = [(("interactive", "met"), (met,)), (("interactive", "ttft"), (missed,))]
    return wire.Figures("sluice_slo_requests_total", "counter", "h", ("class", "result"), (), series)


def moved(
    transfers: int,
    n_bytes: float,
    pair: tuple[str, str] = ("node of prefill", "node of decode"),
    tier: str = "1",
) -> list[wire.Figures]:
    """The counters of an ingress between whose engines `n_bytes` have moved in `transfers`."""
    counts = (
        ((TIER_TRANSFERS, transfers), (TIER_BYTES, n_bytes)),
        ((PAIR_TRANSFERS, transfers), (PAIR_BYTES, n_bytes)),
    )
    labels = ((TIER, (tier,)), (PAIR, pair))
    return [
        wire.Figures(name, "counter", "h", names, (), [(values, (float(count),))])
        for (names, values), both in zip(labels, counts, strict=True)
        for name, count in both
    ]


def observed(now_s: float, *figures: wire.Figures, **more: object) -> wire.IngressObserved:
    facts = {
        "now_s": now_s, "model": "m", "detail": None, "router_connected": True, "decides_here": False, "stages": {},
        "figures": list(figures), "requests": [], "notes": [],
    }  # fmt: skip
    return wire.IngressObserved(**(facts | more))  # type: ignore[arg-type]


def answered(name: str = "1", at_s: float = 100.0, **more: object) -> Answered:
    """A request that came at `at_s`: 10 ms in the queue, 20 ms of prefill, 5 ms in the pool, 15 ms until the first
    token, and 9 tokens of 10 ms after it.
    """
    times = Times(
        at_s, at_s + 0.01, at_s + 0.03, None, at_s + 0.035, None, at_s + 0.05, at_s + 0.14, at_s + 0.05
    )
    attempt = Attempt(
        f"{name}-1", 0, times, at_s + 0.14, "finished", "prefill-1", "decode-1", None, None, False, 10, 0, 4,
        transfer_bytes=3_000_000, transfer_s=0.003,
    )  # fmt: skip
    facts = {
        "kept": Kept(None, False, [attempt], ["met"]), "path": "/v1/completions", "request_id": f"cmpl-{name}",
        "model": "m", "request_class": "interactive", "started_s": at_s, "first_s": at_s + 0.05, "ended_s": at_s + 0.14,
        "status": 200, "input_tokens": 7, "output_tokens": 10, "max_tokens": 10, "stream": True,
        "shown_id": f"req-{name}",
    }  # fmt: skip
    return Answered(**(facts | more))  # type: ignore[arg-type]


@dataclass
class Dashboard:
    """A running dashboard. `client` sends no key."""

    observer: Observer
    feed: Feed
    stream: Stream
    server: DashboardServer
    audit: Audit
    client: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@asynccontextmanager
async def dashboard(
    directory: Path, router: RouterServer, session_s: float = 3600.0, **settings: object
) -> AsyncIterator[Dashboard]:
    """A dashboard on a free port that watches `router`, put together as its replica does."""
    own: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "model": "m",
        "version": "0.0",
        "folder": directory / "d",
    }
    made = Settings(**(own | settings))
    feed = Feed(SLO)
    stream = Stream(feed.snapshot)

    async def find() -> tuple[str, ...]:
        return router.addresses

    observer = Observer(Identity("observer", "dashboard"), find, feed, stream.add)
    audit = Audit(made.folder)
    audit.open()
    changes = Changes(
        observer.ask, audit, feed.engines.role_and_duty,
        lambda what: feed.event(observer.now_s(), Happened("admin", what)),
    )  # fmt: skip
    app = DashboardApp(made, feed, stream, changes, Sessions(Keys((VIEWER,), (ADMIN,)), session_s))
    server = DashboardServer(app, made, stream)
    await observer.start([f"unix:{directory}/dashboard.sock"])
    await server.start()
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60)
    try:
        yield Dashboard(observer, feed, stream, server, audit, client)
    finally:
        await client.aclose()
        await server.stop()
        await observer.stop()
