"""Times one call at a time: wall clock (what a request waits) and CPU time (what it costs on a shared machine)."""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Quantiles over `n` calls, in microseconds."""

    name: str
    n: int
    p50_us: float
    p99_us: float
    cpu_p50_us: float
    note: str = ""

    def line(self) -> str:
        """One row of the printed table."""
        times = f"{self.p50_us:>11.1f} {self.p99_us:>11.1f} {self.cpu_p50_us:>11.1f}"
        return f"{self.name:<46} {self.n:>6} {times}  {self.note}"


HEADER = f"{'':<46} {'calls':>6} {'p50 us':>11} {'p99 us':>11} {'CPU p50 us':>11}"


def timed(name: str, calls: Iterable[Callable[[], object]], per_call: int = 1, note: str = "") -> Timing:
    """Runs the calls once each (made lazily, outside the clock); one that does `per_call` things is divided by it."""
    wall, cpu = [], []
    gc.collect()
    for call in calls:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        call()
        wall.append((time.perf_counter() - wall_s) / per_call)
        cpu.append((time.process_time() - cpu_s) / per_call)
    return Timing(name, len(wall), _quantile(wall, 0.5), _quantile(wall, 0.99), _quantile(cpu, 0.5), note)


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return 1e6 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]
