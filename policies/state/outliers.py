"""Outlier detection: workers that fail or are slow are quarantined, so that they get no new work but probes.

The terms are those of Envoy's outlier detection and of a circuit breaker. A quarantined worker (Envoy: an ejected host)
gets nothing until its back-off is over, and then one request at a time as a probe (half-open). A probe that succeeds
ends the quarantine; one that fails doubles the back-off.

    failure rate   r <- (1 - a) r + a w     w = 1 for a failure of its own, w = SHARED where its partner may be at fault
                   r <- (1 - a) r           for a success
    slow           mean of ln x > ln slow_factor + median of these means in the tier, for a figure x of `Figure`
    back-off       base_s * 2^(times in a row - 1), at most max_s

The failure rate is an exponential mean and no count of failures in a row, because a worker that fails every other
request fails too many and never many in a row. With a = 0.3, two failures in a row of a worker that was well reach the
default rate of 0.5, and four shared ones do. The means of logarithms hardly move with one sample of any size, and the
median of a tier does not move with a minority of bad workers.

A tier is the READY workers of one role and group. At most `max_share` of it is quarantined, and at least one worker is
not. Where more are bad, the least bad serve: a worse one takes the place of a quarantined one whose back-off is over.

Not claimed: that outlier detection knows which of two partners is at fault. A failed hand-over counts against both
ends; the one that is well succeeds elsewhere, and its rate falls.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from policies.state.charges import Load
from policies.state.standing import WEIGHT, Figure, Standing
from policies.state.views import Health, Quarantine, RequestId, Role, WorkerId

SHARED = 0.7  # ASSUMPTION: four such failures in a row are needed where two of a worker's own are
"""Failure w of each of two workers of which either may be at fault."""

SAMPLES = 5  # ASSUMPTION
"""Fewest samples of a figure from which a worker is compared with its tier."""

COMPARED = 3
"""Fewest workers of a tier with enough samples. Of two workers, the median could not say which one is odd."""

COMPARE_S = 1.0
"""Shortest time between two comparisons in seconds, because ticks are more frequent."""

BLAMELESS = frozenset({
    "bad_request", "bad_output", "deadline", "cancelled", "draining", "quarantined", "pool_timeout", "not_resumable",
})  # fmt: skip
"""Codes of failures that say nothing about a worker, because the request, the client, a planned end, a lack of room or
its quarantine itself is the cause. What a model puts out under a client's grammar or tools is the request's matter.
"""

OF_BOTH_ENDS = frozenset({"kv_load", "unknown_handle"})
"""Codes of failed hand-overs; the worker that lends the KV may be the cause as well as the one that reads it."""

OF_WAITING = OF_BOTH_ENDS | {"stalled"}
"""Codes of failures that say nothing where a worker had no room: the request waited inside the engine until its KV's
lease or its ingress's patience ended. Overload must not take workers away.
"""

FAILING = "failing"
"""Reason of a quarantine because of failures; the other reasons are the values of `Figure`."""


@dataclass(frozen=True, slots=True)
class OutlierLimits:
    """The limits of outlier detection; `DispatchConfig` gives their ranges and defaults."""

    failure_rate: float = 0.5
    slow_factor: float = 4.0
    base_s: float = 2.0
    max_s: float = 60.0
    max_share: float = 0.8


class Outliers:
    """The outlier detection of one cluster. It changes the standings in `loads`, and adds the workers whose quarantine
    begins, changes or ends to `dirty`.

    `version` grows when a quarantine begins or ends. `quarantines` counts those that began, by reason.
    """

    def __init__(self, loads: dict[WorkerId, Load], dirty: set[WorkerId]) -> None:
        self.limits = OutlierLimits()
        self.quarantined: dict[WorkerId, Standing] = {}
        self.version = 0
        self.quarantines: dict[str, int] = {}
        self.probes_failed = 0
        self._loads, self._dirty = loads, dirty
        self._compared_s = -math.inf

    # ------------------------------------------------------------------------------------------------- outcomes

    def failed(self, worker: WorkerId, attempt_id: RequestId, weight: float, now_s: float) -> None:
        """Counts a failure of weight w against a worker, and quarantines it where its failure rate is too high."""
        load = self._loads.get(worker)
        if load is None:
            return
        standing = load.standing
        standing.failure_rate += WEIGHT * (weight - standing.failure_rate)
        if standing.quarantine is not None:
            if standing.probe == attempt_id:
                self._again(standing, now_s)
        elif standing.failure_rate >= self.limits.failure_rate:
            self._quarantine(load, FAILING, now_s)

    def succeeded(self, worker: WorkerId | None, attempt_id: RequestId, now_s: float) -> None:
        """Counts a success of a worker. That of its probe ends a quarantine for failures."""
        load = self._loads.get(worker) if worker is not None else None
        if load is None:
            return
        standing = load.standing
        standing.failure_rate *= 1 - WEIGHT
        if standing.quarantine is None or standing.probe != attempt_id:
            return
        if standing.quarantine.reason == FAILING:
            self._release(standing, now_s)
        else:
            standing.look(load.generated_tokens, load.computing, now_s, of_probe=True)
            self._judge(load, now_s)

    def works(self, worker: WorkerId, now_s: float) -> None:
        """Ends the quarantine of a failing worker whose probe has come far enough, before the probe itself ends."""
        standing = self.quarantined[worker]
        if standing.quarantine is not None and standing.quarantine.reason == FAILING:
            self._release(standing, now_s)

    def compare(self, now_s: float) -> None:
        """Looks at the work of every worker, quarantines the slow ones of each tier, and judges the probes of those
        that were slow. Calls that follow within `COMPARE_S` do nothing.
        """
        if now_s - self._compared_s < COMPARE_S:
            return
        self._compared_s = now_s
        tiers: dict[tuple[Role, str], list[Load]] = {}
        for load in self._loads.values():
            load.standing.look(load.generated_tokens, load.computing, now_s)
            if load.health is Health.READY:
                tiers.setdefault((load.up.role, load.up.group), []).append(load)
        for tier in tiers.values():
            for figure in Figure:
                limit = self._slow_from(tier, figure, COMPARED)
                if limit is None:
                    continue
                for load in tier:
                    speed = load.standing.speeds[figure]
                    if (
                        load.standing.quarantine is None
                        and speed.samples >= SAMPLES
                        and speed.mean_log > limit
                    ):
                        self._quarantine(load, figure.value, now_s)
        for worker in sorted(self.quarantined):
            if self.quarantined[worker].probe is not None:
                self._judge(self._loads[worker], now_s)

    # --------------------------------------------------------------------------------------------------- probes

    def probe(self, worker: WorkerId, attempt_id: RequestId, now_s: float) -> None:
        """Notes that a request was sent to a worker. It is a probe if the worker is quarantined; only work after it
        counts for or against the worker then.
        """
        standing = self.quarantined.get(worker)
        if standing is not None:
            load = self._loads[worker]
            standing.probe = attempt_id
            standing.look(load.generated_tokens, load.computing, now_s)
            standing.restart()

    def probe_ended(self, worker: WorkerId | None, attempt_id: RequestId) -> None:
        """Makes way for the next probe after one that showed nothing, because its client left, say."""
        standing = self.quarantined.get(worker) if worker is not None else None
        if standing is not None and standing.probe == attempt_id:
            standing.probe = None

    def due(self, now_s: float) -> list[WorkerId]:
        """Returns the READY quarantined workers whose back-off is over and that have no probe, by id."""
        return [
            worker
            for worker, standing in sorted(self.quarantined.items())
            if standing.probe is None
            and standing.quarantine is not None
            and standing.quarantine.probe_at_s <= now_s
            and self._loads[worker].health is Health.READY
        ]

    # ------------------------------------------------------------------------------------------------- the fleet

    def forget(self, worker: WorkerId) -> None:
        """Drops a worker that is gone."""
        if self.quarantined.pop(worker, None) is not None:
            self.version += 1

    def fit(self, now_s: float) -> None:
        """Releases the least bad workers of each tier until no more are quarantined than its share allows.

        It must be called after a worker has gone or changed its health, and after a change of the limits.
        """
        for worker in sorted(self.quarantined):
            if worker not in self.quarantined:
                continue
            ready, held = self._tier(self._loads[worker])
            for load in held[: max(0, len(held) - self._most(len(ready)))]:
                self._release(load.standing, now_s)

    # ------------------------------------------------------------------------------------------------ quarantine

    def _quarantine(self, load: Load, reason: str, now_s: float) -> None:
        """Quarantines a worker where its tier's share allows it, or in place of one that is less bad."""
        ready, held = self._tier(load)
        standing = load.standing
        if load.health is not Health.READY:
            return
        if len(held) >= self._most(len(ready)):
            if not held or not self._makes_way(held[0].standing, standing, now_s):
                return
            self._release(held[0].standing, now_s)
        if now_s - standing.released_at_s > self.limits.max_s:
            standing.times = 0
        standing.times += 1
        standing.quarantine = Quarantine(reason, now_s, now_s + self._back_off_s(standing))
        standing.restart()
        self.quarantined[standing.worker] = standing
        self.quarantines[reason] = self.quarantines.get(reason, 0) + 1
        self.version += 1
        self._dirty.add(standing.worker)

    def _makes_way(self, held: Standing, bad: Standing, now_s: float) -> bool:
        """Whether a quarantined worker is to serve in place of a worse one. Its back-off must be over, so that workers
        which are all bad do not change places at every failure, each time with what runs on them.
        """
        assert held.quarantine is not None
        return held.failure_rate < bad.failure_rate and held.quarantine.probe_at_s <= now_s

    def _again(self, standing: Standing, now_s: float) -> None:
        """Prolongs a quarantine whose probe has failed."""
        begun = standing.quarantine
        assert begun is not None
        standing.times += 1
        self.probes_failed += 1
        standing.quarantine = Quarantine(begun.reason, begun.since_s, now_s + self._back_off_s(standing))
        standing.probe = None
        standing.restart()
        self._dirty.add(standing.worker)

    def _release(self, standing: Standing, now_s: float) -> None:
        """Ends a quarantine; the worker starts again without failures and samples."""
        standing.quarantine = standing.probe = None
        standing.failure_rate, standing.released_at_s = 0.0, now_s
        standing.restart()
        del self.quarantined[standing.worker]
        self.version += 1
        self._dirty.add(standing.worker)

    def _judge(self, load: Load, now_s: float) -> None:
        """Ends or prolongs a quarantine for slowness by what the probe has shown; without a sample nothing changes."""
        standing, quarantine = load.standing, load.standing.quarantine
        if quarantine is None or quarantine.reason == FAILING:
            return
        figure = Figure(quarantine.reason)
        speed = standing.speeds[figure]
        if not speed.samples:
            return
        # with the worker that is judged these are as many as are compared otherwise
        limit = self._slow_from(self._tier(load)[0], figure, COMPARED - 1)
        if limit is not None and speed.mean_log > limit:
            self._again(standing, now_s)
        else:
            self._release(standing, now_s)

    def _tier(self, of: Load) -> tuple[list[Load], list[Load]]:
        """Returns the READY workers of a worker's tier, and those of them that are quarantined, least bad first."""
        tier = (of.up.role, of.up.group)
        ready = [
            load
            for load in self._loads.values()
            if load.health is Health.READY and (load.up.role, load.up.group) == tier
        ]
        held = [load for load in ready if load.standing.quarantine is not None]
        held.sort(key=lambda load: (load.standing.failure_rate, load.standing.worker))
        return ready, held

    def _slow_from(self, tier: Sequence[Load], figure: Figure, least: int) -> float | None:
        """Returns the mean of ln x above which a worker of the tier is slow; None if fewer than `least` are known."""
        means = [
            load.standing.speeds[figure].mean_log
            for load in tier
            if load.standing.quarantine is None and load.standing.speeds[figure].samples >= SAMPLES
        ]
        if len(means) < least:
            return None
        return statistics.median(means) + math.log(self.limits.slow_factor)

    def _back_off_s(self, standing: Standing) -> float:
        # the exponent is bounded because a float is not
        return min(self.limits.max_s, self.limits.base_s * 2.0 ** min(standing.times - 1, 64))

    def _most(self, ready: int) -> int:
        """Returns the most workers of a tier of `ready` ones that may be quarantined."""
        # a share times a number of workers may fall short of a whole number by a rounding error
        return max(0, min(ready - 1, math.floor(self.limits.max_share * ready + 1e-9)))
