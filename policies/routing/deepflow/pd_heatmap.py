"""The PD-aware policy chooses colocated or disaggregated service by a measured heatmap, and then the least load
(DeepFlow 5.3).

    v = heatmap cell of (prefill length, predicted decode length)         -> heatmap.Heatmap, Request.predicted_tokens
    v > 0: a disaggregated worker, else a colocated one; within the kind: least load score

`load_correction` (k), beyond the paper, replaces v by

    v' = (1 + v) * (1 + k C_col) / (1 + k C_dis) - 1

C_col and C_dis are the mean load scores of the two kinds; C_dis is that of the busier of the prefill and decode
sides. The paper's policy is k = 0, the default: it does not look at the load before it chooses the kind, and loses to
round robin when one side is overloaded (Figure 6). A JCT grows with the load of the side that serves it, so each side's
measured JCT is scaled by its load. A useful k is large, because the score counts queues as shares of an engine's slots.
With 128 slots one running request is 0.001 to 0.002 of the score, so k = 1 has no effect until a side is overloaded;
with k = 100 a few more requests outweigh a cell (`deepflow_scheduling` shows both).
Deviations: without a prediction the request's max_tokens is used as the decode length. Without a heatmap the
less loaded kind is chosen.
Not claimed: that JCT is linear in the load score.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from policies.routing.base import Decision, Needs, Ranked, least_cost
from policies.routing.deepflow.heatmap import Heatmap, heatmap_from
from policies.routing.deepflow.locality import local_or_least_loaded
from policies.routing.flowkv.load_score import LOAD_FORMULA, LoadWeights, load_score
from policies.routing.params import Number
from policies.state.views import Health, Request, Role, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class PdHeatmap(LoadWeights):
    """Chooses disaggregated or colocated service by a measured heatmap, and then the least load within that kind."""

    paper: ClassVar[str] = "DeepFlow 5.3"
    needs: ClassVar[Needs] = Needs.LENGTHS
    formula: ClassVar[str] = (
        "corrected_cell = (1 + cell) * (1 + load_correction * load_colocated)"
        " / (1 + load_correction * load_disaggregated) - 1; above 0: disaggregated, else colocated;"
        " within the kind: " + LOAD_FORMULA
    )
    heatmap: Heatmap | Mapping[str, Any] | None = None
    """Map measured by `sluice profile heatmap`: a file, or the name of a shipped map. With null only the load
    decides.
    """
    load_correction: Annotated[float, Number(low=0.0)] = 0.0
    """Factor k by which the load of a side increases its measured JCT. 0 is the paper's policy; 100 is the best of the
    values that the experiment deepflow_tuning tries.
    """
    name: str = "pd_heatmap"

    def __post_init__(self) -> None:
        LoadWeights.__post_init__(self)
        if self.heatmap is not None:
            object.__setattr__(self, "heatmap", heatmap_from(self.heatmap))

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        kind, terms = self._kind(request, workers, snapshot)
        chosen = self._within(request, kind, snapshot)
        others = [w for w in workers if w not in kind]
        decision = least_cost(self.name, chosen, rng)
        below = max(r.cost for r in chosen) + 1.0
        rest = [Ranked(w.id, below + load_score(w, self)[0], {"other_kind": 1.0}) for w in others]
        ranking = [Ranked(r.worker, r.cost, {**r.terms, **terms}) for r in decision.ranking]
        return Decision(
            decision.worker, (*ranking, *sorted(rest, key=lambda r: (r.cost, r.worker))), decision.reason
        )

    def _within(self, request: Request, workers: Sequence[Worker], snapshot: Snapshot) -> list[Ranked]:
        return [Ranked(worker.id, *load_score(worker, self)) for worker in workers]

    def _kind(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot
    ) -> tuple[Sequence[Worker], dict[str, float]]:
        """Returns the workers of the better kind, and the numbers from which that follows."""
        split = [worker for worker in workers if worker.role is Role.PREFILL]
        whole = [worker for worker in workers if worker.role is not Role.PREFILL]
        if not split or not whole:
            return workers, {}
        cell = self._cell(request)
        ready = [w for w in snapshot.workers.values() if w.health is Health.READY and w.role is Role.DECODE]
        load_split = max(self._mean_load(split), self._mean_load(ready) if ready else 0.0)
        load_whole = self._mean_load(whole)
        # without a heatmap v is 0, and v' then has the same sign for every k above 0
        k = self.load_correction if isinstance(self.heatmap, Heatmap) else 1.0
        corrected = (1.0 + cell) * (1.0 + k * load_whole) / (1.0 + k * load_split) - 1.0
        terms = {
            "cell": cell,
            "corrected_cell": corrected,
            "load_disaggregated": load_split,
            "load_colocated": load_whole,
        }
        return (split if corrected > 0 else whole), terms

    def _cell(self, request: Request) -> float:
        if not isinstance(self.heatmap, Heatmap):
            return 0.0
        predicted = request.predicted_tokens
        decode_tokens = predicted if predicted is not None else float(request.max_tokens)
        return self.heatmap.mean_cell(request.prompt_tokens, decode_tokens)

    def _mean_load(self, workers: Sequence[Worker]) -> float:
        return sum(load_score(worker, self)[0] for worker in workers) / len(workers)


@dataclass(frozen=True, slots=True)
class Combined(PdHeatmap):
    """Chooses the kind as `pd_heatmap` does. Within the kind it follows prefix hits if loads lie within `bound`,
    else load.
    """

    paper: ClassVar[str] = "DeepFlow 5, algorithm 1"
    needs: ClassVar[Needs] = Needs.LENGTHS | Needs.HITS
    formula: ClassVar[str] = (
        "corrected_cell = (1 + cell) * (1 + load_correction * load_colocated)"
        " / (1 + load_correction * load_disaggregated) - 1; above 0: disaggregated, else colocated;"
        " within the kind: cost = load / (1 + load) - hit_tokens if spread <= bound, else load"
    )
    # In the experiment deepflow_scheduling (seeds 100 to 103), 0.03 to 0.3 give similar results and 0 gives 1 to 4 %
    # more JCT.
    bound: Annotated[float, Number(low=0.0)] = 0.3
    """Largest spread of load scores that counts as balanced."""
    name: str = "combined"

    def _within(self, request: Request, workers: Sequence[Worker], snapshot: Snapshot) -> list[Ranked]:
        return local_or_least_loaded(request, workers, snapshot, self, self.bound)
