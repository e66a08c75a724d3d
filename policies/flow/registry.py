"""The registry maps the name of each flow policy to its class, whose fields are the policy's parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from policies.flow.base import FlowError, FlowPolicy
from policies.flow.edf import EDF
from policies.flow.fair import Fair
from policies.flow.karuna import Karuna
from policies.flow.mfs import MFS
from policies.flow.sjf import SJF

FLOW: dict[str, type[Any]] = {
    "mfs": MFS,
    "fair": Fair,
    "sjf": SJF,
    "edf": EDF,
    "karuna": Karuna,
}
DEFAULT = "mfs"


class UnknownFlowPolicy(FlowError):
    """The policy's name or a parameter is unknown. The message lists the known ones."""


def flow_policy(name: str, params: Mapping[str, Any] | None = None) -> FlowPolicy:
    """Builds the named flow policy.

    Raises UnknownFlowPolicy for an unknown name or parameter, BadParameter for a value that is not allowed.
    """
    if name not in FLOW:
        raise UnknownFlowPolicy(f"flow policy {name!r} is not known: choose one of {', '.join(sorted(FLOW))}")
    kind = FLOW[name]
    allowed = {f.name for f in dataclasses.fields(kind) if f.init and f.name != "name"}
    unknown = sorted(set(params or {}) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed)) or "none"
        raise UnknownFlowPolicy(f"flow policy {name!r} has no parameter {unknown[0]!r}: it takes {known}")
    policy: FlowPolicy = kind(**(params or {}))
    return policy


def parameters(policy: Any) -> dict[str, Any]:
    """Returns all parameters of a flow policy by name, those that were not given included."""
    names = [f.name for f in dataclasses.fields(policy) if f.init and f.name != "name"]
    return {name: getattr(policy, name) for name in names}
