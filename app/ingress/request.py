"""One prompt of a client's request in the ingress: the live driver of the life cycle in `policies.request.life`.

Effects of the life cycle become messages to router and engines, calls that build the client's answer, and metrics.
Incoming messages become events of the life cycle in `app.ingress.connections`.
"""

import dataclasses
import hashlib
import logging
import math
from array import array
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from actors.telemetry.facts import Attempt, Kept
from actors.telemetry.logs import about
from actors.telemetry.times import Stamps, at_ingress
from actors.wire.kv import pack_hashes
from actors.wire.messages import (
    Adopt,
    Cancel,
    Closed,
    Decode,
    Fleet,
    Hints,
    LeaseRenewed,
    Out,
    Prefill,
    PrefillReported,
    PromptSignals,
    ReleaseKV,
    RenewKV,
    Resume,
    Submit,
    TimesTold,
)
from app.api.chunks import Choice
from app.api.errors import NOT_AGAIN, ApiError
from app.ingress.connections import Connected, IngressConnections
from policies.engine_model.blocks import block_hashes, salt_of
from policies.record import record
from policies.request import events as ev
from policies.request.effects import Blame, Failure
from policies.request.ended import RequestEnd, Tally
from policies.request.killers import Fingerprint
from policies.request.life import Life
from policies.request.stage import LoanEnd, Outcome, Stage, Task
from policies.request.terms import Terms
from policies.request.troubles import IDLE, NOT_RESUMABLE, POISON, URGENCY, within_budget
from predictors.text import digest, prompt_key, signals, template_key

log = logging.getLogger(__name__)

_ADOPTED_AS: dict[Stage, Literal["prefilling", "pooled", "transferring", "decoding"]] = {
    # the router knows no lending: it charges the prefill worker from the decision on
    Stage.LENDING: "prefilling",
    Stage.PREFILLING: "prefilling",
    Stage.POOLED: "pooled",
    Stage.TRANSFERRING: "transferring",
    Stage.DECODING: "decoding",
}
"""The stage in which a router adopts an attempt."""


@record
class RequestSpec:
    """One prompt with its parameters, which all attempts share. `arrived_s` is on the ingress's clock.

    `request_id` is the answer's id without its prefix (chatcmpl- or cmpl-); `client_request_id` is the client's own id,
    if it sent one. `text` is the prompt where the client sent text; it is read only to make the router's hints.
    `first_choice` is the index of the prompt's first choice in the answer. With `kept`, the attempts of all prompts are
    kept there for a trace. `limits_itself` says whether the client allows less time than the server does.
    """

    tokens: list[int]
    params: dict[str, Any]
    max_tokens: int
    choices: int
    terms: Terms
    arrived_s: float
    chat: bytes | None = None
    first_choice: int = 0
    request_id: str = ""
    client_request_id: str = ""
    user: str = ""
    text: str | None = None
    kept: Kept | None = None
    limits_itself: bool = False


class Client(Protocol):
    """The receiver of a request's output: the exchange with the client."""

    def output(self, request: "IngressRequest", out: Out) -> None: ...
    def split(self, others: list["IngressRequest"]) -> None: ...
    def unsent(self) -> bool: ...
    def finished(self, request: "IngressRequest") -> None: ...
    def failed(self, request: "IngressRequest", error: ApiError) -> None: ...


