"""The contract of a fairness policy, and what is said about a turn.

Requests wait in classes (`Terms.priority`). A more urgent class always goes first, or with a `class_ratio` the class
that has got the least for its weight. Inside a class each tenant has a counter of the service that it got, in tokens
for each unit of its weight. The tenant with the least counter has its turn, with its oldest request.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Protocol

from policies.record import record
from policies.routing.base import Needs
from policies.state.views import Request


@record
class Turn:
    """The shares at a decision for which requests of several tenants waited in the same class, or where classes have
    counters, requests of several classes.

    `counter` is the service that `tenant` had got before the decision, and `cost` what the decision adds to it, both in
    weighted tokens for each unit of weight. `tenants` had requests waiting in the class, and `others` are at most
    `OTHERS` of them that have the least counters, beside this one. `classes` are the counters of at most `OTHERS` + 1
    of the classes that waited, by priority, for each unit of their weight: the class of this request and those with the
    least; it is empty where classes have no counters.
    """

    tenant: str
    counter: float
    cost: float
    tenants: int
    others: Mapping[str, float] = field(default_factory=dict)
    classes: Mapping[str, float] = field(default_factory=dict)


OTHERS = 3
"""The largest number of other tenants, and of other classes, that a `Turn` shows."""


class FairnessPolicy(Protocol):
    """A frozen dataclass of parameters. A policy that shares nothing has one tenant, whose counter stays 0.

    Once there were several tenants, prompts go only to prefill workers that have less than `ahead_tokens` in work, or
    less than they compute in `ahead_s` if that is more, because nobody can overtake inside an engine. A tenant whose
    counter is at most `slack_tokens` above the least one is within its share: the decode policy sees its pool entries.
    A tenant that begins to wait again keeps at most `credit_tokens` of what its counter is below the least one. A
    request of several choices begins with `gang_slots` free slots (None: it waits for slots for all of its choices).
    While several classes wait, one gets `class_ratio` times as much service as one whose priority is larger by 1 (None:
    the more urgent one gets all).
    """

    paper: ClassVar[str]
    formula: ClassVar[str]
    needs: ClassVar[Needs]
    shares: ClassVar[bool]

    @property
    def name(self) -> str: ...
    @property
    def slack_tokens(self) -> float: ...
    @property
    def credit_tokens(self) -> float: ...
    @property
    def ahead_tokens(self) -> float: ...
    @property
    def ahead_s(self) -> float: ...
    @property
    def gang_slots(self) -> int | None: ...
    @property
    def class_ratio(self) -> float | None: ...

    def tenant(self, request: Request) -> str:
        """Returns the name under which the request is counted."""
        ...

    def cost(self, prompt_tokens: float, output_tokens: float) -> float:
        """Returns the service of computing this many tokens of a prompt and generating this many, in weighted
        tokens.
        """
        ...
