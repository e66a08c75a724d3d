"""The evidence that requests of a class are late too often: Page's cumulative sum over the counts of late requests.

    S = max(0, S + late - k judged),  k = a (t - 1) / ln t        proven: S ln t > ln(odds)

`a` is the share of late requests that the objective allows, t a is the share that shall be found, and S ln t is the log
of how much likelier the counts since the sum was last 0 are with t a than with a (Page 1954, for Poisson counts). So a
few late requests among many in time prove nothing, however few requests a window has, and the sum forgets them; a share
that stays above k is found at last, however little it is above it.

Not claimed: that late requests are independent of one another. A queue makes several of them late at once, and a large
one proves what chance alone would not bring.
"""

import math
from dataclasses import dataclass

# ASSUMPTION: the share that shall be found, in times of the allowed one.
TIMES = 2.0
# ASSUMPTION: the odds from which lateness is no chance, as for a burst (`Joint.burst_deviations`).
ODDS = 1e6
PROVEN = math.log(ODDS) / math.log(TIMES)
"""The surplus of late requests from which lateness is proven: 19.9."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """The evidence against the class `name`: the `surplus` S, and the `late` requests and all `judged` ones since S was
    last 0.
    """

    name: str
    surplus: float = 0.0
    late: int = 0
    judged: int = 0

    def after(self, late: int, judged: int, allowed: float) -> "Lateness":
        """Returns the evidence after `judged` more requests, of which `late` were late; the share `allowed` may be."""
        surplus = self.surplus + late - judged * allowed * (TIMES - 1.0) / math.log(TIMES)
        if surplus <= 0.0:
            return Lateness(self.name)
        return Lateness(self.name, surplus, self.late + late, self.judged + judged)

    @property
    def proven(self) -> bool:
        """Whether more requests are late than are allowed."""
        return self.surplus > PROVEN

    @property
    def share(self) -> float:
        """The share of late requests among those that the sum is about; 0 without any."""
        return self.late / self.judged if self.judged else 0.0
