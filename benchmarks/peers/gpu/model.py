"""The model of the comparison on a GPU: the shape of Llama 3 8B, without its weights.

vLLM fills the weights with random numbers (`load_format: dummy`), so nothing has to be downloaded. **What the model
says means nothing, and only times count**: a step takes as long as with true weights, because it moves and multiplies
as much. Requests have `ignore_eos`, so every answer has its number of tokens. The tokenizer and the chat template are
those of the built-in model; the vocabulary is therefore smaller than Llama's, and so are the embedding and the last
layer.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    # of the built-in model's tokenizer
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""The config.json of Meta-Llama-3-8B, but for the tokens."""

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS = "model.safetensors"


def write(folder: Path, tokenizer: Path) -> str:
    """Makes the model's folder with the tokenizer of another model's folder, and returns its path. Raises
    FileNotFoundError where a file of the tokenizer is missing.

    A file of weights without any is there, because `app.models` takes a folder without one for incomplete. There is no
    generation_config.json, so that no server has defaults of sampling.
    """
    folder.mkdir(parents=True)
    for name in TOKENIZER:
        shutil.copyfile(tokenizer / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    header = b"{}".ljust(8)
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    return str(folder)
