"""Sums over requests that wait, by priority, so that the work before a request is known without looking at each."""

from dataclasses import dataclass, field

from policies.record import record
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
        return _changed(self, request, -1)


NOTHING = Backlog()


def _changed(sums: Backlog, request: Request, sign: int) -> Backlog:
    tokens, foreseen = request.predicted_tokens, request.predicted_tokens is not None
    return Backlog(
        sums.prompts + sign,
        sums.prompt_tokens + sign * request.prompt_tokens,
        sums.sequences + sign * request.slots,
        sums.foreseen + (sign * request.slots if foreseen else 0),
        sums.output_tokens + (sign * request.slots * tokens if tokens is not None else 0.0),
    )


@dataclass(slots=True)
class Waiting:
    """The sums over all requests of one kind, by priority."""

    _of: dict[int, Backlog] = field(default_factory=dict)

    def count(self, request: Request, sign: int) -> None:
        """Adds a request (`sign` +1), or takes it away (-1)."""
        priority = request.terms.priority
        sums = _changed(self._of.get(priority, NOTHING), request, sign)
        if sums.prompts:
            self._of[priority] = sums
        else:
            del self._of[priority]

    def until(self, priority: int) -> Backlog:
        """Returns the sums over the requests that are at least as urgent as this priority."""
        # in ascending order, because sums of fractions depend on it
        some = [self._of[one] for one in sorted(self._of) if one <= priority]
        if len(some) == 1:
            return some[0]
        return Backlog(
            sum(one.prompts for one in some),
            sum(one.prompt_tokens for one in some),
            sum(one.sequences for one in some),
            sum(one.foreseen for one in some),
            sum(one.output_tokens for one in some),
        )
