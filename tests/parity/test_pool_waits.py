"""A pool that waits for minutes: BR-0 and BR-H order it as if leases had no end, and no request loses its KV; not under
the default bounds either, with little KV, or where messages take a different time each.
"""

import dataclasses
import json
import math
import random
from typing import Any

import pytest

from benchmarks.sim.cluster import Cluster
from benchmarks.sim.config import IDEAL, EngineSpec, SimConfig
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.blocks import Allocation
from policies.engine_model.leases import MAX_LEASE_S, LeaseTable, renewal_s
from policies.engine_model.timing import TimingProfile
from policies.request.events import Renewed
from policies.request.stage import Stage
from policies.state.views import PoolEntry, Request, Role
from tests.policies.request.recorder import NOW_S, at, now

T = TimingProfile(
    source="test",
    prefill_base_s=0.01,
    prefill_per_token_s=1e-4,
    decode_base_s=1.0,
    decode_per_seq_s=0.01,
    decode_per_kv_token_s=1e-4,
    kv_bytes_per_token=1,
    transfer_bandwidth_bytes_per_s=1e6,
    transfer_latency_s=0.001,
)
LEASE_S = 30.0
WITH_FORECASTS = pytest.param("balance_route_h", marks=pytest.mark.nightly)
POLICIES = ("join_shortest_queue", "netkv", "balance_route_0", "composition")


def played(
    decode: str,
    params: dict[str, Any],
    lease_s: float,
    seed: int,
    max_lease_s: float = 1e9,
    requests: int = 120,
    every_s: float = 0.1,
    first: int = 0,
) -> tuple[Any, list[Any]]:
    """Returns the result of a run of eight slots and its decode decisions. Requests come every `every_s` seconds, and
    the `first` ones at once.
    """
    rng = random.Random(seed)
    sizes = [(rng.choice([20, 100, 400, 900]), rng.randint(10, 60)) for _ in range(requests)]
    work = [WorkloadRequest(f"r{i}", every_s * max(0, i - first), *size) for i, size in enumerate(sizes)]
    prefill = EngineSpec("p", Role.PREFILL, 1, T, lease_s=lease_s, max_lease_s=max_lease_s)
    workers = dataclasses.replace(EngineSpec("d", Role.DECODE, 4, T), slots=2, barrier="b")
    lines: list[str] = []
    config = SimConfig(
        (prefill, workers),
        decode=(decode, params),
        control=dataclasses.replace(IDEAL, request_timeout_s=1e6),
        dispatch=DispatchConfig(kv_high_water=1.0),
    )
    result = Cluster(config, iter(work), lines.append, None).run()
    events = [json.loads(line) for line in "".join(lines).splitlines()]
    return result, [line for line in events if line.get("action") == "RouteDecode"]


