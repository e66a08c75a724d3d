"""Cores are divided evenly, disjointly while there are enough, and shared fairly when there are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.cores import divide_cores, split_ranks, usable_cores


@pytest.mark.parametrize(
    ("cores", "engines", "expected"),
    [
        ([0, 1], 1, ((0, 1),)),
        ([0, 1], 2, ((0,), (1,))),
        ([0, 1], 3, ((0,), (1,), (0,))),
        ([0, 1], 4, ((0,), (1,), (0,), (1,))),
        ([4, 5, 6, 7, 8], 2, ((4, 5, 6), (7, 8))),
        ([7, 3, 3, 5], 2, ((3, 5), (7,))),
    ],
)
def test_division(cores: list[int], engines: int, expected: tuple[tuple[int, ...], ...]) -> None:
    assert divide_cores(cores, engines) == expected


@given(cores=st.sets(st.integers(0, 255), min_size=1, max_size=64), engines=st.integers(1, 80))
def test_every_engine_has_a_core_and_no_core_serves_more_than_its_share(
    cores: set[int], engines: int
) -> None:
    shares = divide_cores(sorted(cores), engines)
    assert len(shares) == engines
    load = {core: sum(core in share for share in shares) for core in cores}
    assert all(share and set(share) <= cores for share in shares)
    assert max(load.values()) - min(load.values()) <= 1
    if engines <= len(cores):
        assert set(load.values()) == {1}


def test_ranks_of_one_engine_are_separated_as_vllm_reads_them() -> None:
    assert split_ranks([2, 3, 4, 5], 2) == "2,3|4,5"
    assert split_ranks([2, 3], 1) == "2,3"


@pytest.mark.parametrize(("cores", "engines"), [([], 1), ([0], 0)])
def test_nothing_to_divide_is_refused(cores: list[int], engines: int) -> None:
    with pytest.raises(ValueError, match="divide_cores needs"):
        divide_cores(cores, engines)


def test_this_process_may_run_somewhere() -> None:
    assert len(usable_cores()) >= 1
