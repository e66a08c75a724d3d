"""The loader gives vLLM the tensors of another engine, each the same as the default loader's from disk."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from actors.engine.vllm import loader
from actors.engine.vllm.config import LANDING, LANDING_OF, LOAD_FORMAT
from actors.engine.weights.checkpoint import Checkpoint
from actors.engine.weights.landing import Landing
from app.models import resolve
from policies.weights.checkpoint import BadCheckpoint, Tensor

PIECE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(resolve("smollm2-135m-instruct"))


def hashes(made: Any, folder: Path) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
    source = DefaultModelLoader.Source(str(folder), None)
    return {
        name: (
            hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            tensor.dtype,
            tuple(tensor.shape),
        )
        for name, tensor in made._get_weights_iterator(source)
    }


def from_disk(folder: Path) -> Any:
    return hashes(DefaultModelLoader(LoadConfig()), folder)


def made(landing: Landing, of: Path, **extra: Any) -> Any:
    loader.register()
    loader.register()
    told = {LANDING: landing.path, LANDING_OF: str(of), **extra}
    found = get_model_loader(LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config=told))
    assert isinstance(found, loader.PeerLoader)
    return found


def fill(landing: Landing, folder: Path, pieces: int | None = None) -> None:
    checkpoint = Checkpoint(folder, PIECE_BYTES)
    landing.open(checkpoint.layout)
    for number in range(checkpoint.layout.pieces if pieces is None else pieces):
        piece = checkpoint.layout.piece(number)
        landing.view(piece)[:] = checkpoint.view(piece)
        landing.arrived(number + 1)


def test_every_tensor_is_the_one_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = from_disk(folder)
    landing = Landing()
    thread = threading.Thread(target=fill, args=(landing, folder))
    thread.start()
    # nothing may come from disk
    monkeypatch.setattr(DefaultModelLoader, "_get_weights_iterator", lambda self, source: iter(()))
    assert hashes(made(landing, folder), folder) == known
    thread.join()
    landing.close()


@pytest.mark.parametrize("pieces", [0, 40])
def test_what_does_not_come_is_read_from_disk(folder: Path, pieces: int) -> None:
    landing = Landing()
    if pieces:
        fill(landing, folder, pieces)
    threading.Timer(0.5, landing.fail).start()
    assert hashes(made(landing, folder), folder) == from_disk(folder)
    landing.close()


def test_without_a_landing_all_comes_from_disk(folder: Path) -> None:
    landing = Landing()
    found = made(landing, folder)
    landing.close()
    assert hashes(found, folder) == from_disk(folder)


def test_another_folder_than_the_landings_is_read_from_disk(folder: Path, tmp_path: Path) -> None:
    """vLLM loads a draft model by the configuration of the model for which it drafts."""
    landing = Landing()
    fill(landing, folder)
    draft = {"weight": torch.arange(4.0)}
    save_file(draft, tmp_path / "model.safetensors")
    found = hashes(made(landing, folder), tmp_path)
    landing.close()
    assert found == from_disk(tmp_path)
    assert found.keys() == draft.keys()


def test_the_rest_of_the_configuration_is_the_default_loaders(folder: Path) -> None:
    landing = Landing()
    assert made(landing, folder, enable_multithread_load=True).load_config.model_loader_extra_config == {
        "enable_multithread_load": True
    }
    with pytest.raises(ValueError, match="nonsense"):
        made(landing, folder, nonsense=1)
    landing.close()


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F5", (4,), 4), ("F32", (3,), 16), ("F32", (2,), 7), ("", (1,), 1)]
)
def test_tensors_that_are_none(dtype: str, shape: tuple[int, ...], size: int) -> None:
    memory = torch.zeros(size, dtype=torch.uint8).numpy()
    with pytest.raises(BadCheckpoint):
        loader.as_tensor(Tensor("t", dtype, shape, 0, 0, size), memory)


def test_every_dtype_that_pytorch_has_is_known() -> None:
    for name, torchs in loader.DTYPES.items():
        dtype = getattr(torch, torchs)
        memory = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8).numpy()
        tensor = loader.as_tensor(Tensor("t", name, (2, 2), 0, 0, len(memory)), memory)
        assert (tensor.dtype, tensor.shape) == (dtype, (2, 2))
    empty = loader.as_tensor(Tensor("t", "BF16", (0, 3), 0, 0, 0), torch.zeros(0, dtype=torch.uint8).numpy())
    assert (empty.dtype, empty.shape) == (torch.bfloat16, (0, 3))
