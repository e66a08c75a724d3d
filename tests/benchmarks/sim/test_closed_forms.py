"""The simulated cluster against queueing theory, within 1 %.

A mean over a run that a test can afford scatters by more than 1 %, so each law is checked in two steps: the simulated
times are, request by request, those of an exact recursion of the queue on the same arrivals; and that recursion's mean
over a path a hundred times as long is the closed form.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import IDEAL, EngineSpec, SimConfig
from benchmarks.sim.records import RunResult
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TimingProfile
from policies.state.views import Role

SLOW = dataclasses.replace(
    IDEAL, progress_s=50.0, status_s=1.0, tick_s=50.0, request_timeout_s=1e6, kv_events=False
)
PATIENT = DispatchConfig(max_queue=100_000, queue_timeout_s=1e6)


def profile(**seconds: float) -> TimingProfile:
    zero = {
        "prefill_base_s": 1e-12,
        "prefill_per_token_s": 0.0,
        "decode_base_s": 0.0,
        "decode_per_seq_s": 0.0,
    }
    return TimingProfile(
        source="closed form",
        **(zero | seconds),  # type: ignore[arg-type]
        decode_per_kv_token_s=0.0,
        kv_bytes_per_token=1,
        transfer_bandwidth_bytes_per_s=1e15,
        transfer_latency_s=0.0,
    )


def colocated(timing: TimingProfile, slots: int) -> SimConfig:
    spec = EngineSpec("c", Role.COLOCATED, 1, timing, slots=slots, kv_blocks=1 << 24, prefix_cache=False)
    return SimConfig((spec,), control=SLOW, dispatch=PATIENT)


def sojourns(result: RunResult) -> np.ndarray:
    return np.array([r.finished_s - r.arrived_s for r in result.requests])  # type: ignore[operator]


def fifo(at_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """Lindley's recursion: one server, first come first served. Sojourn times."""
    done, result = 0.0, []
    for arrived, service in zip(at_s.tolist(), service_s.tolist(), strict=True):
        done = max(done, arrived) + service
        result.append(done - arrived)
    return np.array(result)


def shared(at_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """Processor sharing: n jobs get 1/n of the server each. Sojourn times, by the clock of attained service."""
    attained, now, left = 0.0, 0.0, []
    result = np.zeros(len(at_s))

    def leave_until(until: float) -> None:
        nonlocal attained, now
        while left and now + (left[0][0] - attained) * len(left) <= until:
            end, i = left[0]
            now += (end - attained) * len(left)
            attained = end
            heapq.heappop(left)
            result[i] = now - at_s[i]

    for i, (arrived, service) in enumerate(zip(at_s.tolist(), service_s.tolist(), strict=True)):
        leave_until(arrived)
        if left:
            attained += (arrived - now) / len(left)
        now = arrived
        heapq.heappush(left, (attained + service, i))
    leave_until(math.inf)
    return result


LOAD, ARRIVALS, MANY = 0.5, 4_000, 400_000
Queue = Callable[[np.ndarray, np.ndarray], np.ndarray]
EXPONENTIAL, EQUAL = "exponential", "equal"


def services(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """Service times of mean 1."""
    return rng.exponential(1.0, n) if kind == EXPONENTIAL else np.ones(n)


@pytest.mark.parametrize(
    ("queue", "kind", "mean"),
    [
        (fifo, EXPONENTIAL, 1 / (1 - LOAD)),  # M/M/1
        (fifo, EQUAL, 1 + LOAD / (2 * (1 - LOAD))),  # M/D/1
        # processor sharing, whatever the distribution
        (shared, EXPONENTIAL, 1 / (1 - LOAD)),
        (shared, EQUAL, 1 / (1 - LOAD)),
    ],
)
def test_the_recursions_have_the_closed_forms_means(queue: Queue, kind: str, mean: float) -> None:
    rng = np.random.default_rng(1)
    at_s = rng.exponential(1 / LOAD, MANY).cumsum()
    assert queue(at_s, services(rng, kind, MANY)).mean() == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize("kind", [EXPONENTIAL, EQUAL])
@pytest.mark.parametrize("slots", [1, 1000])
def test_a_colocated_worker(slots: int, kind: str) -> None:
    """One slot, a fixed step time: M/G/1, to the microsecond. Many slots, a step time per sequence: processor sharing,
    but for the steps that an arrival waits (about 1/500 of a service each): within 1 % in the mean.
    """
    rng, step_s, steps = np.random.default_rng(2), 2e-3, 500
    at_s = rng.exponential(1 / LOAD, ARRIVALS).cumsum()
    sizes = np.maximum(1, np.rint(services(rng, kind, ARRIVALS) * steps)).astype(int)
    timing = profile(decode_base_s=step_s) if slots == 1 else profile(decode_per_seq_s=step_s)
    # the first token comes with the prompt, which takes no time: output - 1 steps
    work = [
        WorkloadRequest(f"r{i}", at, 1, 1 + int(k))
        for i, (at, k) in enumerate(zip(at_s.tolist(), sizes, strict=True))
    ]
    took_s = sojourns(simulate(colocated(timing, slots), work))
    if slots == 1:
        assert took_s == pytest.approx(fifo(at_s, sizes * step_s), abs=1e-6)
    else:
        assert took_s.mean() == pytest.approx(shared(at_s, sizes * step_s).mean(), rel=0.01)


def test_equal_prefills_are_md1() -> None:
    """A prefill engine that computes one prompt a step, all equal: M/D/1, to the microsecond."""
    timing = profile(prefill_base_s=1.0, decode_base_s=1e-9)
    spec = EngineSpec(
        "p",
        Role.PREFILL,
        1,
        timing,
        slots=1000,
        kv_blocks=1 << 20,
        prefill_budget_tokens=100,
        prefix_cache=False,
    )
    decode = dataclasses.replace(spec, name="d", role=Role.DECODE)
    at_s = np.random.default_rng(3).exponential(1 / LOAD, ARRIVALS).cumsum()
    work = [WorkloadRequest(f"r{i}", at, 100, 1) for i, at in enumerate(at_s.tolist())]
    result = simulate(SimConfig((spec, decode), control=SLOW, dispatch=PATIENT), work)
    took_s = np.array([r.prefill_done_s - r.arrived_s for r in result.requests])  # type: ignore[operator]
    assert took_s == pytest.approx(fifo(at_s, np.ones(ARRIVALS)), abs=1e-6)
