"""The setup of a simulated fleet that changes: how engines start, and the policy that decides how many serve.

An engine starts in the five steps of DeepFlow's Table 2 (`policies.scaling.starts`). `STARTS` has their times for the
ways of starting that Sluice knows or plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.sim import starts
from policies.scaling.base import ScalingPolicy
from policies.scaling.starts import StartSteps

__all__ = ["STARTS", "FleetSetup", "StartSteps"]


STARTS: Mapping[str, StartSteps] = MappingProxyType({name: starts.load(name) for name in starts.names()})
"""Steps by the way of starting, as the files of `benchmarks.sim.starts` have them."""


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """A fleet that changes while it serves. Its engines are all alike but for role and place.

    `policy` decides once every `every_s` seconds on an observation whose windows are `window_s` long. `warm` engines
    wait warm from the beginning. A role switch and an activation take `switch_s` and `activate_s` from the decision to
    the router's knowledge of it. An engine that stops gets no new work; streams that it still has after `drain_s` move
    to other engines as after an engine's death. Engines that are added take `places` in order, or without any a node
    of their own; without a free place a start waits.
    """

    policy: ScalingPolicy
    start: StartSteps = STARTS["cold"]
    warm: int = 0
    activate_s: float = 0.2  # ASSUMPTION: three messages, of which one waits for the engine's step
    switch_s: float = 0.2
    drain_s: float = 60.0
    every_s: float = 1.0
    window_s: float = 10.0
    settle_s: float = 5.0
    places: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("every_s", "window_s", "drain_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"fleet: {name} is {getattr(self, name)}: it must be above 0")
        for name in ("warm", "activate_s", "switch_s", "settle_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"fleet: {name} is {getattr(self, name)}: it must be >= 0")
