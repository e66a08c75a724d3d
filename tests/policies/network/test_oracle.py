"""Tests of where a pair's tier comes from, and of the data that the oracle refuses."""

from typing import Any

import pytest

from policies.network.oracle import NodePlace, Oracle, OracleError, PairEstimate, PathSource
from tests.policies.routing.views import worker

B = {0: 400.0, 1: 100.0, 2: 50.0, 3: 25.0}
PLACES = {
    "a": NodePlace("r1", "z1"),
    "b": NodePlace("r1", "z1"),
    "c": NodePlace("r2", "z1"),
    "d": NodePlace("r9", "z2"),
    "e": NodePlace(),
}


@pytest.mark.parametrize(("to", "tier"), [("a", 0), ("b", 1), ("c", 2), ("d", 3), ("e", 3), ("unplaced", 3)])
def test_labels_give_the_tiers(to: str, tier: int) -> None:
    assert Oracle(B, places=PLACES).tier("p", "a", "w", to) == tier


def test_a_map_of_workers_wins_over_one_of_nodes_and_both_over_labels() -> None:
    oracle = Oracle(B, places=PLACES, tier_map={("a", "b"): 2, ("p", "w"): 3})
    assert oracle.tier("p", "a", "w", "b") == 3
    assert oracle.tier("q", "a", "w", "b") == 2
    assert oracle.tier("q", "a", "w", "c") == 2


def test_a_tier_without_bandwidth_falls_to_the_next_farther_one() -> None:
    assert Oracle({2: 50.0, 3: 25.0}, places=PLACES).tier("p", "a", "w", "b") == 2
    assert Oracle({1: 50.0}, places=PLACES).tier("p", "a", "w", "d") == 1
    assert Oracle().tier("p", "a", "w", "b") is None


def test_a_pair_estimate_needs_no_tiers() -> None:
    path = Oracle(pairs={("p", "w"): PairEstimate(7.0, 0.0)}).path("p", "a", "w", "b", 1.0)
    assert path is not None
    assert (path.residual_bytes_per_s, path.source) == (7.0, PathSource.PAIR)


def test_a_learned_latency_wins_over_the_tiers() -> None:
    pairs = {("p", "w"): PairEstimate(7.0, 0.0, 0.25), ("p", "v"): PairEstimate(7.0, 0.0)}
    oracle = Oracle({1: 9.0}, latency_s={1: 0.5}, pairs=pairs)
    paths = [oracle.path("p", "a", to, "b", 1.0) for to in ("w", "v")]
    assert [path.latency_s for path in paths if path] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"bandwidth_bytes_per_s": {4: 1.0}}, r"bandwidth_bytes_per_s names tier 4: allowed are 0, 1, 2, 3"),
        ({"bandwidth_bytes_per_s": {1: 0.0}}, r"bandwidth_bytes_per_s\[1\] is 0.0: allowed is \(0"),
        ({"bandwidth_bytes_per_s": {1: 5.0, 2: 6.0}}, r"tier 2 has more bandwidth than the nearer tier 1"),
        (
            {"bandwidth_bytes_per_s": B, "congestion": {1: 1.0}},
            r"congestion\[1\] is 1.0: allowed is \[0.0, 1.0\)",
        ),
        ({"bandwidth_bytes_per_s": B, "latency_s": {1: float("nan")}}, r"latency_s\[1\] is nan"),
        ({"bandwidth_bytes_per_s": {1: 5.0}, "tier_map": {("p", "w"): 2}}, r"puts p -> w on tier 2"),
        ({"pairs": {("p", "w"): PairEstimate(0.0, 0.0)}}, r"pair p -> w has 0.0 bytes/s"),
        ({"pairs": {("p", "w"): PairEstimate(1.0, 0.0, -1.0)}}, r"pair p -> w has latency_s -1.0"),
        ({"stale_after_s": 0.0}, r"stale_after_s is 0.0"),
        ({"uplinks": {2: 0}}, r"uplinks\[2\] is 0: allowed is \[1.0, inf\)"),
        ({"uplinks": {4: 1}}, r"uplinks names tier 4"),
    ],
)
def test_inconsistent_data_are_refused_with_the_key(data: dict[str, Any], message: str) -> None:
    with pytest.raises(OracleError, match=message):
        Oracle(**data)


# the map names worker p itself, but only the node of q
@pytest.mark.parametrize("sender", ["p", "q"])
@pytest.mark.parametrize("asked_before", [False, True])
def test_many_receivers_at_once_get_what_each_would_alone(sender: str, asked_before: bool) -> None:
    receivers = [worker(f"w{i}", node=node) for i, node in enumerate("abcdeabcde")]
    pairs = {("p", "w1"): PairEstimate(7.0, 0.0), ("a", "c"): PairEstimate(9.0, 50.0)}
    oracle, one_by_one = (
        Oracle(B, places=PLACES, tier_map={("a", "b"): 2, ("p", "w6"): 3}, pairs=pairs) for _ in range(2)
    )
    if asked_before:
        oracle.tiers(sender, "a", receivers[:3])
        oracle.pair_paths(sender, "a", receivers[:3], 1.0)
    assert oracle.tiers(sender, "a", receivers) == [
        one_by_one.tier(sender, "a", w.id, w.node) for w in receivers
    ]
    for now_s, fresh in ((1.0, {"w1", "w2", "w7"}), (70.0, {"w2", "w7"}), (111.0, set())):
        paths = {w.id: one_by_one.path(sender, "a", w.id, w.node, now_s) for w in receivers}
        learned = {to: path for to, path in paths.items() if path and path.source is PathSource.PAIR}
        assert oracle.pair_paths(sender, "a", receivers, now_s) == learned
        assert learned.keys() == (fresh if sender == "p" else fresh - {"w1"})


def test_a_path_without_estimates_has_only_the_operators_congestion() -> None:
    oracle = Oracle(B, congestion={1: 0.5, 2: 0.5}, congestion_at_s=0.0, congestion_learnt=(2,))
    rates = [oracle.tier_path(tier, 1.0, estimates=False).residual_bytes_per_s for tier in (1, 2, 3)]
    assert rates == [50.0, 50.0, 25.0]
    assert oracle.tier_path(2, 1.0).residual_bytes_per_s == 25.0
