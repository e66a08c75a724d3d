"""One HTTP request and its answer: a plan, a live request for each of its prompts, and the reply that they feed.

Everything runs in callbacks. The requests add output, and `OpenRequests` has the bytes of each loop iteration written
at once. `_close` ends the exchange exactly once, at the first of finish, failure and disconnect.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial

from actors.telemetry import logs
from actors.telemetry.facts import Answered, Kept
from actors.wire.messages import Out
from app.api.chunks import DONE, Choice, Envelope, StreamWriter, usage_json, whole_parts
from app.api.errors import ApiError
from app.api.plan import Plan
from app.ingress import access
from app.ingress.digests import session_digest
from app.ingress.http.reply import GONE_SLOW, Headers, Reply
from app.ingress.intake import Prompts
from app.ingress.open_requests import OpenRequests, RequestId
from app.ingress.request import IngressRequest, RequestSpec
from app.ingress.tenants.gate import Grant, Used
from app.ingress.work_bound import NOTHING, Held
from policies.request.terms import Terms

log = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
SSE = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE = (b"cache-control", b"no-cache")

COMMENT = b": keep-alive\n\n"
"""A comment, which readers of server-sent events skip (HTML standard, 9.2.6)."""

CANDIDATE_BYTES = 200
"""Memory of a candidate with its log probability. ASSUMPTION: a tuple of four (88 bytes), a short text (60), two
numbers (56)."""

TURN_S = 0.005
"""Seconds for which one request's prompts are started, or its answer is built, before others have a turn. ASSUMPTION: a
stream's reader sees no gap of this length."""

CLIENT_CLOSED = 499
"""Status that metrics show for a client that left: nginx's number (`NGX_HTTP_CLIENT_CLOSED_REQUEST`)."""


