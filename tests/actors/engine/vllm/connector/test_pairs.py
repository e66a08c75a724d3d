"""The order of a read's index pairs, and what NIXL makes of it."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.vllm.connector.pairs import aligned, pieces


def test_only_neighbours_that_step_by_one_on_both_sides_join() -> None:
    assert pieces([0, 1, 2], [5, 6, 7]) == 1
    assert pieces([2, 1, 0], [7, 6, 5]) == 3
    assert pieces([0, 1, 2], [7, 6, 5]) == 3
    assert pieces([0, 1, 3, 4], [5, 6, 7, 8]) == 2
    assert pieces([], []) == 0


def test_descending_pairs_become_one_piece() -> None:
    ours, theirs = aligned([2, 1, 0], np.array([7, 6, 5]))
    assert (ours.tolist(), theirs.tolist()) == ([0, 1, 2], [5, 6, 7])
    assert pieces(ours.tolist(), theirs.tolist()) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5, unique_by=lambda pair: pair[0]))
def test_no_order_has_fewer_pieces(pairs: list[tuple[int, int]]) -> None:
    local, remote = [a for a, _ in pairs], [b for _, b in pairs]
    ours, theirs = aligned(local, remote)
    assert sorted(zip(ours, theirs, strict=True)) == sorted(pairs)
    fewest = min(pieces([a for a, _ in one], [b for _, b in one]) for one in permutations(pairs))
    assert pieces(ours.tolist(), theirs.tolist()) == fewest


def test_lists_of_two_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="pairs 2 local indices with 1 remote"):
        aligned([1, 2], [1])
