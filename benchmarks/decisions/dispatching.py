"""Measures the whole dispatcher: requests from arrival to end, and events while the pool holds far more than fits."""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.decisions.measure import Timing, timed
from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher, RouteDecode, RoutePrefill
from policies.network.oracle import NodePlace, Oracle
from policies.request.terms import Terms
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Request, Role

# The number of engines, a quarter of which do prefill.
ENGINES = 64
SLOTS = 32
LIVE_PER_DECODE = 27
"""The number of requests in the system at once for each decode engine.

It is below the number of slots, so that the pool is short, as in a live router.
"""

STEP_S = 0.05
PAIRS = (
    ("round_robin", "round_robin"),
    ("join_shortest_queue", "join_shortest_queue"),
    ("predicted_ttft", "netkv"),
    ("predicted_ttft", "balance_route_h"),
    ("predicted_ttft", "composition"),
)
POOLS = (100, 1_000, 10_000)
FLEETS = (2, 16, 64, 256)
"""The numbers of engines between which the cost of a request is compared."""
FLEET_PAIRS = (*PAIRS[:2], ("join_shortest_queue", "composition"))
"""The policies with which it is: the least, those of the live comparison with other routers, and those as shipped."""
BLOCKS = 15
"""The number of turns that each fleet gets, one after the other, so that a busy machine slows all of them."""


