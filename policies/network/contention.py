"""The contention of our own transfers, learnt from how long they took: the slowdown of a transfer by the number of
others in flight.

    slowdown y = (seconds - L[tau]) * B[tau] (1 - c[tau]) / bytes       1 for a transfer that is alone on its path
    y ~ level[tau] + slopes[tau] . counts                               `Curve`; counts are those of `InFlight.counts`
    minimise  sum (y - level - slopes . counts)^2 + PRIOR ((level - 1)^2 + slopes^2),  level >= 1, slopes >= 0

The sum is over the transfers of the tier that ended in the last `FORGET_S`. Without any, the level is 1 and the slopes
are 0: a transfer is alone, as NetKV's Topo-Only has it. NetKV's own form (III-C, equation 4) is level 1 and slope 1 on
the sender's transfers of the tier, which is the truth only where they all leave by one link that carries one of them.

FORMS, the counts on which the slowdown may depend; all are taken when a transfer is decided, without itself:
    own     transfers of its sender on its tier (NetKV's n; 1 / slope are the uplinks, learnt)
    fleet   transfers of all senders on its tier
    ends    transfers that leave its sender, and transfers that enter its receiver, on any tier
    shared  as fleet, with one level for all tiers (`fit_shared`)

A level is what a transfer costs with no other of ours in flight: traffic of others, and paths that happen to meet. With
a level of each tier, one on which nothing has ended for a minute counts as free of both, and looks faster than the tier
that is in use, whose jams are known. With "shared" the level is every tier's, so tiers differ only by what our own
transfers cost there, which is what self-contention means.

B (1 - c) is what others leave of the tier; our own transfers must not have a part in it (`own_transfers`).

Not claimed: links that a form's counts do not tell apart; transfers that come later, except by the level; a jam that
is new, because a transfer tells of its slowdown only when it has ended. ASSUMPTION: a decided transfer begins at once.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.record import record

SHARED = "shared"
"""The form in which all tiers have one level."""
COUNTS = {
    "own": ("in_flight",),
    "fleet": ("in_flight",),
    "ends": ("leaving", "entering"),
    SHARED: ("in_flight",),
}
"""The names of each form's counts."""
FORMS = tuple(COUNTS)
PRIOR = 8.0  # ASSUMPTION
"""Number of transfers that the prior counts as."""
FORGET_S = 60.0
"""Age in seconds at which a transfer no longer counts, as in `EstimatorConfig`. A tier that is avoided is then tried
again.
"""
WINDOW = 256
"""Most transfers that count for a tier; a bound on the work of a refresh."""
SWEEPS = 50
"""Rounds of coordinate descent; three coefficients settle within some twenty."""
SHARED_SWEEPS = 400
"""Rounds of coordinate descent of `fit_shared`. A round takes a few operations a tier, and with counts that hardly vary
level and slopes settle slowly.
"""
MOST_OPEN = 16_384
"""Most transfers whose end is not known: a bound in case messages are lost, far above any number in flight."""


@record
class Curve:
    """The slowdown of a tier's transfers: `level` with nothing else in flight, and what each count adds to it.

    It was learnt from `transfers` that have ended; 0 where the record is older than the field.
    """

    level: float
    slopes: tuple[float, ...]
    transfers: int = 0

    def slowdown(self, counts: Sequence[float]) -> float:
        """Returns the expected time of a transfer over its time alone, with `counts` others in flight."""
        return self.level + sum(slope * count for slope, count in zip(self.slopes, counts, strict=True))


Contention = Mapping[str, Mapping[int, Curve]]
"""The curves by form and tier; a tier of which nothing is known is missing."""


@dataclass(slots=True)
class InFlight:
    """Our transfers in flight, counted by what they may meet on."""

    by_sender_tier: Counter[tuple[str, int]] = field(default_factory=Counter)
    by_tier: Counter[int] = field(default_factory=Counter)
    by_sender: Counter[str] = field(default_factory=Counter)
    by_receiver: Counter[str] = field(default_factory=Counter)

    def add(self, sender: str, receiver: str, tier: int, flows: int) -> None:
        """Counts `flows` more transfers; fewer where `flows` is below 0."""
        _count(self.by_sender_tier, (sender, tier), flows)
        _count(self.by_tier, tier, flows)
        _count(self.by_sender, sender, flows)
        _count(self.by_receiver, receiver, flows)

    def counts(self, form: str, sender: str, receiver: str, tier: int) -> tuple[int, ...]:
        """Returns the counts on which the slowdown of one more transfer depends by `form`."""
        if form == "own":
            return (self.by_sender_tier[sender, tier],)
        if form in ("fleet", SHARED):
            return (self.by_tier[tier],)
        if form == "ends":
            return self.by_sender[sender], self.by_receiver[receiver]
        raise ValueError(f"contention has no form {form!r}; there are {', '.join(FORMS)}")


def _count(counts: Counter[Any], key: object, flows: int) -> None:
    """Adds `flows` to a count. A count of 0 is not kept, because workers come and go."""
    counts[key] += flows
    if not counts[key]:
        del counts[key]


@record
class _Begun:
    """A transfer whose end is not known, with the counts of each form when it began."""

    sender: str
    receiver: str
    tier: int
    bytes_per_s: float
    latency_s: float
    counts: tuple[tuple[int, ...], ...]


@record
class _Sample:
    """A transfer that has ended: its slowdown, and the counts of each form when it began."""

    at_s: float
    slowdown: float
    counts: tuple[tuple[int, ...], ...]


