"""The one object that owns a request on its way through router and engines, from Submit to Closed.

    SUBMITTED -RoutePrefill-> PREFILLING -PrefillDone-> POOLED -RouteDecode-> ADMITTING -Admitted-> DECODING -> DONE
        '-------RoutePrefill(colocated)---------------------------------------^

`TABLE` lists every event that a state accepts; all others are refused and change nothing (a message that
crossed a cancellation on its way, say). What is held where follows from the state alone (`_give_back`), and
every way out runs through `_end`, which tells the router `Closed` exactly once per attempt.

A failed attempt is repeated under a new attempt_id before the first token (at most `max_retries` times, avoiding the
engines that failed), so that late messages of the old attempt cannot be taken for the new one's. After the
first token it ends in an error. A job has no task and no timer: it is driven by messages, and `sweep` looks
at its deadlines.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.wire.messages import (
    Admitted,
    Adopt,
    Cancel,
    Closed,
    Decode,
    Message,
    Out,
    Prefill,
    PrefillDone,
    Prefilled,
    Reject,
    ReleaseKV,
    RouteDecode,
    RoutePrefill,
    Submit,
)
from app.api.errors import ApiError
from app.ingress.job_parts import EngineFailed, EngineLost, Owner, Ports, RouterLost, State, Times, Work

NO_ENGINE = "no_engine"
"""The router's reason when it knows no engine that is ready."""


