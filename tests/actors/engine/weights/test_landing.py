"""A loader's view of a landing, at any point of a read."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from actors.engine.weights.checkpoint import Checkpoint
from actors.engine.weights.landing import Landed, Landing
from policies.weights.checkpoint import BadCheckpoint
from tests.actors.engine.weights.rig import PIECE_BYTES, descriptors, model


class Filling:
    """A landing that is filled with the pieces of a checkpoint, one by one."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint(folder, PIECE_BYTES)
        self.layout = self.checkpoint.layout
        self.landing = Landing()
        self.there = 0

    def fill(self, pieces: int) -> None:
        if not self.there:
            self.landing.open(self.layout)
        for number in range(self.there, self.there + pieces):
            piece = self.layout.piece(number)
            self.landing.view(piece)[:] = self.checkpoint.view(piece)
        self.there += pieces
        self.landing.arrived(self.there)


@pytest.fixture
def filling(tmp_path: Path) -> Filling:
    return Filling(model(tmp_path / "m"))


def names(landed: Landed) -> list[str]:
    return [one.name for one, _ in landed.tensors()]


def test_all_tensors_come_with_their_bytes(filling: Filling, tmp_path: Path) -> None:
    filling.fill(filling.layout.pieces)
    landed = Landed(filling.landing.path, 1.0)
    files = [(tmp_path / "m" / file.name).read_bytes() for file in filling.layout.files]
    for one, memory in landed.tensors():
        assert memory.tobytes() == files[one.file][one.begin : one.end]
    assert landed.whole
    filling.landing.close()


def test_a_tensor_comes_as_soon_as_its_bytes_are_there(filling: Filling) -> None:
    landed = Landed(filling.landing.path, 5.0)
    filling.fill(1)
    came = landed.tensors()
    # the library puts wide numbers first
    assert next(came)[0].name == "1.bias"
    began_s = time.monotonic()
    rest = threading.Timer(0.3, filling.fill, (filling.layout.pieces - 1,))
    rest.start()
    assert next(came)[0].name == "1.weight"
    assert time.monotonic() - began_s >= 0.25
    rest.join()
    assert len(list(came)) == 4
    assert landed.whole
    filling.landing.close()


def test_nothing_comes_of_a_read_that_has_failed(filling: Filling) -> None:
    filling.landing.fail()
    landed = Landed(filling.landing.path, 5.0)
    assert names(landed) == []
    assert not landed.whole
    filling.landing.close()


def test_what_came_before_a_failure_stays(filling: Filling) -> None:
    filling.fill(1)
    landed = Landed(filling.landing.path, 5.0)
    came = landed.tensors()
    next(came)
    filling.landing.fail()
    assert len(list(came)) < 6
    assert not landed.whole
    filling.landing.close()


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_loader_does_not_wait_for_a_reader_that_is_stuck(filling: Filling, pieces: int) -> None:
    if pieces:
        filling.fill(pieces)
    landed = Landed(filling.landing.path, 0.2)
    assert "2.weight" not in names(landed)
    assert not landed.whole
    filling.landing.close()


def test_garbage_is_no_checkpoint(filling: Filling) -> None:
    filling.landing.open(filling.layout)
    view = filling.landing.view(filling.layout.piece(0))
    view[:] = np.full(len(view), 255, np.uint8)
    filling.landing.arrived(1)
    with pytest.raises(BadCheckpoint):
        names(Landed(filling.landing.path, 1.0))
    filling.landing.close()


def test_a_landing_that_is_gone_is_an_error_of_the_system(filling: Filling) -> None:
    filling.landing.close()
    with pytest.raises(OSError):
        Landed(filling.landing.path, 1.0)


def test_memory_is_given_back(filling: Filling) -> None:
    assert descriptors() > 0
    filling.fill(filling.layout.pieces)
    filling.landing.close()
    filling.landing.close()
    assert descriptors() == 0
    filling.landing.fail()