class ContentionEstimator:
    """Learns the curves of all forms. Its caller reports each transfer by `begun`, and its end by `ended` or
    `dropped`; by `stopped` before these where it hears later how long the transfer took.

    A slowdown above `most_slowdown` counts as that.
    """

    def __init__(self, most_slowdown: float = math.inf) -> None:
        self._most_slowdown = most_slowdown
        self._open: dict[str, _Begun] = {}
        self._stopped: dict[str, _Begun] = {}
        self._in_flight = InFlight()
        self._samples: dict[int, deque[_Sample]] = {}

    def begun(
        self, attempt_id: str, sender: str, receiver: str, tier: int, bytes_per_s: float, latency_s: float
    ) -> None:
        """Notes a transfer between two workers, whose tier has `bytes_per_s` left by others than us."""
        self.dropped(attempt_id)
        if len(self._open) + len(self._stopped) >= MOST_OPEN:
            self.dropped(next(iter(self._stopped or self._open)))
        counts = tuple(self._in_flight.counts(form, sender, receiver, tier) for form in FORMS)
        self._open[attempt_id] = _Begun(sender, receiver, tier, bytes_per_s, latency_s, counts)
        self._in_flight.add(sender, receiver, tier, 1)

    def stopped(self, attempt_id: str) -> None:
        """Notes that a transfer is no longer in flight, while `ended` may still tell how long it took. Unknown ids are
        no error.
        """
        one = self._open.pop(attempt_id, None)
        if one is not None:
            self._in_flight.add(one.sender, one.receiver, one.tier, -1)
            self._stopped[attempt_id] = one

    def dropped(self, attempt_id: str) -> None:
        """Forgets a transfer that did not arrive. Unknown ids are no error."""
        self.stopped(attempt_id)
        self._stopped.pop(attempt_id, None)

    def ended(self, attempt_id: str, n_bytes: int, seconds: float, now_s: float) -> None:
        """Notes that a transfer has arrived after `seconds`. One that moved nothing, and an unknown one, teach
        nothing.
        """
        self.stopped(attempt_id)
        one = self._stopped.pop(attempt_id, None)
        if one is None or n_bytes <= 0:
            return
        slowdown = (seconds - one.latency_s) * one.bytes_per_s / n_bytes
        slowdown = min(self._most_slowdown, max(1.0, slowdown))
        samples = self._samples.setdefault(one.tier, deque(maxlen=WINDOW))
        samples.append(_Sample(now_s, slowdown, one.counts))

    def curves(self, now_s: float) -> Contention:
        """Returns the curves by the transfers that ended in the last `FORGET_S` before `now_s`."""
        for tier, samples in list(self._samples.items()):
            while samples and now_s - samples[0].at_s > FORGET_S:
                samples.popleft()
            if not samples:
                del self._samples[tier]
        found: dict[str, dict[int, Curve]] = {}
        for i, form in enumerate(FORMS):
            seen = {
                tier: ([s.counts[i] for s in samples], [s.slowdown for s in samples])
                for tier, samples in self._samples.items()
            }
            found[form] = (
                fit_shared(seen)
                if form == SHARED
                else {tier: fit(counts, slowdowns) for tier, (counts, slowdowns) in seen.items()}
            )
        return found


def fit(counts: Sequence[Sequence[float]], slowdowns: Sequence[float]) -> Curve:
    """Returns the curve of least squares with the prior (module docstring). There must be one slowdown at least."""
    rows = [(1.0, *row) for row in counts]
    size = len(rows[0])
    gram = [[sum(row[j] * row[k] for row in rows) for k in range(size)] for j in range(size)]
    right = [sum(row[j] * y for row, y in zip(rows, slowdowns, strict=True)) for j in range(size)]
    # The prior of each coefficient is also its least value.
    prior = [1.0] + [0.0] * (size - 1)
    found = list(prior)
    for _ in range(SWEEPS):
        for j in range(size):
            others = sum(gram[j][k] * found[k] for k in range(size) if k != j)
            found[j] = max(prior[j], (right[j] - others + PRIOR * prior[j]) / (gram[j][j] + PRIOR))
    return Curve(found[0], tuple(found[1:]), len(rows))


def fit_shared(seen: Mapping[int, tuple[Sequence[Sequence[float]], Sequence[float]]]) -> dict[int, Curve]:
    """Returns the curve of each tier from its (counts, slowdowns), of one count each: one level for all tiers, and a
    slope for each.

        minimise  sum over tiers (y - level - slope[tier] count)^2 + PRIOR ((level - 1)^2 + sum slope^2)
    """
    transfers = sum(len(slowdowns) for _, slowdowns in seen.values())
    slowness = sum(sum(slowdowns) for _, slowdowns in seen.values())
    # by tier: the sums of the counts, of their squares, and of their products with the slowdowns
    sums: dict[int, tuple[float, float, float]] = {}
    for tier, (counts, slowdowns) in seen.items():
        flying = [count for (count,) in counts]
        products = sum(n * y for n, y in zip(flying, slowdowns, strict=True))
        sums[tier] = (sum(flying), sum(n * n for n in flying), products)
    level, slopes = 1.0, dict.fromkeys(seen, 0.0)
    for _ in range(SHARED_SWEEPS):
        rest = slowness - sum(slopes[tier] * flown for tier, (flown, _, _) in sums.items())
        level = max(1.0, (rest + PRIOR) / (transfers + PRIOR))
        for tier, (flown, squares, products) in sums.items():
            slopes[tier] = max(0.0, (products - level * flown) / (squares + PRIOR))
    return {tier: Curve(level, (slopes[tier],), len(slowdowns)) for tier, (_, slowdowns) in seen.items()}
