"""Runs of many steps against stepping one by one: the same times, to rounding, whatever cuts them."""

import dataclasses
import random
from typing import Any

import pytest

from benchmarks.sim import engine
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane, EngineSpec, SimConfig
from benchmarks.sim.records import RunResult
from benchmarks.workloads.record import WorkloadRequest
from policies.engine_model.timing import TimingProfile
from policies.state.views import Role

SMALL_KV = 45
T = TimingProfile("test", 0.01, 1e-4, 0.02, 1e-3, 1e-5, 100, 1e6, 1e-3)


def config(barrier: str, kv_blocks: int, decode: str, **changes: Any) -> SimConfig:
    return SimConfig(
        (
            EngineSpec("p", Role.PREFILL, 2, T, block_size_tokens=8),
            EngineSpec(
                "d", Role.DECODE, 3, T, slots=6, kv_blocks=kv_blocks, block_size_tokens=8, barrier=barrier
            ),
            EngineSpec("c", Role.COLOCATED, 1, T, slots=6, block_size_tokens=8),
        ),
        control=dataclasses.replace(ControlPlane(), progress_s=0.05),
        decode=(decode, {}),
        **changes,
    )


def workload() -> list[WorkloadRequest]:
    rng, at_s, work = random.Random(4), 0.0, []
    for i in range(120):
        at_s += rng.expovariate(6.0)
        head = tuple(100 * rng.randrange(6) + b for b in range(4))
        work.append(WorkloadRequest(f"r{i}", at_s, rng.randint(33, 120), rng.randint(1, 90), head, 8))
    return work


def close(a: object, b: object) -> bool:
    return a == pytest.approx(b, abs=1e-7) if isinstance(a, float) and isinstance(b, float) else a == b


def different(a: RunResult, b: RunResult) -> list[str]:
    names = [f.name for f in dataclasses.fields(a.requests[0])]
    found = [
        f"{x.request_id}.{name}: {getattr(x, name)} and {getattr(y, name)}"
        for x, y in zip(a.requests, b.requests, strict=True)
        for name in names
        if not close(getattr(x, name), getattr(y, name))
    ]
    steps = dataclasses.asdict(a.steps), dataclasses.asdict(b.steps)
    return found + [
        f"steps.{k}: {v} and {steps[1][k]}" for k, v in steps[0].items() if v != pytest.approx(steps[1][k])
    ]


@pytest.mark.parametrize("window", [{}, {"warmup_s": 3.0, "measure_s": 9.0}])
@pytest.mark.parametrize(
    ("barrier", "kv_blocks", "decode"),
    [
        ("", 1000, "round_robin"),
        ("", SMALL_KV, "join_shortest_queue"),
        ("b", 1000, "balance_route_0"),
        ("b", SMALL_KV, "netkv"),
    ],
)
def test_jumping_is_stepping(
    monkeypatch: pytest.MonkeyPatch, barrier: str, kv_blocks: int, decode: str, window: dict[str, float]
) -> None:
    chosen = config(barrier, kv_blocks, decode, **window)
    jumped = simulate(chosen, workload())
    monkeypatch.setattr(engine, "MOST_STEPS", 1)
    monkeypatch.setattr(engine, "MOST_STEPS_AT_BARRIER", 1)
    stepped = simulate(chosen, workload())
    assert different(jumped, stepped) == []
    assert jumped.steps.imbalance_sum > 0
    assert jumped.kernel_events < stepped.kernel_events
    if kv_blocks == SMALL_KV:
        assert jumped.peaks["preemptions"] > 0
