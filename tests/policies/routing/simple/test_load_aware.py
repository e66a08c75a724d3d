"""FlowKV's load score, hand-computed, and the regimes that follow from it."""

import random

import pytest

from policies.routing.flowkv.load_score import LoadWeights, load_score
from policies.routing.flowkv.regimes import Regime, RegimeThresholds, RegimeWatch, assess, role_scores
from policies.routing.params import BadParameter
from policies.routing.simple.load_aware import LoadAware
from policies.state.views import Indicators, Role
from tests.policies.routing.views import entry, snapshot, worker

ALL = Indicators(
    running=4, waiting=2, swapped=1, sending=2, token_budget=0.5, compute=0.75, memory_bandwidth=0.25
)


def test_the_score_is_the_weighted_mean_of_all_eight_terms() -> None:
    # slots 8, KV 250 of 1000:  running 4/8 = .5   waiting 2/8 = .25   swapped 1/8 = .125   sending 2/8 = .25
    # weights 1 2 2 1 1 1 1 1 (sum 10): .5 + 2*.25 + 2*.125 + .25 + .5 + .25 + .75 + .25 = 3.25 -> 0.325
    score, terms = load_score(
        worker("w", kv_capacity_tokens=1000, kv_tokens=250, indicators=ALL), LoadWeights()
    )
    assert score == pytest.approx(0.325)
    assert len(terms) == 8


def test_terms_that_the_engine_does_not_report_drop_out_and_the_weights_are_renormalised() -> None:
    # vLLM: no swapped queue, no shares. running .5, waiting .25 (weight 2), kv .25: (.5 + .5 + .25) / 4 = 0.3125
    seen = Indicators(running=4, waiting=2)
    score, terms = load_score(
        worker("w", kv_capacity_tokens=1000, kv_tokens=250, indicators=seen), LoadWeights()
    )
    assert (score, set(terms)) == (pytest.approx(0.3125), {"running", "waiting", "kv_usage"})
    assert load_score(worker("w", indicators=seen), LoadWeights(running=0, kv_usage=0))[0] == pytest.approx(
        0.25
    )


def test_requests_routed_since_the_last_report_count_as_waiting() -> None:
    seen = Indicators(running=0, waiting=0)
    quiet, told = worker("a", indicators=seen, unreported=0), worker("b", indicators=seen, unreported=3)
    assert load_score(told, LoadWeights())[1]["waiting"] == pytest.approx(3 / 8)
    assert (
        LoadAware()
        .choose_prefill(entry("r", 1).request, [quiet, told], snapshot([quiet, told]), random.Random(0))
        .worker
        == "a"
    )


def test_before_the_first_report_our_own_charges_stand_in() -> None:
    busy = worker("p", Role.PREFILL, prefilling=4, slots=8, sending=2)
    assert load_score(busy, LoadWeights())[1] == {
        "running": 0.5,
        "waiting": 0.0,
        "sending": 0.25,
        "kv_usage": 0.0,
    }


@pytest.mark.parametrize("bad", [{"waiting": -1.0}, {"running": 0, "waiting": 0, "kv_usage": 0}])
def test_weights_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadParameter, match="policy load_aware"):
        LoadAware(**bad)  # type: ignore[arg-type]


LIMITS = RegimeThresholds(0.5, 0.9, 0.4, 0.8, idle=0.1, extreme_after_s=10.0)


@pytest.mark.parametrize(
    ("prefill", "decode", "over_since_s", "regime", "since_s"),
    [
        ((0.5, 0.5), (0.4,), None, Regime.NORMAL, None),
        ((0.5, 0.6), (0.0,), None, Regime.IMBALANCED, None),  # mean 0.55 > low
        ((0.0,), (0.8,), None, Regime.IMBALANCED, None),
        ((0.0,), (0.81,), None, Regime.IMBALANCED, 100.0),  # above high, but only from now on
        ((0.0,), (0.81,), 91.0, Regime.IMBALANCED, 91.0),
        ((0.0,), (0.81,), 90.0, Regime.EXTREME, 90.0),  # for 10 s
        ((1.0,), (0.0,), 90.0, Regime.EXTREME, 90.0),
        ((0.0,), (0.5,), 90.0, Regime.IMBALANCED, None),  # came down: the duration starts anew
        ((), (0.9,), 50.0, Regime.EXTREME, 50.0),  # no prefill node: decode alone
        ((), (), None, Regime.NORMAL, None),
    ],
)
def test_the_regimes(prefill, decode, over_since_s, regime, since_s) -> None:  # type: ignore[no-untyped-def]
    scores = ({f"p{i}": s for i, s in enumerate(prefill)}, {f"d{i}": s for i, s in enumerate(decode)})
    result = assess(*scores, LIMITS, 100.0, over_since_s)
    assert (result.regime, result.over_since_s) == (regime, since_s)
    assert set(result.idle) == {n for part in scores for n, s in part.items() if s < 0.1}


def test_an_overload_is_extreme_only_once_it_has_lasted() -> None:
    """A decode node with 8 of 8 slots taken scores above 0.1 from t = 0 on; a prefill node is idle."""
    watch = RegimeWatch(RegimeThresholds(decode_low=0.05, decode_high=0.1, extreme_after_s=10.0))

    def at(now_s: float, used: int) -> Regime:
        view = snapshot([worker("p", Role.PREFILL), worker("d", slots_used=used)], now_s=now_s)
        return watch.look(view).regime

    seen = [at(0.0, 8), at(9.9, 8), at(10.0, 8), at(11.0, 0), at(12.0, 8), at(21.9, 8), at(22.0, 8)]
    assert [regime.value for regime in seen] == [
        "imbalanced",
        "imbalanced",
        "extreme",
        "normal",
        # it lasts anew
        "imbalanced",
        "imbalanced",
        "extreme",
    ]


def test_role_means_take_colocated_nodes_in_both_roles() -> None:
    workers = [
        worker("p", Role.PREFILL, prefilling=8),
        worker("d", slots_used=8),
        worker("c", Role.COLOCATED, slots_used=4),
    ]
    prefill, decode = role_scores(snapshot(workers), LoadWeights(), LoadWeights())
    assert (set(prefill), set(decode)) == ({"p", "c"}, {"d", "c"})


def test_thresholds_out_of_order_are_refused() -> None:
    with pytest.raises(BadParameter, match=r"decode_high is 0.3: it must be a number >= 0.4"):
        RegimeThresholds(decode_low=0.4, decode_high=0.3)
