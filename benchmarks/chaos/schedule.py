"""The choice of the next fault: rounds that a seed shuffles, each with every kind of fault in its number.

A kind that the application cannot bear at the moment, because it would take the last well engine of a role, keeps its
place until it can; a new round begins when all of the present one are done. So a run of N faults, where N is the length
of a round, has harmed every part in every way.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARTS = (
    "prefill",
    "decode",
    "router",
    "ingress",
    "controller",
    "proxy",
    "core",
    "worker",
    "agent",
    "coordinator",
)
ENGINES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: what is done to which part, and how often compared with others.

    It lasts a while drawn between `least_s` and `most_s`, evenly on a logarithmic scale; 0 is a fault without an end.
    """

    action: str
    part: str
    weight: float
    least_s: float = 0.0
    most_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.action} {self.part}"


def _stop(part: str, weight: float) -> Kind:
    return Kind("stop", part, weight, 2.0, 60.0)


SIM = (
    Kind("kill", "decode", 3.0),
    Kind("kill", "prefill", 3.0),
    Kind("kill", "router", 2.0),
    Kind("kill", "ingress", 1.0),
    Kind("kill", "controller", 0.5),
    Kind("kill", "proxy", 0.5),
    _stop("decode", 3.0),
    _stop("prefill", 3.0),
    _stop("router", 2.0),
    _stop("ingress", 1.0),
    _stop("controller", 0.5),
    _stop("proxy", 0.5),
    Kind("slow", "decode", 1.5, 5.0, 20.0),
    Kind("slow", "prefill", 1.5, 5.0, 20.0),
    Kind("fail", "decode", 1.5, 5.0, 20.0),
    Kind("fail", "prefill", 1.5, 5.0, 20.0),
    Kind("stall", "decode", 2.0, 5.0, 30.0),
    Kind("stall", "prefill", 2.0, 5.0, 30.0),
    Kind("memory", "decode", 0.5, 20.0, 20.0),
    Kind("memory", "prefill", 0.5, 20.0, 20.0),
    Kind("memory", "router", 0.25, 20.0, 20.0),
    Kind("poison", "decode", 0.25),
    Kind("poison", "prefill", 0.25),
)
"""The faults of an application on sim engines. ASSUMPTION: weights by how often such things are seen, kills and stops
of engines first; what is rare still comes ten times in a thousand.
"""

FLOW = (
    Kind("kill", "agent", 3.0),
    _stop("agent", 3.0),
    Kind("kill", "coordinator", 1.0),
    _stop("coordinator", 1.0),
    Kind("cut", "decode", 2.0, 5.0, 5.0),
    Kind("expire", "prefill", 2.0, 5.0, 5.0),
    Kind("swap", "prefill", 2.0, 5.0, 5.0),
)
"""The faults of flow scheduling, beside the others, where reads of KV are scheduled. Both agents may be away at once:
reads go on without permits then. Without the coordinator each orders alone. A decode engine's links are cut for 5 s; a
prefill engine's leases end at once, or its handles name the KV of other prompts. Kills of engines, which meet reads and
chunks on their way, are among the other faults.
"""

VLLM = (
    Kind("kill", "decode", 1.0),
    Kind("kill", "core", 2.0),
    Kind("kill", "router", 1.0),
    Kind("kill", "ingress", 0.5),
    Kind("kill", "controller", 0.5),
    Kind("kill", "proxy", 0.25),
    _stop("decode", 2.0),
    _stop("core", 3.0),
    _stop("router", 2.0),
    _stop("ingress", 0.5),
    Kind("slow", "core", 1.0, 5.0, 20.0),
    Kind("memory", "core", 0.5, 20.0, 20.0),
)
"""The faults of an application of one prefill and two decode engines of vLLM; `core` is the engine core of a decode
engine. The prefill engine is the only one, so it is spared.
"""

NEEDED = {"poison": 3}
"""Well engines of the role that a fault needs, where it is not two: a poisonous prompt may kill two."""

_ROLE = {"core": "decode", "worker": "decode"}


def role_of(part: str) -> str:
    """Returns the role of the engine that a part belongs to, or the part itself."""
    return _ROLE.get(part, part)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come: its kind, how long it lasts, and a number that chooses its victim."""

    kind: Kind
    seconds: float
    draw: int

    def victim(self, well: Sequence[str]) -> str:
        """Returns one of the well members of its part."""
        return sorted(well)[self.draw % len(well)]


class Schedule:
    """The faults of one run, by a seed. `whole` has the number of members of each part when all is well."""

    def __init__(self, kinds: Sequence[Kind], seed: int, whole: Mapping[str, int]) -> None:
        self._kinds, self._whole = tuple(kinds), whole
        self._rng = random.Random(f"faults {seed}")

    def next(self, well: Mapping[str, int]) -> Fault | None:
        """Draws the next fault; `well` counts the well members of each part. Returns None if no fault is possible.

        An engine's role keeps one well member, and an ingress is stopped only where another one serves. Serve's
        controller is harmed only while nothing else is missing: it is what brings dead processes back.
        """
        possible = [kind for kind in self._kinds if self._possible(kind, well)]
        if not possible:
            return None
        (kind,) = self._rng.choices(possible, [kind.weight for kind in possible])
        seconds = 0.0
        if kind.most_s:
            seconds = kind.least_s * (kind.most_s / kind.least_s) ** self._rng.random()
        return Fault(kind, seconds, self._rng.randrange(2**31))

    def _possible(self, kind: Kind, well: Mapping[str, int]) -> bool:
        role = role_of(kind.part)
        if role == "controller":
            return all(well.get(part, 0) >= number for part, number in self._whole.items())
        if role in ENGINES:
            return well.get(role, 0) >= NEEDED.get(kind.action, 2)
        if role == "ingress" and kind.action == "stop":
            return well.get(role, 0) >= 2
        return well.get(role, 0) >= 1
