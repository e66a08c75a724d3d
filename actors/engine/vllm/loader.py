"""vLLM's loader for engines that may read their weights from another engine (`weights_from: peer`).

It is vLLM's default loader, but the tensors of the model's folder come out of the landing that the engine's owner fills
(`actors.engine.weights`), each as soon as it is there. What does not come, and all other weights, come from disk.

    registered as    LOAD_FORMAT, by `register`, in every process of such an engine
    told by          model_loader_extra_config: {LANDING: the landing's path, LANDING_OF: the model's folder}
"""

import dataclasses
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from actors.engine.vllm.config import LANDING, LANDING_OF, LOAD_FORMAT
from actors.engine.weights.checkpoint import Bytes
from actors.engine.weights.landing import Landed
from policies.weights.checkpoint import BadCheckpoint, Tensor

logger = init_logger(__name__)

STUCK_S = 60.0
"""Seconds without progress after which the loader reads from disk, whatever the owner's thread says. ASSUMPTION: longer
than that thread waits for anything itself (`weights.reader`)."""

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
"""PyTorch's names of the format's dtypes."""


class PeerLoader(DefaultModelLoader):
    """The loader. Its configuration is the default loader's, but for the landing."""

    counter_before_loading_weights: float

    def __init__(self, load_config: LoadConfig) -> None:
        extra: Any = dict(load_config.model_loader_extra_config)
        self._landing, self._folder = str(extra.pop(LANDING)), str(extra.pop(LANDING_OF))
        super().__init__(
            dataclasses.replace(load_config, load_format="auto", model_loader_extra_config=extra)
        )

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        if (
            source.model_or_path != self._folder
            or source.subfolder is not None
            or source.allow_patterns_overrides is not None
        ):
            # a draft model, say, which vLLM loads by the same configuration
            yield from super()._get_weights_iterator(source)
            return
        self.counter_before_loading_weights = self.counter_before_loading_weights or time.perf_counter()
        came: set[str] = set()
        landed: Landed | None = None
        try:
            landed = Landed(self._landing, STUCK_S)
            for one, memory in landed.tensors():
                tensor = as_tensor(one, memory)
                came.add(source.prefix + one.name)
                yield source.prefix + one.name, tensor
        except (OSError, BadCheckpoint) as error:
            logger.warning("Weights of another engine cannot be used: %s", error)
        if landed is not None and landed.whole:
            return
        logger.warning("Weights come from disk, but for %d tensors of another engine.", len(came))
        yield from self._others(source, came)

    def _others(
        self, source: DefaultModelLoader.Source, came: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super()._get_weights_iterator(source):
            if name not in came:
                yield name, tensor


def as_tensor(one: Tensor, memory: Bytes) -> torch.Tensor:
    """Returns a tensor over this memory. Raises BadCheckpoint for an unknown dtype, or a shape that is not its size."""
    dtype = getattr(torch, DTYPES.get(one.dtype, ""), None)
    if dtype is None:
        raise BadCheckpoint(f"{one.name} has the dtype {one.dtype}, which is not known here")
    if not len(memory):
        return torch.empty(one.shape, dtype=dtype)
    try:
        return torch.from_numpy(memory).view(dtype).reshape(one.shape)
    except RuntimeError as error:
        raise BadCheckpoint(f"{one.name}: {error}") from None


def register() -> None:
    """Makes vLLM know the loader in this process. Idempotent."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as known

    if LOAD_FORMAT not in known:
        register_model_loader(LOAD_FORMAT)(PeerLoader)
