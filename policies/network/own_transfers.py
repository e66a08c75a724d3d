"""Our KV transfers, as the live router and the simulator report them, and the contention learnt from their times.

    began      the transfer was decided (live), or its first byte leaves (simulator)
    stopped    it is no longer in flight: the receiver has admitted the request, or the attempt is over
    arrived    its bytes and the seconds that they took
    dropped    nothing more will be told of it: it failed, was cancelled, or an end of it died

A slowdown is the time of a transfer over its time on the tier's path without what was learnt from our own transfers.
That is B (1 - c) with the operator's c, which has no own flows in it. A pair's estimate or a learnt c has a part of the
level in it, which would then count twice. `NetKV` multiplies the slowdown with the time on the same path.
"""

import dataclasses

from policies.network.contention import ContentionEstimator
from policies.network.oracle import Oracle


class OwnTransfers:
    """Teaches the oracle how much our transfers slow each other down. Unknown ids are no error."""

    def __init__(self, estimator: ContentionEstimator) -> None:
        self._estimator = estimator

    def began(
        self,
        attempt_id: str,
        sender: str,
        receiver: str,
        tier: int | None,
        oracle: Oracle | None,
        now_s: float,
    ) -> None:
        """Notes a transfer between two workers. Without a tier, or an oracle that knows it, nothing can be learnt from
        the transfer.
        """
        if oracle is None or tier is None or tier not in oracle.bandwidth_bytes_per_s:
            self._estimator.dropped(attempt_id)
            return
        alone = oracle.tier_path(tier, now_s, estimates=False)
        self._estimator.begun(attempt_id, sender, receiver, tier, alone.residual_bytes_per_s, alone.latency_s)

    def stopped(self, attempt_id: str) -> None:
        """Notes that a transfer is no longer in flight; `arrived` may still tell how long it took."""
        self._estimator.stopped(attempt_id)

    def arrived(self, attempt_id: str, n_bytes: int, seconds: float, now_s: float) -> None:
        """Notes the duration of a transfer as its request saw it: from the beginning to the last byte, with the time
        for which it was held back for others.
        """
        self._estimator.ended(attempt_id, n_bytes, seconds, now_s)

    def dropped(self, attempt_id: str) -> None:
        """Forgets a transfer of which nothing more will be told."""
        self._estimator.dropped(attempt_id)

    def taught(self, oracle: Oracle, now_s: float) -> Oracle:
        """Returns `oracle` with what is known of contention at `now_s`."""
        return dataclasses.replace(oracle, contention=self._estimator.curves(now_s))
