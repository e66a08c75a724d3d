"""Times one call at a time: wall clock (what a request waits) and CPU time (what it costs on a shared machine)."""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

ROW_S = 15.0
"""Seconds after which a row ends, making its inputs included, but not before LEAST calls."""

LEAST = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Quantiles over `n` calls, in microseconds."""

    name: str
    n: int
    p50_us: float
    p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    note: str = ""

    def line(self) -> str:
        """One row of the printed table."""
        times = [self.p50_us, self.p99_us, self.cpu_p50_us, self.cpu_p99_us]
        return f"{self.name:<46} {self.n:>6} {''.join(f'{us:>12.1f}' for us in times)}  {self.note}"


_COLUMNS = ("p50 us", "p99 us", "CPU p50 us", "CPU p99 us")
HEADER = f"{'':<46} {'calls':>6} {''.join(f'{column:>12}' for column in _COLUMNS)}"


def timed(name: str, calls: Iterable[Callable[[], object]], per_call: int = 1, note: str = "") -> Timing:
    """Runs the calls once each (made lazily, outside the clock); one that does `per_call` things is divided by it.

    What making a call left for the garbage collector is collected before the clock starts; a full collection that falls
    into a call counts, as it would in the router.
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
