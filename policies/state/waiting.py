"""Sums over requests that wait, by priority, so that the work before a request is known without looking at each."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.record import record
from policies.request.classes import class_weight
from policies.state.views import Request


@record
class Backlog:
    """Requests that wait, in sums: their number, the tokens of their prompts, and the sequences that they will decode.
    `foreseen` of these sequences have a forecast of their output, which sums up to `output_tokens`.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    sequences: int = 0
    foreseen: int = 0
    output_tokens: float = 0.0

    def without(self, request: Request) -> "Backlog":
        """Returns the sums without one of the requests that they contain."""
        tokens, slots = request.predicted_tokens, request.slots
        return Backlog(
            self.prompts - 1,
            self.prompt_tokens - request.prompt_tokens,
            self.sequences - slots,
            self.foreseen - (slots if tokens is not None else 0),
            self.output_tokens - (slots * tokens if tokens is not None else 0.0),
        )

    def with_one(self, request: Request) -> "Backlog":
        """Returns the sums with one more request."""
        tokens, slots = request.predicted_tokens, request.slots
        return Backlog(
            self.prompts + 1,
            self.prompt_tokens + request.prompt_tokens,
            self.sequences + slots,
            self.foreseen + (slots if tokens is not None else 0),
            self.output_tokens + (slots * tokens if tokens is not None else 0.0),
        )

    def times(self, factor: float) -> "Backlog":
        """Returns the sums of as much of everything as this factor says, in whole requests, sequences and tokens."""
        return Backlog(
            math.ceil(self.prompts * factor),
            math.ceil(self.prompt_tokens * factor),
            math.ceil(self.sequences * factor),
            math.ceil(self.foreseen * factor),
            self.output_tokens * factor,
        )

    def at_most(self, most: "Backlog") -> "Backlog":
        """Returns the smaller one of each sum."""
        return Backlog(
            min(self.prompts, most.prompts),
            min(self.prompt_tokens, most.prompt_tokens),
            min(self.sequences, most.sequences),
            min(self.foreseen, most.foreseen),
            min(self.output_tokens, most.output_tokens),
        )

    def plus(self, other: "Backlog") -> "Backlog":
        """Returns the sums over these requests and others."""
        return Backlog(
            self.prompts + other.prompts,
            self.prompt_tokens + other.prompt_tokens,
            self.sequences + other.sequences,
            self.foreseen + other.foreseen,
            self.output_tokens + other.output_tokens,
        )


NOTHING = Backlog()


@dataclass(slots=True)
class _Sums:
    """The fields of a `Backlog`, which change with each request that comes or goes."""

    prompts: int = 0
    prompt_tokens: int = 0
    sequences: int = 0
    foreseen: int = 0
    output_tokens: float = 0.0

    def count(self, request: Request, sign: int) -> None:
        slots = sign * request.slots
        self.prompts += sign
        self.prompt_tokens += sign * request.prompt_tokens
        self.sequences += slots
        if request.predicted_tokens is not None:
            self.foreseen += slots
            self.output_tokens += slots * request.predicted_tokens

    def shown(self) -> Backlog:
        return Backlog(self.prompts, self.prompt_tokens, self.sequences, self.foreseen, self.output_tokens)


@dataclass(slots=True)
class _Class:
    """The sums over all requests of one priority, and if tenants are told apart, over those of each; `weights` are the
    tenants' weights, by their newest requests, and `weight` is the sum of them.
    """

    all: _Sums = field(default_factory=_Sums)
    tenants: dict[str, _Sums] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0


