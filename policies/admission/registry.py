"""The registry maps the name of each admission policy to its class, whose fields are the policy's parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from policies.admission.base import AdmissionPolicy
from policies.admission.by_wait import ByWait
from policies.admission.open import Open
from policies.routing.params import read_endless

ADMISSION: dict[str, type[Any]] = {"open": Open, "by_wait": ByWait}
OPEN = "open"
# as `open` while no request has an objective; else what would miss its objective is refused at once, which keeps the
# goodput of an overloaded fleet (`python -m benchmarks run overload`)
DEFAULT = "by_wait"


class UnknownAdmissionPolicy(ValueError):
    """The policy's name or a parameter is unknown. The message lists the known ones."""


def admission_policy(name: str, params: Mapping[str, Any] | None = None) -> AdmissionPolicy:
    """Builds the named admission policy.

    Raises UnknownAdmissionPolicy for an unknown name or parameter, BadParameter for a value that is not allowed.
    """
    if name not in ADMISSION:
        known = ", ".join(sorted(ADMISSION))
        raise UnknownAdmissionPolicy(f"admission policy {name!r} is not known: choose one of {known}")
    kind = ADMISSION[name]
    allowed = {f.name for f in dataclasses.fields(kind) if f.name != "name"}
    unknown = sorted(set(params or {}) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed)) or "none"
        raise UnknownAdmissionPolicy(
            f"admission policy {name!r} has no parameter {unknown[0]!r}: it takes {known}"
        )
    policy: AdmissionPolicy = kind(**read_endless(kind, params or {}))
    return policy
