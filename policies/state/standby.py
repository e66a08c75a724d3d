"""Whether engines that are not there come when a request arrives: the phases of a fleet that may sleep.

    awake  ->  asleep     the scaling policy has let the last engine that decodes go, because nothing came for a while
    asleep ->  waking     a request came: engines are started
    waking ->  awake      an engine that decodes serves
    waking ->  failed     none does after `wake_limit_s`; it may come yet (-> awake), or sleep again (-> asleep)

An autoscaler tells the phase (`policies.scaling.sleep`). Whoever waits for an engine reads it: in the phases ASLEEP and
WAKING a request waits for one, for `wake_limit_s` at most; in FAILED it is refused with the reason.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from policies.state.views import Role


class Phase(StrEnum):
    """The phases of a fleet. A fleet that never sleeps is always AWAKE, whether it has engines or not."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"


class Abilities(NamedTuple):
    """The abilities of a fleet's engines, remembered while there are none: the smallest context of all, in tokens, and
    the features of those that decode.
    """

    context_tokens: int
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Standby:
    """The phase of a fleet. `roles` are those that its engines have when it is awake, `wake_limit_s` is the longest
    time that a wake may take, in seconds, and `reason` says why the last one failed ("" unless the phase is FAILED).
    """

    phase: Phase = Phase.AWAKE
    roles: tuple[Role, ...] = ()
    wake_limit_s: float = 0.0
    reason: str = ""

    @property
    def wakes(self) -> bool:
        """Whether requests wait for an engine that comes because of them."""
        return self.phase in (Phase.ASLEEP, Phase.WAKING)


AWAKE = Standby()
"""The standby of a fleet of which nobody has said anything."""
