"""Measures how many reads go without permits because their agent seems to be silent, by how long it may be silent
(`flow_silent_s` of an engine) and by whether the machine's cores are busy.

The agent beats every 5 ms, and a worker counts silence in its own running time. On a busy machine a living agent comes
late: what a worker then posts at once moves in no order, so the policy does not decide. The longer an agent may be
silent, the longer reads are held for nothing when it has really stopped.
"""

import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from actors.engine.cores import usable_cores
from benchmarks.permits.agents import Worker, agents

SILENT_S = (0.010, 0.020, 0.050, 0.100)
OPEN = 8
"""Reads that are open at once over one port, so that most of them are held."""
CHUNKS = 10
"""Chunks of a read, 100 ms of its port."""
SWEEP_S = 10.0
"""Seconds of a row."""
BUSY_PER_CORE = 2
"""Processes that compute for each core on a busy machine. ASSUMPTION: an engine has a core of its own and two processes
that compute, as a vLLM engine does."""

_COMPUTE = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"


@dataclass(frozen=True, slots=True)
class Silence:
    """How many of `reads` were `unscheduled` in part because the agent was silent for `silent_s`, while `busy`
    processes computed beside it.
    """

    silent_s: float
    busy: int
    reads: int
    unscheduled: int

    @property
    def share(self) -> float:
        """The share of reads that were unscheduled."""
        return self.unscheduled / self.reads

    def line(self) -> str:
        """Returns the figures as a row of the printed table."""
        return f"{1e3 * self.silent_s:>10g} {self.busy:>10} {self.reads:>10} {100 * self.share:>14.2f}"


HEADER = f"{'silent ms':>10} {'busy':>10} {'reads':>10} {'unscheduled %':>14}"


def rows() -> Iterator[Silence]:
    """Yields a row for each time of silence, first on the machine as it is, then with all cores busy."""
    for busy, silent_s in itertools.product((0, BUSY_PER_CORE * len(usable_cores())), SILENT_S):
        with agents(1) as address, _busy(busy):
            yield _row(address, silent_s, busy)


def _row(address: str, silent_s: float, busy: int) -> Silence:
    worker = Worker(address, silent_s)
    worker.connect()
    before, silent = worker.reads, worker.unscheduled.get("silent", 0)
    end_s = time.perf_counter() + SWEEP_S
    while time.perf_counter() < end_s:
        while worker.open < OPEN:
            worker.begin(CHUNKS)
        worker.step()
    worker.end()
    worker.close()
    return Silence(silent_s, busy, worker.reads - before, worker.unscheduled.get("silent", 0) - silent)


@contextlib.contextmanager
def _busy(processes: int) -> Iterator[None]:
    """Has as many processes compute for the time of a block; each ends with this process at the latest."""
    started = [subprocess.Popen([sys.executable, "-c", _COMPUTE]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
