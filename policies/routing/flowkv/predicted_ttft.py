"""Least predicted TTFT: FlowKV's normal load case for prefill (B.1 and line 19 of its algorithm 1).

    TTFT_i = base + per_token * (queued_i + l_r - lambda_r(i))     queued -> Worker.prefilling_tokens
                                                                   lambda -> Snapshot.hits, l_r -> Request.prompt_tokens

`base` is paid once per prompt in front, too. The paper says only "taking into account prefix hits and node loads"; this
is the shortest form of it: work ahead, plus own work that is not cached.
Deviation: the tokens ahead are counted whole, although some of them are computed or were cached: a bias that all
workers share. Not claimed: the decode side; chunked prefills that run side by side.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing import params
from policies.routing.base import Decision, Needs, best_of
from policies.state.views import Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class PredictedTTFT:
    """Seconds per prompt and per token of a prefill; their ratio alone decides."""

    needs: ClassVar[Needs] = Needs.HITS
    formula: ClassVar[str] = "cost = queue_s + own_s"
    prefill_base_s: float = 0.01  # ASSUMPTION: fit both to the engines deployed
    prefill_per_token_s: float = 0.0005  # ASSUMPTION
    name: str = "predicted_ttft"

    def __post_init__(self) -> None:
        params.number(self.name, "prefill_base_s", self.prefill_base_s, low=0.0)
        params.number(self.name, "prefill_per_token_s", self.prefill_per_token_s, above=0.0)

    def choose_prefill(
        self, request: Request, workers: Sequence[Worker], snapshot: Snapshot, rng: random.Random
    ) -> Decision:
        hits = snapshot.hits.tokens(request)
        waits, owns = [], []
        for worker in workers:
            hit_tokens = min(request.prompt_tokens, hits.get(worker.id, 0)) if hits else 0
            waits.append(
                self.prefill_base_s * worker.prefilling + self.prefill_per_token_s * worker.prefilling_tokens
            )
            owns.append(self.prefill_base_s + self.prefill_per_token_s * (request.prompt_tokens - hit_tokens))

        def terms(i: int) -> dict[str, float]:
            hit_tokens = min(request.prompt_tokens, hits.get(workers[i].id, 0))
            return {"queue_s": waits[i], "own_s": owns[i], "hit_tokens": float(hit_tokens)}

        costs = [queue_s + own_s for queue_s, own_s in zip(waits, owns, strict=True)]
        return best_of(self.name, workers, costs, terms, rng)
