"""A life whose effects are recorded, and functions that bring it to a stage."""

from typing import Any

from policies.request.effects import Blame, Failure
from policies.request.events import (
    Admitted,
    Cancel,
    DeadlinePassed,
    EngineFailed,
    EngineLost,
    EngineUnfit,
    Event,
    IdleTooLong,
    Lend,
    Output,
    Preempted,
    PrefillDone,
    Reading,
    Reject,
    RenewalDue,
    Renewed,
    RouteDecode,
    RoutePrefill,
    StageOverdue,
    Start,
    Unknown,
)
from policies.request.life import Life, Limits
from policies.request.stage import LoanEnd, Outcome, Stage, Task
from policies.request.terms import Mode, Terms

NOW_S = 100.0


class Recorder(Life):
    """A life that records each effect as (name, arguments ...) in `did`. Engines in `down` are not connected.

    `tokens` counts those of each choice; an Output belongs to `choice`, and `left` are the choices without their last
    token. `others` are the lives into which it was split, and `loans` the ends of its loans.
    """

    def __init__(
        self,
        max_retries: int = 2,
        timeout_s: float = 600.0,
        choices: int = 1,
        mode: Mode | None = None,
        migrate: bool = True,
        **limits: float,
    ) -> None:
        terms = Terms(mode=mode, timeout_s=timeout_s, migrate=migrate)
        super().__init__(Limits(max_retries, 2.0, **limits), terms, NOW_S, choices)  # type: ignore[arg-type]
        self.tokens = dict.fromkeys(range(choices), 0)
        self.left = list(self.tokens)
        self.choice = 0
        self.others: list[Recorder] = []
        self.budget = True
        self.retries_counted = 0
        self.nothing_sent = False
        self.did: list[tuple[Any, ...]] = []
        self.down: set[str] = set()
        self.live: set[str] = set()
        self.tied: set[str] = set()
        self.leaves_at_output = False
        self.loans: list[LoanEnd] = []

    def of(self, *names: str) -> list[tuple[Any, ...]]:
        """Returns the recorded effects with one of these names, in order."""
        return [effect for effect in self.did if effect[0] in names]

    def new_attempt(self) -> str:
        assert not self.live
        attempt_id = f"r{self.attempts + 1}"
        self.live.add(attempt_id)
        return attempt_id

    def forget(self, outcome: Outcome) -> None:
        self.live.remove(self.attempt_id)
        self.did.append(("forget", self.attempt_id, outcome))

    def retried(self, task: Task, code: str) -> None:
        self.did.append(("retried", task, code))

    def count_retry(self, change: int) -> None:
        self.retries_counted += change
        assert self.retries_counted == self.on_budget

    def may_retry(self) -> bool:
        return self.budget

    def migrated(self, task: Task, code: str, choices: int) -> None:
        self.did.append(("migrated", task, code))

    def resumed(self, stall_s: float) -> None:
        self.did.append(("resumed", stall_s))

    def split(self) -> "list[Recorder]":
        first, *rest = self.left
        for choice in rest:
            other = Recorder()
            other.limits, other.terms, other.deadline_s = self.limits, self.terms, self.deadline_s
            other.tokens, other.left, other.choice = {choice: self.tokens[choice]}, [choice], choice
            other.branch_of(self, self.tokens[choice])
            self.others.append(other)
        self.tokens, self.left, self.choice = {first: self.tokens[first]}, [first], first
        self.become_choice(self.tokens[first])
        self.did.append(("split", len(rest)))
        return self.others

    def wake_at(self, at_s: float) -> None:
        assert at_s == self.wake_at_s

    def refused(self, event: object) -> None:
        self.did.append(("refused", type(event)))

    def submit(self) -> None:
        self.did.append(("submit", self.attempt_id, self.avoid))

    def adopt(self) -> None:
        self.did.append(("adopt", self.stage, self.prefill_engine, self.decode_engine))

    def report_prefill(self, done: PrefillDone) -> None:
        self.did.append(("report_prefill", done))

    def report_renewal(self, lease_s: float) -> None:
        self.did.append(("report_renewal", lease_s))

    def close(self, outcome: Outcome, blame: Blame | None) -> None:
        self.did.append(("close", self.attempt_id, outcome, self.attempt_tokens, blame))

    def send_lend(self, lend: Lend, left_s: float) -> bool:
        return self._sent(("send_lend", lend.engine_id, lend.tokens), lend.engine_id, left_s)

    def loan_ended(self, how: LoanEnd) -> None:
        self.loans.append(how)

    def send_prefill(self, route: RoutePrefill, left_s: float) -> bool:
        effect = ("send_prefill", route.engine_id)
        if self.lent is not None:
            effect += (self.lent.handle,)
        return self._sent(effect, route.engine_id, left_s)

    def send_decode(self, route: RoutePrefill | RouteDecode, left_s: float) -> bool:
        handle = None if self.prefilled is None else self.prefilled.handle
        return self._sent(("send_decode", route.engine_id, handle), route.engine_id, left_s)

    def _sent(self, effect: tuple[Any, ...], engine_id: str, left_s: float) -> bool:
        assert 0 < left_s <= self.deadline_s - NOW_S
        if engine_id in self.down:
            return False
        self.did.append(effect)
        self.tied.add(engine_id)
        return True

    def stop_work(self, engine_id: str) -> None:
        self.did.append(("cancel", engine_id))
        self.tied.remove(engine_id)

    def release_kv(self, engine_id: str) -> None:
        self.did.append(("release", engine_id))
        self.tied.remove(engine_id)

    def renew_lease(self, engine_id: str) -> None:
        assert engine_id in self.tied
        self.did.append(("renew", engine_id))

    def leave_engine(self, engine_id: str) -> None:
        self.tied.remove(engine_id)

    def admitted(self) -> None:
        self.did.append(("admitted",))

    def output(self, event: Output) -> None:
        self.did.append(("output", event))
        if self.left:
            self.tokens[self.choice] += event.tokens
            if event.last:
                self.left.remove(self.choice)
                self.choice = self.left[0] if self.left else -1
        if self.leaves_at_output:
            self.on(Cancel(), NOW_S)

    def unsent(self) -> bool:
        return self.nothing_sent

    def restart(self) -> None:
        self.did.append(("restart",))
        self.tokens = dict.fromkeys(self.tokens, 0)
        self.left = list(self.tokens)

    def finished(self) -> None:
        self.did.append(("finished",))

    def failed(self, failure: Failure) -> None:
        self.did.append(("failed", failure))

    def end(self) -> Failure:
        """Returns the failure that the client got; asserts that the request had no other end."""
        (effect,) = self.of("failed", "finished")
        assert isinstance(effect[1], Failure)
        return effect[1]


