"""The files of a folder that are a checkpoint, and the folders that have the same one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from actors.engine.weights.checkpoint import INDEX, Checkpoint, config_hash, weight_names
from policies.weights.checkpoint import BadCheckpoint
from tests.actors.engine.weights.rig import PIECE_BYTES, model, on_disk


def test_pieces_are_the_bytes_of_the_files(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    checkpoint = Checkpoint(folder, PIECE_BYTES)
    layout = checkpoint.layout
    for number, file in enumerate(layout.files):
        parts = [layout.piece(i) for i in range(layout.pieces)]
        joined = b"".join(checkpoint.view(part).tobytes() for part in parts if part.file == number)
        assert joined == (folder / file.name).read_bytes()
    assert {tensor.name for tensor in checkpoint.tensors} == set(on_disk(folder))


def test_copies_are_the_same_and_other_weights_are_not(tmp_path: Path) -> None:
    one = Checkpoint(model(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text(json.dumps({"rows": 300, "model_type": "toy"}, indent=4))
    copy = Checkpoint(tmp_path / "copy")
    assert (copy.fingerprint, copy.config) == (one.fingerprint, one.config)
    # a fine-tuned model: the same names, shapes and sizes
    tuned = Checkpoint(model(tmp_path / "tuned", seed=1))
    assert tuned.layout == one.layout
    assert tuned.fingerprint != one.fingerprint
    assert Checkpoint(model(tmp_path / "longer", rows=301)).fingerprint != one.fingerprint


def test_one_changed_tensor_is_seen(tmp_path: Path) -> None:
    one = Checkpoint(model(tmp_path / "one")).fingerprint
    file = tmp_path / "one" / "model-2.safetensors"
    changed = load_file(file)
    changed["2.bias"] = changed["2.bias"] + 1
    save_file(changed, file)
    assert Checkpoint(tmp_path / "one").fingerprint != one


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    shutil.copy(folder / "model-1.safetensors", folder / "duplicate.safetensors")
    assert weight_names(folder) == ["duplicate.safetensors", "model-1.safetensors", "model-2.safetensors"]
    index = {"weight_map": {"1.weight": "model-1.safetensors", "2.weight": "model-2.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    assert weight_names(folder) == ["model-1.safetensors", "model-2.safetensors"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / INDEX).write_text("{}"),
        lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}'),
        lambda folder: (folder / "consolidated.safetensors").write_bytes(b"x"),
        lambda folder: (folder / "model-1.safetensors").write_bytes(b"\xff" * 100),
        lambda folder: (folder / "model-1.safetensors").write_bytes(b"\0" * 7),
        lambda folder: (folder / "model-1.safetensors").write_bytes(b""),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "config.json").write_text("no json"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, spoil: object) -> None:
    folder = model(tmp_path / "m")
    assert callable(spoil)
    spoil(folder)
    with pytest.raises(BadCheckpoint):
        Checkpoint(folder)


def test_a_folder_without_weights_has_a_configuration_only(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    known = Checkpoint(folder).config
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(BadCheckpoint, match="no safetensors"):
        Checkpoint(folder)
    assert config_hash(folder) == known


def test_nobody_can_write_through_the_mapping(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    before = (folder / "model-1.safetensors").read_bytes()
    checkpoint = Checkpoint(folder)
    view = checkpoint.view(checkpoint.layout.piece(0))
    view[:] = np.zeros(len(view), np.uint8)
    assert (folder / "model-1.safetensors").read_bytes() == before


def test_copies_of_pages_are_given_back(tmp_path: Path) -> None:
    """A write makes them here, as the registration with a network card does."""
    folder = model(tmp_path / "m")
    checkpoint = Checkpoint(folder, PIECE_BYTES)
    piece = checkpoint.layout.piece(1)
    view = checkpoint.view(piece)
    known = view.tobytes()
    view[:] = np.zeros(len(view), np.uint8)
    assert view.tobytes() != known
    checkpoint.returned(piece)
    assert view.tobytes() == known


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(b"short"),
        lambda file: file.write_bytes(file.read_bytes()),
        lambda file: file.with_suffix(".new").rename(file),
        lambda file: file.unlink(),
    ],
)
def test_a_file_that_has_changed_is_lent_no_more(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = model(tmp_path / "m")
    checkpoint = Checkpoint(folder, PIECE_BYTES)
    last = checkpoint.layout.pieces - 1
    shutil.copy(folder / "model-1.safetensors", folder / "model-1.new")
    change(folder / "model-1.safetensors")
    with pytest.raises(OSError):
        checkpoint.view(checkpoint.layout.piece(0))
    assert len(checkpoint.view(checkpoint.layout.piece(last)))
