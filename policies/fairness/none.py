"""No fairness: all requests of a class are one tenant's, and are served in the order of their arrival.

Whoever sends the most gets the most. Not claimed: any share.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import Needs
from policies.state.views import Request


@dataclass(frozen=True, slots=True)
class NoFairness:
    """Serves each class in the order of arrival, whosever the requests are."""

    name: str = "none"
    paper: ClassVar[str] = "none (baseline)"
    formula: ClassVar[str] = "first come, first served"
    needs: ClassVar[Needs] = Needs.NONE
    shares: ClassVar[bool] = False

    @property
    def slack_tokens(self) -> float:
        return 0.0

    @property
    def credit_tokens(self) -> float:
        return 0.0

    @property
    def ahead_tokens(self) -> float:
        return math.inf

    @property
    def ahead_s(self) -> float:
        return math.inf

    @property
    def gang_slots(self) -> int | None:
        return None

    @property
    def class_ratio(self) -> float | None:
        return None

    def tenant(self, request: Request) -> str:
        return ""

    def cost(self, prompt_tokens: float, output_tokens: float) -> float:
        return 0.0
