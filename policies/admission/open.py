"""Open admission takes every request, as a router without admission control does.

Requests are then bounded by the dispatcher's limits alone: a full queue (`max_queue`) and long waits
(`queue_timeout_s`). Not claimed: any objective above the capacity of the fleet.
"""

from dataclasses import dataclass
from typing import ClassVar

from policies.admission.base import ADMITTED, Case, Judgement, Outlook
from policies.routing.base import Needs


@dataclass(frozen=True, slots=True)
class Open:
    """Takes every request, whatever its objectives."""

    name: str = "open"
    paper: ClassVar[str] = "none (baseline)"
    formula: ClassVar[str] = "admit"
    needs: ClassVar[Needs] = Needs.NONE
    watches: ClassVar[bool] = False

    def judge(self, case: Case, outlook: Outlook) -> Judgement:
        return ADMITTED
