"""The end of a client's request, as the client saw it: told once, however many attempts and migrations it took.

A prompt with several choices that migrates goes on as one life for each choice (`policies.request.life`). All lives of
one prompt share a `Tally`, and the last one to end tells the end of all.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from policies.request.stage import Outcome
from policies.request.terms import Terms

Result = Literal["met", "ttft", "tpot", "rejected", "expired", "failed"]
"""The fate of a request's objectives: met, one of them missed, or not served."""


class RequestEnd(NamedTuple):
    """How a request went. It is a tuple, because messages carry it as an array.

    `ttft_s` is the time from the arrival to the first token and `tpot_s` the mean time of each later token of a choice;
    each is None where the client got too few tokens to tell. `output_tokens` are those of all choices and attempts.
    """

    outcome: Outcome
    request_class: str
    ttft_s: float | None
    tpot_s: float | None
    output_tokens: int

    def result(self, terms: Terms) -> Result | None:
        """Returns what became of the objectives of `terms`; None without an objective, and where the client left."""
        if self.outcome == "cancelled" or (terms.ttft_slo_s is None and terms.tpot_slo_s is None):
            return None
        if self.outcome != "finished":
            return self.outcome
        if _above(self.ttft_s, terms.ttft_slo_s):
            return "ttft"
        return "tpot" if _above(self.tpot_s, terms.tpot_slo_s) else "met"


_WORST: tuple[Outcome, ...] = ("finished", "cancelled", "expired", "rejected", "failed")
"""Outcomes of the parts of a request, from the best to the worst. The failure of one part cancels all others."""


@dataclass(slots=True)
class Tally:
    """The parts of one request that have ended, and what they sent. `open` parts are still under way."""

    request_class: str
    arrived_s: float
    choices: int
    open: int = 1
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    outcome: Outcome = "finished"

    def split(self, others: int, finished_tokens: int) -> None:
        """Notes that a part goes on with one of its choices, and `others` more parts with one each. Its choices that
        had finished sent `finished_tokens`.
        """
        self.open += others
        self.tokens += finished_tokens

    def ends(
        self, outcome: Outcome, first_s: float | None, last_s: float | None, tokens: int
    ) -> RequestEnd | None:
        """Takes in the end of one part, which sent `tokens` tokens, the first and the last at these times. Returns the
        end of the request if this was the last part, else None.
        """
        self.open -= 1
        self.outcome = max(self.outcome, outcome, key=_WORST.index)
        self.tokens += tokens
        if first_s is not None:
            self.first_s = first_s if self.first_s is None else min(self.first_s, first_s)
        if last_s is not None:
            self.last_s = last_s if self.last_s is None else max(self.last_s, last_s)
        if self.open:
            return None
        ttft_s = None if self.first_s is None else self.first_s - self.arrived_s
        return RequestEnd(self.outcome, self.request_class, ttft_s, self._tpot_s(), self.tokens)

    def _tpot_s(self) -> float | None:
        per_choice = self.tokens / self.choices
        if self.first_s is None or self.last_s is None or per_choice <= 1:
            return None
        return (self.last_s - self.first_s) / (per_choice - 1)


def _above(value_s: float | None, slo_s: float | None) -> bool:
    return value_s is not None and slo_s is not None and value_s > slo_s
