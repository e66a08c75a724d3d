"""The simulated cluster: the router's own `Dispatcher`, fed with what engines and ingress would tell it.

`simulate(config, workload)` is the one entry. Nothing is decided here: events go in, the dispatcher's actions are
carried out (`ingress`), engines step (`engine`), KV moves (`pull`, over the network or fixed links). Periods, hops and
retries are `ControlPlane`'s. The event log is the live router's (`policies.journal`), so it replays.

Not per event but per period, as live: engine status, progress (all that gained a token in one `ProgressedMany`), KV
events, forecasts, ticks, the network oracle. A progress report takes no time on its way.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.sim.config import EngineSpec, SimConfig
from benchmarks.sim.engine import BarrierGroup, Meter, StepGroup, Worker
from benchmarks.sim.ingress import Ingress, Job, State
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.layers import LayeredGroup
from benchmarks.sim.links import FixedLinks, KvNetwork
from benchmarks.sim.prompts import hashes_of
from benchmarks.sim.pull import Pull
from benchmarks.sim.records import RequestRecord, RunResult
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch import Action, Dispatcher, Reject, RoutePrefill
from policies.journal import JournalWriter
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Role
from predictors.feed import ForecastFeed, Tracked
from predictors.protocol import Arrival

Progress = Callable[[int, float], None]
"""Told now and then how many requests have ended, and the virtual time."""

SETTLE_S = 1.0  # after the last request, so that its last messages arrive


class SimulationError(ValueError):
    """The workload or the configuration cannot be simulated; the message names the request or the option."""


def simulate(
    config: SimConfig,
    workload: Iterable[WorkloadRequest],
    journal: Callable[[str], object] | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Runs `workload` (in order of `at_s`) through the cluster; the same arguments give the same result, to the bit.

    `journal` is given the event log in pieces of whole lines. Raises SimulationError for a workload out of order or out
    of range, ValueError for an impossible configuration, PolicyError for a policy that broke its contract.
    """
    return Cluster(config, iter(workload), journal, progress).run()


