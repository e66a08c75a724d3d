"""How a request that another engine has begun reaches vLLM's core: its first output tokens travel with its parameters.

A resumed request (`Decode.resume`) starts with k output tokens, as one that vLLM has preempted does. Three places make
it so:

1. The engine puts the ids under `OUTPUT` into the request's `extra_args` (`carry`).
2. The scheduler appends them to the request's output before it schedules it (`scheduler`). Limits, stop tokens and
   grammars then count from the first token of the answer.
3. The model runner must know them as output, for penalties, min_tokens and other logits processors. vLLM's model
   runner V2 gets prompt and output of every new request. Model runner V1, which vLLM takes where there is no Triton (on
   CPUs) or on demand, starts a new request without output; `start_with_output` changes that in a worker.

The prefill engine computes the KV of the k tokens with the prompt's, so that no decode engine stands still for it, and
the decode engine pulls both (`connector.scheduler`). vLLM computes what else of the request is neither cached nor
pulled.
"""

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

OUTPUT = "sluice_output"
"""Key in `extra_args`: ids of the tokens that another engine has generated for this request."""

_SEED_BYTES = 8


def carry(params: "SamplingParams", token_ids: list[int]) -> None:
    """Puts the request's first output tokens into its parameters, and derives the seed of what follows, if there is
    one.
    """
    if not token_ids:
        return
    params.extra_args = {**(params.extra_args or {}), OUTPUT: token_ids}
    if params.seed is not None:
        params.seed = resumed_seed(params.seed, len(token_ids))


def output_before(params: "SamplingParams | None") -> list[int]:
    """Returns the tokens that another engine has generated for the request with these parameters; mostly none."""
    if params is None or params.extra_args is None:
        return []
    ids: list[int] = params.extra_args.get(OUTPUT, [])
    return ids


def resumed_seed(seed: int, n_tokens: int) -> int:
    """Returns the seed with which a choice of seed `seed` goes on after `n_tokens` tokens, from 0 to 2^63 - 1.

    It is the first 8 bytes of BLAKE2b over the text "seed:n_tokens" without the lowest bit. vLLM's generators cannot be
    advanced by k draws, so the text that follows is another valid sample than the undisturbed one; the same
    interruption always gives the same text.
    """
    digest = hashlib.blake2b(f"{seed}:{n_tokens}".encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest) >> 1


def start_with_output() -> None:
    """Lets model runner V1 of this process know the output of resumed requests from the start. Idempotent."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    post_init = CachedRequestState.__post_init__
    if getattr(post_init, "resumes", False):
        return

    def with_output(self: Any) -> None:
        """Completes vLLM's record of a new request, which has no output yet, with the output that came before."""
        post_init(self)
        if not self.output_token_ids:
            self.output_token_ids.extend(output_before(self.sampling_params))

    with_output.resumes = True  # type: ignore[attr-defined]
    CachedRequestState.__post_init__ = with_output  # type: ignore[method-assign]
