"""The registry maps the name of each fairness policy to its class, whose fields are the policy's parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from policies.fairness.base import FairnessPolicy
from policies.fairness.none import NoFairness
from policies.fairness.vtc import VirtualTokenCounter
from policies.routing.params import read_endless

FAIRNESS: dict[str, type[Any]] = {"none": NoFairness, "vtc": VirtualTokenCounter}
NONE = "none"
# as `none` where there is one tenant; where there are several each gets its share (`python -m benchmarks run fairness`)
DEFAULT = "vtc"


class UnknownFairnessPolicy(ValueError):
    """The policy's name or a parameter is unknown. The message lists the known ones."""


def fairness_policy(name: str, params: Mapping[str, Any] | None = None) -> FairnessPolicy:
    """Builds the named fairness policy.

    Raises UnknownFairnessPolicy for an unknown name or parameter, BadParameter for a value that is not allowed.
    """
    if name not in FAIRNESS:
        known = ", ".join(sorted(FAIRNESS))
        raise UnknownFairnessPolicy(f"fairness policy {name!r} is not known: choose one of {known}")
    kind = FAIRNESS[name]
    allowed = {f.name for f in dataclasses.fields(kind) if f.name != "name"}
    unknown = sorted(set(params or {}) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed)) or "none"
        raise UnknownFairnessPolicy(
            f"fairness policy {name!r} has no parameter {unknown[0]!r}: it takes {known}"
        )
    policy: FairnessPolicy = kind(**read_endless(kind, params or {}))
    return policy