class Cluster:
    """One run: the router's side of it."""

    def __init__(
        self,
        config: SimConfig,
        workload: Iterator[WorkloadRequest],
        journal: Callable[[str], object] | None,
        progress: Progress | None,
    ) -> None:
        self.config, self.kernel, self.meter = config, Kernel(), Meter()
        self.dispatcher = Dispatcher(
            config.dispatch, prefill_policy(*config.prefill), decode_policy(*config.decode)
        )
        self.journal = None if journal is None else JournalWriter(journal, self.dispatcher, "simulation")  # type: ignore[arg-type]
        self._workload, self._progress = workload, progress
        self._network, self._oracle = self._build_network()
        self._links: dict[str, KvNetwork] = {}
        self.workers: dict[str, Worker] = {}
        self.ingress = Ingress(
            config,
            self.kernel,
            self.workers,
            self,
            self._start_pull,
            self._on_kv_events,
            max((spec.block_size_tokens for spec in config.engines if spec.prefix_cache), default=0),
        )
        self._groups = self._build_engines()
        self._decoders = [worker for worker in self.workers.values() if worker.decodes]
        decode = [w for w in self._decoders if w.spec.role is Role.DECODE]
        self._balanced = [] if any(w.spec.barrier for w in self._decoders) else decode or self._decoders
        self._lengths: dict[str, int] = {}
        self._forecasts = self._build_forecasts()
        self._reported = dict.fromkeys(self.workers, 0)  # steps of each engine at its last progress report
        self._status: dict[str, tuple[float, tuple[int, int, int]]] = {}
        self._kv_seq = dict.fromkeys(self.workers, 0)
        self._records: list[RequestRecord] = []
        self._measured: set[str] = set()  # live or still to come to an end
        self._ended = 0
        self._exhausted = self._closed_window = False
        self._end_s = 0.0
        self._link_use: dict[str, float] = {}
        self._imbalances, self._samples = 0, 0
        self.decisions: Counter[str] = Counter()
        self.stale = 0
        self.tier_bytes: Counter[int] = Counter()
        self._peaks = {"queue": 0.0, "pool": 0.0, "in_flight": 0.0}

    # ------------------------------------------------------------------------------------------------------ building

    def _build_network(self) -> tuple[KvNetwork | None, Callable[[float], Any] | None]:
        setup = self.config.network
        if setup is None:
            return None, None
        return setup.build(self.kernel, self.config.seed)

    def _build_engines(self) -> list[StepGroup]:
        barriers: dict[str, list[Worker]] = {}
        groups: list[StepGroup] = []
        control = self.config.control
        for spec in self.config.engines:
            for name, node, nic in spec.workers():
                worker = Worker(name, node, nic, spec, self.ingress, control.kv_events)
                self.workers[name] = worker
                if spec.barrier:
                    barriers.setdefault(spec.barrier, []).append(worker)
                elif spec.layers is not None:
                    links = self._links_of(spec)
                    groups.append(LayeredGroup(self.kernel, worker, self.meter, spec.layers, links))
                else:
                    groups.append(StepGroup(self.kernel, [worker], self.meter))
        return groups + [BarrierGroup(self.kernel, members, self.meter) for members in barriers.values()]

    def _links_of(self, spec: EngineSpec) -> KvNetwork:
        """The network, or the fixed bandwidth of that engine kind."""
        if self._network is not None:
            return self._network
        if spec.name not in self._links:
            self._links[spec.name] = FixedLinks(self.kernel, spec.profile)
        return self._links[spec.name]

    def _build_forecasts(self) -> ForecastFeed | None:
        wanted = self.config.forecasts
        if wanted is None:
            return None
        predictor = wanted.source(self._lengths)
        return ForecastFeed(Tracked(predictor), wanted.states, wanted.window_tokens, wanted.total_at_arrival)

    # ------------------------------------------------------------------------------------------------------- running

    def run(self) -> RunResult:
        """To the end of the last measured request."""
        config, kernel, control = self.config, self.kernel, self.config.control
        for worker in self.workers.values():
            spec = worker.spec
            capacity = spec.kv_blocks * spec.block_size_tokens
            self.feed(
                ev.EngineUp(
                    0.0,
                    worker.name,
                    spec.role,
                    spec.group,
                    worker.node,
                    spec.slots,
                    capacity,
                    barrier=spec.barrier,
                )
            )
        self._report_status()
        self._every(control.status_s, self._report_status)
        self._every(control.tick_s, self._tick)
        self._every(control.progress_s, self._report_progress)
        if self._forecasts is not None:
            self._every(control.forecast_s, self._refresh_forecasts)
        if config.network is not None and config.network.oracle_s is not None:
            self._refresh_oracle()
            self._every(config.network.oracle_s, self._refresh_oracle)
        kernel.at(config.warmup_s, self._open_window, -1)
        if config.measure_s is not None:
            kernel.at(config.warmup_s + config.measure_s, self._close_window, -1)
        self._next_arrival()
        kernel.run()
        return self._result()

    def _every(self, period_s: float, what: Callable[[], None]) -> None:
        def again() -> None:
            what()
            self.kernel.after(period_s, again)

        self.kernel.after(period_s, again)

    def _next_arrival(self) -> None:
        work = next(self._workload, None)
        if work is None:
            self._exhausted = True
            self._look_for_end()
            return
        if not work.at_s >= self.kernel.now_s:
            raise SimulationError(
                f"request {work.rid} is at {work.at_s} s, after one at {self.kernel.now_s} s: sort the workload by at_s"
            )
        if work.prompt_tokens < 1 or work.output_tokens < 1:
            raise SimulationError(
                f"request {work.rid} has {work.prompt_tokens} prompt and {work.output_tokens} output tokens: "
                f"both must be at least 1"
            )
        self.kernel.at(work.at_s, lambda: self._arrive(work))

    def _arrive(self, work: WorkloadRequest) -> None:
        config, now_s = self.config, self.kernel.now_s
        record = RequestRecord(
            work.rid,
            work.request_class,
            work.prompt_tokens,
            work.output_tokens,
            now_s,
            ttft_slo_s=work.ttft_slo_s,
            tpot_slo_s=work.tpot_slo_s,
        )
        if now_s >= config.warmup_s and not self._closed_window:
            if work.rid in self._measured:
                raise SimulationError(f"two live requests are called {work.rid}: rids must be unique")
            self._records.append(record)
            self._measured.add(work.rid)
        self.ingress.arrive(work, record, hashes_of(work, config.engines))
        self._next_arrival()

    def _open_window(self) -> None:
        for group in self._groups:
            group.settle()
        if self._network is not None:
            self._network.mark()
        self.meter.measuring = True

    def _close_window(self) -> None:
        if self._closed_window:
            return
        for group in self._groups:
            group.settle()
        if self._samples:
            stats = self.meter.stats
            stats.imbalance_sum += stats.steps * self._imbalances / self._samples
        if self._network is not None:
            self._link_use = self._network.link_use()
        self.meter.measuring = False
        self._closed_window = True
        self._end_s = self.kernel.now_s
        self._look_for_end()

    def _look_for_end(self) -> None:
        if self._measured or not (self._exhausted or self._closed_window):
            return
        if not self._closed_window:
            if self.kernel.now_s >= self.config.warmup_s:
                self._close_window()  # comes back here
            else:
                self.kernel.at(self.config.warmup_s, self._look_for_end)
        elif self._exhausted and not self.ingress.jobs:
            self.kernel.after(SETTLE_S, self._settle)
        else:
            self.kernel.stop()

    def _settle(self) -> None:
        """Stops when the last messages have arrived and the steps that cancelled requests were in are over."""
        if any(group.stepping for group in self._groups):
            self.kernel.after(SETTLE_S, self._settle)
        else:
            self.kernel.stop()

    def _result(self) -> RunResult:
        return RunResult(
            requests=self._records,
            steps=self.meter.stats,
            duration_s=self._end_s - self.config.warmup_s,
            kernel_events=self.kernel.events,
            link_use=self._link_use,
            tier_bytes=dict(self.tier_bytes),
            decisions=dict(self.decisions),
            peaks=self._peaks
            | {
                "stale_events": float(self.stale),
                "retries": float(self.ingress.retries),
                "preemptions": float(sum(w.model.preemptions_total for w in self.workers.values())),
            },
        )

    # ---------------------------------------------------------------------------------------- the router (Router)

    def feed(self, event: ev.Event) -> None:
        """One event for the dispatcher; its actions are carried out, it is journalled."""
        actions: list[Action] = []
        error: ev.StaleEvent | None = None
        try:
            actions = self.dispatcher.handle(event)
        except ev.StaleEvent as stale:  # a message that crossed another on its way: as live
            self.stale += 1
            error = stale
        if self.journal is not None:
            self.journal.record(event, actions, error)
        for action in actions:
            self.decisions[_label(action, self.dispatcher)] += 1
            self.ingress.act(action)

    def predicted(self, job: Job, now_s: float) -> float | None:
        """See `ingress.Router`."""
        if self._forecasts is None or job.generated:
            return None
        work = job.work
        self._lengths[job.rid] = work.output_tokens
        arrival = Arrival(
            request_id=job.rid,
            arrival_s=now_s,
            prompt_tokens=work.prompt_tokens,
            max_tokens=work.max_tokens,
            traffic_class=work.request_class,
            client=work.client or None,
            session=work.session or None,
            prompt_key=work.prompt_key or None,
        )
        return self._forecasts.arrived(arrival, work.max_tokens or self.config.default_max_tokens)

    def closed(self, job: Job, outcome: ev.Outcome, tokens: int) -> None:
        """An attempt is over."""
        if self._forecasts is not None:
            self._forecasts.closed(job.rid, outcome, tokens, self.kernel.now_s)
            self._lengths.pop(job.rid, None)

    def ended(self, job: Job) -> None:
        """A request is over."""
        self._ended += 1
        record = job.record
        if record.tier is not None and job.work.rid in self._measured:
            self.tier_bytes[record.tier] += record.transfer_bytes
        self._measured.discard(job.work.rid)
        self._look_for_end()

    # ------------------------------------------------------------------------------------------------------- periods

    def _report_status(self) -> None:
        now_s = self.kernel.now_s
        always_s = self.config.control.status_always_s - 1e-9
        for name, worker in self.workers.items():
            model = worker.model
            kv_tokens = worker.used_blocks(worker.done_now) * worker.pool.block_size_tokens
            status = (model.n_active, model.n_waiting, kv_tokens)
            known = self._status.get(name)
            if known is None or known[1] != status or now_s - known[0] >= always_s:
                self._status[name] = (now_s, status)
                self.feed(ev.EngineStatus(now_s, name, *status))

    def _report_progress(self) -> None:
        now_s = self.kernel.now_s
        admissions, self.ingress.admissions = self.ingress.admissions, []
        for job in admissions:
            if job.state is State.DECODING:
                self.feed(ev.Admitted(now_s, job.rid))
        items: list[tuple[str, int]] = []
        for worker in self._decoders:
            running = worker.model.running
            if running:
                steps = worker.model.steps + worker.done_now
                if steps != self._reported[worker.name]:
                    self._reported[worker.name] = steps
                    items += [(seq.owner.rid, steps - seq.offset) for seq in running]  # type: ignore[attr-defined]
        if items:
            if self._forecasts is not None:
                self._note_ages(items)
            self.feed(ev.ProgressedMany(now_s, tuple(items)))
        if self.meter.measuring and self._balanced:
            self._sample_imbalance()

    def _sample_imbalance(self) -> None:
        """Without a barrier there is no common step: the mean over time stands for the mean over steps."""
        loads = [worker.kv_load_tokens(worker.done_now) for worker in self._balanced]
        if any(loads):
            self._imbalances += max(loads) - min(loads)
            self._samples += 1

    def _note_ages(self, items: list[tuple[str, int]]) -> None:
        forecasts, jobs = self._forecasts, self.ingress.jobs
        assert forecasts is not None
        for rid, tokens in items:
            job = jobs.get(rid)
            if job is not None:
                forecasts.progressed(rid, tokens + job.generated)

    def _refresh_forecasts(self) -> None:
        assert self._forecasts is not None
        now_s = self.kernel.now_s
        for made in self._forecasts.refresh():
            tokens = made.age - self.ingress.jobs[made.request_id].generated
            self.feed(ev.ForecastMade(now_s, made.request_id, tokens, made.finishes_in_tokens))

    def _refresh_oracle(self) -> None:
        assert self._oracle is not None
        now_s = self.kernel.now_s
        self.feed(ev.OracleRefreshed(now_s, self._oracle(now_s)))

    def _tick(self) -> None:
        self.feed(ev.Tick(self.kernel.now_s))
        state, peaks = self.dispatcher.state, self._peaks
        peaks["queue"] = max(peaks["queue"], self.dispatcher.queue_size)
        peaks["pool"] = max(peaks["pool"], state.pool_size)
        peaks["in_flight"] = max(peaks["in_flight"], state.in_flight)
        if self._progress is not None:
            self._progress(self._ended, self.kernel.now_s)

    # ------------------------------------------------------------------------------------------- of the KV cache

    def _on_kv_events(self, worker: Worker, changes: list[Any]) -> None:
        seq = self._kv_seq[worker.name]
        self._kv_seq[worker.name] = seq + 1
        batch = tuple(changes)
        self.kernel.after(
            self.config.control.hop_s,
            lambda: self.feed(ev.KvBatch(self.kernel.now_s, worker.name, "0", seq, batch)),
        )

    def _start_pull(self, job: Job, on_done: Callable[[], None]) -> Pull:
        source, target, seq = job.prefill, job.decode, job.seq
        assert source is not None
        assert target is not None
        assert seq is not None
        n_bytes = source.spec.profile.kv_bytes(seq.prompt_tokens - seq.cached_tokens)
        links = self._links_of(target.spec)
        job.record.transfer_bytes = n_bytes
        if self._network is not None:
            job.record.tier = links.tier(source.node, target.node)
        released, groups = job.layers
        pull = Pull(links, source, target, n_bytes, job.work.priority, job.rid, groups, on_done)
        pull.release(released)
        return pull


def _label(action: Action, dispatcher: Dispatcher) -> str:
    if isinstance(action, Reject):
        return f"reject: {action.reason}"
    reason = action.decision.reason.value
    if isinstance(action, RoutePrefill):
        kind = "degraded" if action.degraded else "colocated" if action.colocated else "prefill"
        return f"{kind} {dispatcher.prefill.name}: {reason}"
    return f"decode {dispatcher.decode.name}: {reason}"
