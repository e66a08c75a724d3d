"""The life of one request, from Start to DONE: one state machine for the live system and the simulator.

A driver passes events to `on`, with the time at which they happened. Their effects are calls of methods that the driver
implements (`effects.Effects`): the ingress live (`app.ingress.request`), the simulator in virtual time
(`benchmarks.sim.ingress`). Nothing here reads a clock, waits, logs or counts.

`TABLE` lists every event that a stage accepts, what is done, and the stages to which that may lead;
`docs/request-life.md` is generated from it. No event bypasses the table: one that it does not list for the stage
changes nothing and goes to `refused` (a message that arrives after a cancellation, say).

The stage alone says what is held at which engine (`_give_back`). Every attempt ends in `_end`, which tells the router
once for each attempt. Each attempt has a new id, so that late messages of an old attempt cannot be taken for messages
of the new one. What follows a failed attempt is decided in `_goes_on`:

    the attempt had no output of its own    the next attempt is a retry; at most `max_retries`
    it had output                           the next attempt resumes it (a migration); at most `max_migrations`
    it may not be resumed                   a retry from the start, if nothing has been sent to the client
    otherwise                               the request ends with an error

A request may wait in the pool, or for a slot of its decode engine, for longer than the lease on its KV. It has the
lease renewed by the engine that holds the KV, `ASKS_PER_LEASE` times in the duration of a lease, and tells the router
of each renewal in the pool. If the engine refuses, has gone or stands still, the lease runs out: the router rescues
the entry before that, and a margin before the lease ends the pooled request gives it up by itself (`_lease_ends`).

A prefill may borrow the head of its prompt from another engine (LENDING). That is worth a try and no more: whatever
goes wrong with the lender, the prefill engine computes the whole prompt.

A request with several choices that migrates becomes one request for each choice that has not finished, because from
then on each choice has a prefix of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from policies.request import events as ev
from policies.request import troubles
from policies.request.effects import Begins, Blame, Effects, Failure
from policies.request.retry_after import named_s
from policies.request.stage import Outcome, Stage, Task
from policies.request.terms import Terms

NO_ENGINE = "no_engine"
"""The router's reason when it knows no engine that is ready."""
_NOT_WOKEN = {
    "wake_failed": "All engines were asleep, and none could be started",
    "wake_timeout": "All engines were asleep, and none was ready in time",
}
"""The meaning of the router's reasons where no engine came that was to come because of this request."""

LEASE_PARTS = 5
"""A margin before a lease's end is at most this part of the lease."""

ASKS_PER_LEASE = 3
"""Times that a pooled request asks for a longer lease in the duration of one lease: an answer that is lost or late
leaves time for another. ASSUMPTION: vLLM's own heartbeats come six times, because it sends them without an answer.
"""

# ASSUMPTION: an ordinary renewal gains a third of a lease. Two answers that name the same end differ by the time that
# they took, which is far less.
LEAST_GAIN = 0.1
"""The share of a lease by which a renewal must put off its end. Once a lender agrees to no later end, all its answers
name the same one, and none of them may count as a renewal.
"""

LEAST_LEFT_S = 0.001
"""Least time that an engine is given, so that a request whose deadline has come is ended by DeadlinePassed, not by its
engine.
"""

