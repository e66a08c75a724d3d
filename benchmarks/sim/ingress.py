"""The ingress of the simulation, which drives the life cycle of requests (`policies.request.life`) in virtual time.

`SimRequest` carries out the effects of a request's life, at the simulated engines and the simulated router. `Ingress`
turns what engines and router do into events of that life. The live ingress uses the same life cycle, so its rules are
the same. The simulation deviates in these points:

- Engines fail only where a test has them fail (`Ingress.engine_fails`), and the next engine takes new work at once.
- The router is never away, no client leaves, a request has one choice, and there is one ingress.
- A cancellation reaches its engine at once.
- A decision of the router travels over the ingress to an engine; the life gets its event when it reaches the engine.
- An engine may give a preempted request back to the router (`EngineSpec.preempted`), which no live engine does.
- An engine reports only the first and the last token of its output, so no gap between tokens is too long, and no answer
  is idle: neither limit is set.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.sim.config import SimConfig
from benchmarks.sim.engine import Worker
from benchmarks.sim.kernel import Kernel, Timer
from benchmarks.sim.kv_store import Staged
from benchmarks.sim.lending import Loan, Loans, StartFetch
from benchmarks.sim.pull import Transfer
from benchmarks.sim.records import RequestRecord
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import Action, Reject, RouteDecode, RoutePrefill
from policies.engine_model.blocks import BlockError
from policies.engine_model.scheduler import Sequence, SequenceStage
from policies.request import events as life_events
from policies.request.effects import Blame, Failure
from policies.request.life import Life, Limits
from policies.request.stage import Outcome, Stage, Task
from policies.request.terms import Terms
from policies.request.troubles import within_budget
from policies.state import events as ev
from policies.state.views import Request

ONE_WAY = 1
"""Hops of a message between an ingress and its router, or between an ingress and an engine."""

VIA_INGRESS = 2
"""Hops of a message between the router and an engine, which goes over the ingress."""

ASK_AND_GRANT = 2
"""Hops between two engines before KV flows: the decode engine sends a request, and the prefill engine a grant."""


class Router(Protocol):
    """The interface through which an ingress uses the router and its predictors."""

    def feed(self, event: ev.Event) -> None: ...
    def computing(self, worker: str, prompts: list[int]) -> None:
        """Charges a worker with prompts (their tokens) that it computes on although they were reported as done. The
        charges of its last call end.
        """

    def predicted(self, request: "SimRequest", now_s: float) -> float | None:
        """Returns the expected output tokens of an arriving request, or None where the router does not predict them."""

    def closed(self, request: "SimRequest", outcome: Outcome, tokens: int) -> None:
        """Notes that an attempt of `request` has ended with `outcome` after `tokens` output tokens."""

    def ended(self, request: "SimRequest") -> None:
        """Notes that `request` has ended, with all its attempts."""


class SimRequest(Life):
    """One simulated request: it carries out the effects of its life, and records what it holds at its engines.

    `seq` is the sequence that an engine works on. `generated` counts the tokens from before a preemption that sent the
    request back to the router; they are part of its prompt now. `layers` is (layer groups whose KV may be sent, all
    layer groups). Its prompt is computed since `computing_from_s`. `staged` is what a scheduled request's flows need to
    know of its prefill (`SimConfig.flows`). `loan` is the prefix that another engine lends it. `unfit` is the failure
    of an engine that can never hold the request; it becomes an event once the work has been sent.
    """

    __slots__ = (
        "_ingress", "_timer", "computing_from_s", "decode", "generated", "hashes", "layers", "lease", "loan",
        "prefill", "pull", "record", "seq", "staged", "submit_in_s", "unfit", "work",
    )  # fmt: skip

    def __init__(
        self,
        ingress: "Ingress",
        work: WorkloadRequest,
        record: RequestRecord,
        hashes: tuple[int, ...],
        terms: Terms,
    ) -> None:
        super().__init__(ingress.limits, terms, ingress.kernel.now_s)
        self.work, self.record, self.hashes = work, record, hashes
        self._ingress = ingress
        self._timer: Timer | None = None
        self.submit_in_s = ingress.config.control.ingress_s + ingress.config.control.hop_s
        self.generated = 0
        self.prefill: Worker | None = None
        self.decode: Worker | None = None
        self.seq: Sequence | None = None
        self.pull: Transfer | None = None
        self.staged: Staged | None = None
        self.loan: Loan | None = None
        self.layers = (1, 1)
        self.computing_from_s = 0.0
        self.lease: str | None = None
        self.unfit: life_events.EngineFailed | None = None

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length in tokens, including the tokens that were generated before a preemption."""
        return self.work.prompt_tokens + self.generated

    # ------------------------------------------------------------------------------------------------- attempts

    def new_attempt(self) -> str:
        request_id = self.work.request_id
        attempt_id = f"{request_id}~{self.attempts}" if self.attempts else request_id
        self._ingress.live[attempt_id] = self
        return attempt_id

    def forget(self, outcome: Outcome) -> None:
        del self._ingress.live[self.attempt_id]
        tokens = 0 if outcome == "rejected" else self.record.generated_tokens
        self._ingress.router.closed(self, outcome, tokens)

    def may_retry(self) -> bool:
        return within_budget(self._ingress.budgeted, len(self._ingress.live))

    def retried(self, task: Task, code: str) -> None:
        self._ingress.retries += 1

    def count_retry(self, change: int) -> None:
        self._ingress.budgeted += change

    def migrated(self, task: Task, code: str, choices: int) -> None:
        self._ingress.migrations += 1
        self.generated = self.output_tokens

    def resumed(self, stall_s: float) -> None:
        """Does nothing: the record has the times of the first and the last token."""

    def split(self) -> list[Life]:
        raise AssertionError("a simulated request has one choice")

    def wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        kernel = self._ingress.kernel
        self._timer = None if at_s == math.inf else kernel.at(at_s, self._wakes)

    def _wakes(self) -> None:
        self.wake(self._ingress.kernel.now_s)
        self.report_unfit()

    def report_unfit(self) -> None:
        """Handles the failure of an engine to which the request was sent and that can never hold it."""
        while (failed := self.unfit) is not None:
            self.unfit = None
            self.on(failed, self._ingress.kernel.now_s)

    def told_by_engine(self, event: life_events.Event) -> None:
        """Takes the report of an engine; the life has its event when the message that follows it reaches an engine."""
        self._ingress.later(VIA_INGRESS, self, lambda: self._ingress.happens(self, event))

    def refused(self, event: object) -> None:
        self._ingress.refused += 1

    # --------------------------------------------------------------------------------------------------- router

    def submit(self) -> None:
        delay_s, self.submit_in_s = self.submit_in_s, self._ingress.config.control.hop_s
        self._ingress.later_s(delay_s, self, lambda: self._ingress.arrived(self))

    def adopt(self) -> None:
        raise AssertionError("the simulated router is never away")

    def report_prefill(self, done: life_events.PrefillDone) -> None:
        ingress, attempt_id = self._ingress, self.attempt_id

        def tell() -> None:
            now_s = ingress.kernel.now_s
            lease_until_s = now_s + done.lease_s
            ingress.router.feed(
                ev.PrefillDone(
                    now_s,
                    attempt_id,
                    lease_until_s,
                    done.kv_bytes,
                    done.cached_tokens,
                    compute_s=done.compute_s,
                )
            )

        ingress.later(VIA_INGRESS, self, tell)

    def report_renewal(self, lease_s: float) -> None:
        ingress, attempt_id = self._ingress, self.attempt_id

        def tell() -> None:
            now_s = ingress.kernel.now_s
            ingress.router.feed(ev.LeaseRenewed(now_s, attempt_id, now_s + lease_s))

        ingress.later(ONE_WAY, self, tell)

    def close(self, outcome: Outcome, blame: Blame | None) -> None:
        ingress, attempt_id, tokens = self._ingress, self.attempt_id, self.record.generated_tokens

        def tell() -> None:
            now_s = ingress.kernel.now_s
            if blame is not None:
                workers = (blame.engine_id,)
                ingress.router.feed(ev.AttemptFailed(now_s, attempt_id, workers, blame.task, blame.code))
            ingress.router.feed(ev.Closed(now_s, attempt_id, outcome, tokens))

        ingress.kernel.after(ingress.config.control.hop_s, tell)

    # -------------------------------------------------------------------------------------------------- engines

    def send_lend(self, lend: life_events.Lend, left_s: float) -> bool:
        self._ingress.loans.lend(self, lend)
        return True

    def send_prefill(self, route: life_events.RoutePrefill, left_s: float) -> bool:
        worker = self._ingress.workers[route.engine_id]
        self.record.colocated = False
        self.record.prefill_worker = worker.name
        self.prefill = worker
        seq = Sequence(self.prompt_tokens, 0, self.hashes, self.terms.priority, True, owner=self)
        if self.loan is None or self.lent is None:
            self._add(worker, seq, "prefill")
            return True
        # it is queued when the prefix has been read
        self._take(worker, seq)

        def queue() -> None:
            if self.seq is seq:
                self._add(worker, seq, "prefill")

        self._ingress.loans.read(self.loan, worker, seq, queue)
        return True

    def send_decode(self, route: life_events.RoutePrefill | life_events.RouteDecode, left_s: float) -> bool:
        worker = self._ingress.workers[route.engine_id]
        colocated = isinstance(route, life_events.RoutePrefill)
        if colocated:
            self.record.colocated = True
            self.record.prefill_worker = worker.name
        self.record.decode_worker = worker.name
        self.decode = worker
        output = max(1, self.work.output_tokens - self.generated)
        seq = Sequence(
            self.prompt_tokens, output, self.hashes, self.terms.priority, remote=not colocated, owner=self
        )
        self._add(worker, seq, "decode")
        return True

    def _take(self, worker: Worker, seq: Sequence) -> None:
        if not worker.spec.prefix_cache:
            seq.hashes = ()
        self.seq = seq

    def _add(self, worker: Worker, seq: Sequence, task: Task) -> None:
        self._take(worker, seq)
        try:
            worker.add(seq)
        except BlockError as error:
            self.drop()
            self.unfit = life_events.EngineFailed(worker.name, task, "bad_request", str(error), False)

    def stop_work(self, engine_id: str) -> None:
        self._leave(engine_id)

    def release_kv(self, engine_id: str) -> None:
        self._leave(engine_id)

    def _leave(self, engine_id: str) -> None:
        if self.loan is not None and self.loan.lender.name == engine_id:
            self._ingress.loans.give_up(self.loan)
        else:
            self.drop()

    def renew_lease(self, engine_id: str) -> None:
        ingress, worker, key = self._ingress, self.prefill, self.lease
        assert worker is not None

        def answer() -> None:
            left_s = None if key is None else worker.renew(key, ingress.kernel.now_s)
            if left_s is not None:
                ingress.kernel.after(left_s, lambda: ingress.expire(worker))
            renewed = life_events.Renewed(left_s or 0.0, worker.name)
            ingress.later(ONE_WAY, self, lambda: ingress.happens(self, renewed))

        ingress.later(ONE_WAY, self, answer)

    def leave_engine(self, engine_id: str) -> None:
        """Does nothing: what the request held at the engine has been given back already."""

    def drop(self) -> None:
        """Gives back whatever the request holds at its engines, but for a loan. A second call does nothing."""
        if self.pull is not None:
            self.pull.cancel()
            self.pull = None
            if self.lease is not None and self.prefill is not None:
                self.prefill.read_ended(self.lease)
                self.lease = None
        if self.lease is not None and self.prefill is not None:
            self.prefill.free(self.lease)
            self.lease = None
        if self.seq is not None:
            holder = self.prefill if self.seq.prefill_only else self.decode
            if holder is not None:
                if not self.seq.prefill_only:
                    self.record.generated_tokens = self.generated + holder.generated(self.seq)
                holder.remove(self.seq)
        self.prefill = self.decode = self.seq = None

    def admitted(self) -> None:
        self._ingress.admissions.append(self)

    # --------------------------------------------------------------------------------------------------- client

    def output(self, event: life_events.Output) -> None:
        if event.last:
            self.record.finished_s = self._ingress.kernel.now_s
            self.record.generated_tokens = self.work.output_tokens

    def unsent(self) -> bool:
        return False

    def restart(self) -> None:
        raise AssertionError("a simulated client has got all output")

    def finished(self) -> None:
        self._ingress.router.ended(self)

    def failed(self, failure: Failure) -> None:
        self.record.rejected = failure.code
        self.record.rejected_s = self._ingress.kernel.now_s
        self._ingress.router.ended(self)


