"""The ingress of the simulation: one `Job` a request, with the states and rules of the live one (`app/ingress/job.py`).

    SUBMITTED -> PREFILLING -> POOLED -> ADMITTING -> DECODING -> DONE            (colocated: SUBMITTED -> ADMITTING)

A failed attempt before the first token is repeated under a new attempt_id, avoiding the engine that failed, at most
`max_retries` times; so is a pooled request, a margin before its lease ends; a request ends at its timeout wherever it
is. Deviations: a cancellation reaches its engine at once; engines do not die; there is one ingress.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.sim.config import SimConfig
from benchmarks.sim.engine import Worker
from benchmarks.sim.job import Job, Router, State
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.pull import Pull
from benchmarks.sim.records import RequestRecord
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import Action, Reject, RouteDecode, RoutePrefill
from policies.engine_model.blocks import BlockError
from policies.engine_model.scheduler import Sequence, SequenceStage
from policies.request.terms import Terms
from policies.state import events as ev
from policies.state.views import Request


@dataclass(slots=True)
class Ingress:
    """Owns all jobs; `Owner` of the workers. `jobs` are the live ones by attempt_id."""

    config: SimConfig
    kernel: Kernel
    workers: dict[str, Worker]
    router: Router
    start_pull: Callable[[Job, Callable[[], None]], Pull]
    on_kv_events: Callable[[Worker, list[Any]], None]
    block_tokens: int
    jobs: dict[str, Job] = field(default_factory=dict)
    admissions: list[Job] = field(default_factory=list)  # to be reported with the next progress
    retries: int = 0

    # ------------------------------------------------------------------------------------------------ on the way in

    def arrive(self, work: WorkloadRequest, record: RequestRecord, hashes: tuple[int, ...]) -> None:
        """A client sends a request now."""
        control = self.config.control
        terms = Terms(
            work.priority,
            work.request_class,
            work.ttft_slo_s,
            work.tpot_slo_s,
            work.session,
            timeout_s=control.request_timeout_s,
        )
        deadline_s = terms.deadline_s(self.kernel.now_s)
        job = Job(work, record, hashes, terms, deadline_s, work.request_id)
        job.timeout = self.kernel.after(
            control.request_timeout_s, lambda: self._fail(job, "timeout", "expired")
        )
        self.jobs[job.attempt_id] = job
        self.kernel.after(control.ingress_s + control.hop_s, lambda: self._submit(job))

    def _submit(self, job: Job) -> None:
        if job.state is State.DONE:
            return
        work, now_s = job.work, self.kernel.now_s
        request = Request(
            attempt_id=job.attempt_id,
            arrived_s=now_s,
            prompt_tokens=job.prompt_tokens,
            max_tokens=work.max_tokens or self.config.default_max_tokens,
            terms=job.terms,
            deadline_s=job.deadline_s,
            avoid=job.avoid,
            block_hashes=job.hashes,
            block_tokens=self.block_tokens if job.hashes else 0,
            predicted_tokens=self.router.predicted(job, now_s),
        )
        self.router.feed(ev.Arrived(now_s, request))

    def act(self, action: Action) -> None:
        """Carries out what the router decided; it is on its way for some hops."""
        job = self.jobs.get(action.attempt_id)
        if job is None:
            return  # it ended while the decision was made
        if isinstance(action, Reject):
            reason = action.reason
            self._later(1, job, lambda: self._rejected(job, reason))
            return
        worker = self.workers[action.decision.worker]
        if isinstance(action, RoutePrefill):
            job.record.prefill_routed_s = self.kernel.now_s
            colocated = action.colocated
            self._later(2, job, lambda: self._send_prefill(job, worker, colocated))
        else:
            assert isinstance(action, RouteDecode)
            job.record.decode_routed_s = self.kernel.now_s
            self._later(2, job, lambda: self._send_decode(job, worker, remote=True))

    def _later(self, hops: int, job: Job, what: Callable[[], None]) -> None:
        """After so many messages, unless the attempt is over by then."""
        attempt_id = job.attempt_id

        def arrived() -> None:
            if job.attempt_id == attempt_id and job.state is not State.DONE:
                what()

        self.kernel.after(hops * self.config.control.hop_s, arrived)

    def _send_prefill(self, job: Job, worker: Worker, colocated: bool) -> None:
        if job.state is State.POOLED:  # the router gave the lease up: once more from the start
            self._give_back(job)
        job.record.colocated = colocated
        if colocated:
            job.record.prefill_worker = worker.name
            self._send_decode(job, worker, remote=False)
            return
        job.state, job.prefill = State.PREFILLING, worker
        job.record.prefill_worker = worker.name
        self._add(job, worker, Sequence(job.prompt_tokens, 0, job.hashes, job.work.priority, True, owner=job))

    def _send_decode(self, job: Job, worker: Worker, remote: bool) -> None:
        if job.guard is not None:
            job.guard.cancel()
        job.state, job.decode = State.ADMITTING, worker
        job.record.decode_worker = worker.name
        output = max(1, job.work.output_tokens - job.generated)
        seq = Sequence(job.prompt_tokens, output, job.hashes, job.work.priority, remote=remote, owner=job)
        self._add(job, worker, seq)

    def _add(self, job: Job, worker: Worker, seq: Sequence) -> None:
        if not worker.spec.prefix_cache:
            seq.hashes = ()
        job.seq = seq
        try:
            worker.add(seq)
        except BlockError:  # live: 400 before anything starts
            self._fail(job, "too_long", "rejected")

    # ------------------------------------------------------------------------------------------- what engines report

    def admitted(self, worker: Worker, seq: Sequence) -> None:
        """Slot and blocks are taken."""
        job: Job = seq.owner  # type: ignore[assignment]
        now_s = self.kernel.now_s
        if seq.stage is SequenceStage.TRANSFERRING:
            self._later(2, job, lambda: self._begin_pull(job))  # asks the prefill engine for the KV
            return
        if job.record.prefill_started_s is None:
            job.record.prefill_started_s = now_s
        job.record.prefill_hit_tokens = seq.cached_tokens
        if not seq.prefill_only:
            self._decoding(job)

    def prefilled(self, worker: Worker, seq: Sequence) -> None:
        """The prompt's KV is there and leased."""
        job: Job = seq.owner  # type: ignore[assignment]
        now_s = self.kernel.now_s
        assert seq.allocation is not None
        if job.seq is not seq and job.prefill is not worker:  # cancelled while it was computed
            worker.pool.release(seq.allocation)
            return
        key = f"{job.attempt_id}/{now_s}"
        worker.leases.grant(key, seq.allocation, seq.prompt_tokens, now_s)
        job.lease, job.record.prefill_done_s = key, now_s
        self.kernel.after(worker.spec.lease_s, lambda: self._expire(worker))
        if job.pull is not None:  # layer-wise: it is being read already
            worker.leases.begin_read(key)
        elif worker.spec.layers is None:
            self._pooled(job, worker, seq)

    def layer_done(self, worker: Worker, seqs: list[Sequence], done: int, groups: int) -> None:
        """The KV of `done` of `groups` groups of layers may leave."""
        for seq in seqs:
            job: Job = seq.owner  # type: ignore[assignment]
            if job.prefill is not worker or job.state is State.DONE:
                continue
            job.layers = (done, groups)
            if done == 1:
                self._pooled(job, worker, seq)
            if job.pull is not None:
                job.pull.release(done)

    def _pooled(self, job: Job, worker: Worker, seq: Sequence) -> None:
        lease_s = worker.spec.lease_s
        job.state = State.POOLED
        margin_s = min(self.config.control.lease_margin_s, lease_s / 5)
        job.guard = self.kernel.after(lease_s - margin_s, lambda: self._lease_ends(job))
        kv_bytes, cached = worker.spec.profile.kv_bytes(seq.prompt_tokens), seq.cached_tokens

        def tell() -> None:
            now_s = self.kernel.now_s
            self.router.feed(ev.PrefillDone(now_s, job.attempt_id, now_s + lease_s, kv_bytes, cached))

        self._later(2, job, tell)

    def first_token(self, seq: Sequence, at_s: float) -> None:
        """The first token leaves its engine at `at_s`, which may lie a step ahead."""
        job: Job = seq.owner  # type: ignore[assignment]
        if job.record.first_token_s is None:
            job.record.first_token_s = at_s + self.config.control.hop_s

    def finished(self, worker: Worker, seq: Sequence) -> None:
        """The last token has left its engine."""
        job: Job = seq.owner  # type: ignore[assignment]
        if job.seq is seq:
            job.decode = None  # it holds nothing any more
            self._later(1, job, lambda: self._end(job, "finished"))

    def preempted(self, worker: Worker, seq: Sequence) -> None:
        """It waits at its engine to be computed again, or goes back to the router with what it has generated."""
        job: Job = seq.owner  # type: ignore[assignment]
        job.record.preemptions += 1
        if worker.spec.preempted == "router" and job.seq is seq:
            job.generated += seq.generated
            worker.model.remove(seq)
            job.state, job.decode, job.seq, job.prefill = State.SUBMITTED, None, None, None
            self._later(2, job, lambda: self._submit(job))

    def kv_events(self, worker: Worker, events: list[Any]) -> None:
        """Its prefix cache has changed."""
        self.on_kv_events(worker, events)

    # ------------------------------------------------------------------------------------------------- KV transfers

    def _begin_pull(self, job: Job) -> None:
        seq, prefill = job.seq, job.prefill
        assert seq is not None
        assert prefill is not None
        if seq.stage is not SequenceStage.TRANSFERRING:
            return
        if job.lease is not None and prefill.leases.begin_read(job.lease) is None:
            assert job.decode is not None
            self._attempt_failed(job, job.decode)  # the lease has ended
            return
        job.record.transfer_started_s = self.kernel.now_s
        job.record.decode_hit_tokens = seq.cached_tokens
        job.pull = self.start_pull(job, lambda: self._pulled(job))

    def _pulled(self, job: Job) -> None:
        seq, decode = job.seq, job.decode
        assert seq is not None
        assert decode is not None
        job.pull = None
        job.record.transfer_done_s = self.kernel.now_s
        self._read_ended(job)
        job.prefill = None
        decode.loaded(seq)
        self._decoding(job)

    def _read_ended(self, job: Job) -> None:
        """The prefill engine's copy is free, one message later."""
        prefill, key = job.prefill, job.lease
        if prefill is not None and key is not None:
            self.kernel.after(self.config.control.hop_s, lambda: prefill.read_ended(key))
        job.lease = None

    def _expire(self, worker: Worker) -> None:
        """Ends the leases whose time is over; who reads one ends it."""
        for lease in worker.leases.expire(self.kernel.now_s + 1e-9):
            worker.pool.release(lease.allocation)
            worker.group.kick()

    def _decoding(self, job: Job) -> None:
        job.state = State.DECODING
        self.admissions.append(job)

    # -------------------------------------------------------------------------------------------------- on the way out

    def _rejected(self, job: Job, reason: str) -> None:
        self._give_back(job)
        self.router.closed(job, "rejected", 0)
        self._close_record(job, reason)

    def _lease_ends(self, job: Job) -> None:
        if job.state is State.POOLED and not self._again(job, "expired"):
            self._fail(job, "pool_timeout", "expired")

    def _attempt_failed(self, job: Job, culprit: Worker) -> None:
        job.avoid = (*job.avoid, culprit.name)
        if job.record.first_token_s is not None or not self._again(job, "failed"):
            self._fail(job, "failed", "failed")

    def _again(self, job: Job, outcome: ev.Outcome) -> bool:
        """Once more from the start, under a new attempt_id; False when it was tried often enough."""
        if job.attempts >= self.config.control.max_retries:
            return False
        self._give_back(job)
        self._tell_closed(job, outcome)
        del self.jobs[job.attempt_id]
        job.attempts += 1
        self.retries += 1
        job.attempt_id = f"{job.work.request_id}~{job.attempts}"
        job.state = State.SUBMITTED
        self.jobs[job.attempt_id] = job
        self._later(1, job, lambda: self._submit(job))
        return True

    def _fail(self, job: Job, reason: str, outcome: ev.Outcome) -> None:
        if job.state is not State.DONE:
            self._give_back(job)
            self._tell_closed(job, outcome)
            self._close_record(job, reason)

    def _end(self, job: Job, outcome: ev.Outcome) -> None:
        job.record.finished_s = self.kernel.now_s
        job.record.generated_tokens = job.work.output_tokens
        self._tell_closed(job, outcome)
        self._close_record(job, None)

    def _tell_closed(self, job: Job, outcome: ev.Outcome) -> None:
        attempt_id, tokens = job.attempt_id, job.record.generated_tokens
        self.router.closed(job, outcome, tokens)
        self.kernel.after(
            self.config.control.hop_s,
            lambda: self.router.feed(ev.Closed(self.kernel.now_s, attempt_id, outcome, tokens)),
        )

    def _close_record(self, job: Job, rejected: str | None) -> None:
        job.record.rejected = rejected
        job.state = State.DONE
        for timer in (job.guard, job.timeout):
            if timer is not None:
                timer.cancel()
        del self.jobs[job.attempt_id]
        self.router.ended(job)

    def _give_back(self, job: Job) -> None:
        """Whatever the job holds at its engines, by what there is to hold."""
        if job.guard is not None:
            job.guard.cancel()
        if job.pull is not None:
            job.pull.cancel()
            job.pull = None
            if job.lease is not None and job.prefill is not None:
                job.prefill.read_ended(job.lease)
                job.lease = None
        if job.lease is not None and job.prefill is not None:
            job.prefill.free(job.lease)
            job.lease = None
        if job.seq is not None:
            holder = job.prefill if job.seq.prefill_only else job.decode
            if holder is not None:
                if not job.seq.prefill_only:
                    job.record.generated_tokens = job.generated + holder.generated(job.seq)
                holder.remove(job.seq)
        job.prefill = job.decode = job.seq = None
