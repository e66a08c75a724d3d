"""A pool keeps its number of processes ready, and makes new ones for those that were taken or have died."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from actors.engine.cores import claim
from app.prewarmed.launcher import STARTING
from app.prewarmed.pool import MISPLACED_S, RETRY_S, START_S, Counts, Pool
from tests.app.prewarmed.waiting import socket_of, started, until, until_waiting

SHARES = ((0,), (1,))


class Rig:
    """A pool whose processes wait, or die, when the test says so."""

    def __init__(self, folder: Path, size: int = 1) -> None:
        self.folder, self.claims = folder / "pool", folder / "cores"
        self.now_s = 0.0
        self.made: list[tuple[subprocess.Popen[bytes], tuple[int, ...] | None]] = []
        self.pool = Pool(size, self.folder, self._start, SHARES, self.claims, lambda: self.now_s)

    def _start(self, cores: tuple[int, ...] | None) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.made.append((process, cores))
        return process

    def ready(self, number: int) -> None:
        socket_of(self.folder, self.made[number][0].pid).touch()

    def taken(self, number: int) -> None:
        socket_of(self.folder, self.made[number][0].pid).unlink()

    def mark(self, number: int) -> Path:
        """The file that stands for a process in which an engine starts."""
        return socket_of(self.folder, self.made[number][0].pid).with_suffix(STARTING)

    def starting(self, number: int) -> None:
        socket_of(self.folder, self.made[number][0].pid).rename(self.mark(number))

    def kill(self, number: int) -> None:
        self.made[number][0].kill()
        self.made[number][0].wait()


R = TypeVar("R", bound="Rig")


def until_the_end(made: R) -> Iterator[R]:
    """Yields a rig, and then ends its processes."""
    yield made
    for number in range(len(made.made)):
        made.kill(number)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield from until_the_end(Rig(tmp_path))


def test_one_is_made_and_no_more(rig: Rig) -> None:
    assert rig.pool.look() == Counts(0, 1, 0, 0)
    assert rig.pool.look() == Counts(0, 1, 0, 0)
    rig.ready(0)
    assert rig.pool.look() == Counts(1, 0, 0, 0)
    assert len(rig.made) == 1


def test_one_that_is_taken_is_made_again(rig: Rig) -> None:
    rig.pool.look()
    rig.ready(0)
    rig.pool.look()
    rig.taken(0)
    assert rig.pool.look() == Counts(0, 1, 1, 0)
    assert len(rig.made) == 2
    rig.pool.close()
    assert rig.made[1][0].poll() is not None
    # what became an engine lives on
    assert rig.made[0][0].poll() is None


def test_one_that_is_taken_keeps_its_place_until_its_engine_has_started(rig: Rig) -> None:
    rig.pool.look()
    rig.ready(0)
    rig.pool.look()
    rig.starting(0)
    rig.now_s = START_S - 1.0
    assert rig.pool.look() == Counts(0, 0, 1, 0)
    rig.now_s += START_S - 1.0
    assert rig.pool.look() == Counts(0, 0, 1, 0)
    rig.mark(0).unlink()
    assert rig.pool.look() == Counts(0, 1, 1, 0)
    assert len(rig.made) == 2


def test_one_whose_engine_starts_for_long_is_made_again_all_the_same(rig: Rig) -> None:
    rig.pool.look()
    rig.ready(0)
    rig.pool.look()
    rig.starting(0)
    rig.pool.look()
    rig.now_s = START_S
    assert rig.pool.look() == Counts(0, 1, 1, 0)


def test_one_that_ends_before_its_engine_has_started_is_made_again_at_once(rig: Rig) -> None:
    rig.pool.look()
    rig.ready(0)
    rig.pool.look()
    rig.starting(0)
    rig.pool.look()
    rig.kill(0)
    assert rig.pool.look() == Counts(0, 1, 1, 0)
    # another process may get its number
    assert not rig.mark(0).exists()


def test_others_are_made_while_an_engine_starts(tmp_path: Path) -> None:
    """Each start holds one place of the pool, so that many of them in a row do not empty it for good."""
    rig = Rig(tmp_path, size=2)
    try:
        for number in range(2):
            rig.pool.look()
            rig.ready(number)
        rig.pool.look()
        rig.starting(0)
        rig.taken(1)
        assert rig.pool.look() == Counts(0, 1, 2, 0)
        rig.ready(2)
        assert rig.pool.look() == Counts(1, 0, 2, 0)
        assert len(rig.made) == 3
    finally:
        for number in range(len(rig.made)):
            rig.kill(number)


def test_one_that_cannot_be_made_is_tried_again_less_and_less_often(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper looks twice a second and logs each failure."""
    tries: list[float] = []

    def no_memory(cores: tuple[int, ...] | None) -> "subprocess.Popen[bytes]":
        tries.append(rig.now_s)
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(rig.pool, "_start", no_memory)
    for _ in range(20):
        with contextlib.suppress(OSError):
            rig.pool.look()
        rig.now_s += 0.5
    # after 1 s, 2 s, 4 s
    assert tries == [0.0, 1.0, 3.0, 7.0]


