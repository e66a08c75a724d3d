"""Measures one cell: an application of some ingresses and engines under a ladder of closed loops."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.live import measure
from benchmarks.live.measure import Measurement, Plan
from benchmarks.live.servers import Command, Server, ServerError, administrator, running
from benchmarks.live.targets import SimTiming, sim_args, sluice_app

TOKENS = 2
"""Tokens of an answer: one that the prefill gives and one of the decode engine, so the router decides twice and every
hop of a request is there.
"""
SHIPPED = "composition"
"""The name of the policies that are there without configuration, by that for decode."""
POLICIES: Mapping[str, Mapping[str, Any]] = {
    SHIPPED: {},
    "join_shortest_queue": {
        "prefill": {"name": "join_shortest_queue"},
        "decode": {"name": "join_shortest_queue"},
    },
}
"""The configuration of the router for each policy that is measured."""
GROWS = 1.05
"""Ratio of requests/s to the most so far below which a further step of the ladder ends it."""
SLOTS, KV_BLOCKS = 1024, 4096
"""Of an engine: two engines have room for the longest ladder, and hundreds of engines fit into memory."""
SPARE_CONNECTIONS = 256
START_S = 300.0
"""Longest time until an application serves; on a machine that is busy otherwise the imports alone take minutes."""
THERE_S = 120.0
"""Longest time until every ingress is connected with the router and with all engines."""
ASK_S = 30.0
LOOK_S = 0.2
FALLBACKS = "sluice_fallback_decisions_total"


@dataclass(frozen=True, slots=True)
class Cell:
    """One application to measure; half of the `engines` prefill, and the others decode."""

    policy: str
    ingresses: int
    engines: int

    @property
    def name(self) -> str:
        """The cell in words, as rows and progress name it."""
        several = "ingress" if self.ingresses == 1 else "ingresses"
        return f"{self.policy}, {self.ingresses} {several}, {self.engines} engines"


@dataclass(frozen=True, slots=True)
class Ladder:
    """The loads of a cell: `rungs` are the numbers of clients, each for `seconds`.

    The ladder ends where requests/s no longer grow (`GROWS`), but not before `common` clients, with which all cells are
    compared; this rung is measured `repeats` times. `ttft_requests` is the most requests of the measurement of TTFT.
    """

    rungs: tuple[int, ...] = (32, 64, 128, 256, 512)
    seconds: int = 4
    common: int = 128
    repeats: int = 3
    ttft_requests: int = 10_000

    def __post_init__(self) -> None:
        if list(self.rungs) != sorted(set(self.rungs)) or self.common not in self.rungs or self.repeats < 1:
            raise ValueError(f"{self}: rungs ascend, `common` is one of them, and `repeats` is at least 1")


def climb(ladder: Ladder, rate_of: Callable[[int], float]) -> int:
    """Calls `rate_of(clients)` on one rung after the other; returns the number of clients with the highest rate.

    It ends at the first rung from `ladder.common` on whose rate is not `GROWS` times the highest before.
    """
    best, highest = ladder.rungs[0], 0.0
    for clients in ladder.rungs:
        rate = rate_of(clients)
        grown = rate >= GROWS * highest
        if rate > highest:
            best, highest = clients, rate
        if not grown and clients >= ladder.common:
            break
    return best


def application(cell: Cell, folder: Path, most_clients: int) -> Command:
    """Returns the command that serves the cell's application without Ray to `most_clients`. Its files are in
    `folder`.
    """
    folder.mkdir(parents=True)
    prefill = cell.engines // 2
    args = sim_args(SimTiming(), prefill, cell.engines - prefill)
    for group in args["engines"]:
        group["options"] = {**group["options"], "slots": SLOTS, "kv_blocks": KV_BLOCKS}
    room = most_clients + SPARE_CONNECTIONS
    limits = {"max_connections": room, "max_connections_per_address": room, "max_in_flight": room}
    args |= {
        "router": dict(POLICIES[cell.policy]),
        "wire": {"socket_dir": str(folder / "sockets")},
        "ingress": {"replicas": cell.ingresses, "options": limits},
    }
    made = sluice_app(cell.name, folder / "app.yaml", args, START_S)
    argv = list(made.argv)
    argv[argv.index("app.serve")] = "benchmarks.capacity.application"
    return replace(made, argv=argv)


def measure_cell(
    cell: Cell, ladder: Ladder, folder: Path, wrk: str | None, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Starts the cell's application, and returns what `measured` found. Raises ServerError or MeasureError where it
    cannot be measured.
    """
    with running(application(cell, folder, ladder.rungs[-1]), say) as server:
        return measured(server, cell, ladder, wrk, seed, say)