class IngressRequest(Connected):
    """One prompt on its way through router and engines, driven live.

    Call `start` once; `cancel` may follow at any time. `IngressConnections` delivers the messages. `parts` are the
    choices that this request generates: all of its prompt's, or one of them after a migration. `timed_out` says whether
    it has ended because the time was over that its client allows, with its prompt at an engine.
    """

    __slots__ = (
        "_blamed",
        "_cached_tokens",
        "_client",
        "_connections",
        "_kills_before",
        "_tally",
        "parts",
        "spec",
        "timed_out",
    )

    def __init__(
        self, spec: RequestSpec, parts: list[Choice], client: Client, connections: IngressConnections
    ) -> None:
        super().__init__(connections.limits, spec.terms, spec.arrived_s, spec.choices)
        self.spec, self.parts, self._client, self._connections = spec, parts, client, connections
        # shared with the requests into which this one is split; None once this part has ended
        self._tally: Tally | None = Tally(spec.terms.request_class, spec.arrived_s, spec.choices)
        # those of the first attempt with output; None before its end
        self._cached_tokens: int | None = None
        # the engine that failed the attempt which ended last
        self._blamed: Blame | None = None
        # the deaths with which it began, and their task
        self._kills_before: tuple[float, Task] = (self.kills, self.killed_at)
        self.timed_out = False

    def start(self) -> None:
        """Begins the first attempt; the request may already have failed when this returns."""
        connections = self._connections
        refused_s = self._refused_s()
        if refused_s:
            connections.metrics.killers_refused.inc()
            message = (
                f"Engines died when they got this request before, so none gets it for {refused_s:.0f} s."
            )
            self._tell_end("failed")
            self._client.failed(self, ApiError(500, message, code=POISON.code, headers=[NOT_AGAIN]))
            return
        self.on(ev.Start(), connections.now_s())

    def cancel(self) -> None:
        """Ends the request, whatever its stage. Idempotent; a request that has not begun never begins."""
        if self.attempt_id:
            self.on(ev.Cancel(), self._connections.now_s())
        else:
            self._tell_end("cancelled")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine which computed the prompt took from its prefix cache."""
        if self._cached_tokens is not None:
            return self._cached_tokens
        told = self.prefilled or self.admission
        return 0 if told is None else told.cached_tokens

    # ------------------------------------------------------------------------------------------------- attempts

    def new_attempt(self) -> str:
        return self._connections.new_attempt(self, self.spec.request_id)

    def ends(self, outcome: Outcome, blame: Blame | None) -> None:
        self._blamed = blame
        kept = self.spec.kept
        if kept is None:
            return
        failed, _, code = blame or (None, None, None)
        attempt = Attempt(
            self.attempt_id,
            self.spec.first_choice,
            self.times,
            # the next attempt begins at the moment at which this one ends, by which they are found together
            self._connections.now_s() if self.goes_on_s is None else self.goes_on_s,
            outcome,
            self.prefill_engine,
            self.decode_engine,
            failed,
            code,
            self.goes_on,
            self.attempt_tokens,
            self.carried_tokens,
            self.cached_tokens,
        )
        moved = self.admission if self.prefilled is not None else None
        if moved is not None:
            attempt = attempt._replace(
                transfer_bytes=moved.transfer_bytes,
                transfer_s=moved.transfer_s,
                held_s=moved.held_s,
                level=moved.level,
            )
        kept.attempts.append(attempt)
        if kept.wire is not None:
            self._tell_times(kept)

    def timed(self, stamps: Stamps) -> None:
        kept = self.spec.kept
        if kept is not None:
            kept.engines.setdefault(self.attempt_id, []).append(stamps)

    def _tell_times(self, kept: Kept) -> None:
        """Tells the router the moments of the attempt that ends now."""
        own = at_ingress(self._connections.name, self.spec.arrived_s, kept.at_s, self.times)
        self._connections.to_router(TimesTold(self.attempt_id, (own, *kept.engines.get(self.attempt_id, ()))))

    def forget(self, outcome: Outcome) -> None:
        self._connections.forget(self)
        self._connections.metrics.closed(self, len(self.spec.tokens), outcome)
        if not self.goes_on:
            self._remember(outcome)
        self._tell_end(outcome)

    def _tell_end(self, outcome: Outcome) -> None:
        """Tells the router how the whole request went, if that is still to be told: it has rejected the last attempt,
        or never got it.
        """
        ended = self._ends(outcome)
        if ended is not None:
            self._connections.to_router(Closed(self.attempt_id, outcome, self.attempt_tokens, ended=ended))

    def _ends(self, outcome: Outcome) -> RequestEnd | None:
        """Returns how the whole request went if its last part ends with this attempt, once; else None."""
        tally = self._tally
        if self.goes_on or tally is None:
            return None
        self._tally = None
        ended = tally.ends(outcome, self.times.first_s, self.times.last_s, self.output_tokens)
        if ended is not None:
            result = ended.result(self.spec.terms)
            self._connections.metrics.ended(ended, result)
            if self.spec.kept is not None:
                self.spec.kept.results.append(result)
        return ended

    def _refused_s(self) -> float:
        """Has the request begin with the deaths of its earlier sends. Returns for how long no engine gets it, in whole
        seconds; 0 if engines may get it.
        """
        killers = self._connections.killers
        if not killers.has_length(len(self.spec.tokens)):
            return 0.0
        known = killers.suspicion(fingerprint_of(self.spec), self._connections.now_s())
        if known is None:
            return 0.0
        self._kills_before = known.kills, known.task
        self.suspect(known.kills, known.task)
        return math.ceil(known.refused_s)

    def _remember(self, outcome: Outcome) -> None:
        """Remembers a request that ends badly after deaths of engines, and forgets one that came through."""
        killers, spec = self._connections.killers, self.spec
        if outcome == "finished" or self.acquitted:
            if killers.has_length(len(spec.tokens)):
                killers.clear(fingerprint_of(spec))
        elif (self.kills, self.killed_at) != self._kills_before:
            now_s = self._connections.now_s()
            refused_s = killers.blame(fingerprint_of(spec), self.kills, self.killed_at, now_s)
            if refused_s:
                log.warning(
                    "a request under which engines died is refused for %.0f s",
                    refused_s,
                    extra=self._about(),
                )

    def may_retry(self) -> bool:
        connections = self._connections
        return within_budget(connections.budgeted, len(connections.live))

    def retried(self, task: Task, code: str) -> None:
        self._connections.metrics.retries.labels(task, code).inc()
        failed = self.avoid[-1] if self.avoid else None
        self._connections.observers.note("retry", f"retry after a failed {task} ({code})", failed)
        avoided = ", ".join(self.avoid) or "no engine"
        log.warning(
            "retry of a request after a failed %s (%s), now avoiding %s",
            task,
            code,
            avoided,
            extra=self._about(),
        )

    def count_retry(self, change: int) -> None:
        self._connections.budgeted += change

    def migrated(self, task: Task, code: str, choices: int) -> None:
        if self._cached_tokens is None:
            self._cached_tokens = self.cached_tokens
        self.parts[0].resumed_at.append(self.parts[0].tokens)
        self._connections.metrics.migrations.labels(code).inc(choices)
        failed = self.avoid[-1] if self.avoid else None
        went_on = (
            f"a request went on elsewhere with {self.output_tokens} tokens after a failed {task} ({code})"
        )
        self._connections.observers.note("migration", went_on, failed)
        log.warning(
            "a request goes on elsewhere with %d tokens after a failed %s (%s), now avoiding %s",
            self.output_tokens, task, code, ", ".join(self.avoid), extra=self._about(),
        )  # fmt: skip

    def _about(self) -> dict[str, str]:
        """Returns what log lines say of this request."""
        kept = self.spec.kept
        trace_id = None if kept is None else kept.trace_id
        return about(self.attempt_id, self.spec.client_request_id or f"req-{self.spec.request_id}", trace_id)

    def resumed(self, stall_s: float) -> None:
        self._connections.metrics.migration_stall.observe(stall_s)

    def split(self) -> Sequence[Life]:
        first, *rest = (choice for choice in self.parts if choice.finish is None)
        others = []
        assert self._tally is not None
        self._tally.split(len(rest), sum(choice.tokens for choice in self.parts if choice.finish is not None))
        for choice in rest:
            other = IngressRequest(self.spec, [choice], self._client, self._connections)
            other.branch_of(self, choice.tokens)
            other._tally, other._kills_before = self._tally, self._kills_before
            # the prompt's are counted once
            other._cached_tokens = 0
            if choice.tokens:
                choice.resumed_at.append(choice.tokens)
            others.append(other)
        self.parts = [first]
        self.become_choice(first.tokens)
        self._client.split(others)
        return others

    def wake_at(self, at_s: float) -> None:
        self._connections.alarms.set(self, at_s)

    def refused(self, event: object) -> None:
        self._connections.metrics.refused_events.inc()
        log.debug("%s, which is %s, refused %s", self.attempt_id, self.stage, type(event).__name__)
        if isinstance(event, ev.RoutePrefill | ev.RouteDecode) and self.stage is not Stage.DONE:
            # the router takes the attempt for something else: it must learn the true stage, or it charges others
            self.on(ev.Unknown(), self._connections.now_s())

    # --------------------------------------------------------------------------------------------------- router

    def submit(self) -> None:
        self._connections.to_router(self._submit())

    def adopt(self) -> None:
        kv_engine = self.prefill_engine or self.decode_engine
        kv_rank = self.prefill_rank if self.prefill_engine else self.decode_rank
        if self.stage is Stage.LENDING and self.route is not None:
            kv_engine, kv_rank = self.route.engine_id, self.route.rank
        lease_s, kv_bytes, waited = 0.0, 0, dict[str, float | None]()
        if self.stage is Stage.POOLED:
            assert self.prefilled is not None
            now_s, pooled_s, renewed_s = self._connections.now_s(), self.times.pooled_s, self.times.renewed_s
            assert pooled_s is not None
            lease_s = self.lease_until_s - now_s
            kv_bytes = self.prefilled.kv_bytes
            waited = {
                "pooled_ago_s": now_s - pooled_s,
                "granted_s": self.prefilled.lease_s,
                "renewed_ago_s": None if renewed_s is None else now_s - renewed_s,
            }
        self._connections.to_router(
            Adopt(
                self._submit(),
                _ADOPTED_AS[self.stage],
                kv_engine,
                self.decode_engine,
                self.attempt_tokens,
                lease_s,
                kv_bytes,
                dp_rank=kv_rank,
                decode_dp_rank=self.decode_rank,
                **waited,  # type: ignore[arg-type]  # three times
            )
        )

    def report_prefill(self, done: ev.PrefillDone) -> None:
        self._connections.to_router(
            PrefillReported(
                self.attempt_id,
                done.lease_s,
                done.kv_bytes,
                done.cached_tokens,
                self.prefill_engine or "",
                self.prefill_rank,
                done.compute_s,
            )
        )

    def report_renewal(self, lease_s: float) -> None:
        self._connections.to_router(LeaseRenewed(self.attempt_id, lease_s))

    def close(self, outcome: Outcome, blame: Blame | None) -> None:
        # an engine that rejects a request finds fault with the request, and did not serve it badly
        ended = self._ends("cancelled" if outcome == "rejected" else outcome)
        engine_id, task, code = blame or (None, None, None)
        self._connections.to_router(
            Closed(self.attempt_id, outcome, self.attempt_tokens, engine_id, task, code, ended)
        )

    def _submit(self) -> Submit:
        spec, connections = self.spec, self._connections
        now_s = connections.now_s()
        fleet = None if connections.decides_here() else connections.fleet
        hashes, block_tokens = b"", 0
        # an adopted request whose prompt is computed is not routed by its prefix any more
        if self.stage in (Stage.QUEUED, Stage.LENDING, Stage.PREFILLING):
            hashes, block_tokens = self._block_hashes(fleet)
        wants_hints = fleet is not None and fleet.wants_hints
        return Submit(
            attempt_id=self.attempt_id,
            prompt_tokens=len(spec.tokens) + self.carried_tokens,
            max_tokens=max(1, spec.max_tokens - self.carried_tokens),
            slots=self.choices,
            terms=self.terms._replace(priority=self._priority()) if self.migrations else self.terms,
            age_s=now_s - spec.arrived_s,
            avoid=self.avoid,
            hints=hints_of(spec, connections.config.served_names[0], connections.salt)
            if wants_hints
            else None,
            block_hashes=hashes,
            block_tokens=block_tokens,
            client_request_id=spec.client_request_id,
            resumed_tokens=self.carried_tokens,
            again=self.attempts > 0,
            waits_s=now_s - self.waits_since_s,
            trace=self._trace(),
        )

    def _trace(self) -> str | None:
        """Returns the request's place in its trace as `traceparent`, or None unless it is sampled."""
        return None if self.spec.kept is None else self.spec.kept.wire

    def _priority(self) -> int:
        """The priority at router and engines; that of a migrated request is raised."""
        return self.terms.priority - (URGENCY if self.migrations else 0)

    @property
    def cache_salt(self) -> str | None:
        """The salt by which only requests with the same one share this request's KV; None: any without a salt."""
        return self.spec.params.get("cache_salt")

    def _block_hashes(self, fleet: Fleet | None) -> tuple[bytes, int]:
        """Returns the packed hashes of the prompt's KV blocks that a prefix cache can serve, and the tokens of a block.

        Returns (b"", 0) unless the policies of the router, which has sent `fleet`, use prefix hits. The last token is
        always computed, so a block that ends with it is left out. A prompt whose own logprobs are wanted is computed
        whole, so it has no hashes.
        """
        size = None if fleet is None else fleet.block_tokens
        if size is None or self.terms.local:
            return b"", 0
        return pack_hashes(block_hashes(self.spec.tokens[:-1], size, salt_of(self.cache_salt))), size

    # -------------------------------------------------------------------------------------------------- engines

    def send_lend(self, lend: ev.Lend, left_s: float) -> bool:
        # one token more, because the last token of a prompt is always computed, which would waste a cached block
        head = self.spec.tokens[: lend.tokens + 1]
        params = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        message = Prefill(self.attempt_id, head, params, left_s, self._priority(), lend.rank)
        return self._connections.send_work(lend.engine_id, self, message)

    def loan_ended(self, how: LoanEnd) -> None:
        self._connections.metrics.prefix_loans.labels(how).inc()

    def send_prefill(self, route: ev.RoutePrefill, left_s: float) -> bool:
        spec = self.spec
        message = Prefill(
            self.attempt_id,
            spec.tokens,
            spec.params,
            left_s,
            self._priority(),
            route.rank,
            spec.chat,
            None if self.lent is None else self.lent.handle,
            self._resume(),
            self._trace(),
        )
        return self._connections.send_work(route.engine_id, self, message)

    def send_decode(self, route: ev.RoutePrefill | ev.RouteDecode, left_s: float) -> bool:
        spec, resume = self.spec, self._resume()
        handle = None if self.prefilled is None else self.prefilled.handle
        message = Decode(
            self.attempt_id,
            spec.tokens,
            spec.params if resume is None else params_of(spec, resume),
            handle,
            left_s,
            self._priority(),
            spec.chat,
            route.rank,
            resume,
            route.kv_due_s if isinstance(route, ev.RouteDecode) else None,
            self._trace(),
        )
        return self._connections.send_work(route.engine_id, self, message)

    def _resume(self) -> Resume | None:
        """Returns what has been generated of this request's only choice; None if all choices begin."""
        if not self.carried_tokens and len(self.parts) == self.spec.choices:
            return None
        (choice,) = self.parts
        index = choice.index - self.spec.first_choice
        return Resume(index, choice.tokens, choice.ids.tolist(), choice.chars)

    def stop_work(self, engine_id: str) -> None:
        self._connections.end_work(engine_id, self, Cancel(self.attempt_id))

    def release_kv(self, engine_id: str) -> None:
        self._connections.end_work(engine_id, self, ReleaseKV(self.attempt_id))

    def renew_lease(self, engine_id: str) -> None:
        self._connections.metrics.lease_renewals.inc()
        self._connections.ask_engine(engine_id, self, RenewKV(self.attempt_id))

    def leave_engine(self, engine_id: str) -> None:
        self._connections.end_work(engine_id, self, None)

    def admitted(self) -> None:
        self._connections.admitted(self, moved=self.prefilled is not None)

    # --------------------------------------------------------------------------------------------------- client

    def has(self, index: int) -> bool:
        return index < self.spec.choices

    def output(self, event: ev.Output) -> None:
        self._client.output(self, self.out)

    def unsent(self) -> bool:
        return self._client.unsent()

    def restart(self) -> None:
        for choice in self.parts:
            choice.restart()

    def finished(self) -> None:
        self._client.finished(self)

    def failed(self, failure: Failure) -> None:
        blamed, message = self._blamed, failure.message
        if blamed is not None:
            # what an engine says of itself names it and may quote its exceptions, so only the log has it
            engine_id, task, code = blamed
            log.warning(
                "a request ends with %d after engine %s failed its %s (%s): %r",
                failure.status, engine_id, task, code, message, extra=self._about(),
            )  # fmt: skip
            if failure.code == blamed.code:
                message = told_of(blamed)
        if failure.code == IDLE:
            self._connections.metrics.idle_answers.inc()
        if failure.code == "deadline" and self.spec.limits_itself:
            message = "The request took longer than its 'x-sluice-timeout-s' allows."
            self.timed_out = self.times.routed_s is not None
        self._client.failed(
            self,
            ApiError(
                failure.status,
                message,
                param=failure.param,
                code=failure.code,
                retry_after_s=failure.retry_after_s,
                headers=[NOT_AGAIN] if failure.code in _NOT_AGAIN else None,
            ),
        )


