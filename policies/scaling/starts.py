"""How long engines take to start, and what is learned from it for the leads of a plan.

An engine starts in the five steps of DeepFlow (arXiv 2501.14417, Table 2, whose names stand in brackets below). A lead
is a quantile of what was measured, since a plan that is in time only on the mean is late every second time:

    lead = the ceil(quantile * n)-th smallest of the last n <= `kept` measured times
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from policies.routing.params import BadParameter
from policies.scaling.observation import Leads

T = TypeVar("T")

MOST_COUNTED = 8_192
"""Most engines of which it is remembered that their start counts: twice the largest bound of a group
(`actors.scaling.bounds.MOST`). Those that are connected are named at each look, so they are not forgotten first."""


@dataclass(frozen=True, slots=True)
class StartSteps:
    """Seconds of the five steps in which an engine starts."""

    reserve_s: float = 0.0
    """A place is reserved and a process made there: placement group, container, Ray's worker (Scaler-Pre)."""
    process_s: float = 0.0
    """The engine's processes start and import (TE-Pre-Load)."""
    weights_s: float = 0.0
    """Weights are loaded (TE-Load)."""
    post_load_s: float = 0.0
    """KV blocks are allocated and registered, a dummy request runs (TE-Post-Load)."""
    announce_s: float = 0.0
    """The engine is announced and connected (Scaler-Post)."""

    def __post_init__(self) -> None:
        for own in fields(self):
            value = getattr(self, own.name)
            if not (math.isfinite(value) and value >= 0.0):
                raise BadParameter(f"start steps: {own.name} is {value}: it must be a finite number >= 0")

    @property
    def total_s(self) -> float:
        """The seconds from the decision to start until the engine is warm."""
        return self.reserve_s + self.process_s + self.weights_s + self.post_load_s + self.announce_s


@dataclass(slots=True)
class LeadTimes:
    """The measured times of each way to more capacity, of which the newest `kept` count."""

    quantile: float = 0.9  # ASSUMPTION: that of the demand that serving engines carry (`joint.quantile`)
    kept: int = 64
    _starts: deque[StartSteps] = field(default_factory=deque)
    _counted: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """The engines whose start counts already, those that were named last at the end."""
    _switches: deque[float] = field(default_factory=deque)
    _activations: deque[float] = field(default_factory=deque)

    def started(self, engine: str, steps: StartSteps) -> None:
        """Takes in how an engine has started; each engine counts once."""
        if engine in self._counted:
            self._counted.move_to_end(engine)
            return
        self._counted[engine] = None
        if len(self._counted) > MOST_COUNTED:
            self._counted.popitem(last=False)
        self._add(self._starts, steps)

    def switched(self, seconds: float) -> None:
        """Takes in the time of one role switch, from the order until the router knew the new role."""
        self._add(self._switches, seconds)

    def activated(self, seconds: float) -> None:
        """Takes in the time of one activation, from the order until the router knew the new duty."""
        self._add(self._activations, seconds)

    def leads(self, prior: Leads) -> Leads:
        """Returns the learned leads; `prior` has those of ways that were not measured yet."""
        starts = [steps.total_s for steps in self._starts]
        ways = (("start_s", starts), ("switch_s", self._switches), ("activate_s", self._activations))
        return replace(prior, **{name: self._high(times) for name, times in ways if times})

    def steps(self) -> StartSteps | None:
        """Returns the quantile of each step by itself, whose sum is above the lead of a start; None before the first
        start.
        """
        if not self._starts:
            return None
        return StartSteps(
            *(self._high([getattr(s, own.name) for s in self._starts]) for own in fields(StartSteps))
        )

    def _high(self, times: Iterable[float]) -> float:
        ordered = sorted(times)
        return ordered[max(0, math.ceil(self.quantile * len(ordered)) - 1)]

    def _add(self, times: deque[T], measured: T) -> None:
        times.append(measured)
        if len(times) > self.kept:
            times.popleft()