def measured(
    server: Server, cell: Cell, ladder: Ladder, wrk: str | None, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the cell with all rungs, the common one again, TTFT, and what ingresses decided without the router.

    Without `wrk` the Python client climbs, too. Raises ServerError or MeasureError.
    """
    wait_whole(server, cell)
    measure.first_answer(server, "sim", TOKENS)
    rungs: list[dict[str, Any]] = []

    def loaded(clients: int) -> float:
        rungs.append(figures(_load(server, clients, ladder, wrk, seed + len(rungs))))
        say(f"  {clients} clients: {rungs[-1]['requests_per_s']:,.0f} requests/s")
        return float(rungs[-1]["requests_per_s"])

    best = climb(ladder, loaded)
    common = [rung for rung in rungs if rung["concurrency"] == ladder.common]
    for number in range(1, ladder.repeats):
        common.append(figures(_load(server, ladder.common, ladder, wrk, seed + 100 + number)))
    plan = Plan(best, ladder.ttft_requests, TOKENS, float(ladder.seconds))
    timed = figures(measure.with_python(server, "sim", plan, seed + 200))
    decided = sum(fallbacks for _, fallbacks in ingresses_of(server, cell).values())
    return {
        **asdict(cell),
        "best": best,
        "rungs": rungs,
        "common": common,
        "timed": timed,
        "decided_by_ingresses": decided,
    }


def _load(server: Server, clients: int, ladder: Ladder, wrk: str | None, seed: int) -> Measurement:
    plan = Plan(clients, 1_000_000, TOKENS, float(ladder.seconds))
    if wrk is None:
        return measure.with_python(server, "sim", plan, seed)
    return measure.with_wrk(server, "sim", plan, seed, wrk)


def figures(case: Measurement) -> dict[str, Any]:
    """Returns what a cell keeps of a measurement. CPU times are in microseconds a request, by role."""
    cpu_us = {role: 1e3 * ms for role, ms in case.cpu_ms_per_request.items()}
    return {
        "client": case.client,
        "concurrency": case.concurrency,
        "requests": case.requests,
        "requests_per_s": case.requests_per_s,
        "cpu_us": cpu_us,
        "client_cpu_us": 1e3 * case.client_cpu_ms_per_request,
        "router_cores": cpu_us.get("router", 0.0) * case.requests_per_s / 1e6,
        "other_cores": case.other_cores,
        "ttft_ms": case.ttft_ms and {name: case.ttft_ms[name] for name in ("p50", "p99")},
        "failures": case.failures,
    }


def ingresses_of(server: Server, cell: Cell) -> dict[int, tuple[dict[str, Any], int]]:
    """Returns the status of each ingress, and how many requests it decided without the router, by its process id.

    The kernel chooses the ingress of each connection, so connections are opened until all have answered. Raises
    ServerError after `THERE_S`.
    """
    found: dict[int, tuple[dict[str, Any], int]] = {}
    until_s = time.monotonic() + THERE_S
    while len(found) < cell.ingresses:
        if time.monotonic() >= until_s:
            raise ServerError(f"{cell.name}: {len(found)} ingresses answer:\n{server.tail()}")
        with administrator(server.command.port, ASK_S) as asked:
            status = asked.get("/sluice/status").raise_for_status().json()
            # the kept connection leads to the same process
            found[status["replica"]["pid"]] = (status, fallbacks_in(asked.get("/metrics").text))
    return found


def fallbacks_in(metrics: str) -> int:
    """Returns the sum of an ingress's own decisions in its metrics."""
    lines: Sequence[str] = [line for line in metrics.splitlines() if line.startswith(FALLBACKS)]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def whole(status: Mapping[str, Any], engines: int) -> bool:
    """Returns whether an ingress has its router, and `engines` engines that are ready."""
    ready = sum(engine["state"] == "ready" for engine in status["engines"])
    return bool(status["ready"] and status["router"]["connected"] and not status["router"]["fallback"]) and (
        ready == engines
    )


def wait_whole(server: Server, cell: Cell) -> None:
    """Waits until every ingress has the router and all engines. Raises ServerError after `THERE_S`."""
    until_s = time.monotonic() + THERE_S
    while not all(whole(status, cell.engines) for status, _ in ingresses_of(server, cell).values()):
        if time.monotonic() >= until_s:
            raise ServerError(
                f"{cell.name}: not all ingresses have all engines after {THERE_S:g} s:\n{server.tail()}"
            )
        time.sleep(LOOK_S)
