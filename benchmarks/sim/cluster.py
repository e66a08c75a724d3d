"""The simulated cluster: the live router's `Dispatcher` with simulated engines and a simulated ingress around it.

`simulate(config, workload)` runs a simulation. This module decides nothing. It gives events to the dispatcher, whose
actions `ingress` carries out; engines step (`engine`) and KV moves over the network or fixed links (`pull`).
`ControlPlane` has the periods, the latencies of messages and the number of retries. The event log has the format of the
live router's (`policies.journal.lines`), so it can be replayed.

As in the live system, some events come once a period and not at each change: engine status, progress (one
`ProgressedMany` for all requests that gained a token), forecasts, ticks, the network oracle, and, where prefixes are
lent by scheduled flows, what is still to move at the ports of each node. Changes of a prefix cache are reported in
batches, when its engine begins or ends steps. A progress report arrives without delay.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.sim.build import Links, build_engines, build_flows, hashes_of
from benchmarks.sim.built import note
from benchmarks.sim.config import SimConfig
from benchmarks.sim.engine import Meter, Worker
from benchmarks.sim.fleet import Fleet
from benchmarks.sim.forecasts import Forecasts
from benchmarks.sim.ingress import Ingress, SimRequest
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.lending import Loan
from benchmarks.sim.links import KvNetwork
from benchmarks.sim.pull import Pull, ScheduledPull, Transfer
from benchmarks.sim.records import RequestRecord, RunResult
from benchmarks.sim.reports import Reports
from benchmarks.sim.roles import Roles, announcement
from benchmarks.sim.staged import StagedGroup
from benchmarks.workloads.record import WorkloadRequest
from policies.admission.registry import admission_policy
from policies.dispatch.dispatcher import Action, Dispatcher, Reject, RoutePrefill
from policies.fairness.registry import fairness_policy
from policies.flow.base import Stage
from policies.flow.stages import home_of
from policies.journal.lines import JournalWriter
from policies.network.contention import ContentionEstimator
from policies.network.oracle import Oracle
from policies.network.own_transfers import OwnTransfers
from policies.request.stage import Outcome
from policies.routing.base import Needs
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Request

Progress = Callable[[int, float], None]
"""A callback that is called on every tick with the number of requests that have ended and the virtual time (s)."""

SETTLE_S = 1.0
"""Virtual seconds for which a run goes on after its last request, so that the last messages arrive.

It is thousands of times the latency of a message (`ControlPlane.hop_s`).
"""


class SimulationError(ValueError):
    """The error of a workload or configuration that cannot be simulated; its message names the request or option."""


def simulate(
    config: SimConfig,
    workload: Iterable[WorkloadRequest],
    journal: Callable[[str], object] | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Runs `workload` (in order of `at_s`) through the cluster and returns the records of the run.

    The same arguments give the same result, to the bit. `journal` is called with pieces of the event log, each of whole
    lines. Raises SimulationError for a workload out of order or out of range, ValueError for an impossible
    configuration, and PolicyError for a policy that broke its contract.
    """
    return Cluster(config, iter(workload), journal, progress).run()


