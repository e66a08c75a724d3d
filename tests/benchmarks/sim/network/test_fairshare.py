"""The rates against an independent reference: successive linear programmes, level by level."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from benchmarks.sim.network.fairshare import Bundle, FairShare


def reference(capacity: list[float], bundles: list[Bundle]) -> dict[int, float]:
    """Max-min rates per weight: raise the common rate as far as a linear programme can, fix who is stuck, repeat."""
    left = np.array(capacity, dtype=float)
    rates: dict[int, float] = {}
    for level in sorted({b.level for b in bundles}):
        mine = [b for b in bundles if b.level == level]
        uses = np.array(
            [[b.weight if link in b.links else 0.0 for b in mine] for link in range(len(capacity))]
        )
        fixed: dict[int, float] = {}
        while len(fixed) < len(mine):
            free = [i for i in range(len(mine)) if i not in fixed]
            bounds = [(fixed[i], fixed[i]) if i in fixed else (0, None) for i in range(len(mine))]
            common = _maximise(uses, left, bounds, free, None)
            floor = [
                (fixed[i], fixed[i]) if i in fixed else (common * (1 - 1e-9), None) for i in range(len(mine))
            ]
            stuck = [i for i in free if _maximise(uses, left, floor, free, i) < common * (1 + 1e-6) + 1e-6]
            assert stuck
            fixed.update(dict.fromkeys(stuck, common))
        for i, bundle in enumerate(mine):
            rates[bundle.id] = fixed[i]
            for link in bundle.links:
                left[link] = max(0.0, left[link] - fixed[i] * bundle.weight)
    return rates


def _maximise(uses, left, bounds, free, one) -> float:
    """The largest common rate of `free`, or the largest rate of flow `one` alone."""
    n = uses.shape[1]
    if one is not None:
        objective = np.zeros(n)
        objective[one] = -1
        solved = linprog(objective, A_ub=uses, b_ub=left * (1 + 1e-12) + 1e-9, bounds=bounds)
        assert solved.status == 0, solved.message
        return float(-solved.fun)
    objective = np.zeros(n + 1)
    objective[n] = -1
    at_least = np.zeros((len(free), n + 1))
    for row, i in enumerate(free):
        at_least[row, i], at_least[row, n] = -1, 1
    solved = linprog(
        objective,
        A_ub=np.vstack([np.hstack([uses, np.zeros((len(left), 1))]), at_least]),
        b_ub=np.concatenate([left * (1 + 1e-12) + 1e-9, np.zeros(len(free))]),
        bounds=[*bounds, (0, None)],
    )
    assert solved.status == 0, solved.message
    return float(-solved.fun)


def rates_of(
    capacity: list[float], paths: list[tuple[int, ...]], levels: list[int] | None = None
) -> list[float]:
    fair = FairShare(capacity)
    bundles = []
    for i, links in enumerate(paths):
        bundle = Bundle(i, links, levels[i] if levels else 0)
        bundle.weight = 1.0
        fair.add(bundle)
        bundles.append(bundle)
    fair.rebalance(0.0)
    return [b.rate for b in bundles]


@pytest.mark.parametrize(
    ("capacity", "paths", "levels", "rates"),
    [
        # one link, three flows
        ([9.0], [(0,), (0,), (0,)], None, [3, 3, 3]),
        # a long flow over both, one on each: the narrow link gives 4 / 2 = 2, the wide one has 10 - 2 = 8 left
        ([10.0, 4.0], [(0, 1), (0,), (1,)], None, [2, 8, 2]),
        # 12 / 3 = 4 on link 0; link 1: 6 / 2 = 3 comes first, so link 0 has (12 - 3) / 2 = 4.5 for the others
        ([12.0, 6.0], [(0, 1), (1,), (0,), (0,)], None, [3, 3, 4.5, 4.5]),
        # level 0 takes link 1 whole (4); level 1's long flow starves, its other flow has what is left of link 0: 10
        ([10.0, 4.0], [(1,), (0, 1), (0,)], [0, 1, 1], [4, 0, 10]),
        # level 0 is held to 4 by link 1; on link 0 level 1 has 10 - 4 = 6, halved; level 2 nothing
        ([10.0, 4.0], [(0, 1), (0,), (0,), (0,)], [0, 1, 1, 2], [4, 3, 3, 0]),
    ],
)
def test_by_hand(capacity, paths, levels, rates):
    assert rates_of(capacity, paths, levels) == pytest.approx(rates)


def test_weights_divide_a_link():
    fair = FairShare([12.0])
    bundles = [Bundle(i, (0,), 0) for i in range(2)]
    for bundle, weight in zip(bundles, (1.0, 3.0), strict=True):
        bundle.weight = weight
        fair.add(bundle)
    fair.rebalance(0.0)
    assert [b.rate * b.weight for b in bundles] == [3.0, 9.0]


LINKS = 6
operation = st.one_of(
    st.tuples(
        st.just("add"),
        st.sets(st.integers(0, LINKS - 1), min_size=1, max_size=4),
        st.integers(0, 2),
        st.sampled_from([0.5, 1.0, 2.0, 7.0]),
    ),
    st.tuples(st.just("remove"), st.integers(0, 100)),
    st.tuples(st.just("reweigh"), st.integers(0, 100), st.sampled_from([0.5, 1.0, 3.0])),
    st.tuples(st.just("capacity"), st.integers(0, LINKS - 1), st.sampled_from([1.0, 5.0, 10.0, 33.0])),
    st.tuples(st.just("rebalance")),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 2.0, 10.0, 33.0]), min_size=LINKS, max_size=LINKS),
    st.lists(operation, min_size=1, max_size=30),
)
def test_after_any_changes_the_rates_are_the_max_min_ones(capacity, operations):
    """The incremental rates after changes in any order equal what the linear programmes say of the final state."""
    fair, bundles = FairShare(capacity), []
    for i, (what, *args) in enumerate(operations):
        if what == "add":
            bundle = Bundle(i, tuple(sorted(args[0])), args[1])
            bundle.weight = args[2]
            fair.add(bundle)
            bundles.append(bundle)
        elif what == "capacity":
            capacity[args[0]] = args[1]
            fair.set_capacity(*args)
        elif what == "rebalance":
            fair.rebalance(0.0)
        elif bundles:
            bundle = bundles[args[0] % len(bundles)]
            if what == "remove":
                bundles.remove(bundle)
                fair.remove(bundle)
            else:
                bundle.weight = args[1]
                fair.reweigh(bundle)
    fair.rebalance(0.0)
    expected = reference(capacity, bundles)
    for bundle in bundles:
        assert bundle.rate == pytest.approx(expected[bundle.id], rel=1e-5, abs=1e-5)
    for link in range(LINKS):
        assert fair.taken(link) == pytest.approx(sum(b.weight * b.rate for b in bundles if link in b.links))


def test_a_flow_that_overtakes_takes_its_bottlenecks_others_along():
    """Link 0 has 4.4: b 1.5 (held by link 0 itself), g and h 1.4 and f 0.1 (held by links of their own).

    At once g and h are held to 0.1 and f to nothing. With b held fixed f would have 4.4 - 1.5 - 0.2 = 2.7 and link 0
    would be full; right is (4.4 - 0.2) / 2 = 2.1 for f and b.
    """
    fair = FairShare([4.4, 1.4, 1.4, 0.1])
    bundles = [Bundle(i, links, 0) for i, links in enumerate([(0,), (0, 1), (0, 2), (0, 3)])]
    for bundle in bundles:
        bundle.weight = 1.0
        fair.add(bundle)
    fair.rebalance(0.0)
    assert [b.rate for b in bundles] == pytest.approx([1.5, 1.4, 1.4, 0.1])
    for link, capacity in ((1, 0.1), (2, 0.1), (3, 10.0)):
        fair.set_capacity(link, capacity)
    fair.rebalance(0.0)
    assert [b.rate for b in bundles] == pytest.approx([2.1, 0.1, 0.1, 2.1])


def test_a_change_elsewhere_leaves_rates_alone():
    fair = FairShare([10.0, 10.0])
    near, far, new = (Bundle(i, (link,), 0) for i, link in enumerate((0, 1, 0)))
    for bundle in (near, far, new):
        bundle.weight = 1.0
    fair.add(near)
    fair.add(far)
    fair.rebalance(0.0)
    fair.add(new)
    assert {b.id for b in fair.rebalance(0.0)} == {near.id, new.id}
