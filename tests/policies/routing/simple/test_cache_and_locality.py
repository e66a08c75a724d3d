"""Cache-aware, cache+load-aware, locality (DeepFlow's algorithm 1), predicted TTFT: hand-computed cases."""

import random
from typing import Any

import pytest

from policies.routing.base import Decision
from policies.routing.registry import prefill_policy
from policies.state.views import Role, Worker
from tests.policies.routing.views import entry, snapshot, worker

REQUEST = entry("r", 1000).request


def decide(name: str, workers: list[Worker], hits: dict[str, int], **params: Any) -> Decision:
    view = snapshot(workers, hits={"r": hits})
    return prefill_policy(name, params).choose_prefill(REQUEST, workers, view, random.Random(0))


def prefillers(*busy: int, **kw: Any) -> list[Worker]:
    """Workers a, b, c with `busy` of 8 slots computing: without reports the score is busy/8 * 1/5 (weights 1 2 1 1)."""
    return [
        worker(name, Role.PREFILL, prefilling=n, prefilling_tokens=n * 1000, **kw)
        for name, n in zip("abc", busy, strict=False)
    ]


@pytest.mark.parametrize(
    ("busy", "hits", "chosen"),
    [
        ((8, 0, 0), {"a": 512}, "a"),  # however busy
        ((3, 1, 2), {"a": 512, "b": 512}, "b"),  # equal hits: load
        ((3, 2, 1), {}, "c"),
        ((0, 8, 0), {"a": 511, "b": 512}, "b"),  # one token more
    ],
)
def test_cache_aware_takes_the_longest_hit_then_the_least_load(busy, hits, chosen) -> None:  # type: ignore[no-untyped-def]
    assert decide("cache_aware", prefillers(*busy), hits).worker == chosen


@pytest.mark.parametrize(
    ("weights", "chosen"),
    # score: busy / 8 / 5, so a: 0.2, b: 0. hit ratio a: 0.1.   1 * .2 - 1 * .1 = .1 > 0;  .4 * .2 - 1 * .1 = -.02 < 0
    [({}, "b"), ({"load_weight": 0.4}, "a"), ({"cache_weight": 2.1}, "a")],
)
def test_cache_load_aware_weighs_both(weights: dict[str, float], chosen: str) -> None:
    assert decide("cache_load_aware", prefillers(8, 0), {"a": 100}, **weights).worker == chosen


@pytest.mark.parametrize(
    ("bound", "chosen", "balanced"),
    [(0.2, "a", True), (0.19, "b", False)],  # spread 0.2 - 0
)
def test_locality_follows_hits_only_while_the_load_is_balanced(
    bound: float, chosen: str, balanced: bool
) -> None:
    decision = decide("locality", prefillers(8, 0), {"a": 512}, bound=bound)
    assert decision.worker == chosen
    terms = decision.ranking[0].terms
    assert (terms["spread"] <= terms["bound"]) is balanced


@pytest.mark.parametrize(
    ("busy", "hits", "chosen"),
    [
        # base 10, per token 1 ms: a waits 1010 ms and computes 10 + 1000; b waits 0
        ((1, 0), {}, "b"),
        # a: 1010 + 10 + 0 = 1020 ms; b: 2020 + 10 + 1000
        ((1, 2), {"a": 1000}, "a"),
        # a: 2020 + 10 + 100; b: 1010 + 10 + 1000 = 2020 < 2130
        ((2, 1), {"a": 900}, "b"),
        # a: 1010 + 10 + 0 = 1020; b: 0 + 10 + 1000 = 1010
        ((1, 0), {"a": 1000}, "b"),
    ],
)
def test_predicted_ttft_adds_the_queue_and_what_is_not_cached(busy, hits, chosen) -> None:  # type: ignore[no-untyped-def]
    params = {"prefill_base_s": 0.01, "prefill_per_token_s": 0.001}
    assert decide("predicted_ttft", prefillers(*busy), hits, **params).worker == chosen