class Loop:
    """A closed loop of requests on a virtual clock.

    In every step each running request gains a token, and new requests replace those that ended.
    """

    def __init__(self, prefill: str, decode: str, seed: int, engines: int = ENGINES) -> None:
        config = DispatchConfig(max_queue=10**6, queue_timeout_s=1e9, seed=seed)
        prefills = max(1, engines // 4)
        self.live = LIVE_PER_DECODE * (engines - prefills)
        self.dispatcher = Dispatcher(config, prefill_policy(prefill), decode_policy(decode))
        self.rng, self.now_s, self.events, self.arrived, self.closed = random.Random(seed), 0.0, 0, 0, 0
        self.running: dict[str, tuple[int, int]] = {}  # attempt_id -> tokens, output length
        self.computing: list[str] = []
        self.names = [f"p{i:03d}" for i in range(prefills)]
        self.names += [f"d{i:03d}" for i in range(engines - prefills)]
        for name in self.names:
            role = Role.PREFILL if name[0] == "p" else Role.DECODE
            self.feed(ev.EngineUp(0.0, name, role, "g", f"n{name}", SLOTS, 10_000_000))
            self.feed(ev.EngineStatus(0.0, name, 0, 0, 0))
        places = {f"n{name}": NodePlace(f"r{i // 4}", f"p{i // 16}") for i, name in enumerate(self.names)}
        self.feed(ev.OracleRefreshed(0.0, Oracle({0: 4e11, 1: 1e10, 2: 5e9, 3: 2.5e9}, places=places)))

    def feed(self, event: ev.Event) -> list[Action]:
        self.events += 1
        actions = self.dispatcher.handle(event)
        self.computing += [a.attempt_id for a in actions if isinstance(a, RoutePrefill)]
        for action in actions:
            if isinstance(action, RouteDecode):
                self.running[action.attempt_id] = (0, self.rng.randint(20, 120))
        return actions

    def step(self) -> None:
        """Lets all engines make one step; with every tenth step each engine reports its status, and a Tick follows."""
        self.now_s += STEP_S
        if round(self.now_s / STEP_S) % 10 == 0:
            for name in self.names:
                self.feed(ev.EngineStatus(self.now_s, name, 10, 0, 0))
            self.feed(ev.Tick(self.now_s))
        while self.dispatcher.state.in_flight < self.live:
            request = Request(
                f"r{self.arrived}", self.now_s, self.rng.randint(50, 8000), 1024, terms=Terms(ttft_slo_s=10.0)
            )
            self.arrived += 1
            self.feed(ev.Arrived(self.now_s, request))
        computed, self.computing = self.computing, []
        for attempt_id in computed:
            self.feed(ev.PrefillDone(self.now_s, attempt_id, self.now_s + 1e6, 80_000_000, 0))
        grown = {attempt_id: (tokens + 1, length) for attempt_id, (tokens, length) in self.running.items()}
        self.running = {attempt_id: at for attempt_id, at in grown.items() if at[0] < at[1]}
        self.feed(
            ev.ProgressedMany(
                self.now_s, tuple((attempt_id, at[0]) for attempt_id, at in self.running.items())
            )
        )
        for attempt_id in grown.keys() - self.running.keys():
            self.closed += 1
            self.feed(ev.Closed(self.now_s, attempt_id, "finished", grown[attempt_id][0]))

    def until(self, closed: int) -> tuple[float, float]:
        """Goes on until `closed` requests have ended. Returns the wall and CPU time of one request in microseconds,
        which include the loop's own.
        """
        before, wall_s, cpu_s = self.closed, time.perf_counter(), time.process_time()
        while self.closed < closed:
            self.step()
        each = 1e6 / max(1, self.closed - before)
        return each * (time.perf_counter() - wall_s), each * (time.process_time() - cpu_s)


def requests(number: int, seed: int) -> list[Timing]:
    """Returns the mean time of a request, which includes the loop's own CPU time.

    The mean over all requests takes the place of p50 and p99.
    """
    rows = []
    for prefill, decode in PAIRS:
        loop = Loop(prefill, decode, seed)
        wall_us, cpu_us = loop.until(number)
        note = f"{loop.events / loop.closed:.1f} events a request, {ENGINES} engines"
        rows.append(
            Timing(f"request: {prefill} + {decode}", loop.closed, wall_us, wall_us, cpu_us, cpu_us, note)
        )
    return rows


def fleet_name(prefill: str, decode: str, engines: int) -> str:
    """Returns the name of the row of a request on a fleet of this size."""
    return f"request, {engines} engines: {prefill} + {decode}"


def fleets(number: int, seed: int, quick: bool) -> list[Timing]:
    """Returns the time of a request by the number of engines, each of which has the same load.

    p50 is the median over `BLOCKS` turns of at least `number / BLOCKS` requests each, and p99 the longest turn. Before
    the first turn each fleet has ended as many requests as it has at once.
    """
    rows, median = [], BLOCKS // 2
    for prefill, decode in FLEET_PAIRS:
        loops = {engines: Loop(prefill, decode, seed, engines) for engines in FLEETS[: 2 if quick else None]}
        for loop in loops.values():
            loop.until(loop.live)
        turns = [
            {engines: loop.until(loop.closed + max(1, number // BLOCKS)) for engines, loop in loops.items()}
            for _ in range(BLOCKS)
        ]
        for engines, loop in loops.items():
            wall_us, cpu_us = (sorted([turn[engines][which] for turn in turns]) for which in (0, 1))
            quantiles = wall_us[median], wall_us[-1], cpu_us[median], cpu_us[-1]
            note = f"{loop.events / loop.closed:.1f} events a request, {loop.live:,} at once"
            rows.append(Timing(fleet_name(prefill, decode, engines), BLOCKS, *quantiles, note))
    return rows


class Backlog:
    """A cluster whose 16 decode workers each have a free slot, but no KV room for any of the `pool` pooled entries."""

    def __init__(self, decode: str, pool: int, seed: int) -> None:
        self.rng, self.made, self.running = random.Random(seed), 0, list[str]()
        config = DispatchConfig(max_queue=10**6, starvation_s=1e9, seed=seed)
        self.dispatcher = Dispatcher(config, prefill_policy("round_robin"), decode_policy(decode))
        self.handle(ev.EngineUp(0.0, "p", Role.PREFILL, "g", "n", 10**6, 10**9))
        self.handle(ev.EngineStatus(0.0, "p", 0, 0, 0))
        for i in range(16):
            self.handle(ev.EngineUp(0.0, f"d{i:02d}", Role.DECODE, "g", "n", 2, 2000))
            self.handle(ev.EngineStatus(0.0, f"d{i:02d}", 0, 0, 0))
        for _ in range(16 + pool):
            self.handle(self.new_entry())

    def handle(self, event: ev.Event) -> None:
        """Feeds an event to the dispatcher, and carries out the decodes that it orders."""
        actions = self.dispatcher.handle(event)
        self.running += [action.attempt_id for action in actions if isinstance(action, RouteDecode)]

    def new_entry(self) -> ev.PrefillDone:
        """Adds a request and returns the event of its finished prefill.

        Its prompt takes more than half of a worker's KV, so no worker has room for two.
        """
        attempt_id = f"r{self.made:05d}"
        self.made += 1
        self.handle(ev.Arrived(0.0, Request(attempt_id, 0.0, self.rng.randint(1100, 1900), 64)))
        return ev.PrefillDone(0.0, attempt_id, 1e9, 80_000_000, 0)

    def end(self) -> ev.Closed:
        """Returns the event that ends the request that has run longest; its worker then has room for one more."""
        return ev.Closed(0.0, self.running.pop(0), "finished")


def long_pools(calls: int, seed: int) -> list[Timing]:
    """Measures events while the pool holds far more than fits.

    The pool scan of an event is bounded (`tick_entries`), so a pool of 10,000 should cost as much as one of 1,000.
    """
    rows = []
    for decode in ("join_shortest_queue", "balance_route_h"):
        for pool in POOLS:
            backlog = Backlog(decode, pool, seed)
            state = backlog.dispatcher.state

            def ends(backlog: Backlog = backlog) -> Iterator[Callable[[], object]]:
                for _ in range(calls):
                    yield partial(backlog.handle, backlog.end())
                    backlog.handle(backlog.new_entry())

            def entries(backlog: Backlog = backlog) -> Iterator[Callable[[], object]]:
                for _ in range(calls):
                    yield partial(backlog.handle, backlog.new_entry())

            assert state.pool_size == pool
            at = f"{decode}, pool {pool:,}"
            grown = ev.ProgressedMany(0.0, ((backlog.running[0], 1),))
            rows += [
                timed(f"{at}: progress", (partial(backlog.handle, grown) for _ in range(calls))),
                timed(
                    f"{at}: Tick, nothing fits", (partial(backlog.handle, ev.Tick(0.0)) for _ in range(calls))
                ),
                timed(f"{at}: a request ends, one is sent", ends()),
                timed(f"{at}: one more that does not fit", entries()),
            ]
    return rows
