"""The heatmap's cells, the choice between colocated and disaggregated, and its load correction."""

import random
from typing import Any

import pytest

from policies.routing.deepflow.heatmap import Heatmap, combine, heatmap_from
from policies.routing.deepflow.pd_heatmap import Combined, PdHeatmap
from policies.routing.params import BadParameter
from policies.state.views import Request, Role, Worker
from tests.policies.routing.views import snapshot, worker

# Long prompts with short answers gain from disaggregation (DeepFlow 5.3.1).
MAP = {"prefill_tokens": [100, 1000], "ratios": [0.1, 1.0], "cells": [[0.5, -0.2], [1.0, 0.25]]}


@pytest.mark.parametrize(
    ("prefill", "decode", "cell"),
    [
        (100, 10, 0.5),
        (100, 100, -0.2),
        (1000, 100, 1.0),
        (5, 100, -0.2),  # outside: the edge
        (9000, 9000, 0.25),
        (316, 31.6, 0.5),  # just below sqrt(100 * 1000) = 316.2
        (317, 31.7, 1.0),
        (100, 31, 0.5),  # ratio 0.31 < sqrt(0.1) = 0.316
        (100, 32, -0.2),
        (100, 0, 0.5),
    ],
)
def test_a_request_is_looked_up_in_the_cell_nearest_by_ratio(
    prefill: float, decode: float, cell: float
) -> None:
    assert heatmap_from(MAP).mean_cell(prefill, decode) == cell


def test_maps_of_several_rates_are_added_and_the_mean_is_a_ratio_again() -> None:
    other = Heatmap((100.0, 1000.0), (0.1, 1.0), ((0.1, -0.4), (0.0, 0.05)))
    both = combine([heatmap_from(MAP), other])
    assert both.cells == ((0.6, pytest.approx(-0.6)), (1.0, 0.3))
    assert both.mean_cell(100, 10) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratios": [1.0, 0.1]}, "ratios is .* ascending numbers above 0"),
        ({"prefill_tokens": [0, 5]}, "prefill_tokens is"),
        ({"cells": [[1.0, 2.0]]}, r"cells must be 2 rows \(prefill_tokens\) of 2 numbers"),
        ({"cells": [[1.0, 2.0], [float("nan"), 1.0]]}, r"cells\[1\]\[0\] is nan"),
        ({"rates": 0}, "rates is 0"),
        ({"speed": 1}, "'speed' is missing or unknown; keys: cells, prefill_tokens, rates, ratios"),
    ],
)
def test_bad_maps_are_refused_with_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        heatmap_from(MAP | change)
    with pytest.raises(BadParameter, match="is no table with"):
        PdHeatmap(heatmap=5)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="must be numbers"):
        heatmap_from({"prefill_tokens": 5, "ratios": [1], "cells": [[0]]})
    with pytest.raises(BadParameter, match="must be numbers"):
        heatmap_from(MAP | {"cells": [["much", 1.0], [1.0, 1.0]]})
    with pytest.raises(BadParameter, match="heatmap: 'cells' is missing"):
        heatmap_from({"prefill_tokens": [1], "ratios": [1]})


def fleet(prefilling: int = 0, decoding: int = 0, colocated: int = 0) -> list[Worker]:
    return [
        worker("c0", Role.COLOCATED, slots_used=colocated),
        worker("d0", slots_used=decoding),
        worker("p0", Role.PREFILL, prefilling=prefilling),
        worker("p1", Role.PREFILL, prefilling=prefilling + 1 if prefilling else 0),
    ]


def choose(policy: PdHeatmap, workers: list[Worker], prefill: int, decode: float | None, **hits: int) -> str:
    request = Request("r", 0.0, prefill, 1000, predicted_tokens=decode)
    candidates = [w for w in workers if w.role is not Role.DECODE]
    view = snapshot(workers, hits={"r": hits})
    decision = policy.choose_prefill(request, candidates, view, random.Random(0))
    assert {r.worker for r in decision.ranking} == {w.id for w in candidates}
    assert decision.ranking[0].cost <= min(r.cost for r in decision.ranking)
    return decision.worker


@pytest.mark.parametrize(
    ("prefill", "decode", "kind"),
    [
        (1000, 100, "p"),
        (100, 100, "c"),
        (100, 10, "p"),
        # no prediction: max_tokens 1000, ratio 10
        (100, None, "c"),
    ],
)
def test_the_sign_of_the_cell_chooses_the_kind(prefill: int, decode: float | None, kind: str) -> None:
    assert choose(PdHeatmap(heatmap=MAP), fleet(), prefill, decode)[0] == kind


def test_by_default_the_load_does_not_choose_the_kind_as_in_the_paper() -> None:
    """The decode side is full and the colocated worker idle; a cell above 0 still means disaggregated."""
    for policy in (PdHeatmap(heatmap=MAP), Combined(heatmap=MAP)):
        assert choose(policy, fleet(prefilling=7, decoding=8), 100, 10)[0] == "p"


@pytest.mark.parametrize(
    ("load", "k", "kind"),
    [
        # score = used / 8 / 5: 8 of 8 is 0.2. cell 0.5: 1.5 * (1 + k C_col) / (1 + k C_dis) - 1
        ({"decoding": 8}, 0.0, "p"),  # the paper's policy does not look
        ({"decoding": 8}, 1.0, "p"),  # 1.5 / 1.2 > 1
        ({"decoding": 8}, 3.0, "c"),  # 1.5 / 1.6 < 1
        # the busier side counts: 7 and 8 of 8, mean 0.1875: 1.5 / 1.5625 < 1
        ({"prefilling": 7}, 3.0, "c"),
        # both sides full: the cell decides again
        ({"decoding": 8, "colocated": 8}, 3.0, "p"),
    ],
)
def test_the_load_of_both_sides_corrects_the_cell(load: dict[str, int], k: float, kind: str) -> None:
    assert choose(PdHeatmap(heatmap=MAP, load_correction=k), fleet(**load), 100, 10)[0] == kind


def test_within_the_kind_the_least_load_decides_and_combined_follows_hits_while_balanced() -> None:
    workers = fleet(prefilling=3)
    shared: dict[str, Any] = {"heatmap": MAP, "load_correction": 1.0}
    assert choose(PdHeatmap(**shared), workers, 1000, 100, p1=512) == "p0"
    assert choose(Combined(**shared, bound=0.5), workers, 1000, 100, p1=512) == "p1"
    assert choose(Combined(**shared, bound=0.0), workers, 1000, 100, p1=512) == "p0"


def test_one_kind_alone_needs_no_map_and_without_a_map_load_decides_the_kind() -> None:
    only = [worker("p0", Role.PREFILL, prefilling=2), worker("p1", Role.PREFILL, prefilling=1), worker("d0")]
    assert choose(PdHeatmap(), only, 100, 10) == "p1"
    assert choose(PdHeatmap(), fleet(decoding=8), 100, 10)[0] == "c"
    assert choose(PdHeatmap(), fleet(colocated=8), 100, 10)[0] == "p"
