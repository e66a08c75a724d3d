"""The `scaling` section of a configuration for `sluice simulate`: a fleet that changes by a policy's plans."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from benchmarks.sim import starts
from benchmarks.sim.fleet_setup import FleetSetup
from policies.scaling.base import ScalingPolicy
from policies.scaling.registry import make
from policies.scaling.starts import StartSteps

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
_SETUP: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(FleetSetup)}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Steps(_Strict):
    """The five steps of a start, as in `policies.scaling.starts.StartSteps`."""

    reserve_s: Seconds = 0.0
    process_s: Seconds = 0.0
    weights_s: Seconds = 0.0
    post_load_s: Seconds = 0.0
    announce_s: Seconds = 0.0


class Scaling(_Strict):
    """The autoscaler: a policy of `policies.scaling.registry` by name with its parameters, and how engines change.

    `start` names a start profile (`benchmarks.sim.starts`), shipped or a file, or gives the seconds of its five steps;
    the rest is as in `FleetSetup`. On a network new engines take what GPUs are free.
    """

    policy: str = "joint"
    params: dict[str, Any] = Field(default_factory=dict)
    start: str | Steps = "cold"
    warm: Annotated[int, Field(ge=0)] = 0
    activate_s: Seconds = _SETUP["activate_s"]
    switch_s: Seconds = _SETUP["switch_s"]
    drain_s: Positive = _SETUP["drain_s"]
    every_s: Positive = _SETUP["every_s"]
    window_s: Positive = _SETUP["window_s"]
    settle_s: Seconds = _SETUP["settle_s"]

    @model_validator(mode="after")
    def _policy_exists(self) -> Self:
        try:
            self.made()
        except TypeError as error:
            raise ValueError(str(error)) from error
        return self

    def made(self) -> ScalingPolicy:
        """Returns the policy. Raises BadParameter for an unknown name or a wrong parameter."""
        return make(self.policy, self.params)

    def steps(self) -> StartSteps:
        """Returns the steps of a start. Raises ProfileError, a ValueError, for a start profile that cannot be used."""
        return (
            starts.load(self.start) if isinstance(self.start, str) else StartSteps(**self.start.model_dump())
        )

    def setup(self, places: tuple[str, ...]) -> FleetSetup:
        """Returns the simulator's setup; `places` are the nodes that engines may take besides those in use."""
        return FleetSetup(
            self.made(),
            self.steps(),
            self.warm,
            self.activate_s,
            self.switch_s,
            self.drain_s,
            self.every_s,
            self.window_s,
            self.settle_s,
            places,
        )
