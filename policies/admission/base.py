"""The contract of an admission policy.

    judge(case, outlook) -> Judgement(verdict, reason, budget_s, terms, wait_s)

A case is one request at one moment of its way, with the work that is served before it. An outlook is the service that
the fleet gives, as measured. Both are records, and so is the judgement, whose terms sum up to the expected time of the
first token; it is journalled with the action that follows from it.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol

from policies.record import record
from policies.routing.base import Needs
from policies.state.views import Request
from policies.state.waiting import NOTHING, Backlog


class Moment(StrEnum):
    """The moment of a request's way at which it is judged."""

    ARRIVAL = "arrival"
    """The request has arrived and would be the last of its priority in the queue."""
    TURN = "turn"
    """The request is queued, and judged as one that would be sent to a prefill worker now, whether or not it is the
    head of the queue.
    """
    POOLED = "pooled"
    """The request waits for a decode worker, with its prompt computed."""


class Verdict(StrEnum):
    """The fate of a request at one moment."""

    ADMIT = "admit"
    HOLD = "hold"
    """The request keeps its place in the queue for now: its computed prompt would wait, or its engine is busy."""
    REFUSE = "refuse"


@record
class Case:
    """One request at one moment. `queued` are the requests that the queue serves before it, and `without_slot` those
    beyond the queue that get a decode slot before it: their prompts are computed now or wait in the pool. Where it
    contains requests that are only expected to come, `without_slot_now` are those that are there; None: all are.

    A `committed` request must not be refused: it is a retry, it goes on after a migration, or its prompt was computed
    before. Its objectives count from `counts_from_s`. It may be sent to a decode worker as soon as that has slots for
    `begins_with` of its sequences; None: for all of them.
    """

    request: Request
    moment: Moment
    now_s: float
    counts_from_s: float
    queued: Backlog = NOTHING
    without_slot: Backlog = NOTHING
    committed: bool = False
    without_slot_now: Backlog | None = None
    begins_with: int | None = None


class Prefiller(NamedTuple):
    """One prefill worker: for how long it has work already, and the prompt tokens that it computes in a second."""

    busy_s: float
    tokens_per_s: float


@record
class PrefillTier:
    """The prefill workers, the one with the least work first. A prompt counts as `standing.PROMPT_TOKENS` tokens more
    than it has. Workers of which nothing was measured compute infinitely fast: the first prompts show how fast.
    """

    workers: tuple[Prefiller, ...]

    @property
    def tokens_per_s(self) -> float:
        """The prompt tokens that all workers compute in a second."""
        return sum([worker.tokens_per_s for worker in self.workers])

    def start_s(self, tokens: float) -> float:
        """Returns when a worker is free for one more prompt, if `tokens` are computed before it and each prompt goes to
        the worker that is free first: the time t at which the workers have sum_i (t - busy_i) * tokens_per_s_i = tokens
        behind them.
        """
        speed = done = 0.0
        start_s = 0.0
        for worker in self.workers:
            if speed and (tokens + done) / speed <= worker.busy_s:
                break
            speed += worker.tokens_per_s
            done += worker.busy_s * worker.tokens_per_s
            start_s = (tokens + done) / speed if math.isfinite(speed) else 0.0
        return start_s


@record
class DecodeTier:
    """The workers that decode, of one kind. `slots` are the sequences that they can hold in memory and slots, of which
    `used` are taken. A sequence takes `token_s` for each token, where all workers run `used` sequences, and
    `token_per_sequence_s` more for each further sequence on its worker. A sequence has `output_tokens` tokens on
    average.

    None: nothing was measured yet. `start_s` is the time from the choice of the worker until the sequence has a slot
    and its KV, `first_step_s` that from there to the first token. Colocated workers have `prompt_token_s` instead, the
    time from the choice to the first token for each token of the prompt.
    """

    workers: int
    slots: int
    used: int
    token_s: float | None = None
    token_per_sequence_s: float = 0.0
    output_tokens: float | None = None
    start_s: float | None = None
    first_step_s: float | None = None
    prompt_token_s: float | None = None


@record
class Outlook:
    """The service of the fleet. A tier of None has no worker that takes work.

    `urgent_tokens_per_s` and `urgent_sequences_per_s` are the prompt tokens and sequences per second that have come of
    late and are more urgent than the request that is judged; 0 where classes share, because `Case.queued` and
    `Case.without_slot` count then what comes. While the fleet `sleeps`, or wakes, nothing is expected.
    """

    prefill: PrefillTier | None = None
    decode: DecodeTier | None = None
    colocated: DecodeTier | None = None
    urgent_tokens_per_s: float = 0.0
    urgent_sequences_per_s: float = 0.0
    sleeps: bool = False


@record
class Judgement:
    """The verdict on a request. `budget_s` is the objective that the sum of `terms` was compared with, in seconds
    (None: it has none). `wait_s` is the part of the sum that others cause; after it another try may succeed. `reason`
    is a word for the error's code and the metrics ("" unless the request is refused or held), and `detail` says it in
    words.
    """

    verdict: Verdict
    reason: str = ""
    budget_s: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    wait_s: float = 0.0
    detail: str = ""

    @property
    def expected_s(self) -> float:
        """The expected time from the request's arrival to its first token."""
        return sum(self.terms.values())


ADMITTED = Judgement(Verdict.ADMIT)
"""The judgement on a request of which nothing is expected."""


class AdmissionPolicy(Protocol):
    """A frozen dataclass of parameters. A policy that does not `watch` admits every request, and is not asked. Nor is
    any other one while no request has an objective (`policies.dispatch.gate`).
    """

    paper: ClassVar[str]
    formula: ClassVar[str]
    needs: ClassVar[Needs]
    watches: ClassVar[bool]

    @property
    def name(self) -> str: ...

    def judge(self, case: Case, outlook: Outlook) -> Judgement: ...