_NOT_AGAIN = frozenset({POISON.code, "deadline", IDLE})
"""Codes of failures after which a client should not send the request again by itself: it would kill two more engines,
or take all of its time once more.
"""

_TOLD: dict[str, str] = {
    "deadline": "The request took longer than the server allows.",
    "draining": "The engine that had the request is shutting down; try again later.",
    "overloaded": "The engine that had the request has as many as it takes; try again later.",
    "bad_output": "The output broke the grammar that the request asks for, or is no valid tool call; try again, or ask "
    "for a simpler one.",
    NOT_RESUMABLE: "An engine failed in the midst of the answer, and no other one can go on with it; try again.",
}
"""The sentence that a client gets about an engine's failure, by its code."""


def told_of(blame: Blame) -> str:
    """Returns the sentence that a client gets about a request which an engine has failed for good. It names no engine
    and quotes none of its messages.
    """
    return _TOLD.get(
        blame.code, f"An engine failed at the request's {blame.task} ({blame.code}); try again later."
    )


def fingerprint_of(spec: RequestSpec) -> Fingerprint:
    """Returns the fingerprint of a prompt with its parameters and its tenant. All names of the model are one model."""
    told = msgspec.msgpack.encode([spec.params, spec.terms.tenant], order="deterministic")
    made = hashlib.blake2b(array("q", spec.tokens), digest_size=16)
    made.update(told)
    return Fingerprint(len(spec.tokens), made.digest())


def params_of(spec: RequestSpec, resume: Resume) -> dict[str, Any]:
    """Returns the parameters for one choice that is resumed. Logprobs of the prompt came with its first token."""
    left_out = {"n", "prompt_logprobs"} if resume.n_tokens else {"n"}
    return {name: value for name, value in spec.params.items() if name not in left_out}


def hints_of(spec: RequestSpec, model: str, salt: bytes) -> Hints:
    """Returns the hints for the router's predictors: sampling, digests of text and user, and signals of the text.

    The text and the user's name never leave the ingress this way. The digests are keyed by `salt`, so a log of them
    does not reveal a prompt or a name to somebody who can guess it but lacks the key.
    """
    params, text = spec.params, spec.text
    return Hints(
        model=model,
        temperature=params.get("temperature"),
        top_p=params.get("top_p"),
        top_k=params.get("top_k"),
        stop_strings=len(params.get("stop") or ()),
        structured_output=params.get("response_format") is not None,
        prompt_key=None if text is None else prompt_key(text, salt),
        template_key=None if text is None else template_key(text, salt),
        signals=None if text is None else PromptSignals(**dataclasses.asdict(signals(text))),
        user=digest(spec.user, salt) if spec.user else None,
    )