def test_one_that_dies_while_it_waits_is_made_again_at_once(rig: Rig) -> None:
    rig.pool.look()
    rig.ready(0)
    rig.pool.look()
    rig.kill(0)
    assert rig.pool.look() == Counts(0, 1, 0, 1)
    # nobody tries to reach it
    assert not socket_of(rig.folder, rig.made[0][0].pid).exists()


def test_one_that_never_gets_ready_is_tried_again_ever_more_seldom(rig: Rig) -> None:
    waits, last_s = [], 0.0
    rig.pool.look()
    for number in range(9):
        rig.kill(number)
        rig.pool.look()
        while len(rig.made) == number + 1:
            rig.now_s += 0.5
            rig.pool.look()
        waits.append(rig.now_s - last_s)
        last_s = rig.now_s
    assert waits == [RETRY_S[0], 2.0, 4.0, 8.0, 16.0, 32.0, RETRY_S[1], 60.0, 60.0]


def test_processes_are_made_for_the_shares_that_the_next_engines_will_claim(tmp_path: Path) -> None:
    rig = Rig(tmp_path, size=2)
    held = claim(SHARES, 0, rig.claims)
    assert held.cores == (0,)
    try:
        for number in range(2):
            # they import one after another
            assert rig.pool.look().importing == 1
            rig.ready(number)
        assert rig.pool.look() == Counts(2, 0, 0, 0)
        # core 0 has an engine; core 1 gets the first, and then both have one
        assert [cores for _, cores in rig.made] == [(1,), (0,)]
    finally:
        held.release()
        for number in range(len(rig.made)):
            rig.kill(number)


class RealRig(Rig):
    """A pool whose processes are those of `waiting`, in which nothing is replaced by the test."""

    def _start(self, cores: tuple[int, ...] | None) -> "subprocess.Popen[bytes]":
        process = started(self.folder, cores)
        self.made.append((process, cores))
        return process


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealRig]:
    yield from until_the_end(RealRig(tmp_path))


def waits(rig: Rig, number: int) -> None:
    """Has the pool see that a process of it waits."""
    until_waiting(rig.folder, rig.made[number][0].pid)
    assert rig.pool.look().waiting == 1


def test_one_that_waits_for_other_cores_than_the_next_engine_claims_is_made_anew(real: RealRig) -> None:
    """Two engines run when it is made, and then the one of the other core ends."""
    first, second = (claim(SHARES, 0, real.claims) for _ in range(2))
    assert (first.cores, second.cores) == ((0,), (1,))
    try:
        real.pool.look()
        waits(real, 0)
        second.release()
        real.pool.look()
        real.now_s = MISPLACED_S - 0.1
        assert real.pool.look() == Counts(1, 0, 0, 0)
        real.now_s = MISPLACED_S
        until(lambda: real.pool.look() == Counts(0, 1, 0, 0), "one is made anew")
        assert real.made[0][0].poll() is not None
        waits(real, 1)
        assert [cores for _, cores in real.made] == [(0,), (1,)]
        real.now_s *= 3
        assert real.pool.look() == Counts(1, 0, 0, 0)
    finally:
        first.release()
        second.release()


def test_one_that_waits_stays_where_a_share_is_free_for_a_moment(real: RealRig) -> None:
    """An engine that ends is often replaced at once."""
    first, second = (claim(SHARES, 0, real.claims) for _ in range(2))
    try:
        real.pool.look()
        waits(real, 0)
        for _ in range(3):
            second.release()
            real.pool.look()
            real.now_s += MISPLACED_S - 0.1
            second = claim(SHARES, 0, real.claims)
            assert second.cores == (1,)
            assert real.pool.look() == Counts(1, 0, 0, 0)
        assert len(real.made) == 1
    finally:
        first.release()
        second.release()


def test_none_is_made_anew_while_an_engine_starts_that_has_claimed_nothing_yet(tmp_path: Path) -> None:
    rig = RealRig(tmp_path, size=2)
    held = claim(SHARES, 0, rig.claims)
    try:
        for number in range(2):
            rig.pool.look()
            until_waiting(rig.folder, rig.made[number][0].pid)
        assert rig.pool.look() == Counts(2, 0, 0, 0)
        assert [cores for _, cores in rig.made] == [(1,), (0,)]
        rig.starting(0)
        for rig.now_s in (0.0, MISPLACED_S, 2 * MISPLACED_S):
            assert rig.pool.look() == Counts(1, 0, 1, 0)
        assert len(rig.made) == 2
    finally:
        held.release()
        for number in range(len(rig.made)):
            rig.kill(number)


def test_a_close_leaves_nothing_that_waits(rig: Rig) -> None:
    rig.pool.look()
    rig.ready(0)
    rig.pool.close()
    until(lambda: rig.made[0][0].poll() is not None, "it has ended")
    assert list(rig.folder.iterdir()) == []