class HttpExchange:
    """One HTTP request under way; `begin` starts one request for each of its prompts.

    Before `begin` only `fail` and the client's leaving can end the exchange.
    """

    __slots__ = (
        "_choices", "_client_request_id", "_code", "_ended_s", "_finish", "_first_s", "_grant", "_held", "_held_bytes",
        "_id", "_kept", "_limits", "_live", "_open", "_pending", "_requests", "_sent", "_started_s",
        "_tenant", "_tokens", "_writer", "_written_s", "closed", "envelope", "plan", "reply", "request_id",
    )  # fmt: skip

    def __init__(
        self, requests: OpenRequests, plan: Plan, reply: Reply, request_id: RequestId, started_s: float
    ) -> None:
        self._requests = requests
        self.plan = plan
        self.reply = reply
        self.request_id = request_id.shown
        self.closed = False
        self._started_s = started_s
        self._first_s: float | None = None
        # what an API key has granted, until it is settled
        self._grant: Grant | None = None
        self._limits: Headers = []
        self._live: list[IngressRequest] = []
        self._open = 0  # requests that have not finished
        self._pending: list[bytes] = []
        self._finish: bytes | None = None
        self._sent = False  # some output; comments are none
        self._held_bytes = 0
        self._held = NOTHING
        self._tenant = plan.unnamed or plan.terms.tenant
        self._written_s = started_s
        self._tokens: list[list[int]] = []
        self._choices: list[Choice] = []
        self._writer: StreamWriter | None = None
        self._id, self._client_request_id = request_id.own, request_id.client
        # for a trace or an observer, if there may be one: the attempts, and the status and time of the end
        self._kept = requests.keep(_path(plan), request_id)
        self._code, self._ended_s = 0, started_s
        prefix = "chatcmpl-" if plan.chat else "cmpl-"
        self.envelope = Envelope(
            prefix + self._id,
            int(time.time()),
            requests.model_name(plan.model),
            plan.chat,
            plan.include_usage,
        )
        reply.on_gone = self._gone

    def parsed(self, at_s: float) -> None:
        """Notes that the body of a request that is followed was parsed at `at_s`."""
        if self._kept is not None:
            self._kept.at_s["parsed"] = at_s

    def hold(self, held: Held) -> None:
        """Counts what the exchange has under way until it ends. Raises ApiError if that is too much for the replica;
        the exchange then holds what it held before.
        """
        if self.closed:
            return
        work = self._requests.work
        work.check(held, self._held, self._tenant)
        work.change(self._held, held, self._tenant)
        self._held = held

    def begin(self, prompts: Prompts, grant: Grant | None = None) -> None:
        """Starts one request per prompt. With a `grant` of an API key, the end settles it. Of many prompts some start
        later, so that other answers go on.
        """
        plan = self.plan
        if grant is not None:
            self._grant, self._limits = grant, grant.headers
        if self._kept is not None and self._kept.wire is not None:
            self._kept.at_s["tokenised"] = self._requests.connections.now_s()
        tokens, budgets, echoes = prompts
        self._tokens = tokens
        keep = not plan.stream
        logprobs = plan.logprobs is not None
        for index in range(len(tokens) * plan.n):
            echo = echoes[index // plan.n] if plan.echo else ("", "")
            self._choices.append(Choice(index, plan.chat, logprobs, keep, *echo))
        if plan.stream:
            self._writer = StreamWriter(self.envelope)
        session = session_digest(plan.terms.session, self._requests.connections.salt)
        terms = plan.terms._replace(session=session, tenant=self._tenant)
        self._open = len(tokens)
        # the prompt has been made of it
        plan.request = None
        self._begin_from(0, terms, budgets)

    def _begin_from(self, first: int, terms: Terms, budgets: list[int]) -> None:
        """Starts the requests of the prompts from `first` on, and has those for which its time does not last started in
        a later turn of the event loop.
        """
        plan, tokens, until_s = self.plan, self._tokens, time.perf_counter() + TURN_S
        for index in range(first, len(tokens)):
            # an earlier one has failed, or the client has left
            if self.closed:
                return
            if index > first and time.perf_counter() > until_s:
                self._requests.soon(partial(self._begin_from, index, terms, budgets), self)
                return
            ids = tokens[index]
            spec = RequestSpec(
                tokens=ids,
                params=plan.params | {"max_tokens": budgets[index]},
                max_tokens=budgets[index],
                choices=plan.n,
                terms=terms,
                arrived_s=self._started_s,
                user=plan.user,
                chat=plan.engine_chat,
                first_choice=index * plan.n,
                request_id=self._id,
                client_request_id=self._client_request_id,
                text=prompt
                if index < len(plan.prompts) and isinstance(prompt := plan.prompts[index], str)
                else None,
                kept=self._kept,
                limits_itself=plan.limits_itself,
            )
            parts = self._choices[spec.first_choice : spec.first_choice + plan.n]
            request = IngressRequest(spec, parts, self, self._requests.connections)
            self._live.append(request)
            request.start()

    # ------------------------------------------------------------------------------------ what the requests say

    def output(self, request: IngressRequest, out: Out) -> None:
        """Adds a piece of output to the answer."""
        if self.closed:
            return
        if self._first_s is None:
            self._first_s = request.times.first_s
        try:
            choice = self._choices[request.spec.first_choice + out.index]
            writer = self._writer
            if writer is None:
                choice.absorb(out)
                if choice.logprobs:
                    self._hold(choice, out)
                return
            data = writer.piece(choice, out, self._usage if self.plan.continuous_usage else None)
        except Exception as error:
            self.broken(error)
            return
        if data:
            if not self._pending:
                self._requests.flush_soon(self)
            self._pending.append(data)

    def _hold(self, choice: Choice, out: Out) -> None:
        """Counts the memory of a piece's log probabilities, which wait for the end of the answer."""
        more = (out.prompt_logprobs or ()) if choice.tokens == out.n_tokens else ()
        entries = [*(out.logprobs or ()), *more]
        self._held_bytes += CANDIDATE_BYTES * sum(1 + len(entry[3]) for entry in entries if entry is not None)
        self._requests.answers.hold(self, self._held_bytes)

    def split(self, others: list[IngressRequest]) -> None:
        """Counts in the requests that go on with some choices of one that was split."""
        self._live += others
        self._open += len(others)

    def unsent(self) -> bool:
        """Returns whether nothing of the answer has been sent."""
        return not self._sent and not self._pending

    def finished(self, request: IngressRequest) -> None:
        """Counts a request as finished, and completes the answer after the last one."""
        self._open -= 1
        if self._open or self.closed:
            return
        try:
            self._complete()
        except Exception as error:
            self.broken(error)

    def _complete(self) -> None:
        if self._writer is None:
            self._build([], whole_parts(self.envelope, self._choices, self._usage()))
            return
        finish = DONE
        if self.plan.include_usage:
            finish = self._writer.usage(self._usage(), self._choices) + DONE
        if not self._pending:
            self._requests.flush_soon(self)
        self._finish = finish
        self._close(200)
        self._release()

    def _build(self, made: list[bytes], parts: Iterator[bytes]) -> None:
        """Makes the rest of a whole answer and sends it, in as many turns of the event loop as it takes."""
        until_s = time.perf_counter() + TURN_S
        # its client may leave meanwhile
        while not self.closed:
            part = next(parts, None)
            if part is None:
                body = b"".join(made)
                self._close(200)
                self._release()
                self.reply.respond(200, [JSON, *self._headers()], body)
                return
            made.append(part)
            if time.perf_counter() > until_s:
                self._requests.soon(partial(self._build, made, parts), self)
                return

    def _cancel_all(self) -> None:
        for request in self._live:
            request.cancel()
        self._release()

    def _release(self) -> None:
        """Drops the requests, which refer back to this exchange.

        A cycle of references would keep the prompts in memory until the garbage collector runs.
        """
        self._live = []
        if self._kept is not None:
            self._tell(self._kept)
            self._kept = None
        # a client may take long to read the rest of its answer
        self._tokens, self.plan.prompts = [], []

    def _tell(self, kept: Kept) -> None:
        """Hands over what was kept for a trace and for observers."""
        envelope, plan = self.envelope, self.plan
        answered = Answered(
            kept=kept,
            path=_path(plan),
            request_id=envelope.id,
            model=envelope.model,
            request_class=plan.terms.request_class,
            started_s=self._started_s,
            first_s=self._first_s,
            ended_s=self._ended_s,
            status=self._code,
            input_tokens=sum(map(len, self._tokens)),
            output_tokens=sum(choice.tokens for choice in self._choices),
            max_tokens=plan.max_tokens,
            stream=plan.stream,
            shown_id=self.request_id,
            choices=len(self._choices),
        )
        self._requests.ended(answered)

    def broken(self, error: Exception) -> None:
        """Fails this exchange alone, after an error in building or writing its answer."""
        told = logs.about(request_id=self.request_id)
        log.error("request %s: cannot build its answer", self.request_id, exc_info=error, extra=told)
        failure = ApiError(500, "Internal error; see the server's log.")
        if not self.closed:
            self.fail(failure)
        # its requests are over, but its client still waits
        elif self.reply.started:
            self.reply.end(failure.event())
        else:
            self.reply.respond(failure.status, [JSON, *self._headers()], failure.body())

    def failed(self, request: IngressRequest, error: ApiError) -> None:
        """Ends the whole answer with the `error` of one of its requests."""
        self.fail(error)

    # --------------------------------------------------------------------------------------------------- output

    def flush(self) -> None:
        """Writes all output that was added since the last flush, in one write."""
        reply = self.reply
        if reply.gone:
            return
        if self._requests.keeps_alive:
            self._written_s = self._requests.connections.now_s()
        if not self._sent:
            self._sent = True
            if not reply.started:
                reply.start([SSE, NO_CACHE, *self._headers()])
            if self._kept is not None and self._kept.wire is not None:
                self._kept.at_s["written"] = self._requests.connections.now_s()
        pending, self._pending = self._pending, []
        if self._finish is not None:
            pending.append(self._finish)
            reply.end(b"".join(pending))
        elif pending:
            reply.write(pending[0] if len(pending) == 1 else b"".join(pending))

    def keep_alive(self, silent_s: float) -> None:
        """Writes a comment if the answer is a stream on which nothing was written for `silent_s`."""
        reply, now_s = self.reply, self._requests.connections.now_s()
        if not self.plan.stream or self.closed or reply.gone or now_s - self._written_s < silent_s:
            return
        self._written_s = now_s
        if not reply.started:
            reply.start([SSE, NO_CACHE, *self._headers()])
        reply.write(COMMENT)

    def fail(self, error: ApiError) -> None:
        """Ends the exchange with an error, sent as a status before the first byte and as an event after it."""
        if self.closed:
            return
        self._close(error.status)
        self._cancel_all()
        if self.reply.started or self._pending:
            self._finish = error.event()
            self._requests.flush_soon(self)
        else:
            self.reply.respond(error.status, [JSON, *error.headers(), *self._headers()], error.body())

    def _gone(self, reason: str) -> None:
        if self.closed:
            return
        if reason == GONE_SLOW:
            self._requests.metrics.slow_clients.inc()
        self._close(CLIENT_CLOSED)
        self._cancel_all()

    def _close(self, code: int) -> None:
        self.closed = True
        requests = self._requests
        if self._held_bytes:
            requests.answers.hold(self, 0)
        requests.closed(self)
        requests.work.change(self._held, NOTHING, self._tenant)
        self._held = NOTHING
        metrics, request_class = requests.metrics, self.plan.terms.request_class
        metrics.answered(code, request_class)
        if self._kept is not None:
            self._code, self._ended_s = code, requests.connections.now_s()
        if self._first_s is not None:
            metrics.ttft.observe(self._first_s - self._started_s, request_class)
        if code == 200:
            metrics.e2e.observe(requests.connections.now_s() - self._started_s, request_class)
        if logs.access.on:
            self._log(code)
        if self._grant is not None:
            self._settle(self._grant, code)

    def _settle(self, grant: Grant, code: int) -> None:
        """Gives back what an API key has granted and this exchange, which ends with `code`, has not used.

        A prompt counts once it was sent to an engine, but a fault of the service costs only what has brought output. A
        client that has no more patience has left, whether it says so by a limit of its own or by its connection.
        """
        self._grant = None
        completion = sum(choice.tokens for choice in self._choices)
        if code == 200:
            prompt = sum(map(len, self._tokens))
        elif code == CLIENT_CLOSED or completion or any(request.timed_out for request in self._live):
            # a prompt whose choices were split among several requests counts once
            sent = {r.spec.first_choice: len(r.spec.tokens) for r in self._live if _was_sent(r)}
            prompt = sum(sent.values())
        else:
            prompt = 0
        grant.ended(
            Used(
                self.envelope.id,
                self._client_request_id,
                _path(self.plan),
                self.envelope.model,
                self.plan.terms.request_class,
                code,
                len(self._choices),
                prompt,
                min(prompt, sum(request.cached_tokens for request in self._live)),
                completion,
                self._requests.connections.now_s() - self._started_s,
            )
        )

    def _log(self, code: int) -> None:
        """Writes the access line of this exchange, which ends with `code`."""
        plan, first_s = self.plan, self._first_s
        access.write(
            _path(plan),
            code,
            self._requests.connections.now_s() - self._started_s,
            self.request_id,
            attempt_id=self._live[-1].attempt_id if self._live else "",
            trace_id="" if self._kept is None else self._kept.trace_id,
            model=self.envelope.model,
            request_class=plan.terms.request_class,
            tenant=plan.terms.tenant or None,
            stream=plan.stream,
            input_tokens=sum(map(len, self._tokens)),
            output_tokens=sum(choice.tokens for choice in self._choices),
            first_token_s=None if first_s is None else round(first_s - self._started_s, 6),
            retried=sum(request.attempts for request in self._live),
        )

    def _headers(self) -> Headers:
        return [(b"x-request-id", self.request_id.encode()), *self._limits]

    def _usage(self) -> bytes:
        prompt = sum(map(len, self._tokens))
        completion = sum(choice.tokens for choice in self._choices)
        return usage_json(prompt, completion, sum(request.cached_tokens for request in self._live))


def _was_sent(request: IngressRequest) -> bool:
    """Returns whether an engine has got the request's prompt."""
    at_engine = request.prefill_engine is not None or request.decode_engine is not None
    return bool(request.output_tokens) or at_engine or request.timed_out


def _path(plan: Plan) -> str:
    return "/v1/chat/completions" if plan.chat else "/v1/completions"
