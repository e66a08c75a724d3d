"""The folder of the model with dummy weights: Sluice takes it for complete, and its shape is Llama 3 8B's."""

import json
from pathlib import Path

import pytest

from app.models import resolve
from benchmarks.peers.gpu import model


def tokenizer(folder: Path) -> Path:
    """A folder with the files of a tokenizer, and one that is not copied."""
    folder.mkdir()
    for name in (*model.TOKENIZER, "generation_config.json"):
        (folder / name).write_text("{}")
    return folder


def test_the_folder_is_a_model_without_weights(tmp_path: Path) -> None:
    made = Path(model.write(tmp_path / "model", tokenizer(tmp_path / "t")))
    assert resolve(str(made)) == made
    names = {file.name for file in made.iterdir()}
    assert names == {"config.json", "model.safetensors", *model.TOKENIZER}
    # a safetensors file is the length of its header, the header, and the tensors
    assert (made / "model.safetensors").read_bytes() == b"\x08\0\0\0\0\0\0\0{}      "


def test_the_shape_has_eight_billion_parameters_but_for_the_vocabulary(tmp_path: Path) -> None:
    config = json.loads(
        (Path(model.write(tmp_path / "m", tokenizer(tmp_path / "t"))) / "config.json").read_text()
    )
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    # q and o, k and v, gate and up and down, two norms
    layer = 2 * hidden**2 + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    body = config["num_hidden_layers"] * layer + hidden
    # Llama 3 8B has 8,030,261,248 with embeddings of 128,256 tokens
    assert body + 2 * 128_256 * hidden == 8_030_261_248
    assert config["vocab_size"] == 49_152


def test_a_tokenizer_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    whole = tokenizer(tmp_path / "t")
    (whole / "chat_template.jinja").unlink()
    with pytest.raises(FileNotFoundError, match=r"chat_template\.jinja"):
        model.write(tmp_path / "m", whole)