@dataclass(slots=True)
class Waiting:
    """The sums over all requests of one kind, by priority, and with `by_tenant` also by tenant. With a `class_ratio` a
    class gets this many times as much service as one whose priority is larger by 1; else a more urgent one gets all.
    `objectives` is the number of the requests that have an objective.
    """

    by_tenant: bool = False
    class_ratio: float | None = None
    objectives: int = 0
    _of: dict[int, _Class] = field(default_factory=dict)
    # ascending priorities, and the sums up to each of them behind those up to none; None: to be summed up anew
    _up_to: tuple[list[int], list[Backlog]] | None = None

    def count(self, request: Request, sign: int) -> None:
        """Adds a request (`sign` +1), or takes it away (-1)."""
        priority = request.terms.priority
        self._up_to = None
        if request.terms.has_objective:
            self.objectives += sign
        of = self._of.get(priority)
        if of is None:
            of = self._of[priority] = _Class()
        sums = of.all
        sums.count(request, sign)
        if not sums.prompts:
            # rounding errors of its sums end with it
            del self._of[priority]
        elif self.by_tenant:
            _count_own(of, request, sign)

    def until(self, priority: int) -> Backlog:
        """Returns the sums over the requests that are at least as urgent as this priority."""
        if self._up_to is None:
            # in ascending order, because sums of fractions depend on it
            ascending, sums = sorted(self._of), [NOTHING]
            for one in ascending:
                sums.append(sums[-1].plus(self._of[one].all.shown()))
            self._up_to = ascending, sums
        priorities, up_to = self._up_to
        return up_to[bisect_right(priorities, priority)]

    def before(self, request: Request, counted: bool, coming: Mapping[int, Backlog] | None = None) -> Backlog:
        """Returns what is expected to be served before a request, the last one of its tenant in its class. `counted`
        says whether the sums contain it.

        That is all of its class and of more urgent ones. With `by_tenant`, where several tenants wait in the class,
        each of them gets service by its weight until the request has its turn. So no more of the class is before it
        than its own tenant has, times the weights of all by its own. With a `class_ratio` the same holds between
        classes: of another class no more is before it than of its own and itself, times the weight of that class by the
        weight of its own, and no more than waits there or is expected to come (`coming`, by priority).
        """
        if self.class_ratio is not None:
            return self._before_by_class(request, counted, coming or {}, self.class_ratio)
        priority, tenant = request.terms.priority, request.terms.tenant
        queued = self.until(priority)
        if counted:
            queued = queued.without(request)
        of = self._of.get(priority)
        if not self.by_tenant or of is None or not of.tenants.keys() - {tenant}:
            return queued
        return self.until(priority - 1).plus(_by_shares(of, request, counted)).at_most(queued)

    def _before_by_class(
        self, request: Request, counted: bool, coming: Mapping[int, Backlog], class_ratio: float
    ) -> Backlog:
        priority, tenant = request.terms.priority, request.terms.tenant
        of, before = self._of.get(priority), NOTHING
        if of is not None:
            before = of.all.shown()
            if counted:
                before = before.without(request)
            if self.by_tenant and of.tenants.keys() - {tenant}:
                before = _by_shares(of, request, counted).at_most(before)
        own = before.plus(NOTHING.with_one(request))
        weight = class_weight(priority, class_ratio)
        # in ascending order, because sums of fractions depend on it
        for other in sorted(self._of.keys() | coming.keys()):
            if other == priority:
                continue
            waits = self._of[other].all.shown() if other in self._of else NOTHING
            waits = waits.plus(coming.get(other, NOTHING))
            before = before.plus(own.times(class_weight(other, class_ratio) / weight).at_most(waits))
        return before


def _by_shares(of: _Class, request: Request, counted: bool) -> Backlog:
    """Returns what of a class in which several tenants wait is served before a request of it, by its tenant's share."""
    tenant = request.terms.tenant
    sums, weight = of.tenants.get(tenant), of.weight
    own = NOTHING if sums is None else sums.shown()
    if counted:
        own = own.without(request)
    weight += request.terms.weight - of.weights.get(tenant, 0.0)
    return own.times(weight / request.terms.weight)


def _count_own(of: _Class, request: Request, sign: int) -> None:
    """Adds a request to the sums of its tenant, or takes it away, while others of its class are counted."""
    terms = request.terms
    tenant = terms.tenant
    own = of.tenants.get(tenant)
    if own is None:
        own = of.tenants[tenant] = _Sums()
    own.count(request, sign)
    if sign > 0:
        before = of.weights.get(tenant, 0.0)
        if before != terms.weight:
            of.weight += terms.weight - before
            of.weights[tenant] = terms.weight
    elif not own.prompts:
        del of.tenants[tenant]
        of.weight -= of.weights.pop(tenant)
