"""Measures the policies' decisions: NetKV's for each request, and those of BR-0, BR-H and the composition per tick."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.decisions.inputs import RoundInput, round_input
from benchmarks.decisions.measure import Timing, timed
from policies.dispatch.config import DispatchConfig
from policies.dispatch.feasibility import FeasibleEntries, WorkerPools, rooms_of
from policies.routing.balance.balance_route_0 import BalanceRoute0
from policies.routing.balance.balance_route_h import BalanceRouteH
from policies.routing.base import DecodePolicy, Overcommit, assign
from policies.routing.composition.composition import Composition
from policies.routing.netkv.netkv import NetKV

NETKV_CANDIDATES = (16, 64, 256)
WORKERS = (8, 16, 64, 144)
POOLS = (16, 64, 256, 1024)


def netkv(calls: int, seed: int) -> list[Timing]:
    """Measures NetKV's decision for one request, for several numbers of candidates.

    The oracle has labels and congestion, and there are own transfers and prefix hits.
    """
    policy = NetKV()
    rows = []
    for candidates in NETKV_CANDIDATES:
        rng = random.Random(seed)
        given = round_input(candidates, 64, rng, busy=False)
        work = [
            partial(assign, policy, given.feasible[i % 64 : i % 64 + 1], given.snapshot, rng)
            for i in range(calls)
        ]
        rows.append(timed(f"netkv, {candidates} candidates", work))
    return rows


def tick_name(policy: DecodePolicy, workers: int, pool: int) -> str:
    """Returns the name of a tick's row."""
    return f"{policy.name}, G = {workers}, pool {pool}"


def ticks(policy: DecodePolicy, calls: int, seed: int, quick: bool) -> list[Timing]:
    """Measures a tick for every size of cluster and pool."""
    sizes = [(64, 256)] if quick else [(g, p) for g in WORKERS for p in POOLS]
    rows = []
    for workers, pool in sizes:
        rng = random.Random(seed)
        admitted: list[int] = []
        work = _tick_calls(policy, workers, pool, calls, rng, admitted)
        row = timed(tick_name(policy, workers, pool), work)
        note = f"{sum(admitted) / len(admitted):.0f} admitted a tick"
        rows.append(dataclasses.replace(row, note=note))
    return rows


def _tick_calls(
    policy: DecodePolicy, workers: int, pool: int, calls: int, rng: random.Random, admitted: list[int]
) -> Iterator[Callable[[], object]]:
    for _ in range(calls):
        given = round_input(workers, pool, rng)
        yield partial(_count, policy, given, rng, admitted)


def _count(policy: DecodePolicy, given: RoundInput, rng: random.Random, admitted: list[int]) -> None:
    admitted.append(len(assign(policy, given.feasible, given.snapshot, rng)))


def windows(calls: int, seed: int) -> list[Timing]:
    """Measures a tick of BR-0 and BR-H for two windows W, 8 and the default (G = 64, pool 256)."""
    rows = []
    for policy in (BalanceRoute0(), BalanceRouteH()):
        for window in (8, policy.window):
            (row,) = ticks(dataclasses.replace(policy, window=window), calls, seed, quick=True)
            rows.append(dataclasses.replace(row, name=f"{row.name}, W {window}"))
    return rows


def single_admissions(policy: DecodePolicy, calls: int, seed: int) -> list[Timing]:
    """Measures the tick after one finished request, with one free slot and a full pool (G = 64, pool 256)."""
    rng = random.Random(seed)

    def inputs() -> Iterator[Callable[[], object]]:
        for i in range(calls):
            given = round_input(64, 256, rng)
            lucky = [given.feasible[0][1][i % 8]]
            one = [(entry, lucky) for entry, _ in given.feasible]
            yield partial(assign, policy, one, given.snapshot, rng)

    return [timed(f"{policy.name}, G = 64, pool 256, one worker open", inputs())]


def feasibility(calls: int, seed: int) -> list[Timing]:
    """Measures the dispatcher's part of a tick, which finds the workers on which entries fit (G = 64, pool 256)."""
    rng, config = random.Random(seed), DispatchConfig()

    def feasible(given: RoundInput) -> int:
        rooms = rooms_of(given.snapshot, WorkerPools.of(given.snapshot.workers), 16, 3.0, Overcommit.NEVER)
        return len(FeasibleEntries(given.snapshot.pool, rooms, config.starves_from_s, given.snapshot.now_s))

    def inputs() -> Iterator[Callable[[], object]]:
        for _ in range(calls):
            yield partial(feasible, round_input(64, 256, rng))

    return [timed("dispatcher: feasible lists, G = 64, pool 256", inputs())]


def growth(policy: DecodePolicy, rows: Sequence[Timing]) -> list[str]:
    """Returns a table of a tick's median CPU time in ms.

    It has a line for each cluster size and a column for each pool size.
    """
    cpu_us = {row.name: row.cpu_p50_us for row in rows}
    lines = [f"{policy.name}, CPU p50 ms" + "".join(f"{f'pool {pool}':>12}" for pool in POOLS)]
    for workers in WORKERS:
        cells = [cpu_us[tick_name(policy, workers, pool)] / 1e3 for pool in POOLS]
        lines.append(f"{f'G = {workers}':>{len(policy.name) + 12}}" + "".join(f"{ms:>12.2f}" for ms in cells))
    return lines


def all_policies() -> list[DecodePolicy]:
    """Returns the batch policies with their default parameters."""
    return [BalanceRoute0(), BalanceRouteH(), Composition()]