@dataclass(slots=True, eq=False)
class Job:
    """See the module. Create with `Job(work, owner, ports)`, then `start()`."""

    work: Work
    owner: Owner
    ports: Ports
    attempt_id: str = ""
    state: State = State.SUBMITTED
    prefill_engine: str | None = None
    decode_engine: str | None = None
    prefill_rank: int | None = None
    decode_rank: int | None = None
    handle: bytes | None = None
    lease_guard_s: float | None = None
    epoch: int | None = None  # the router connection that knows this attempt_id
    attempts: int = 0
    avoid: tuple[str, ...] = ()
    output_tokens: int = 0
    cached_tokens: int = 0
    unfinished: int = 0
    times: Times = field(default_factory=lambda: Times(0.0))

    # ------------------------------------------------------------------------------------------------- events

    def start(self) -> None:
        """First attempt, or the next one."""
        self.attempt_id = self.ports.new_attempt_id(self.work)
        self.state = State.SUBMITTED
        self.prefill_engine = self.decode_engine = self.handle = self.lease_guard_s = None
        self.unfinished = self.work.choices
        self.times = Times(self.ports.now_s())
        self.ports.register(self)
        self.epoch = self.ports.router_epoch()
        if self.epoch is None:
            self._decide_prefill_here(None)
        else:
            self.ports.to_router(self._submit())

    def on(self, event: Any) -> None:
        """Any event; one that `TABLE` does not list for the state changes nothing."""
        handler = TABLE.get((self.state, type(event)))
        if handler is None:
            self.ports.refused(self, event)
        else:
            handler(self, event)

    def output(self, out: Out) -> None:
        """The hot path: a piece of output in state DECODING."""
        now_s = self.ports.now_s()
        if self.times.first_s is None:
            self.times.first_s = now_s
        self.times.last_s = now_s
        self.output_tokens += out.n_tokens
        self.owner.job_output(self, out)
        if out.finish is not None and self.state is State.DECODING:
            self.unfinished -= 1
            if self.unfinished <= 0:
                self._end("finished", gone=self.decode_engine)
                self.owner.job_finished(self)

    def cancel(self) -> None:
        """The client has gone, or the answer failed elsewhere. Idempotent; nothing before `start`."""
        if self.attempt_id and self.state is not State.DONE:
            self._end("cancelled")

    def router_up(self, epoch: int) -> None:
        """A new router, to which this job is unknown: tell it, so that its charges are right again."""
        stage = "prefilling" if self.state is State.PREFILLING else "decoding"
        kv_engine = self.prefill_engine or self.decode_engine
        kv_rank = self.prefill_rank if self.prefill_engine else self.decode_rank
        self.epoch = epoch
        self.ports.to_router(
            Adopt(
                self._submit(),
                stage,  # type: ignore[arg-type]
                kv_engine,
                self.decode_engine,
                self.output_tokens,
                dp_rank=kv_rank,
                decode_dp_rank=self.decode_rank,
            )
        )

    def sweep(self, now_s: float) -> None:
        """Looks at the deadlines: the request's own, and the lease of a pooled one."""
        if self.state is State.DONE:
            return
        if now_s >= self.work.deadline_s:
            self._fail(
                ApiError(504, "The request took longer than the server allows.", code="deadline"), "expired"
            )
        elif self.state is State.POOLED and self.lease_guard_s is not None and now_s >= self.lease_guard_s:
            self._lease_ends()

    def _lease_ends(self) -> None:
        """The router, which looks after leases earlier than we do, was held up: once more from the start."""
        if self.attempts < self.ports.max_retries:
            self._end("expired")
            self.attempts += 1
            self.ports.retried(self, "decode", "pool_timeout")
            self.start()
            return
        message = "No decode engine had room before the prompt's KV lease ended; try again later."
        self._fail(ApiError(503, message, code="pool_timeout", retry_after_s=1.0), "expired")

    # ------------------------------------------------------------------------------------------------ handlers

    def _route_prefill(self, event: RoutePrefill) -> None:
        ports = self.ports
        if self.state is State.POOLED:  # the router gave the lease up: once more from the start
            self._give_back(None)
        self.state = State.SUBMITTED
        self.times.routed_s = ports.now_s()
        left_s = self.work.deadline_s - self.times.routed_s
        if event.mode == "colocated":
            self._send_decode(event, left_s)
            return
        self.prefill_engine, self.prefill_rank = event.engine_id, event.dp_rank
        work = self.work
        sent = ports.to_engine(
            event.engine_id,
            self,
            Prefill(
                self.attempt_id,
                work.tokens,
                work.params,
                max(left_s, 0.001),
                work.terms.priority,
                event.dp_rank,
            ),
        )
        if sent:
            self.state = State.PREFILLING
        else:
            self._attempt_failed(
                event.engine_id, "prefill", "not_connected", "is not connected", retryable=True
            )

    def _prefill_done(self, event: PrefillDone) -> None:
        ports, times = self.ports, self.times
        times.pooled_s = ports.now_s()
        times.engine_queue_s, times.prefill_s = event.queue_s, event.compute_s
        self.handle, self.cached_tokens = event.handle, event.cached_tokens
        margin_s = min(ports.lease_margin_s, event.lease_s / 5)
        self.lease_guard_s = times.pooled_s + event.lease_s - margin_s
        self.state = State.POOLED
        if self._router_knows():
            ports.to_router(Prefilled(self.attempt_id, event.lease_s, event.kv_bytes, event.cached_tokens))
        else:
            self._decide_decode_here(None)

    def _route_decode(self, event: RouteDecode) -> None:
        self.times.decode_routed_s = self.ports.now_s()
        self._send_decode(event, self.work.deadline_s - self.times.decode_routed_s)

    def _send_decode(self, route: RoutePrefill | RouteDecode, left_s: float) -> None:
        work, engine_id = self.work, route.engine_id
        message = Decode(
            self.attempt_id, work.tokens, work.params, self.handle, max(left_s, 0.001), work.terms.priority, work.chat,
            route.dp_rank
        )  # fmt: skip
        if self.ports.to_engine(engine_id, self, message):
            self.decode_engine, self.decode_rank = engine_id, route.dp_rank
            self.state = State.ADMITTING
        else:
            self._attempt_failed(engine_id, "decode", "not_connected", "is not connected", retryable=True)

    def _admitted(self, event: Admitted) -> None:
        times = self.times
        times.transfer_s, times.transfer_bytes, times.descriptors = (
            event.transfer_s,
            event.transfer_bytes,
            event.descriptors,
        )
        self.cached_tokens = (
            max(self.cached_tokens, event.cached_tokens) if self.handle is None else self.cached_tokens
        )
        self.state = State.DECODING
        if self.prefill_engine is not None:
            self.ports.leave_engine(self.prefill_engine, self)
        self.ports.admitted(self)

    def _output_before_admitted(self, event: Out) -> None:
        """Tokens imply that the KV is there; the engine has lost its `Admitted` only in what it says."""
        self._admitted(Admitted(self.attempt_id))
        self.output(event)

    def _rejected(self, event: Reject) -> None:
        self.epoch = None  # the router has given everything back already
        lacking = event.reason in (NO_ENGINE, f"no_{self.work.terms.mode}_engine")
        if lacking and self.state is State.SUBMITTED:
            route = self.ports.choose_prefill(self)  # a router just restarted knows fewer engines than we do
            if route is not None:
                self._route_prefill(route)
                return
        reason = event.reason.replace("_", " ")
        trouble = f"There is {reason} ready" if lacking else f"The server is overloaded ({reason})"
        message = f"{trouble}; try again in {event.retry_after_s:.0f} s."
        self._fail(
            ApiError(event.status, message, code=event.reason, retry_after_s=event.retry_after_s), "rejected"
        )

    def _failed(self, event: EngineFailed) -> None:
        failed = event.failed
        if failed.code == "kv_load":
            self.ports.transfer_failed(self)
        if failed.code == "bad_request":
            error = ApiError(400, failed.message, param=failed.param, code="invalid_value")
            self._fail(error, "rejected", event.engine_id)  # the request's fault: the engine is not to blame
            return
        self._attempt_failed(event.engine_id, failed.stage, failed.code, failed.message, failed.retryable)

    def _engine_lost(self, event: EngineLost) -> None:
        stage = "decode" if event.engine_id == self.decode_engine else "prefill"
        self._attempt_failed(event.engine_id, stage, "engine_dead", event.reason, retryable=True)

    def _decide_prefill_here(self, _: RouterLost | None) -> None:
        self.epoch = None
        route = self.ports.choose_prefill(self)
        if route is None:
            self._fail(
                ApiError(
                    503, "No engine is connected; try again later.", code="no_engine", retry_after_s=2.0
                ),
                "failed",
            )
        else:
            self._route_prefill(route)

    def _decide_decode_here(self, _: RouterLost | None) -> None:
        self.epoch = None
        route = self.ports.choose_decode(self)
        if route is None:
            self._fail(
                ApiError(
                    503,
                    "No decode engine is connected; try again later.",
                    code="no_engine",
                    retry_after_s=2.0,
                ),
                "failed",
            )
        else:
            self._route_decode(route)

    def _on_router_lost(self, _: RouterLost) -> None:
        self.epoch = None

    # -------------------------------------------------------------------------------------------- the ways out

    def _attempt_failed(self, engine_id: str, stage: str, code: str, message: str, retryable: bool) -> None:
        if self.times.first_s is None and retryable and self.attempts < self.ports.max_retries:
            self._end("failed", gone=engine_id, stage=stage)
            self.attempts += 1
            self.avoid = (*self.avoid, engine_id)
            self.ports.retried(self, stage, code)
            self.start()
            return
        error = _error_of(code, f"The {stage} engine {engine_id} failed ({code}): {message}")
        self._fail(error, "failed", engine_id, stage)

    def _fail(self, error: ApiError, outcome: str, gone: str | None = None, stage: str | None = None) -> None:
        self._end(outcome, gone, stage)
        self.owner.job_failed(self, error)

    def _end(self, outcome: str, gone: str | None = None, stage: str | None = None) -> None:
        """The one way out. `gone`: the engine that holds nothing any more, and failed unless the outcome is
        "finished".
        """
        self._give_back(gone)
        self.state = State.DONE
        if self._router_knows():
            culprit = gone if outcome == "failed" else None
            self.ports.to_router(Closed(self.attempt_id, outcome, self.output_tokens, culprit, stage))
        self.epoch = None
        self.ports.forget(self, outcome)

    def _give_back(self, gone: str | None) -> None:
        """By state: who holds what, and how it is told to let go. `gone` needs no telling."""
        prefill, decode = self.prefill_engine, self.decode_engine
        if self.state is State.PREFILLING and prefill != gone:
            self._tell(prefill, Cancel(self.attempt_id))
        elif self.state is State.POOLED and prefill != gone:
            self._tell(prefill, ReleaseKV(self.attempt_id))
        elif self.state in (State.ADMITTING, State.DECODING) and decode != gone:
            self._tell(
                decode, Cancel(self.attempt_id)
            )  # the decode engine frees the prefill engine's copy too
        elif self.state is State.ADMITTING and prefill is not None:
            self._tell(
                prefill, ReleaseKV(self.attempt_id)
            )  # the decode engine died or failed: nobody will pull
        for engine_id in (prefill, decode):
            if engine_id is not None:
                self.ports.leave_engine(engine_id, self)
        self.prefill_engine = self.decode_engine = None

    def _tell(self, engine_id: str | None, message: Message) -> None:
        if engine_id is not None:
            self.ports.to_engine(engine_id, self, message)  # a lost connection has freed everything already

    def _router_knows(self) -> bool:
        return self.epoch is not None and self.epoch == self.ports.router_epoch()

    def _submit(self) -> Submit:
        work = self.work
        # an adopted request that decodes already is not routed any more
        routed = self.state in (State.ADMITTING, State.DECODING)
        block_hashes, block_tokens = (b"", 0) if routed else self.ports.block_hashes_of(work)
        return Submit(
            attempt_id=self.attempt_id,
            prompt_tokens=len(work.tokens),
            max_tokens=work.max_tokens,
            slots=work.choices,
            terms=work.terms,
            age_s=self.ports.now_s() - work.arrived_s,
            avoid=self.avoid,
            hints=self.ports.hints_of(work),
            block_hashes=block_hashes,
            block_tokens=block_tokens,
            request_id=work.client_id,
        )


