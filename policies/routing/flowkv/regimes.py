"""FlowKV's three load regimes (algorithm 1, lines 13-31) are computed here. The router reports the regime of its fleet
in its metrics and status (`actors.router.fleet`), and `role_switch` acts on it. The scaling policy
`policies.scaling.rivals.regime_rule` acts on all three.

    C^p, C^d = means of the load scores of the prefill and of the decode nodes (a colocated node counts in both), each
               with the queues of its phase only
    C^p <= low_p  and C^d <= low_d   normal
    C^p <= high_p and C^d <= high_d  imbalanced; idle nodes = {i : C_i < idle} may switch role
    else                             extreme, once it has lasted `extreme_after_s`; until then imbalanced
Deviations: the paper mentions the duration only in its text ("if their duration exceeds a threshold"). Here the
caller passes `over_since_s` from one assessment to the next. A role without any node is ignored. The paper's text calls
a low load extreme, too, in which it scales down, but its algorithm has no condition for that: here it is normal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from policies.routing.flowkv.load_score import LoadWeights, load_score
from policies.routing.params import Number, check, need
from policies.state.views import Health, Role, Snapshot, WorkerId


class Regime(StrEnum):
    """FlowKV's three load scenarios."""

    NORMAL = "normal"
    IMBALANCED = "imbalanced"
    EXTREME = "extreme"


@dataclass(frozen=True, slots=True)
class RegimeThresholds:
    """The paper's epsilons, for which it prints no values, in units of the load score; times are in s. Raises
    BadParameter for a value out of range, or a high threshold below its low one.
    """

    prefill_low: Annotated[float, Number(low=0.0)] = 0.5  # ASSUMPTION: all defaults
    prefill_high: float = 0.9
    decode_low: Annotated[float, Number(low=0.0)] = 0.5
    decode_high: float = 0.9
    idle: Annotated[float, Number(low=0.0)] = 0.2
    extreme_after_s: Annotated[float, Number(low=0.0)] = 10.0
    name: ClassVar[str] = "regimes"

    def __post_init__(self) -> None:
        check(self)
        need(self.name, "prefill_high", self.prefill_high, Number(low=self.prefill_low))
        need(self.name, "decode_high", self.decode_high, Number(low=self.decode_low))


@dataclass(frozen=True, slots=True)
class Assessment:
    """The present regime and the numbers from which it follows. `over_since_s` is an argument of the next
    assessment.
    """

    regime: Regime
    prefill_mean: float | None
    decode_mean: float | None
    idle: tuple[WorkerId, ...]
    over_since_s: float | None


def assess(
    prefill: Mapping[WorkerId, float],
    decode: Mapping[WorkerId, float],
    thresholds: RegimeThresholds,
    now_s: float,
    over_since_s: float | None,
) -> Assessment:
    """Returns the regime for the load scores of the nodes of each role. `over_since_s` is the time since which the
    mean of a role has been above its high threshold, or None.
    """
    prefill_mean, decode_mean = _mean(prefill), _mean(decode)
    over = _above(prefill_mean, thresholds.prefill_high) or _above(decode_mean, thresholds.decode_high)
    busy = _above(prefill_mean, thresholds.prefill_low) or _above(decode_mean, thresholds.decode_low)
    since_s = (over_since_s if over_since_s is not None else now_s) if over else None
    if since_s is not None and now_s - since_s >= thresholds.extreme_after_s:
        regime = Regime.EXTREME
    else:
        regime = Regime.IMBALANCED if busy else Regime.NORMAL
    scores = {**prefill, **decode}
    idle = tuple(sorted(worker for worker, score in scores.items() if score < thresholds.idle))
    return Assessment(regime, prefill_mean, decode_mean, idle, since_s)


@dataclass(slots=True)
class RegimeWatch:
    """The regime of one fleet over time: it remembers since when a role has been above its high threshold."""

    thresholds: RegimeThresholds = field(default_factory=RegimeThresholds)
    prefill_weights: LoadWeights = field(default_factory=LoadWeights)
    decode_weights: LoadWeights = field(default_factory=LoadWeights)
    over_since_s: float | None = None

    def look(self, snapshot: Snapshot) -> Assessment:
        """Returns the regime at the time of `snapshot`, which must not lie before that of the last call."""
        scores = role_scores(snapshot, self.prefill_weights, self.decode_weights)
        assessment = assess(*scores, self.thresholds, snapshot.now_s, self.over_since_s)
        self.over_since_s = assessment.over_since_s
        return assessment


def role_scores(
    snapshot: Snapshot, prefill_weights: LoadWeights, decode_weights: LoadWeights
) -> tuple[dict[WorkerId, float], dict[WorkerId, float]]:
    """Returns the load scores of the ready prefill nodes and of the ready decode nodes, by the weights of the role.
    A colocated node is in both. A node's queues are those of the role's phase: an engine that was lent to prefill with
    30 requests that it decodes, and has no prompt to compute, has no queue as a prefill node.
    """
    ready = [worker for worker in snapshot.workers.values() if worker.health is Health.READY]
    prefill = {
        w.id: load_score(w, prefill_weights, Role.PREFILL)[0] for w in ready if w.role is not Role.DECODE
    }
    decode = {
        w.id: load_score(w, decode_weights, Role.DECODE)[0] for w in ready if w.role is not Role.PREFILL
    }
    return prefill, decode


def _mean(scores: Mapping[WorkerId, float]) -> float | None:
    return sum(scores.values()) / len(scores) if scores else None


def _above(mean: float | None, threshold: float) -> bool:
    return mean is not None and mean > threshold
