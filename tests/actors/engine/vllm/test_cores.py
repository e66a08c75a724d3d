"""Cores are divided evenly, disjointly while there are enough, and shared fairly when there are not; engines that come
and go get shares that nobody has.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.cores import claim, divide_cores, split_ranks, usable_cores


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


def test_an_engine_that_starts_gets_the_share_of_one_that_has_gone(tmp_path: Path) -> None:
    """Serve gives rank 0 of the first, which goes, to the third, so the new one starts with rank 2."""
    shares = divide_cores([0, 1, 2, 3, 4, 5], 3)
    first, second, third = (claim(shares, rank, tmp_path) for rank in range(3))
    assert [one.cores for one in (first, second, third)] == [(0, 1), (2, 3), (4, 5)]
    first.release()
    assert claim(shares, 2, tmp_path).cores == (0, 1)


def test_engines_above_the_number_of_shares_are_spread(tmp_path: Path) -> None:
    # four engines on two cores; then each core has two, and a fifth takes the one from which its group counts
    shares = divide_cores([0, 1], 4)
    held = [claim(shares, 0, tmp_path) for _ in range(4)]
    assert sorted(one.cores for one in held) == [(0,), (0,), (1,), (1,)]
    assert claim(shares, 3, tmp_path).cores == (1,)


_HOLDS = """
import sys
from pathlib import Path
from actors.engine.cores import claim
held = claim(((0,), (1,)), 0, Path(sys.argv[1]))
print(held.cores, flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_leaves_no_claim(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "(0,)\n"
        mine = claim(((0,), (1,)), 0, tmp_path)
        assert mine.cores == (1,)
        other.kill()
        other.wait()
    again = claim(((0,), (1,)), 0, tmp_path)
    assert again.cores == (0,)
    assert len(list(tmp_path.glob("*.claim"))) == 2


def test_the_folder_above_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    """The folder above holds the sockets and the admin key of this user's processes."""
    umask = os.umask(0o002)
    try:
        held = claim(((0,),), 0, tmp_path / "sluice-7" / "cores")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "sluice-7").stat().st_mode) == 0o700
    held.release()
