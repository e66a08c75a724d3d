"""The choice of the next fault: rounds that a seed shuffles, each with every kind of fault in its number.

A kind that the application cannot bear at the moment, because it would take the last well engine of a role, keeps its
place until it can. When none that is left can be borne, a new round begins behind them, and they still go first; this
ends once a whole round's number of faults has to wait. So a run does not stand still while one part is away for long,
and without such times N faults, where N is the length of a round, harm every part in every way.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

ENGINES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: what is done to which part, and how many times in a round.

    It lasts a while drawn between `least_s` and `most_s`, evenly on a logarithmic scale; 0 is a fault without an end.
    """

    action: str
    part: str
    times: int = 1
    least_s: float = 0.0
    most_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.action} {self.part}"


def _stop(part: str, times: int = 1) -> Kind:
    return Kind("stop", part, times, 2.0, 60.0)


SIM = (
    Kind("kill", "decode", 3),
    Kind("kill", "prefill", 3),
    Kind("kill", "router", 2),
    Kind("kill", "ingress"),
    Kind("kill", "controller"),
    Kind("kill", "proxy"),
    _stop("decode", 3),
    _stop("prefill", 3),
    _stop("router", 2),
    _stop("ingress"),
    _stop("controller"),
    _stop("proxy"),
    Kind("slow", "decode", 2, 5.0, 20.0),
    Kind("slow", "prefill", 2, 5.0, 20.0),
    Kind("fail", "decode", 2, 5.0, 20.0),
    Kind("fail", "prefill", 2, 5.0, 20.0),
    Kind("stall", "decode", 2, 5.0, 30.0),
    Kind("stall", "prefill", 2, 5.0, 30.0),
    Kind("poison", "decode"),
    Kind("poison", "prefill"),
)
"""The faults of an application on sim engines, 36 of a round. ASSUMPTION: numbers by how often such things are seen,
kills and stops of engines first.
"""

BARE = (
    Kind("memory", "decode", 1, 20.0, 20.0),
    Kind("memory", "prefill", 1, 20.0, 20.0),
    Kind("memory", "router", 1, 20.0, 20.0),
    Kind("partition", "decode", 2, 2.0, 60.0),
    Kind("partition", "prefill", 1, 2.0, 60.0),
    Kind("partition", "ingress", 1, 2.0, 60.0),
)
"""The faults of an application without Ray, beside the others. Its processes obey orders about connections, and a lack
of memory costs none but the one that has it: under Ray it costs the node, because memory that the node's object store
shares with its workers is not intact after a worker has died so, and Ray's raylet dies at the next object.
"""

FLOW = (
    Kind("kill", "agent", 3),
    _stop("agent", 3),
    Kind("kill", "coordinator"),
    _stop("coordinator"),
)
"""The faults of flow scheduling, beside the others, where reads of KV are scheduled. Both agents may be away at once:
reads go on without permits then. Without the coordinator each orders alone. Kills of engines, which meet reads and
chunks on their way, are among the other faults.
"""

READS = (
    Kind("cut", "decode", 2, 5.0, 5.0),
    Kind("expire", "prefill", 2, 5.0, 5.0),
    Kind("swap", "prefill", 2, 5.0, 5.0),
)
"""The faults of reads of KV between sim engines, beside the others, whether or not reads are scheduled. A decode
engine's links are cut for 5 s; a prefill engine's leases end at once, or its handles name the KV of other prompts.
"""

LENDING = (
    Kind("kill", "lender", 3),
    _stop("lender", 2),
    Kind("expire", "lender", 2, 15.0, 15.0),
    Kind("swap", "lender", 2, 15.0, 15.0),
    Kind("kill", "borrower"),
    Kind("cut", "borrower", 2, 5.0, 5.0),
)
"""The faults in the middle of a loan, beside the others, where prefixes are lent. A `lender` is an engine of any role
that lends at the moment, and a `borrower` a prefill engine to which it does (`loans.at_loans`). While nothing is lent
none of these faults is possible: each is awaited for a while (`loans.AWAITED_S`), then others go before it.
Leases that end and handles that are swapped last longer than at other engines, so that they meet loans.
"""