_STATUS_OF_CODE = {"deadline": 504, "draining": 503, "overloaded": 503}


def _error_of(code: str, message: str) -> ApiError:
    status = _STATUS_OF_CODE.get(code, 502)
    return ApiError(status, message, code=code, retry_after_s=1.0 if status in (502, 503) else None)


S = State
TABLE: dict[tuple[State, type], Callable[[Job, Any], None]] = {
    (S.SUBMITTED, RoutePrefill): Job._route_prefill,
    (S.SUBMITTED, Reject): Job._rejected,
    (S.SUBMITTED, RouterLost): Job._decide_prefill_here,
    (S.PREFILLING, PrefillDone): Job._prefill_done,
    (S.PREFILLING, EngineFailed): Job._failed,
    (S.PREFILLING, EngineLost): Job._engine_lost,
    (S.PREFILLING, RouterLost): Job._on_router_lost,
    (S.POOLED, RouteDecode): Job._route_decode,
    (S.POOLED, RoutePrefill): Job._route_prefill,
    (S.POOLED, Reject): Job._rejected,
    (S.POOLED, EngineFailed): Job._failed,
    (S.POOLED, EngineLost): Job._engine_lost,
    (S.POOLED, RouterLost): Job._decide_decode_here,
    (S.ADMITTING, Admitted): Job._admitted,
    (S.ADMITTING, Out): Job._output_before_admitted,
    (S.ADMITTING, EngineFailed): Job._failed,
    (S.ADMITTING, EngineLost): Job._engine_lost,
    (S.ADMITTING, RouterLost): Job._on_router_lost,
    (S.DECODING, Out): Job.output,
    (S.DECODING, EngineFailed): Job._failed,
    (S.DECODING, EngineLost): Job._engine_lost,
    (S.DECODING, RouterLost): Job._on_router_lost,
}