@dataclass(slots=True)
class Ingress:
    """The ingress of all simulated requests, which is also the `Owner` of the workers.

    `live` has the requests by the id of their present attempt. `admissions` are the requests whose admission the next
    progress report will announce. `refused` counts the events that no life accepted.
    """

    config: SimConfig
    kernel: Kernel
    workers: dict[str, Worker]
    router: Router
    start_pull: Callable[[SimRequest, Callable[[], None]], Transfer]
    start_fetch: StartFetch
    on_kv_events: Callable[[Worker, list[Any]], None]
    block_tokens: int
    limits: Limits = field(init=False)
    loans: Loans = field(init=False)
    live: dict[str, SimRequest] = field(default_factory=dict)
    admissions: list[SimRequest] = field(default_factory=list)
    retries: int = 0
    migrations: int = 0
    budgeted: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        control = self.config.control
        self.limits = Limits(
            control.max_retries,
            control.lease_margin_s,
            prefill_s=control.prefill_limit_s,
            transfer_s=control.transfer_limit_s,
        )
        self.loans = Loans(self, self.start_fetch, ASK_AND_GRANT * control.hop_s, control.hop_s)

    # --------------------------------------------------------------------------------------------------- the events

    def happens(self, request: SimRequest, event: life_events.Event, at_s: float | None = None) -> None:
        """Gives an event to a request's life, at the present time or at `at_s`.

        Where this sends the request to an engine that can never hold it, the engine's failure follows at once.
        """
        request.on(event, self.kernel.now_s if at_s is None else at_s)
        request.report_unfit()

    def later(self, hops: int, request: SimRequest, what: Callable[[], None]) -> None:
        """Runs `what` after the time of `hops` hops, unless the attempt has ended by then."""
        self.later_s(hops * self.config.control.hop_s, request, what)

    def later_s(self, delay_s: float, request: SimRequest, what: Callable[[], None]) -> None:
        """Runs `what` after `delay_s` seconds, unless the attempt has ended by then."""
        attempt_id = request.attempt_id

        def arrived() -> None:
            if request.attempt_id == attempt_id and request.stage is not Stage.DONE:
                what()

        self.kernel.after(delay_s, arrived)

    # ------------------------------------------------------------------------------------------------ on the way in

    def arrive(self, work: WorkloadRequest, record: RequestRecord, hashes: tuple[int, ...]) -> None:
        """Starts a request that a client sends now."""
        terms = Terms(
            work.priority,
            work.request_class,
            work.ttft_slo_s,
            work.tpot_slo_s,
            work.session,
            timeout_s=self.config.control.request_timeout_s,
            tenant=work.client,
            weight=work.weight,
        )
        self.happens(SimRequest(self, work, record, hashes, terms), life_events.Start())

    def arrived(self, request: SimRequest) -> None:
        """Gives the router the event of an attempt that has reached it."""
        now_s = self.kernel.now_s
        asked = Request(
            attempt_id=request.attempt_id,
            arrived_s=now_s,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.work.max_tokens or self.config.default_max_tokens,
            terms=request.terms,
            deadline_s=request.deadline_s,
            avoid=request.avoid,
            block_hashes=request.hashes,
            block_tokens=self.block_tokens if request.hashes else 0,
            predicted_tokens=self.router.predicted(request, now_s),
            waits_since_s=request.waits_since_s,
            again=request.attempts > 0,
        )
        self.router.feed(ev.Arrived(now_s, asked))

    def act(self, action: Action) -> None:
        """Carries out the router's action after the hops that its message takes."""
        request = self.live.get(action.attempt_id)
        if request is None:
            # The attempt ended while the decision was made.
            return
        hops = VIA_INGRESS
        event: life_events.Event
        match action:
            case Reject():
                hops = ONE_WAY
                why = action.reason, action.retry_after_s, action.detail
                event = life_events.Reject(action.status, *why)
            case RoutePrefill():
                request.record.prefill_routed_s = self.kernel.now_s
                prefix, lend = action.prefix, None
                if prefix is not None and prefix.fetch:
                    # live, the last token's block has no hash, because that token is always computed
                    tokens = min(prefix.tokens, request.prompt_tokens - 1)
                    lend = life_events.Lend(prefix.lender, tokens, prefix.patience_s)
                event = life_events.RoutePrefill(action.decision.worker, action.colocated, lend=lend)
            case RouteDecode():
                request.record.decode_routed_s = self.kernel.now_s
                event = life_events.RouteDecode(action.decision.worker, None, action.kv_due_s)
        self.later(hops, request, lambda: self.happens(request, event))

    # ------------------------------------------------------------------------------------------- what engines report

    def admitted(self, worker: Worker, seq: Sequence) -> None:
        """Notes that a sequence has its slot and blocks; a transfer begins where its KV lies on another engine."""
        if isinstance(seq.owner, Loan):
            return
        request: SimRequest = seq.owner  # type: ignore[assignment]
        if seq.stage is SequenceStage.TRANSFERRING:
            self.happens(request, life_events.Reading())
            self.later(ASK_AND_GRANT, request, lambda: self._begin_pull(request))
            return
        record = request.record
        if record.prefill_started_s is None:
            record.prefill_started_s = self.kernel.now_s
        request.computing_from_s = self.kernel.now_s
        record.prefill_hit_tokens = seq.cached_tokens
        # A request that its engine preempted and admits again is DECODING already.
        if not seq.prefill_only and not seq.preemptions:
            self.happens(request, life_events.Admitted(cached_tokens=seq.cached_tokens))

    def prefilled(self, worker: Worker, seq: Sequence) -> None:
        """Leases the KV of a prompt that has been computed, and reports the end of the prefill."""
        if isinstance(seq.owner, Loan):
            self.loans.stands(seq.owner)
            return
        request: SimRequest = seq.owner  # type: ignore[assignment]
        now_s = self.kernel.now_s
        assert seq.allocation is not None
        # The request was cancelled while its prompt was computed.
        if request.seq is not seq and request.prefill is not worker:
            worker.pool.release(seq.allocation)
            return
        key = f"{request.attempt_id}/{now_s}"
        worker.leases.grant(key, seq.allocation, seq.prompt_tokens, now_s)
        request.lease, request.record.prefill_done_s = key, now_s
        self.kernel.after(worker.spec.lease_s, lambda: self.expire(worker))
        # A transfer layer by layer is reading the KV already.
        if request.pull is not None:
            worker.leases.begin_read(key)
        elif worker.spec.layers is None:
            self._prefill_done(request, worker, seq)

    def layer_done(self, worker: Worker, seqs: list[Sequence], done: int, groups: int) -> None:
        """Lets the KV of the first `done` of `groups` groups of layers leave.

        With the first group, the prefill is reported as done, so that a decode worker can be chosen. The router goes on
        to count it at the prefill worker until the last group.
        """
        if groups > 1 and done in (1, groups):
            self.router.computing(worker.name, [seq.prompt_tokens for seq in seqs] if done == 1 else [])
        for seq in seqs:
            request: SimRequest = seq.owner  # type: ignore[assignment]
            if request.prefill is not worker or request.stage is Stage.DONE:
                continue
            request.layers = (done, groups)
            if done == 1:
                self._prefill_done(request, worker, seq)
            if request.pull is not None:
                request.pull.release(done)

    def _prefill_done(self, request: SimRequest, worker: Worker, seq: Sequence) -> None:
        spec = worker.spec
        kv_bytes = spec.profile.kv_bytes(seq.prompt_tokens)
        # layer by layer, the computation goes on behind the report
        compute_s = self.kernel.now_s - request.computing_from_s if spec.layers is None else 0.0
        done = life_events.PrefillDone(spec.lease_s, kv_bytes, seq.cached_tokens, compute_s=compute_s)
        self.happens(request, done)

    def first_token(self, seq: Sequence, at_s: float) -> None:
        """Notes that the first token leaves its engine at `at_s`, which may lie up to a step in the future."""
        request: SimRequest = seq.owner  # type: ignore[assignment]
        seen_s = at_s + self.config.control.hop_s
        if request.record.first_token_s is None:
            request.record.first_token_s = seen_s
        if request.seq is seq:
            self.happens(request, life_events.Output(1, last=False), seen_s)

    def finished(self, worker: Worker, seq: Sequence) -> None:
        """Notes that the last token has left its engine; the ingress gets it one hop later."""
        request: SimRequest = seq.owner  # type: ignore[assignment]
        if request.seq is seq:
            # The request holds nothing at its engine any more.
            request.decode = None
            rest = life_events.Output(request.work.output_tokens - request.output_tokens, last=True)
            self.later(ONE_WAY, request, lambda: self.happens(request, rest))

    def preempted(self, worker: Worker, seq: Sequence) -> None:
        """Notes that a sequence has lost its slot. Its engine computes it again, or it goes back to the router."""
        request: SimRequest = seq.owner  # type: ignore[assignment]
        request.record.preemptions += 1
        if worker.spec.preempted == "router" and request.seq is seq:
            request.generated += seq.generated
            worker.model.remove(seq)
            request.prefill = request.decode = request.seq = None
            request.submit_in_s = VIA_INGRESS * self.config.control.hop_s
            self.happens(request, life_events.Preempted())

    def engine_fails(self, worker: Worker, code: str) -> int:
        """Has everything at `worker` fail with `code`; what the engine has generated arrives first.

        Returns the number of requests that fail.
        """
        failed = 0
        for request in list(self.live.values()):
            if request.loan is not None and request.loan.lender is worker:
                self.loans.lender_failed(request.loan)
                lost = life_events.EngineFailed(worker.name, "prefill", code, "as ordered", retryable=True)
                self.happens(request, lost)
                continue
            seq = request.seq
            holder = request.decode if seq is None or not seq.prefill_only else request.prefill
            if holder is not worker or seq is None:
                continue
            failed += 1
            task: Task = "prefill" if seq.prefill_only else "decode"
            unseen = (
                request.generated + (0 if seq.prefill_only else worker.generated(seq)) - request.output_tokens
            )
            request.drop()
            if unseen > 0:
                self.happens(request, life_events.Output(unseen, last=False))
            self.happens(
                request, life_events.EngineFailed(worker.name, task, code, "as ordered", retryable=True)
            )
        return failed

    def kv_events(self, worker: Worker, events: list[Any]) -> None:
        """Passes on the changes of the prefix cache of `worker`."""
        self.on_kv_events(worker, events)

    # ------------------------------------------------------------------------------------------------- KV transfers

    def _begin_pull(self, request: SimRequest) -> None:
        seq, prefill = request.seq, request.prefill
        assert seq is not None
        assert prefill is not None
        if seq.stage is not SequenceStage.TRANSFERRING:
            return
        if request.lease is not None and prefill.leases.begin_read(request.lease) is None:
            assert request.decode is not None
            engine_id, message = request.decode.name, "the lease has ended"
            request.drop()
            self.happens(
                request, life_events.EngineFailed(engine_id, "decode", "kv_load", message, retryable=True)
            )
            return
        request.record.transfer_started_s = self.kernel.now_s
        request.record.decode_hit_tokens = seq.cached_tokens
        request.pull = self.start_pull(request, lambda: self._pulled(request))

    def _pulled(self, request: SimRequest) -> None:
        seq, decode = request.seq, request.decode
        assert seq is not None
        assert decode is not None
        request.pull = None
        now_s, record = self.kernel.now_s, request.record
        record.transfer_done_s = now_s
        self._read_ended(request)
        request.prefill = None
        decode.loaded(seq)
        assert record.transfer_started_s is not None
        self.happens(request, life_events.Admitted(record.transfer_bytes, now_s - record.transfer_started_s))

    def _read_ended(self, request: SimRequest) -> None:
        """Ends the read of the request's lease; the prefill engine frees its copy one hop later."""
        prefill, key = request.prefill, request.lease
        if prefill is not None and key is not None:
            self.kernel.after(self.config.control.hop_s, lambda: prefill.read_ended(key))
        request.lease = None

    def expire(self, worker: Worker) -> None:
        """Ends the leases of `worker` whose time is over and which nobody reads; the others end with their read."""
        for lease in worker.leases.expire(self.kernel.now_s + 1e-9):
            worker.pool.release(lease.allocation)
            worker.group.kick()
