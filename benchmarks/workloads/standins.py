"""Synthetic workloads that stand in for traces that are not published or not available.

Their results must not be reported under a trace's name. Every figure is a published margin or is marked as an
assumption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from benchmarks.workloads.arrivals import Gamma, Poisson
from benchmarks.workloads.lengths import Lognormal, Quantiles
from benchmarks.workloads.prefixes import Sharing
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Clients, Corpus, Recurrence, Sessions, Synthetic

# Mean, p50, p95 and p99 over all of ServeGen's deepseek-r1 clients, sampled from the published distributions.
# The cap brings the outputs near their published CV of 1.52.
REASONING_PROMPT = Quantiles.of_margins(
    1_268, ((0.0, 8.0), (0.5, 208.0), (0.95, 6_714.0), (0.99, 23_423.0)), free=0.8, cap_tokens=40_000
)
REASONING_OUTPUT = Quantiles.of_margins(
    1_527, ((0.0, 8.0), (0.5, 792.0), (0.95, 5_701.0), (0.99, 12_607.0)), free=0.75, cap_tokens=16_384
)

# Derived from BalanceRoute, Table 1 (G = 8): 843 tok/s at 83 ms a token are 70 requests in flight, nine per worker.
# Let contexts have mean m and deviation s. With nine contexts on each of 8 workers the range of the workers' sums is
# 2.85 * 3 s (2.85 is the expected range of 8 normals), so JSQ's 215,110 tokens give s = 25,000. Under Random a worker
# holds a Poisson number of contexts, so the range is 2.85 * 3 sqrt(m^2 + s^2), and its 438,225 tokens give m = 45,000.
# A request in flight has generated some 2,500 tokens on average (reasoning outputs, length-biased), so prompts have
# mean 42,500 and deviation 25,000.
LONG_CONTEXT_PROMPT = Lognormal.of_mean(
    42_500, 25_000 / 42_500, cap_tokens=131_072
)  # cap: the model's context

# ASSUMPTION: how much of the load recurs, and how alike the outputs of one prompt are. BalanceRoute's Table 3 reports a
# stage-1 AUC of 0.974 by exact match against 0.700 by survival, so most prompts had been seen before.
_RECURRENCE = Recurrence(p_recur=0.7, prompts=200, spread=0.01)
_CLIENTS = Clients(clients=20, zipf=1.0, spread=0.25)  # ASSUMPTION


def heavy_tail(rate_per_s: float = 16.0) -> Synthetic:
    """Returns reasoning requests with ServeGen's published margins; a request's client hints at its output length."""
    return Synthetic(
        name="synthetic-heavy-tail",
        arrivals=Gamma(rate_per_s, 1.5),  # ASSUMPTION: burstiness of the merged clients
        prompt=REASONING_PROMPT,
        output=REASONING_OUTPUT,
        clients=_CLIENTS,
    )


def heavy_tail_recurring(rate_per_s: float = 16.0) -> Synthetic:
    """Returns `heavy_tail` with recurring prompts, whose output length a predictor by exact match can learn."""
    return replace(heavy_tail(rate_per_s), name="synthetic-heavy-tail-recurring", recurrence=_RECURRENCE)


def heavy_tail_long_context(rate_per_s: float = 1.0, recurring: bool = True) -> Synthetic:
    """Returns reasoning outputs after long prompts, whose lengths (`LONG_CONTEXT_PROMPT`) BalanceRoute's Table 1 gives.

    With `recurring`, most prompts recur.
    """
    return replace(
        heavy_tail(rate_per_s),
        name="synthetic-heavy-tail-long-context",
        prompt=LONG_CONTEXT_PROMPT,
        recurrence=_RECURRENCE if recurring else None,
    )


def with_long_context(requests: Iterable[WorkloadRequest], seed: int) -> Iterator[WorkloadRequest]:
    """Yields the requests with prompt lengths drawn from `LONG_CONTEXT_PROMPT` and no shared prefixes.

    Outputs, clients and times stay as they are.
    """
    rng = np.random.default_rng(seed)
    for r in requests:
        tokens = int(LONG_CONTEXT_PROMPT.quantile(rng.random(1))[0])
        yield replace(r, prompt_tokens=tokens, block_hashes=(), block_tokens=0)


def qwen_a(rate_per_s: float = 5.98) -> Synthetic:
    """Returns the stand-in for Qwen-Bailian A (chat).

    46 % of its requests are later turns of a session, with a median gap of 111 s. An unlimited cache would hold 0.579
    of the prompt tokens.
    """
    return Synthetic(
        name="synthetic-qwen-a",
        arrivals=Poisson(rate_per_s),
        prompt=Quantiles.of_margins(2_331, ((0.0, 16.0), (0.5, 1_046.0), (0.99, 14_359.0)), 0.85, 32_768),
        output=Quantiles.of_margins(430, ((0.0, 2.0), (0.5, 375.0), (0.99, 1_641.0)), 0.9, 4_096),
        sessions=Sessions(follow_up=0.46, gap_median_s=111.0, spread=0.1),
        sharing=Sharing(p_share=0.83, groups=32, covered=(0.5, 0.9), block_tokens=16),
        block_tokens=16,
    )


def qwen_b(rate_per_s: float = 24.0) -> Synthetic:
    """Returns the stand-in for Qwen-Bailian B (API and agents).

    It has no sessions. An unlimited cache would hold 0.542 of the prompt tokens.
    """
    return Synthetic(
        name="synthetic-qwen-b",
        arrivals=Gamma(rate_per_s, 1.5),  # ASSUMPTION
        prompt=Quantiles.of_margins(915, ((0.0, 8.0), (0.5, 574.0), (0.99, 6_294.0)), 0.9, 16_384),
        output=Quantiles.of_margins(92, ((0.0, 1.0), (0.5, 39.0), (0.99, 1_006.0)), 0.85, 4_096),
        sharing=Sharing(p_share=0.91, groups=256, covered=(0.4, 0.95), block_tokens=16),
        block_tokens=16,
    )


def chat(rate_per_s: float = 4.0) -> Synthetic:
    """Returns conversations for trying things out: sessions, short prompts and moderate outputs."""
    return Synthetic(
        name="synthetic-chat",
        arrivals=Poisson(rate_per_s),
        prompt=Lognormal(900.0, 1.0, cap_tokens=16_384),  # ASSUMPTION
        output=Lognormal(200.0, 0.9, cap_tokens=2_048),  # ASSUMPTION
        clients=Clients(clients=10),
        sessions=Sessions(follow_up=0.5, gap_median_s=60.0),
        block_tokens=128,
    )


def rag(rate_per_s: float = 2.0) -> Synthetic:
    """Returns questions about a document collection: long prompts that begin with documents chosen by popularity."""
    return Synthetic(
        name="synthetic-rag",
        arrivals=Poisson(rate_per_s),
        prompt=Lognormal(200.0, 0.7, cap_tokens=2_048),  # ASSUMPTION: the question
        output=Lognormal(250.0, 0.8, cap_tokens=2_048),  # ASSUMPTION
        corpus=Corpus(documents=500, per_request=4, document_tokens=2_048),  # ASSUMPTION
        block_tokens=512,
    )