_STATUS_OF_CODE = {"deadline": 504, "draining": 503, "overloaded": 503}
_BAD_GATEWAY = 502
_QUEUED, _LENDING, _PREFILLING, _POOLED, _TRANSFERRING, _DECODING, _DONE = Stage


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of every request, from a driver's configuration.

    A pooled request is given up some time before its lease ends: `lease_margin_s`, but at most a fifth of the lease as
    it was first granted.
    An engine has stalled for a request if the prompt takes longer than `prefill_s`, or reading the KV longer than
    `transfer_s`, or if no token comes for `token_gap_s`. It may have the request wait for a slot before it reads, for
    as long as the lease lasts; when that has been over for `transfer_s`, it has stalled, too.

    A request that has output ends when no further token has come for `idle_s`, in whatever stage it is then: other
    attempts, and the waits between them, do not begin that time anew.
    """

    max_retries: int
    lease_margin_s: float
    max_migrations: int = 2
    prefill_s: float = math.inf
    transfer_s: float = math.inf
    token_gap_s: float = math.inf
    idle_s: float = math.inf


@dataclass(slots=True)
class Times:
    """Times at which the present attempt reached its stages, in seconds of the driver's clock; None: not reached yet.

    `renewed_s` is that of the last renewal of its lease, `reading_s` that at which the decode engine began to read its
    KV. `first_s` and `last_s` are the times of the first and the latest token. `first_s` belongs to the request and
    stays when another attempt begins; `attempt_first_s` is that of the attempt's own first token.
    """

    submitted_s: float
    routed_s: float | None = None
    pooled_s: float | None = None
    renewed_s: float | None = None
    decode_routed_s: float | None = None
    reading_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    attempt_first_s: float | None = None


class Life(Effects):
    """One request and its attempts. A driver makes it, passes Start and all later events to `on`, and calls `wake`.

    A colocated attempt has a `decode_engine` only. `prefilled` and `admission` are the engines' reports about the last
    attempt. `wake_at_s` is the time at which `wake` has something to do. `attempts` counts the attempts that were
    followed by another: `retries` and `migrations`. Of the `output_tokens`, all attempts before the present one
    generated `carried_tokens`. `arrived_s` is the arrival of the request, before its first attempt. `lease_until_s` is
    the end of a pooled request's lease. `on_budget` says whether the present attempt counts against the retry budget,
    which it does until its first output. An attempt for which the budget has no room, and a further retry, waits in
    QUEUED for a moment, unknown to the router; so does one after an engine failed the request that it had avoided,
    because the router knew no other. While an attempt ends, `goes_on_s` is the time at which another one
    follows, or None. `kills` are the deaths of engines with the task `killed_at` that count against the request
    (`troubles`). After `kv_failures` of `troubles.MOST_KV_FAILURES`, `terms` ask for one engine for prompt and
    answer.
    """

    __slots__ = (
        "_ask_s", "_held_until_s", "_idle_at_s", "_interrupted_s", "_repeats", "_rows", "_until_s",
        "_wants_budget", "admission", "arrived_s", "attempt_id", "attempts", "avoid", "carried_tokens", "choices",
        "deadline_s", "decode_engine", "decode_rank", "former_lender", "goes_on_s", "killed_at", "kills", "kv_failures",
        "lease_until_s", "lender", "lent", "limits", "migrations", "on_budget", "output_tokens", "prefill_engine",
        "prefill_rank", "prefilled", "retries", "route", "router_knows", "stage", "terms", "times", "unfinished",
        "wake_at_s",
    )  # fmt: skip

    def __init__(self, limits: Limits, terms: Terms, arrived_s: float, choices: int = 1) -> None:
        self.limits, self.terms, self.choices = limits, terms, choices
        self.arrived_s = arrived_s
        self.deadline_s, self.wake_at_s = terms.deadline_s(arrived_s), math.inf
        self.stage, self._rows = _QUEUED, TABLE[None]
        self._until_s = self._ask_s = self.lease_until_s = math.inf
        self.attempt_id, self.attempts = "", 0
        self.retries = self.migrations = 0
        self.kills, self.kv_failures = 0.0, 0
        self.killed_at: Task = "prefill"
        # failures of engines that it had avoided
        self._repeats = 0
        self.on_budget = self._wants_budget = False
        self.goes_on_s: float | None = None
        self._held_until_s = 0.0
        # when no token will have come for too long; it may lag behind the last token until `wake` looks
        self._idle_at_s = math.inf
        # time of the last token before a migration, until the first token after it
        self._interrupted_s: float | None = None
        self.avoid: tuple[str, ...] = ()
        self.router_knows = False  # of the present attempt
        self.prefill_engine: str | None = None
        self.decode_engine: str | None = None
        self.prefill_rank: int | None = None
        self.decode_rank: int | None = None
        # the engine that lends a prefix, its report once the lease stands, and the prefill that borrows it
        self.lender: str | None = None
        self.former_lender: str | None = None
        self.lent: ev.PrefillDone | None = None
        self.route: ev.RoutePrefill | None = None
        self.prefilled: ev.PrefillDone | None = None
        self.admission: ev.Admitted | None = None
        self.output_tokens, self.carried_tokens, self.unfinished = 0, 0, choices
        self.times = Times(arrived_s)

    @property
    def colocated(self) -> bool:
        """Whether one engine both computes the prompt and decodes."""
        return self.prefill_engine is None and self.decode_engine is not None

    @property
    def goes_on(self) -> bool:
        """Whether another attempt follows the one that ends."""
        return self.goes_on_s is not None

    @property
    def waits_since_s(self) -> float:
        """The time since which the client waits for the next token: the arrival of the request, whatever attempt this
        is, or the last token that came. The TTFT objective of an attempt counts from it.
        """
        if self.times.last_s is not None:
            return self.times.last_s
        return self.arrived_s if self._interrupted_s is None else self._interrupted_s

    @property
    def attempt_tokens(self) -> int:
        """Tokens that the present attempt has generated."""
        return self.output_tokens - self.carried_tokens

    @property
    def acquitted(self) -> bool:
        """Whether engines have generated enough for the request to show that it does not kill them."""
        return self.output_tokens > troubles.ACQUITTED_TOKENS * self.choices

    def suspect(self, kills: float, task: Task) -> None:
        """Has the request, which has not begun, begin with deaths that earlier sends of it have caused."""
        self.kills, self.killed_at = kills, task

    def become_choice(self, tokens: int) -> None:
        """Leaves this request one choice, of which earlier attempts have generated `tokens` tokens."""
        self.choices = self.unfinished = 1
        self.output_tokens = self.carried_tokens = tokens

    def branch_of(self, other: "Life", tokens: int) -> None:
        """Makes this life, which has not begun, go on with another choice of `other`, as `become_choice` does."""
        self.become_choice(tokens)
        self.attempts, self.retries, self.migrations = other.attempts, other.retries, other.migrations
        self.kills, self.killed_at = other.kills, other.killed_at
        self.avoid, self._repeats = other.avoid, other._repeats
        self.times.first_s, self._interrupted_s = other.times.first_s, other._interrupted_s
        self._idle_at_s = other._idle_at_s

    # ---------------------------------------------------------------------------------------------- the runner

    def on(self, event: ev.Event, now_s: float) -> bool:
        """Handles an event that happened at `now_s`. Returns False, and changes nothing, if the stage does not accept
        it.
        """
        row = self._rows.get(type(event))
        if row is None or (row.when is not None and not row.when(self)):
            self.refused(event)
            return False
        action, leads_to, _ = row
        action(self, event, now_s)
        if self.stage not in leads_to:
            raise AssertionError(f"{type(event).__name__} led to {self.stage}: TABLE lists {leads_to}")
        return True

    def wake(self, now_s: float) -> None:
        """Handles the passing of time: from `wake_at_s` on, a passed deadline or an overdue stage becomes an event, and
        so does an answer to which no token was added for too long.
        """
        if now_s < self.wake_at_s:
            return
        last_s = self.times.last_s
        # gaps are looked at here and not at each token, which would cost a timer a token
        if last_s is not None:
            self._idle_at_s = max(self._idle_at_s, last_s + self.limits.idle_s)
            if self.stage is _DECODING:
                self._until_s = max(self._until_s, last_s + self.limits.token_gap_s)
        if now_s >= self.deadline_s:
            self.on(ev.DeadlinePassed(), now_s)
        elif now_s >= self._idle_at_s:
            self.on(ev.IdleTooLong(), now_s)
        elif now_s >= self._until_s:
            self.on(ev.StageOverdue(), now_s)
        elif now_s >= self._ask_s:
            self.on(ev.RenewalDue(), now_s)
        else:
            self._wake_in_time()

    def forbear(self, until_s: float) -> None:
        """Takes no engine for stalled before `until_s`, and no answer for idle: the driver was held up itself, and may
        have to read first what engines have sent meanwhile. The end of a lease stays.
        """
        if self.stage is _DONE:
            return
        if self.stage in (_PREFILLING, _TRANSFERRING, _DECODING):
            self._until_s = max(self._until_s, until_s)
        self._idle_at_s = max(self._idle_at_s, until_s)
        self._wake_in_time()

    def _enter(self, stage: Stage, until_s: float = math.inf, ask_s: float = math.inf) -> None:
        """Changes the stage, which is done nowhere else. `until_s` is the time at which the new stage is overdue, and
        `ask_s` the time at which a lease is to be renewed.
        """
        self.stage, self._rows, self._until_s, self._ask_s = stage, TABLE[stage], until_s, ask_s
        if stage is _DONE:
            self._wake_at(math.inf)
        else:
            self._wake_in_time()

    def _wake_in_time(self) -> None:
        """Has `wake` called when the first of the present limits is over."""
        self._wake_at(min(self._until_s, self._ask_s, self._idle_at_s, self.deadline_s))

    def _wake_at(self, at_s: float) -> None:
        if at_s != self.wake_at_s:
            self.wake_at_s = at_s
            self.wake_at(at_s)

    # -------------------------------------------------------------------------------------- actions: on the way

    def _start(self, event: ev.Start, now_s: float) -> None:
        """Ask the router for a prefill worker."""
        self._begin(now_s)

    def _route_prefill(self, event: ev.RoutePrefill, now_s: float) -> None:
        """Have the prefix lent if the router says so, else send the prompt to the engine; a pooled request's KV is
        given back first.
        """
        if self.stage is _POOLED:
            self._give_back()
            # nothing is held now, in case the new engine is not connected
            self._enter(_QUEUED)
            self.prefilled = None
        self.times.routed_s, self.route, self.lent = now_s, event, None
        self.former_lender = None
        lend = event.lend
        if lend is not None and self.send_lend(lend, max(self.deadline_s - now_s, LEAST_LEFT_S)):
            self.lender = lend.engine_id
            self._enter(_LENDING, now_s + lend.patience_s)
        else:
            self._compute(event, now_s)

    def _compute(self, event: ev.RoutePrefill, now_s: float) -> None:
        """Sends the prompt to the engine that is to compute it."""
        left_s = max(self.deadline_s - now_s, LEAST_LEFT_S)
        if not (self.send_decode if event.colocated else self.send_prefill)(event, left_s):
            self._not_connected(event.engine_id, "decode" if event.colocated else "prefill", now_s)
            return
        if event.colocated:
            self.decode_engine, self.decode_rank = event.engine_id, event.rank
        else:
            self.prefill_engine, self.prefill_rank = event.engine_id, event.rank
        self._enter(_PREFILLING, now_s + self.limits.prefill_s)

    def _prefix_lent(self, event: ev.PrefillDone, now_s: float) -> None:
        """Send the prompt to the prefill engine, with the handle of the lent prefix."""
        assert self.route is not None
        self.lent = event
        self._compute(self.route, now_s)

    def _lend_failed(self, event: ev.Event, now_s: float) -> None:
        """Send the prompt to the prefill engine, which computes all of it; the lender gives up if it still works."""
        assert self.route is not None
        gone = None
        if isinstance(event, ev.EngineFailed | ev.EngineLost):
            gone = event.engine_id
        lender, self.lender = self.lender, None
        # its failure may be on the way already, and blames nobody
        self.former_lender = lender
        self._let_go(lender, self.stop_work, gone)
        self.loan_ended("failed")
        self._compute(self.route, now_s)

    def _only_lends(self, engine_id: str) -> bool:
        """Whether an engine holds, or held, only a lent prefix of the attempt, which the prefill engine reads if it
        can.
        """
        if self.stage is not _PREFILLING or engine_id in (self.prefill_engine, self.decode_engine):
            return False
        return engine_id in (self.lender, self.former_lender)

    def _lending_ends(self, gone: str | None = None) -> None:
        """Has the lender free the prefix, if there is one: it was read, or will not be. A read under way ends first."""
        lender, self.lender = self.lender, None
        self._let_go(lender, self.release_kv, gone)

    def _has_prefix(self, done: ev.PrefillDone) -> bool:
        """Whether a prefill found all of the lent prefix in its engine's cache."""
        assert self.route is not None
        assert self.route.lend is not None
        return done.cached_tokens >= self.route.lend.tokens

    def _prefill_done(self, event: ev.PrefillDone, now_s: float) -> None:
        """Tell the router, which chooses a decode engine; a late answer of the lender changes nothing."""
        if event.engine_id not in ("", self.prefill_engine):
            return
        self._lending_ends()
        if self.lent is not None:
            self.loan_ended("used" if self._has_prefix(event) else "recomputed")
        self.times.pooled_s, self.times.renewed_s = now_s, None
        self.prefilled = event
        self.lease_until_s = now_s + event.lease_s
        until_s = now_s + (event.lease_s - self._lease_margin_s(event))
        self._enter(_POOLED, until_s, now_s + event.lease_s / ASKS_PER_LEASE)
        self.report_prefill(event)

    def _renewal_due(self, event: ev.RenewalDue, now_s: float) -> None:
        """Ask the engine that holds the KV for a longer lease."""
        assert self.prefilled is not None
        assert self.prefill_engine is not None
        self._ask_s = now_s + self.prefilled.lease_s / ASKS_PER_LEASE
        self._wake_in_time()
        self.renew_lease(self.prefill_engine)

    def _renewed(self, event: ev.Renewed, now_s: float) -> None:
        """Wait on, and tell the router of a longer lease if it waits, too; a refusal changes nothing, nor does the late
        answer of an engine that held the KV before.
        """
        assert self.prefilled is not None
        gain_s = now_s + event.lease_s - self.lease_until_s
        if event.engine_id != self.prefill_engine or gain_s < LEAST_GAIN * self.prefilled.lease_s:
            return
        self.lease_until_s, self.times.renewed_s = now_s + event.lease_s, now_s
        if self.stage is _POOLED:
            self._until_s = self.lease_until_s - self._lease_margin_s(self.prefilled)
            self.report_renewal(event.lease_s)
        elif self.times.reading_s is None:
            self._until_s = self.lease_until_s + self.limits.transfer_s
        self._wake_in_time()

    def _lease_margin_s(self, granted: ev.PrefillDone) -> float:
        return min(self.limits.lease_margin_s, granted.lease_s / LEASE_PARTS)

    def _route_decode(self, event: ev.RouteDecode, now_s: float) -> None:
        """Send the request to the engine, which pulls the KV."""
        self.times.decode_routed_s = now_s
        if self.send_decode(event, max(self.deadline_s - now_s, LEAST_LEFT_S)):
            self.decode_engine, self.decode_rank = event.engine_id, event.rank
            # the decode engine may have it wait for a slot, for longer than the lease as it stands
            self._enter(_TRANSFERRING, self.lease_until_s + self.limits.transfer_s, self._ask_s)
        else:
            self._not_connected(event.engine_id, "decode", now_s)

    def _reading(self, event: ev.Reading, now_s: float) -> None:
        """Note that the request waits for a slot no more: from now on the transfer takes its time."""
        self.times.reading_s = now_s
        self._until_s = now_s + self.limits.transfer_s
        self._wake_in_time()

    def _admitted(self, event: ev.Admitted, now_s: float) -> None:
        """Note that tokens can come; the prefill engine holds nothing any more."""
        self.admission = event
        self._enter(_DECODING, now_s + self.limits.token_gap_s)
        if self.prefill_engine is not None:
            self.leave_engine(self.prefill_engine)
        self.admitted()

    def _output(self, event: ev.Output, now_s: float) -> None:
        """Pass the tokens on; the last token of the last choice ends the request. Tokens imply that the engine has the
        KV.
        """
        if self.stage is not _DECODING:
            self._admitted(ev.Admitted(), now_s)
        times = self.times
        if times.last_s is None:
            self._first_output(now_s)
        times.last_s = now_s
        self.output_tokens += event.tokens
        self.output(event)
        # the client may have gone meanwhile
        if event.last and self.stage is _DECODING:
            self.unfinished -= 1
            if self.unfinished <= 0:
                self._end("finished", gone=self.decode_engine)
                self.finished()

    def _first_output(self, now_s: float) -> None:
        """Notes the first output of an attempt, and how long its client saw none if it was resumed."""
        self.times.attempt_first_s = now_s
        if self.times.first_s is None:
            self.times.first_s = now_s
        self._off_budget()
        interrupted_s, self._interrupted_s = self._interrupted_s, None
        self._idle_at_s = now_s + self.limits.idle_s
        self._wake_in_time()
        if interrupted_s is not None:
            self.resumed(now_s - interrupted_s)

    def _preempted(self, event: ev.Preempted, now_s: float) -> None:
        """Queue again, in the same attempt; the engine holds nothing any more."""
        self._give_back(gone=self.decode_engine)
        self._enter(_QUEUED)
        self.prefilled = self.admission = None
        self.submit()

    # -------------------------------------------------------------------------- actions: routers, failures, time

    def _unknown(self, event: ev.Unknown, now_s: float) -> None:
        """Submit a queued attempt to the router, unless it is held back; have any other adopted, with its engines and
        its stage.
        """
        if self.stage is not _QUEUED:
            self.adopt()
        elif self.router_knows:
            self.submit()

    def _rejected(self, event: ev.Reject, now_s: float) -> None:
        """End with the router's reason."""
        # the router has taken its charges back already
        self.router_knows = False
        reason = event.reason.replace("_", " ")
        missing = event.reason in (NO_ENGINE, f"no_{self.terms.mode}_engine")
        trouble = f"There is {reason} ready" if missing else f"The server is overloaded ({reason})"
        if event.reason in _NOT_WOKEN:
            trouble = f"{_NOT_WOKEN[event.reason]}{event.detail and f' ({event.detail})'}"
        elif event.detail:
            trouble += f": {event.detail}"
        retry_after_s = named_s(event.retry_after_s, self.attempt_id)
        message = f"{trouble}; try again in {retry_after_s:.0f} s."
        if event.status == 500:
            message = f"The router could not decide this request ({reason}); its log says why."
        self._fail(Failure(event.status, message, event.reason, retry_after_s), "rejected")

    def _engine_failed(self, event: ev.EngineFailed, now_s: float) -> None:
        """Try again or go on elsewhere, within bounds, else end in an error; never try again where the request is at
        fault.
        """
        blame = Blame(event.engine_id, event.task, event.code)
        if self._only_lends(event.engine_id):
            self._lending_ends(event.engine_id)
            return
        # a request that has output was in order: what is refused is to go on with it
        if event.code == "bad_request" and self.carried_tokens:
            refused = blame._replace(code=troubles.NOT_RESUMABLE)
            self._broken(refused, event.message, True, now_s, event.engine_id)
            return
        if event.code == "bad_request":
            failure = Failure(400, event.message, "invalid_value", param=event.param)
            self._fail(failure, "rejected", event.engine_id)
            return
        self._broken(blame, event.message, event.retryable, now_s, event.engine_id, event.silent_s)

    def _engine_lost(self, event: ev.EngineLost, now_s: float) -> None:
        """Try again or go on elsewhere, within bounds, else end in an error. A lost lender changes nothing else."""
        if self._only_lends(event.engine_id):
            self._lending_ends(event.engine_id)
            return
        blame = Blame(event.engine_id, self._task_at(event.engine_id), troubles.ENGINE_LOST)
        self._broken(blame, event.reason, True, now_s, event.engine_id, event.silent_s)

    def _engine_unfit(self, event: ev.EngineUnfit, now_s: float) -> None:
        """Give back what is held there, and try again or go on elsewhere as after a failure. KV that a quarantined
        engine has finished stays there, and so does a lent prefix.
        """
        if self._only_lends(event.engine_id):
            return
        at_work = (
            self.decode_engine if self.stage is not _PREFILLING else self.decode_engine or self.prefill_engine
        )
        if event.code != troubles.QUARANTINED or event.engine_id == at_work:
            blame = Blame(event.engine_id, self._task_at(event.engine_id), event.code)
            # the engine itself says for how long it stood still; without that nobody is suspected
            self._broken(blame, event.reason, True, now_s, silent_s=math.inf)

    def _stalled(self, event: ev.StageOverdue, now_s: float) -> None:
        """Give back what is held, and try again or go on elsewhere: the engine takes too long."""
        engine_id = self.decode_engine or self.prefill_engine
        assert engine_id is not None
        blame = Blame(engine_id, self._task_at(engine_id), troubles.STALLED)
        self._broken(blame, f"it has been {self.stage} for too long", True, now_s)

    def _lease_ends(self, event: ev.StageOverdue, now_s: float) -> None:
        """Try again from the start; the router, which rescues leases earlier than this, must have been held up."""
        if not self._goes_on("expired", "decode", troubles.POOL_TIMEOUT, now_s):
            message = "No decode engine had room before the prompt's KV lease ended; try again later."
            self._fail(Failure(503, message, troubles.POOL_TIMEOUT, 1.0), "expired")

    def _held_back(self, event: ev.StageOverdue, now_s: float) -> None:
        """Submit an attempt that was held back, if the retry budget has room or it needs none; else fail in the end."""
        if not self._wants_budget:
            self._hand_in()
        elif now_s < self._held_until_s:
            self._try_budget(now_s)
        else:
            self._fail(troubles.OVER_BUDGET, "failed")

    def _deadline_passed(self, event: ev.DeadlinePassed, now_s: float) -> None:
        """End in an error and give everything back."""
        self._fail(Failure(504, "The request took longer than the server allows.", "deadline"), "expired")

    def _idle_too_long(self, event: ev.IdleTooLong, now_s: float) -> None:
        """End in an error and give everything back: the client waits for the next token for too long."""
        message = "No further token came for longer than the server waits for one."
        self._fail(Failure(504, message, troubles.IDLE), "expired")

    def _cancelled(self, event: ev.Cancel, now_s: float) -> None:
        """Give everything back, unless the request has ended already."""
        if self.stage is not _DONE:
            self._end("cancelled")

    # ------------------------------------------------------------------------------------------------- attempts

    def _begin(self, now_s: float, on_budget: bool = False, repeats: int = 0) -> None:
        """Begins the first attempt, or the next one. One that counts against the retry budget may have to wait, and
        waits for a moment if it is not the first of its kind. So does one after engines that were to be avoided have
        failed `repeats` attempts, the last one among them (0: it was another engine).
        """
        self.attempt_id = self.new_attempt()
        self.prefilled = self.admission = None
        self.unfinished, self.carried_tokens = self.choices, self.output_tokens
        self.times = Times(now_s, first_s=self.times.first_s)
        self._held_until_s = now_s + troubles.MOST_HELD_S
        self._wants_budget = on_budget
        pause_s = troubles.pause_s(max(self.retries if on_budget else 0, 1 + repeats))
        if pause_s:
            self._enter(_QUEUED, now_s + pause_s)
        elif on_budget:
            self._try_budget(now_s)
        else:
            self._hand_in()

    def _hand_in(self) -> None:
        """Gives the attempt to the router."""
        self._enter(_QUEUED)
        self.router_knows = True
        self.submit()

    def _try_budget(self, now_s: float) -> None:
        """Gives the attempt to the router if the retry budget has room, and else holds it back for a moment."""
        if self.may_retry():
            self.on_budget = True
            self.count_retry(1)
            self._hand_in()
        else:
            self._enter(_QUEUED, now_s + troubles.LOOK_AGAIN_S)

    def _off_budget(self) -> None:
        if self.on_budget:
            self.on_budget = False
            self.count_retry(-1)

    def _not_connected(self, engine_id: str, task: Task, now_s: float) -> None:
        blame = Blame(engine_id, task, troubles.NOT_CONNECTED)
        self._broken(blame, "is not connected", True, now_s, engine_id)

    def _task_at(self, engine_id: str) -> Task:
        return "decode" if engine_id == self.decode_engine else "prefill"

    def _broken(
        self,
        blame: Blame,
        why: str,
        retryable: bool,
        now_s: float,
        gone: str | None = None,
        silent_s: float = 0.0,
    ) -> None:
        """Ends an attempt that an engine, which was silent for `silent_s` before, has broken; the next one begins, or
        the request ends with an error.
        """
        engine_id, task, code = blame
        if self._killed_again(blame, now_s, silent_s):
            self._fail(troubles.POISON, "failed", gone, blame)
        elif not (retryable and self._goes_on("failed", task, code, now_s, gone, blame)):
            status = _STATUS_OF_CODE.get(code, _BAD_GATEWAY)
            message = f"The {task} engine {engine_id} failed ({code}): {why}"
            retry_after_s = 1.0 if status in (502, 503) else None
            self._fail(Failure(status, message, code, retry_after_s), "failed", gone, blame)

    def _killed_again(self, blame: Blame, now_s: float, silent_s: float) -> bool:
        """Counts a death or stall of the engine that worked on the request; returns whether that is too much. A request
        that came while the engine was silent, or that had got its tokens, is not at fault.
        """
        engine_id, task, code = blame
        split_decode = engine_id == self.decode_engine and self.prefill_engine is not None
        taken_s = self.times.decode_routed_s if split_decode else self.times.routed_s
        computes = engine_id == self.decode_engine or self.stage is _PREFILLING
        if code not in troubles.DEADLY or self.acquitted or not computes or taken_s is None:
            return False
        if 0 <= now_s - silent_s - taken_s <= troubles.SUSPECT_S:
            died = code == "engine_dead" or (code == troubles.ENGINE_LOST and silent_s == 0)
            before = self.kills if task == self.killed_at else 0.0
            self.kills = before + (1.0 if died else troubles.SILENT_KILL)
            self.killed_at = task
        return self.kills >= troubles.MOST_KILLS

    def _goes_on(
        self,
        outcome: Outcome,
        task: Task,
        code: str,
        now_s: float,
        gone: str | None = None,
        blame: Blame | None = None,
    ) -> bool:
        """Ends this attempt and begins the next one, if there may be one. Returns False, and does nothing, if not."""
        has_output = self.output_tokens > 0
        resumes = has_output and self.terms.migrate and code != troubles.NOT_RESUMABLE
        migrates = resumes and self.attempt_tokens > 0
        if migrates and self.migrations >= self.limits.max_migrations:
            resumes = migrates = False
        restarts = has_output and not resumes
        if restarts and not self.unsent():
            return False
        if not migrates and self.retries >= self.limits.max_retries:
            return False
        avoid, last_s = troubles.avoided(blame, self.prefill_engine), self.times.last_s
        again = blame is not None and blame.engine_id in self.avoid
        self._repeats += again
        self.goes_on_s = now_s
        self._end(outcome, gone, blame)
        self.goes_on_s = None
        self.attempts += 1
        self.avoid = (*self.avoid, *(engine_id for engine_id in avoid if engine_id not in self.avoid))
        self.kv_failures += code == troubles.KV_LOAD
        if self.kv_failures >= troubles.MOST_KV_FAILURES and self.terms.mode is None:
            self.terms = self.terms._replace(local=True)
        others: Sequence[Begins] = ()
        if migrates:
            self.migrations += 1
            self._interrupted_s = last_s
            self._idle_at_s = max(self._idle_at_s, self.waits_since_s + self.limits.idle_s)
            others = self.split() if self.choices > 1 else ()
            self.migrated(task, code, 1 + len(others))
        else:
            self.retries += 1
            if restarts:
                self.output_tokens, self.times.first_s, self._interrupted_s = 0, None, None
                self._idle_at_s = math.inf
                self.restart()
            self.retried(task, code)
        self._begin(now_s, code not in troubles.OFF_BUDGET, self._repeats if again else 0)
        for other in others:
            # the failure of one part of an answer cancels all others
            if self.stage is not _DONE:
                other.on(ev.Start(), now_s)
        return True

    # --------------------------------------------------------------------------------------------- the ways out

    def _fail(
        self, failure: Failure, outcome: Outcome, gone: str | None = None, blame: Blame | None = None
    ) -> None:
        self._end(outcome, gone, blame)
        self.failed(failure)

    def _end(self, outcome: Outcome, gone: str | None = None, blame: Blame | None = None) -> None:
        """Ends the attempt, which is done nowhere else. `gone` is an engine that holds nothing of the attempt any more;
        `blame` names the engine that failed, if one did.
        """
        self.ends(outcome, blame)
        self._give_back(gone, blame)
        self._enter(_DONE)
        if self.router_knows:
            self.close(outcome, blame)
        self.router_knows = False
        self._off_budget()
        self.forget(outcome)

    def _give_back(self, gone: str | None = None, blame: Blame | None = None) -> None:
        """Gives back what the stage holds at the engines; the engine `gone` gets no message."""
        stage, prefill, decode = self.stage, self.prefill_engine, self.decode_engine
        if stage is _POOLED:
            self._let_go(prefill, self.release_kv, gone)
        elif stage is _LENDING:
            lender, self.lender = self.lender, None
            self._let_go(lender, self.stop_work, gone)
            # a loan that has failed has no lender any more
            if lender is not None:
                self.loan_ended("dropped")
        elif stage is _PREFILLING:
            if self.lent is not None:
                self.loan_ended("dropped")
            self._let_go(prefill or decode, self.stop_work, gone)
            self._lending_ends(gone)
        elif stage in (_TRANSFERRING, _DECODING):
            self._let_go(decode, self.stop_work, gone)
        if stage is _TRANSFERRING:
            # a decode engine that is well also frees the prefill engine's copy
            well = decode != gone and (blame is None or decode != blame.engine_id)
            self._let_go(prefill, self.leave_engine if well else self.release_kv, gone)
        self.prefill_engine = self.decode_engine = None

    def _let_go(self, engine_id: str | None, how: Callable[[str], None], gone: str | None) -> None:
        if engine_id is not None:
            (self.leave_engine if engine_id == gone else how)(engine_id)