DONE = PrefillDone(30.0, 999, 1, b"h", 0.1, 0.2)

WAY: dict[Stage, Event] = {
    Stage.PREFILLING: RoutePrefill("p", colocated=False),
    Stage.POOLED: DONE,
    Stage.TRANSFERRING: RouteDecode("d"),
    Stage.DECODING: Admitted(9, 0.1, 3),
    Stage.DONE: Output(1, True),
}
"""The ordinary way through the stages, with engines p and d: by stage the event that leads there."""

LENT = PrefillDone(30.0, 99, 64, b"prefix", engine_id="l")

LEND_WAY: dict[Stage, Event] = {
    Stage.LENDING: RoutePrefill("p", colocated=False, lend=Lend("l", 64, 20.0)),
    Stage.PREFILLING: LENT,
    **{stage: event for stage, event in WAY.items() if stage is not Stage.PREFILLING},
}
"""The way of a request whose prefix the engine l lends."""

COLOCATED_WAY: dict[Stage, Event] = {
    Stage.PREFILLING: RoutePrefill("c", colocated=True),
    Stage.DECODING: Admitted(),
    Stage.DONE: Output(1, True),
}

EVENTS: list[Event] = [
    Start(),
    RoutePrefill("p", colocated=False),
    RouteDecode("d"),
    Reject(429, "queue_full", 3.0),
    DONE,
    RenewalDue(),
    Renewed(30.0, "p"),
    Reading(),
    Admitted(),
    Output(1, False),
    Preempted(),
    EngineFailed("p", "prefill", "internal", "x", retryable=False),
    EngineLost("p", "gone"),
    EngineUnfit("p", "stalled", "so the router says"),
    Unknown(),
    Cancel(),
    DeadlinePassed(),
    IdleTooLong(),
    StageOverdue(),
]
"""One event of each type."""


def at(stage: Stage, way: dict[Stage, Event] = WAY, **more: Any) -> Recorder:
    """Returns a life that has reached `stage` by the events of `way`."""
    life = Recorder(**more)
    way = LEND_WAY if stage is Stage.LENDING else way
    life.on(Start(), NOW_S)
    for reached, event in way.items():
        if life.stage is stage:
            break
        assert life.on(event, NOW_S)
        assert now(life) is reached
    assert now(life) is stage
    return life


def now(life: Life) -> Stage:
    """Returns the stage of `life`. It is a call, because a type checker takes an attribute for unchanged."""
    return life.stage