@pytest.mark.parametrize("decode", ["balance_route_0", "balance_route_h"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_renewed_leases_change_nothing_in_the_order(decode: str, seed: int) -> None:
    endless, wanted = played(decode, {}, 1e9, seed)
    result, made = played(decode, {}, LEASE_S, seed)
    waits = [route["waited_s"] for route in made]
    # the pool's longest waits are those of many leases
    assert max(waits) > 6 * LEASE_S
    assert [(r["attempt_id"], r["decision"]["worker"]) for r in made] == [
        (r["attempt_id"], r["decision"]["worker"]) for r in wanted
    ]
    reasons = {route["decision"]["reason"] for route in made}
    assert not reasons & {"overdue", "lease_rescue"}
    assert result.peaks["retries"] == 0
    assert all(record.finished_s is not None for record in result.requests)
    assert len(made) == len(result.requests) == len(endless.requests)


@pytest.mark.parametrize("decode", ["balance_route_0", WITH_FORECASTS])
def test_it_is_not_the_order_of_arrival(decode: str) -> None:
    """The limit of 10 s that made such a pool first in, first out is still to be had, by its name."""
    _, ours = played(decode, {"max_wait_s": 10.0}, LEASE_S, seed=1)
    late = [route for route in ours if route["waited_s"] > 11.0]
    assert len(late) > 80
    assert {route["decision"]["reason"] for route in late} == {"overdue"}
    _, paper = played(decode, {"ageing_s": None}, LEASE_S, seed=1)
    _, aged = played(decode, {}, LEASE_S, seed=1)
    names = [[route["attempt_id"] for route in run] for run in (ours, paper, aged)]
    assert names[0] != names[1]
    assert names[0] != names[2]


@pytest.mark.parametrize("decode", ["balance_route_0", WITH_FORECASTS])
def test_nobody_is_starved_under_lasting_load(decode: str) -> None:
    """As many requests come as go, for 16 minutes. By size alone some entries wait through most of it; ageing ends
    that, and so does the bound on the lease, without a lease that is lost.
    """
    lasting: dict[str, Any] = {"seed": 3, "requests": 240, "every_s": 4.8, "first": 40}
    _, by_size = played(decode, {"ageing_s": None}, 1e9, **lasting)
    _, aged = played(decode, {"ageing_s": 60.0}, LEASE_S, **lasting)
    bounded, kept = played(decode, {"ageing_s": None}, LEASE_S, max_lease_s=450.0, **lasting)
    longest = [max(route["waited_s"] for route in run) for run in (by_size, aged, kept)]
    assert longest[1] < 0.7 * longest[0]
    assert longest[2] <= 450.0 < longest[0]
    reasons = {route["decision"]["reason"] for route in kept}
    assert "overdue" in reasons
    assert "lease_rescue" not in reasons
    assert bounded.peaks["retries"] == 0
    assert all(record.finished_s is not None for record in bounded.requests)


def crowd(
    decode: str, lease_s: float = LEASE_S, prefill_blocks: int = 1 << 20, **limits: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Returns the result of a run with prompts of 900 tokens every 2 s and one of 4,000 among them, for a decode engine
    with 10,000 tokens of KV, and its decode decisions. Eleven small ones fit at once, and each stays for 30 s.
    """
    work = [WorkloadRequest(f"r{i}", 2.0 * i, 900, 30) for i in range(150)]
    work.insert(10, WorkloadRequest("large", 19.0, 4000, 30))
    prefill = EngineSpec("p", Role.PREFILL, 1, T, lease_s=lease_s, slots=8, kv_blocks=prefill_blocks)
    worker = EngineSpec("d", Role.DECODE, 1, T, slots=64, kv_blocks=625, block_size_tokens=16)
    lines: list[str] = []
    config = SimConfig(
        (prefill, worker),
        decode=(decode, {}),
        control=dataclasses.replace(IDEAL, request_timeout_s=1e6),
        dispatch=DispatchConfig(queue_timeout_s=1e6, **limits),
    )
    result = Cluster(config, iter(work), lines.append, None).run()
    events = [json.loads(line) for line in "".join(lines).splitlines()]
    return result, [line for line in events if line.get("action") == "RouteDecode"]


@pytest.mark.parametrize("decode", POLICIES)
def test_a_large_prompt_among_small_ones_waits_no_longer_than_they_do(decode: str) -> None:
    """A large prompt fits nowhere as long as every gap is filled at once. Two thirds of its lease are its patience."""
    _, made = crowd(decode)
    (waited_s,) = [route["waited_s"] for route in made if route["attempt_id"] == "large"]
    assert waited_s < 60.0
    _, paper = crowd(decode, starvation_s=math.inf)
    (waited_s,) = [route["waited_s"] for route in paper if route["attempt_id"] == "large"]
    assert waited_s > 200.0


def test_a_full_prefill_engine_lets_its_oldest_leases_end_and_the_rest_keeps_its_order() -> None:
    """Some twenty prompts fill the engine and more wait for its KV, for minutes."""
    result, made = crowd("balance_route_0", prefill_blocks=1200, kv_high_water=1.0)
    late = [route["decision"]["reason"] for route in made if route["waited_s"] > LEASE_S]
    assert len(late) > 50
    assert late.count("overdue") < 0.5 * len(late)
    assert not late.count("lease_rescue")
    assert result.peaks["retries"] == 0
    assert all(record.finished_s is not None for record in result.requests)


@pytest.mark.parametrize("seed", range(5))
def test_an_entry_is_overdue_at_the_same_time_however_long_messages_take(seed: int) -> None:
    """After two thirds of `max_lease_s` all answers name the same end. The last renewal is the one at 400 s, of 200 s,
    so that the entry is overdue from 533 s on; no later answer may put that off.
    """
    rng = random.Random(seed)
    life = at(Stage.POOLED, timeout_s=1e6)
    leases = LeaseTable(LEASE_S)
    leases.grant("a", Allocation([], 1), 5, NOW_S - rng.uniform(0.0, 0.02))
    entry = PoolEntry(Request("r1", NOW_S, 5, 8), "p", "g", NOW_S, NOW_S + LEASE_S, 1, 0)
    while now(life) is Stage.POOLED and life.wake_at_s < NOW_S + 590.0:
        now_s = life.wake_at_s
        life.wake(now_s)
        now_s += rng.uniform(0.0, 0.02)
        lease_s = renewal_s(LEASE_S, MAX_LEASE_S, leases.age_s("a", now_s))
        left_s = None if lease_s is None else leases.renew("a", lease_s, now_s)
        reports = len(life.of("report_renewal"))
        now_s += rng.uniform(0.0, 0.02)
        life.on(Renewed(left_s or 0.0, "p"), now_s)
        if len(life.of("report_renewal")) > reports:
            now_s += rng.uniform(0.0, 0.02)
            entry = dataclasses.replace(entry, lease_until_s=now_s + (left_s or 0.0), renewed_s=now_s)
    assert entry.overdue_from_s - NOW_S == pytest.approx(400.0 + 200.0 * 2 / 3, abs=0.2)
    assert entry.starves_from_s == NOW_S + 20.0
