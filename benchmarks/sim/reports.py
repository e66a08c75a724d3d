"""Periodic reports to the simulated router: the status of engines and the progress of requests.

The imbalance of workers without a barrier is measured at the same moments.
"""

from collections.abc import Callable

from benchmarks.sim.config import ControlPlane
from benchmarks.sim.engine import Meter, Worker
from benchmarks.sim.forecasts import Forecasts
from benchmarks.sim.ingress import Ingress
from benchmarks.sim.kernel import Kernel
from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.views import Health, Role


class Reports:
    """The maker of a run's reports, which it gives to `feed` as events."""

    def __init__(
        self,
        control: ControlPlane,
        kernel: Kernel,
        ingress: Ingress,
        meter: Meter,
        forecasts: Forecasts | None,
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._control, self._kernel, self._ingress = control, kernel, ingress
        self._meter, self._forecasts, self._feed = meter, forecasts, feed
        decoders = [worker for worker in ingress.workers.values() if worker.decodes]
        decode = {w.name for w in decoders if w.spec.role is Role.DECODE}
        # Names of the workers whose loads are compared: the decode workers, or the colocated workers where there are
        # none. It is empty with a barrier, because a barrier group measures its own imbalance.
        at_barrier = any(w.spec.barrier for w in decoders)
        self._compared = set() if at_barrier else decode or {w.name for w in decoders}
        # The number of steps of each engine at its last progress report.
        self._steps = dict.fromkeys(ingress.workers, 0)
        self._status: dict[str, tuple[float, tuple[int, int, int, Health]]] = {}
        self._imbalances, self._samples = 0, 0

    def joined(self, worker: Worker) -> None:
        """Notes an engine that was added; its load is compared with that of the others of its role."""
        self._steps[worker.name] = worker.model.steps
        if self._compared and worker.spec.role is Role.DECODE:
            self._compared.add(worker.name)

    def left(self, name: str) -> None:
        """Forgets an engine that has left."""
        self._steps.pop(name, None)
        self._status.pop(name, None)
        self._compared.discard(name)

    def status(self) -> None:
        """Reports every engine whose counts have changed, or that has been silent for `status_always_s`."""
        now_s, always_s = self._kernel.now_s, self._control.status_always_s - 1e-9
        for worker in self._ingress.workers.values():
            kv_tokens = worker.used_blocks(worker.done_now) * worker.pool.block_size_tokens
            status = (worker.n_active, worker.n_waiting, kv_tokens, worker.health)
            known = self._status.get(worker.name)
            if known is None or known[1] != status or now_s - known[0] >= always_s:
                self._status[worker.name] = (now_s, status)
                self._feed(ev.EngineStatus(now_s, worker.name, *status))

    def progress(self) -> None:
        """Reports the requests that were admitted or gained a token since the last report."""
        now_s, ingress = self._kernel.now_s, self._ingress
        admissions, ingress.admissions = ingress.admissions, []
        for request in admissions:
            if request.stage is Stage.DECODING:
                self._feed(ev.Admitted(now_s, request.attempt_id))
        items: list[tuple[str, int]] = []
        loads: list[int] = []
        for worker in ingress.workers.values():
            # A worker may begin to decode when it gets another role.
            if not worker.decodes:
                continue
            running = worker.model.running
            done = worker.done_now if running else 0
            if worker.name in self._compared:
                loads.append(worker.kv_load_tokens(done))
            steps = worker.model.steps + done
            if running and steps != self._steps[worker.name]:
                self._steps[worker.name] = steps
                items += [(seq.owner.attempt_id, steps - seq.offset) for seq in running]  # type: ignore[attr-defined]
        if items:
            if self._forecasts is not None:
                self._forecasts.progressed(items, ingress.live)
            self._feed(ev.ProgressedMany(now_s, tuple(items)))
        if self._meter.measuring and any(loads):
            self._imbalances += max(loads) - min(loads)
            self._samples += 1

    def count_imbalance(self) -> None:
        """Adds the run's imbalance to the meter: the mean over all progress reports, counted once for every step."""
        if self._samples:
            stats = self._meter.stats
            stats.imbalance_sum += stats.steps * self._imbalances / self._samples
