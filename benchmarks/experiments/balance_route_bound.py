"""The imbalance that remains for a router that knows everything, as a reference for BalanceRoute's Table 1.

A request cannot be divided. A departure leaves a gap of one request's KV, and no request in the pool fills it exactly.
How small the imbalance can become depends on the pool and on the search. This experiment models the cluster of Table 1
without transfers: a slot that becomes free is filled at once. Pool and arrivals are those of Table 1, and all lengths
are known.

    rule      BR-H's choice at H = 0 with the parameters of Table 1 (`balance_route_cluster.OURS`)
    search    each of the best `candidates` by that rule is tried: the rule then decides the next `departures`
              departures, with the true lengths and arrivals; the candidate with the least mean of max - min is taken

The search gives only an upper bound on the least imbalance, because a longer search could find a lower one. In Table 1
a slot is also empty while its KV is in transfer: one worker then lacks a mean context, for the two or three steps that
3 GB take. This adds to the imbalance of `rule`; `balance_route_table1` counts those steps separately.

Two searches of different size show whether more of it would find much less (docs/results.md).

Not claimed: that such a search could be deployed. It knows every length, and the requests that are still to come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks import plots as look
from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from benchmarks.sim import profiles
from benchmarks.workloads.catalog import available

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "BalanceRoute, a ceiling: the imbalance left to a search that knows all lengths and arrivals, on the long contexts "
    "that stand in for the paper's trace"
)
SEEDS = (3, 1)
WORKERS = 8
SEARCHES = {"rule": (1, 0), "search 6 x 12": (6, 12), "search 12 x 24": (12, 24)}
LONG_CASES = ("recurring-long", "reasoning-long")

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rule:
    """BR-H at H = 0: an entry of w tokens is worth w - beta max(0, w - margin), and more with its time in the pool.

    `pool_lag` and `center` reduce the margin. `age_per_step` is the worth of one step in the pool, in mean prompts.
    """

    beta: float
    pool_lag: float
    center: float
    age_per_step: float

    def worth(self, state: State, row: int) -> FloatArray:
        """Returns the worth in tokens (pooled,) of each entry of the pool for a free slot of worker `row`."""
        tokens, entered = state.pool[0, : state.pooled], state.pool[2, : state.pooled]
        loads = state.context.sum(axis=1)
        mean_tokens, total, envelope = tokens.mean(), loads.sum(), loads.max()
        lag = max(0.0, total / (state.context.size - 1) - mean_tokens)
        above_mean = envelope - (total - loads[row]) / (len(loads) - 1)
        margin = envelope - loads[row] - self.pool_lag * lag - self.center * above_mean
        worth: FloatArray = (
            tokens
            - self.beta * np.maximum(0.0, tokens - margin)
            + self.age_per_step * mean_tokens * (state.step - entered)
        )
        return worth


class State:
    """The state of the cluster between two departures. Times are in decode steps, sizes in KV tokens."""

    __slots__ = ("arrivals", "capacity", "context", "left", "next", "pool", "pooled", "step")

    def __init__(self, arrivals: FloatArray, workers: int, slots: int, pool_tokens: float) -> None:
        """Fills all slots and the pool from `arrivals` (n, 2), the prompt and output tokens of requests in order.

        Raises ValueError if the arrivals are too few.
        """
        places = workers * slots
        if len(arrivals) <= places:
            raise ValueError(f"{len(arrivals)} requests do not outlast {places} slots: give more")
        self.arrivals, self.capacity, self.next = arrivals, pool_tokens, places
        self.context = arrivals[:places, 0].reshape(workers, slots).copy()
        self.left = arrivals[:places, 1].reshape(workers, slots).copy()
        self.step = 0.0
        most = int(pool_tokens / arrivals[:, 0].min()) + 1
        # The rows are prompt tokens, output tokens, and the step of entry.
        self.pool = np.zeros((3, min(most, len(arrivals))))
        self.pooled = 0
        self._refill()

    def copy(self) -> State:
        made = State.__new__(State)
        made.arrivals, made.capacity, made.next = self.arrivals, self.capacity, self.next
        made.context, made.left, made.step = self.context.copy(), self.left.copy(), self.step
        made.pool, made.pooled = self.pool.copy(), self.pooled
        return made

    def depart(self) -> tuple[float, float, int, int]:
        """Advances to the next departure; returns (steps, max - min during them, worker, slot), the slot now free.

        All slots run, so all loads grow equally and their differences do not change before the departure.
        """
        row, slot = divmod(int(self.left.argmin()), self.left.shape[1])
        steps, loads = float(self.left[row, slot]), self.context.sum(axis=1)
        self.context += steps
        self.left -= steps
        self.step += steps
        self.context[row, slot], self.left[row, slot] = 0.0, np.inf
        return steps, float(loads.max() - loads.min()), row, slot

    def admit(self, row: int, slot: int, index: int) -> float:
        """Moves entry `index` of the pool into the slot, and fills the pool with the next arrivals.

        Returns the steps that the entry spent in the pool. Raises ValueError when the pool is empty and no arrival is
        left.
        """
        self.context[row, slot], self.left[row, slot], entered = self.pool[:, index]
        self.pooled -= 1
        self.pool[:, index] = self.pool[:, self.pooled]
        self._refill()
        return float(self.step - entered)

    def _refill(self) -> None:
        room = self.capacity - self.pool[0, : self.pooled].sum()
        while self.next < len(self.arrivals) and self.arrivals[self.next, 0] <= room:
            prompt, output = self.arrivals[self.next]
            self.pool[:, self.pooled] = prompt, output, self.step
            self.pooled, self.next, room = self.pooled + 1, self.next + 1, room - prompt
        if not self.pooled:
            raise ValueError(
                f"all {len(self.arrivals)} requests have been admitted: give more, or fewer steps"
            )


def choose(rule: Rule, state: State, row: int, slot: int, candidates: int, departures: int) -> int:
    """Returns the index of the entry that takes the slot.

    With one candidate it is the rule's choice, else the best of the rule's first `candidates` after `departures` more
    departures.
    """
    worth = rule.worth(state, row)
    if candidates == 1:
        return int(worth.argmax())
    best = np.argsort(-worth, kind="stable")[:candidates]
    ahead = [_play(rule, state, row, slot, int(index), departures) for index in best]
    return int(best[int(np.argmin(ahead))])


def _play(rule: Rule, state: State, row: int, slot: int, index: int, departures: int) -> float:
    """Returns the mean of max - min over the next `departures` if entry `index` is taken now and the rule goes on."""
    played = state.copy()
    played.admit(row, slot, index)
    total = steps = 0.0
    for _ in range(departures):
        lasted, imbalance, row, slot = played.depart()
        total, steps = total + lasted * imbalance, steps + lasted
        played.admit(row, slot, int(rule.worth(played, row).argmax()))
    return total / steps if steps else 0.0


def variants(quick: bool) -> list[Variant]:
    searches = dict(list(SEARCHES.items())[:2]) if quick else SEARCHES
    return [
        Variant(
            f"{name}/{search}",
            {
                "case": name,
                "candidates": candidates,
                "departures": departures,
                "warmup_steps": 2_000 if quick else 8_000,
                "steps": 3_000 if quick else 14_000,
            },
        )
        for name in LONG_CASES
        if available(cluster.CASES[name].workload)
        for search, (candidates, departures) in searches.items()
    ]


def run_one(config: Config, seed: int) -> Metrics:
    case = cluster.CASES[config["case"]]
    rows = cluster.rows_of(case, "held_out", seed)
    arrivals = np.array([(r.prompt_tokens, r.output_tokens) for r in rows], dtype=np.float64)
    sizing = cluster.Sizing.of(rows, WORKERS, case.slots, profiles.load(cluster.PROFILE))
    params = cluster.OURS
    age_per_step = sizing.step_s / params["ageing_s"]
    rule = Rule(params["beta"], params["pool_lag"], params["center"], age_per_step)
    state = State(arrivals, WORKERS, case.slots, case.pool * WORKERS * float(arrivals[:, 0].mean()))
    total = steps = 0.0
    waits: list[float] = []
    while state.step < config["warmup_steps"] + config["steps"]:
        lasted, imbalance, row, slot = state.depart()
        chosen = choose(rule, state, row, slot, config["candidates"], config["departures"])
        waited = state.admit(row, slot, chosen)
        if state.step > config["warmup_steps"]:
            total, steps = total + lasted * imbalance, steps + lasted
            waits.append(waited)
    return {
        "imbalance_tokens": total / steps,
        "pool_mean_s": sizing.step_s * float(np.mean(waits)),
        "pool_max_s": sizing.step_s * max(waits),
        "admitted": float(len(waits)),
    }


def compare(results: Results) -> list[Row]:
    rows = []
    for variant in results.variants:
        seen = results.spread(variant, "imbalance_tokens")
        name = variant.replace("/", ", ")
        rows.append(
            Row(f"{name}: imbalance while every slot runs", None, seen.mean, "tokens", seen.half_width)
        )
        longest = results.spread(variant, "pool_max_s")
        rows.append(Row(f"{name}: longest wait in the pool", None, longest.mean, "s", longest.half_width))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    made, axes = look.figure(columns=1)
    seen = {name: results.spread(name, "imbalance_tokens") for name in results.variants}
    label = "mean of max - min while every slot runs, KV tokens"
    look.bars(axes[0], {name: (s.mean, s.half_width) for name, s in seen.items()}, label)
    return {"balance_route_bound": made}