class Row(NamedTuple):
    """One line of `TABLE`: an event's action in a stage. `leads_to` names all stages in which it may leave the request.

    The event is refused where `when` is given and returns False.
    """

    action: Callable[[Life, Any, float], None]
    leads_to: tuple[Stage, ...]
    when: Callable[[Life], bool] | None = None


def is_colocated(life: Life) -> bool:
    """Whether one engine both computes the prompt and decodes."""
    return life.colocated


def is_split(life: Life) -> bool:
    """Whether the KV moves from one engine to another."""
    return not life.colocated


def is_held(life: Life) -> bool:
    """Whether the attempt is held back for a moment, so that the router does not know it yet."""
    return not life.router_knows


_AGAIN = (_QUEUED, _DONE)
"""Stages to which a failed attempt may lead: the next attempt begins, or the request ends."""


def _always(stage: Stage) -> dict[type, Row]:
    """Returns the rows that every stage but DONE has."""
    return {
        ev.Unknown: Row(Life._unknown, (stage,)),
        ev.DeadlinePassed: Row(Life._deadline_passed, (_DONE,)),
        ev.IdleTooLong: Row(Life._idle_too_long, (_DONE,)),
        ev.Cancel: Row(Life._cancelled, (_DONE,)),
    }


def _at_engines(stage: Stage) -> dict[type, Row]:
    """Returns the rows that every stage has in which an engine holds something of the request for good."""
    ends = (stage, *_AGAIN) if stage is _PREFILLING else _AGAIN
    return {
        ev.EngineFailed: Row(Life._engine_failed, ends),
        ev.EngineLost: Row(Life._engine_lost, ends),
        ev.EngineUnfit: Row(Life._engine_unfit, (stage, *_AGAIN)),
        ev.StageOverdue: Row(Life._lease_ends if stage is _POOLED else Life._stalled, _AGAIN),
        **_always(stage),
    }


