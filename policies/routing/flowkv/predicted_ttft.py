"""Predicted TTFT decides FlowKV's normal load case for prefill (B.1 and line 19 of its algorithm 1).

    TTFT_i = base + per_token * (queued_i + l_r - lambda_r(i))     queued -> Worker.prefilling_tokens
                                                                   lambda -> Snapshot.hits, l_r -> Request.prompt_tokens

Each prompt ahead costs `base` as well. The paper says only "taking into account prefix hits and node loads". This
is the shortest such form: the work ahead, plus the request's own tokens that are not cached.
Deviations: the tokens ahead count in full, although some of them are computed or were cached. All workers share this
bias. The algorithm's "subject to a cache prefix hit condition" is no condition here: a hit shortens the prompt.
Not claimed: any regard to the decode side, or to chunked prefills that run side by side.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.routing.base import Decision, Needs, best_of
from policies.routing.params import Number, check
from policies.state.views import Request, Snapshot, Worker


@dataclass(frozen=True, slots=True)
class PredictedTTFT:
    """Chooses the worker of least predicted TTFT, from its queue and the prompt's prefix hit there."""

    needs: ClassVar[Needs] = Needs.HITS
    paper: ClassVar[str] = "FlowKV B.1 and algorithm 1, line 19"
    formula: ClassVar[str] = "cost = queue_s + own_s"
    # ASSUMPTION for this default and the next: fit both to the engines deployed.
    prefill_base_s: Annotated[float, Number(low=0.0, unit="s")] = 0.01
    """Time that each prompt costs besides its tokens. Only its ratio to `prefill_per_token_s` matters."""
    prefill_per_token_s: Annotated[float, Number(above=0.0, unit="s")] = 0.0005
    """Time to prefill one token that is not cached."""
    name: str = "predicted_ttft"

    def __post_init__(self) -> None:
        check(self)

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
