"""How BalanceRoute's admissions explain themselves: the decision that all entries of a set share."""

from collections.abc import Callable, Sequence

from policies.routing.base import RANKED, Decision, Ranked, Reason
from policies.state.fast_frozen import fast_constructor
from policies.state.views import Worker, WorkerId

_ranked, _decision = fast_constructor(Ranked), fast_constructor(Decision)


def terms_of(
    score: float, w_tokens: float, margin_tokens: float, workers: int, free_slots: int, set_size: int
) -> dict[str, float]:
    """What an admission's decision shows: the set's score and sum, and its worker as it was before."""
    return {
        "score": float(score),
        "w_tokens": float(w_tokens),
        "margin_tokens": float(margin_tokens),
        "workers": float(workers),
        "free_slots": float(free_slots),
        "set_size": float(set_size),
    }


def decide(worker: WorkerId, terms: dict[str, float], others: tuple[Ranked, ...], reason: Reason) -> Decision:
    """The decision for a worker, first in its ranking."""
    made: Decision = _decision(worker, (_ranked(worker, -terms["score"], terms), *others), reason)
    return made


class Others:
    """What a decision's ranking names beside the chosen worker: the first that entries could go to as the round began,
    in the order of stage 2. `rows` are in that order; `free` and `margin` are asked for by row.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        rows: Sequence[int],
        free: Sequence[int],
        margin: Callable[[int], float],
    ) -> None:
        self._shown: list[tuple[int, Ranked]] = []
        for row in rows[:RANKED]:
            worker, slots = workers[row], float(free[row])
            terms = {
                "free_slots": slots,
                "margin_tokens": float(margin(row)),
                "load_tokens": float(worker.kv_tokens),
            }
            self._shown.append((row, _ranked(worker.id, -slots, terms)))
        self._without: dict[int, tuple[Ranked, ...]] = {}

    def without(self, row: int) -> tuple[Ranked, ...]:
        """Those but `row`'s."""
        if row not in self._without:
            self._without[row] = tuple([ranked for other, ranked in self._shown if other != row])
        return self._without[row]
