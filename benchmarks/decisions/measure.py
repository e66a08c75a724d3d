"""Measures single calls by wall clock (the time that a request waits) and CPU time (the cost on a shared machine)."""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

ROW_S = 15.0
"""A row ends after this many seconds, but not before LEAST calls. The time includes the making of inputs."""

LEAST = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Quantiles of wall and CPU time over `n` calls, in microseconds."""

    name: str
    n: int
    p50_us: float
    p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    note: str = ""

    def line(self) -> str:
        """Returns the timing as a row of the printed table."""
        times = [self.p50_us, self.p99_us, self.cpu_p50_us, self.cpu_p99_us]
        return f"{self.name:<46} {self.n:>6} {''.join(f'{us:>12.1f}' for us in times)}  {self.note}"


_COLUMNS = ("p50 us", "p99 us", "CPU p50 us", "CPU p99 us")
HEADER = f"{'':<46} {'calls':>6} {''.join(f'{column:>12}' for column in _COLUMNS)}"


def timed(name: str, calls: Iterable[Callable[[], object]], per_call: int = 1, note: str = "") -> Timing:
    """Runs each of the calls once and returns their timing, divided by `per_call` where a call does several things.

    The iterator makes each call outside the measured time. Garbage that this leaves is collected before the measurement
    starts. A full collection during a call counts, as it would in the router.
    """
    wall, cpu = [], []
    gc.collect()
    end_s = time.perf_counter() + ROW_S
    for call in calls:
        gc.collect(0)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        call()
        wall.append((time.perf_counter() - wall_s) / per_call)
        cpu.append((time.process_time() - cpu_s) / per_call)
        if len(wall) >= LEAST and time.perf_counter() > end_s:
            break
    p50_us, p99_us = _quantile(wall, 0.5), _quantile(wall, 0.99)
    return Timing(name, len(wall), p50_us, p99_us, _quantile(cpu, 0.5), _quantile(cpu, 0.99), note)


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return 1e6 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]