class Cluster:
    """One run of a simulation. It does the router's part, and begins and ends the measurement."""

    def __init__(
        self,
        config: SimConfig,
        workload: Iterator[WorkloadRequest],
        journal: Callable[[str], object] | None,
        progress: Progress | None,
    ) -> None:
        if journal is not None and any(spec.layers for spec in config.engines):
            raise ValueError(
                "a run of engines with layers has no journal: the router is charged beside its events"
            )
        self.config, self.kernel, self.meter = config, Kernel(), Meter()
        prefill, decode = prefill_policy(*config.prefill), decode_policy(*config.decode)
        note("prefill", config.prefill[0], prefill)
        note("decode", config.decode[0], decode)
        admission = admission_policy(*config.admission)
        if admission.watches:
            note("admission", config.admission[0], admission)
        fairness = fairness_policy(*config.fairness)
        if fairness.shares:
            note("fairness", config.fairness[0], fairness)
        self.dispatcher = Dispatcher(config.dispatch, prefill, decode, admission, fairness)
        self.journal = None if journal is None else JournalWriter(journal, self.dispatcher, "simulation")  # type: ignore[arg-type]
        self._workload, self._progress = workload, progress
        self._links = Links(config, self.kernel)
        self._own = OwnTransfers(ContentionEstimator()) if config.learn_contention else None
        self._told: Oracle | None = None
        self.workers: dict[str, Worker] = {}
        reuse = config.flows is not None and config.flows.reuse
        sizes = [
            spec.block_size_tokens
            for spec in config.engines
            if spec.prefix_cache or (reuse and spec.layers is not None)
        ]
        self.ingress = Ingress(
            config,
            self.kernel,
            self.workers,
            self,
            self._start_pull,
            self._start_fetch,
            self._on_kv_events,
            block_tokens=max(sizes, default=0),
        )
        self._flows = build_flows(config, self.kernel, self.meter, self._links)
        workers, self._groups = build_engines(
            config, self.kernel, self.ingress, self.meter, self._links, self._flows
        )
        self.workers.update(workers)
        wanted = config.forecasts
        self._forecasts = None if wanted is None else Forecasts(wanted, config.default_max_tokens)
        self._reports = Reports(
            config.control, self.kernel, self.ingress, self.meter, self._forecasts, self.feed
        )
        hop_s = config.control.hop_s
        self._roles = (
            None if config.roles is None else Roles(config.roles, self.kernel, self.workers, hop_s, self.feed)
        )
        self._fleet = None if config.scaling is None else self._build_fleet()
        self._kv_seq: Counter[str] = Counter()
        self._computing: dict[str, list[str]] = {}
        self._records: list[RequestRecord] = []
        # Ids of the measured requests that have not ended.
        self._measured: set[str] = set()
        self._ended = 0
        self._exhausted = self._closed_window = False
        self._end_s = 0.0
        self._link_use: dict[str, float] = {}
        self.decisions: Counter[str] = Counter()
        self.stale = 0
        self.tier_bytes: Counter[int] = Counter()
        self._peaks = {"queue": 0.0, "pool": 0.0, "in_flight": 0.0}

    @property
    def network(self) -> KvNetwork:
        """The network between the engines, for flows other than those of requests. Raises ValueError without one."""
        if self._links.network is None:
            raise ValueError("the simulation has no network: set `network` to a Fabric")
        return self._links.network

    # ------------------------------------------------------------------------------------------------------- running

    def run(self) -> RunResult:
        """Runs until the last measured request has ended (without `drain` until the window has); returns the result."""
        config, kernel, control = self.config, self.kernel, self.config.control
        for worker in self.workers.values():
            self.feed(announcement(worker, worker.spec.role, 0.0))
        if self._fleet is not None:
            self._fleet.begin()
        self._reports.status()
        self._every(control.status_s, self._reports.status)
        self._every(control.tick_s, self._tick)
        self._every(control.progress_s, self._reports.progress)
        if self._forecasts is not None:
            self._every(control.forecast_s, self._refresh_forecasts)
        if self._roles is not None and config.roles is not None:
            roles = self._roles
            self._every(config.roles.every_s, lambda: roles.look(self.dispatcher.state))
        if self._fleet is not None and config.scaling is not None:
            self._every(config.scaling.every_s, self._fleet.look)
        if config.network is not None and config.network.oracle_s is not None:
            self._refresh_oracle()
            self._every(config.network.oracle_s, self._refresh_oracle)
        if self._flows is not None and Needs.FLOWS in self.dispatcher.needs:
            self._report_flows()
            self._every(control.flows_s, self._report_flows)
        kernel.at(config.warmup_s, self._open_window, -1)
        if config.measure_s is not None:
            kernel.at(config.warmup_s + config.measure_s, self._close_window, -1)
        self._next_arrival()
        kernel.run()
        return self._result()

    def _build_fleet(self) -> Fleet:
        return Fleet(
            self.config,
            self.kernel,
            self.ingress,
            self.meter,
            self._groups,
            self._reports,
            self.dispatcher,
            lambda source, target: 0 if (net := self._links.network) is None else net.tier(source, target),
            self.feed,
        )

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
                f"request {work.request_id} is at {work.at_s} s, after one at {self.kernel.now_s} s: sort by at_s"
            )
        if work.prompt_tokens < 1 or work.output_tokens < 1:
            raise SimulationError(
                f"request {work.request_id} has {work.prompt_tokens} prompt and {work.output_tokens} output tokens: "
                f"both must be at least 1"
            )
        self.kernel.at(work.at_s, lambda: self._arrive(work))

    def _arrive(self, work: WorkloadRequest) -> None:
        config, now_s = self.config, self.kernel.now_s
        record = RequestRecord(
            work.request_id,
            work.request_class,
            work.prompt_tokens,
            work.output_tokens,
            now_s,
            ttft_slo_s=work.ttft_slo_s,
            tpot_slo_s=work.tpot_slo_s,
            tenant=work.client,
        )
        if work.request_id in self.ingress.live:
            raise SimulationError(
                f"two live requests are called {work.request_id}: request ids must be unique"
            )
        if now_s >= config.warmup_s and not self._closed_window:
            self._records.append(record)
            self._measured.add(work.request_id)
        reuse = config.flows is not None and config.flows.reuse
        self.ingress.arrive(work, record, hashes_of(work, config.engines, reuse))
        self._next_arrival()

    def _open_window(self) -> None:
        for group in self._groups:
            group.settle()
        if self._links.network is not None:
            self._links.network.mark()
        if self._fleet is not None:
            self._fleet.measure()
        self.meter.measuring = True

    def _close_window(self) -> None:
        if self._closed_window:
            return
        for group in self._groups:
            group.settle()
        self._reports.count_imbalance()
        if self._fleet is not None:
            self._fleet.close()
        if self._links.network is not None:
            self._link_use = self._links.network.link_use()
        self.meter.measuring = False
        self._closed_window = True
        self._end_s = self.kernel.now_s
        self._look_for_end()

    def _look_for_end(self) -> None:
        if self._closed_window and not self.config.drain:
            self.kernel.stop()
            return
        if self._measured or not (self._exhausted or self._closed_window):
            return
        if not self._closed_window:
            if self.kernel.now_s >= self.config.warmup_s:
                # Closing the window calls this method again.
                self._close_window()
            else:
                self.kernel.at(self.config.warmup_s, self._look_for_end)
        elif self._exhausted and not self.ingress.live:
            self.kernel.after(SETTLE_S, self._settle)
        else:
            self.kernel.stop()

    def _settle(self) -> None:
        """Stops the run once no engine is stepping; a step goes on after its requests were cancelled."""
        if any(group.stepping for group in self._groups):
            self.kernel.after(SETTLE_S, self._settle)
        else:
            self.kernel.stop()

    def _result(self) -> RunResult:
        models = [worker.model for worker in self.workers.values()]
        if self._fleet is not None:
            models += self._fleet.gone
        return RunResult(
            requests=self._records,
            steps=self.meter.stats,
            duration_s=self._end_s - self.config.warmup_s,
            kernel_events=self.kernel.events,
            link_use=self._link_use,
            tier_bytes=dict(self.tier_bytes),
            decisions=dict(self.decisions),
            flows=None if self._flows is None else self._flows.driver.stats,
            fleet=None if self._fleet is None else self._fleet.stats,
            peaks=self._peaks
            | ({} if self._roles is None else {"role_switches": float(self._roles.switches)})
            | {
                "stale_events": float(self.stale),
                "retries": float(self.ingress.retries),
                "loans": float(self.ingress.loans.stats.asked),
                "prefixes_read": float(self.ingress.loans.stats.reads),
                "prefixes_failed": float(self.ingress.loans.stats.failed),
                "prefix_bytes": float(self.ingress.loans.stats.read_bytes),
                "prefill_tokens": float(sum(model.prefill_tokens_total for model in models)),
                "preemptions": float(sum(model.preemptions_total for model in models)),
            },
        )

    # ---------------------------------------------------------------------------------------- the router (Router)

    def feed(self, event: ev.Event) -> None:
        """Passes one event to the dispatcher, records it in the journal, and carries out the dispatcher's actions."""
        actions: list[Action] = []
        error: ev.StaleEvent | None = None
        try:
            actions = self.dispatcher.handle(event)
        # The message crossed another one on its way, which also happens on sockets.
        except ev.StaleEvent as stale:
            self.stale += 1
            error = stale
        if self.journal is not None:
            self.journal.record(event, actions, error)
        for action in actions:
            self.decisions[_label(action, self.dispatcher)] += 1
            if self._fleet is not None:
                self._fleet.routed(action)
            self.ingress.act(action)
        if self._fleet is not None and isinstance(event, ev.Arrived):
            self._fleet.ring()

    def computing(self, worker: str, prompts: list[int]) -> None:
        """Charges the prompts as requests of their own, which no policy decides: the life of the real ones is at their
        decode already.
        """
        state, now_s = self.dispatcher.state, self.kernel.now_s
        for attempt_id in self._computing.pop(worker, ()):
            state.apply(ev.Closed(now_s, attempt_id, "cancelled"))
        for number, tokens in enumerate(prompts):
            attempt_id = f"{worker}/computing/{number}"
            state.apply(ev.Arrived(now_s, Request(attempt_id, now_s, tokens, 1)))
            state.apply(ev.PrefillRouted(now_s, attempt_id, worker, colocated=False))
            self._computing.setdefault(worker, []).append(attempt_id)

    def predicted(self, request: SimRequest, now_s: float) -> float | None:
        """Returns the expected output tokens of an arriving request, or None where the router does not predict them."""
        expected = (
            None
            if self._forecasts is None
            else self._forecasts.arrived(request, now_s, Needs.LENGTHS in self.dispatcher.needs)
        )
        if self._fleet is not None and not request.attempts:
            record = request.record
            slos = record.ttft_slo_s, record.tpot_slo_s
            self._fleet.arrived(record.request_class, record.prompt_tokens, expected, slos)
        return expected

    def closed(self, request: SimRequest, outcome: Outcome, tokens: int) -> None:
        """Tells the predictor that an attempt of `request` has ended with `outcome` after `tokens` output tokens."""
        if self._forecasts is not None:
            self._forecasts.closed(request, outcome, tokens, self.kernel.now_s)
        if self._fleet is not None:
            self._fleet.attempt_ended(request, outcome)
        if self._own is not None:
            self._own.dropped(request.attempt_id)

    def ended(self, request: SimRequest) -> None:
        """Counts a request that has ended, and ends the run where it was the last."""
        self._ended += 1
        if self._fleet is not None:
            self._fleet.ended(request)
        record = request.record
        if record.tier is not None and request.work.request_id in self._measured:
            self.tier_bytes[record.tier] += record.transfer_bytes
        if self._flows is not None:
            self._flows.batches.departed(request.attempt_id)
        self._measured.discard(request.work.request_id)
        self._look_for_end()

    # ------------------------------------------------------------------------------------------------------- periods

    def _refresh_forecasts(self) -> None:
        assert self._forecasts is not None
        horizon = self.dispatcher.horizon
        for event in self._forecasts.refresh(self.kernel.now_s, self.ingress.live, horizon):
            self.feed(event)

    def _refresh_oracle(self) -> None:
        assert self._links.oracle is not None
        now_s = self.kernel.now_s
        oracle = self._links.oracle(now_s)
        if self._own is not None:
            oracle = self._own.taught(oracle, now_s)
        self._told = oracle
        self.feed(ev.OracleRefreshed(now_s, oracle))

    def _report_flows(self) -> None:
        """Reports what is still to move at every node's ports, as each node's flow agent does."""
        assert self._flows is not None
        assert self.config.flows is not None
        choice = ev.PolicyChoice(self.config.flows.policy[0], dict(self.config.flows.policy[1]))
        nodes = sorted({worker.node for worker in self.workers.values()})
        for load in self._flows.driver.loads(nodes):
            self.feed(ev.FlowsReported(self.kernel.now_s, choice, load))

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

    def _start_pull(self, request: SimRequest, on_done: Callable[[], None]) -> Transfer:
        source, target, seq = request.prefill, request.decode, request.seq
        assert source is not None
        assert target is not None
        assert seq is not None
        n_bytes = source.spec.profile.kv_bytes(seq.prompt_tokens - seq.cached_tokens)
        links = self._links.of(target.spec)
        request.record.transfer_bytes = n_bytes
        if self._links.network is not None:
            request.record.tier = links.tier(source.node, target.node)
        if self._own is not None:
            on_done = self._observed(self._own, request, n_bytes, on_done)
        released, groups = request.layers
        pull: Transfer
        if self._flows is None:
            pull = Pull(links, source, target, n_bytes, request.attempt_id, groups, on_done)
        else:
            home = source.node if request.staged is None else request.staged.home
            to = home_of(request.attempt_id, target.span)
            driver, batches, key = self._flows.driver, self._flows.batches, request.attempt_id

            def ended(arrived: bool) -> None:
                batches.departed(key)
                if arrived:
                    on_done()

            pull = ScheduledPull(driver, home, to, n_bytes, key, groups, self._terms_of(request), ended)
        pull.release(released)
        return pull

    def _observed(
        self, own: OwnTransfers, request: SimRequest, n_bytes: int, on_done: Callable[[], None]
    ) -> Callable[[], None]:
        """Has contention learn from a transfer that begins now; returns what to call at its end."""
        assert request.prefill is not None
        assert request.decode is not None
        started_s, key = self.kernel.now_s, request.attempt_id
        ends = request.prefill.name, request.decode.name
        own.began(key, *ends, request.record.tier, self._told, started_s)

        def ended() -> None:
            own.arrived(key, n_bytes, self.kernel.now_s - started_s, self.kernel.now_s)
            on_done()

        return ended

    def _start_fetch(self, loan: Loan, reader: Worker, n_bytes: int, on_done: Callable[[], None]) -> Transfer:
        """Starts to move a lent prefix, whole. The relative layer index of a scheduled flow is the number of requests
        that wait in the reader's queue. Deviation: live engines count other prefixes that are being read, too, and say
        so when requests before it have left the queue (`actors.engine.sim.prefix`).
        """
        links, key = self._links.of(reader.spec), f"{loan.request.attempt_id}/lent"
        fetch: Transfer
        if self._flows is None:
            fetch = Pull(links, loan.lender, reader, n_bytes, key, 1, on_done)
        else:

            def ended(arrived: bool) -> None:
                if arrived:
                    on_done()

            fetch = ScheduledPull(
                self._flows.driver,
                loan.lender.node,
                reader.node,
                n_bytes,
                loan.request.attempt_id,
                1,
                lambda: (loan.request.attempt_id, None, 0.0),
                ended,
                Stage.REUSE,
                reader.n_waiting,
            )
        fetch.release(1)
        return fetch

    def _terms_of(self, request: SimRequest) -> Callable[[], tuple[str, float | None, float]]:
        """Returns a function of a flow's batch, the seconds until the request's KV is due, and the seconds that its
        prefill still computes. The KV is due when the decode engine's first step can still be in time.
        """
        record, source, target = request.record, request.prefill, request.decode
        assert source is not None
        assert target is not None
        first_s = target.spec.profile.step_s(0, 1, record.prompt_tokens) + self.config.control.hop_s

        def terms() -> tuple[str, float | None, float]:
            slo_s, staged = record.ttft_slo_s, request.staged
            due_s = None if slo_s is None else request.waits_since_s + slo_s - first_s - self.kernel.now_s
            compute_s = 0.0
            if request.layers[0] < request.layers[1] and isinstance(source.group, StagedGroup):
                compute_s = source.group.left_s()
            return (staged.batch if staged is not None else request.attempt_id), due_s, compute_s

        return terms


def _label(action: Action, dispatcher: Dispatcher) -> str:
    if isinstance(action, Reject):
        return f"reject: {action.reason}"
    reason = action.decision.reason.value
    if isinstance(action, RoutePrefill):
        kind = "degraded" if action.degraded else "colocated" if action.colocated else "prefill"
        return f"{kind} {dispatcher.prefill.name}: {reason}"
    return f"decode {dispatcher.decode.name}: {reason}"