VLLM = (
    Kind("kill", "decode"),
    Kind("kill", "core", 2),
    Kind("kill", "router"),
    Kind("kill", "ingress"),
    Kind("kill", "controller"),
    Kind("kill", "proxy"),
    _stop("decode", 2),
    _stop("core", 3),
    _stop("router", 2),
    _stop("ingress"),
    Kind("slow", "core", 1, 5.0, 20.0),
    Kind("memory", "core", 1, 20.0, 20.0),
)
"""The faults of an application of one prefill and two decode engines of vLLM, a round of 17; `core` is the engine core
of a decode engine. The prefill engine is the only one, so it is spared.
"""

GCS = Kind("kill", "gcs", 2, 2.0, 75.0)
"""The loss of Ray's control process, which a supervisor starts again after a while. Ray's own limit is 60 s."""

SCALING = (
    Kind("kill", "autoscaler", 2),
    _stop("autoscaler"),
    Kind("kill", "warm", 2),
    _stop("warm"),
    Kind("kill", "starting", 2),
    Kind("kill", "draining"),
)
"""The faults of an application with an autoscaler, beside the others: of itself, and of engines that do not serve, of
which none may be there at the moment. Few are of the autoscaler, since without it and without the router, which is
harmed four times a round, no order is taken.
"""

OTHERS = {
    "decode": ("router", "ingress", "prefill"),
    "prefill": ("router", "ingress"),
    "ingress": ("router",),
}
"""The parts from which a partition cuts off a part."""

NEEDED = {"poison": 3}
"""Well engines of the role that a fault needs, where it is not two: a poisonous prompt may kill two."""

_ROLE = {"core": "decode", "worker": "decode"}


def role_of(part: str) -> str:
    """Returns the role of the engine that a part belongs to, or the part itself."""
    return _ROLE.get(part, part)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come: its kind, how long it lasts, and a number that chooses its victim, or both of a partition."""

    kind: Kind
    seconds: float
    draw: int

    def victim(self, well: Sequence[str]) -> str:
        """Returns one of the well members of its part."""
        return sorted(well)[self.draw % len(well)]

    def other(self, well: Sequence[str]) -> str:
        """Returns one of the members from which a partition cuts the victim off."""
        return sorted(well)[(self.draw >> 10) % len(well)]


class Schedule:
    """The faults of one run, by a seed. `whole` has the number of members of each part when all is well."""

    def __init__(self, kinds: Sequence[Kind], seed: int, whole: Mapping[str, int]) -> None:
        self._kinds, self._whole = tuple(kinds), whole
        self._rng = random.Random(f"faults {seed}")
        self._round: list[Kind] = []
        """The faults that are left, those that are owed the longest first."""
        self._length = sum(kind.times for kind in self._kinds)

    def next(self, well: Mapping[str, int], awaited: Collection[str] = ()) -> Fault | None:
        """Returns the next fault that is possible; `well` counts the well members of each part. Returns None if none
        is, or if it is the turn of one whose part is `awaited`, because it comes and goes.

        An engine's role keeps one well member, and an ingress is stopped only where another one serves. Serve's
        controller is harmed only while nothing else is missing: it is what brings dead processes back.
        """
        kind = self._first_possible(well, awaited)
        if kind is None and len(self._round) < self._length:
            begun = [kind for kind in self._kinds for _ in range(kind.times)]
            self._rng.shuffle(begun)
            self._round += begun
            kind = self._first_possible(well, awaited)
        if kind is None or not self._possible(kind, well):
            return None
        self._round.remove(kind)
        seconds = 0.0
        if kind.most_s:
            seconds = kind.least_s * (kind.most_s / kind.least_s) ** self._rng.random()
        return Fault(kind, seconds, self._rng.randrange(2**31))

    def _first_possible(self, well: Mapping[str, int], awaited: Collection[str]) -> Kind | None:
        """Returns the first kind that is possible or awaited."""
        found = (kind for kind in self._round if kind.part in awaited or self._possible(kind, well))
        return next(found, None)

    def _possible(self, kind: Kind, well: Mapping[str, int]) -> bool:
        role = role_of(kind.part)
        if not well.get(kind.part):
            return False
        if role == "controller":
            return all(well.get(part, 0) >= number for part, number in self._whole.items())
        if role in ENGINES:
            return well.get(role, 0) >= NEEDED.get(kind.action, 2)
        if role == "ingress" and kind.action == "stop":
            return well.get(role, 0) >= 2
        return kind.action != "partition" or any(well.get(part) for part in OTHERS[kind.part])