TABLE: dict[Stage | None, dict[type, Row]] = {
    None: {ev.Start: Row(Life._start, (_QUEUED,))},
    _QUEUED: {
        ev.RoutePrefill: Row(Life._route_prefill, (_LENDING, _PREFILLING, *_AGAIN)),
        ev.Reject: Row(Life._rejected, (_DONE,)),
        ev.StageOverdue: Row(Life._held_back, (_QUEUED, _DONE), is_held),
        **_always(_QUEUED),
    },
    _LENDING: {
        ev.PrefillDone: Row(Life._prefix_lent, (_PREFILLING, *_AGAIN)),
        ev.EngineFailed: Row(Life._lend_failed, (_PREFILLING, *_AGAIN)),
        ev.EngineLost: Row(Life._lend_failed, (_PREFILLING, *_AGAIN)),
        ev.EngineUnfit: Row(Life._lend_failed, (_PREFILLING, *_AGAIN)),
        ev.StageOverdue: Row(Life._lend_failed, (_PREFILLING, *_AGAIN)),
        **_always(_LENDING),
    },
    _PREFILLING: {
        ev.PrefillDone: Row(Life._prefill_done, (_PREFILLING, _POOLED), is_split),
        ev.Admitted: Row(Life._admitted, (_DECODING,), is_colocated),
        ev.Output: Row(Life._output, (_DECODING, _DONE), is_colocated),
        **_at_engines(_PREFILLING),
    },
    _POOLED: {
        ev.RouteDecode: Row(Life._route_decode, (_TRANSFERRING, *_AGAIN)),
        ev.RenewalDue: Row(Life._renewal_due, (_POOLED,)),
        ev.Renewed: Row(Life._renewed, (_POOLED,)),
        ev.RoutePrefill: Row(Life._route_prefill, (_LENDING, _PREFILLING, *_AGAIN)),
        ev.Reject: Row(Life._rejected, (_DONE,)),
        **_at_engines(_POOLED),
    },
    _TRANSFERRING: {
        ev.Admitted: Row(Life._admitted, (_DECODING,)),
        ev.Output: Row(Life._output, (_DECODING, _DONE)),
        ev.Reading: Row(Life._reading, (_TRANSFERRING,)),
        ev.RenewalDue: Row(Life._renewal_due, (_TRANSFERRING,)),
        ev.Renewed: Row(Life._renewed, (_TRANSFERRING,)),
        **_at_engines(_TRANSFERRING),
    },
    _DECODING: {
        ev.Output: Row(Life._output, (_DECODING, _DONE)),
        ev.Preempted: Row(Life._preempted, (_QUEUED,)),
        **_at_engines(_DECODING),
    },
    _DONE: {ev.Cancel: Row(Life._cancelled, (_DONE,))},
}
"""Every event that a stage accepts, by stage; None is the stage before Start."""
