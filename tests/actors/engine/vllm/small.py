"""vLLM's own classes around the small model, as its engine builds them, without a worker: nothing is computed."""

from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from actors.engine.vllm.launch import served_config
from app.models import resolve

BLOCK = 16
BLOCKS = 65
MAX_MODEL_LEN = 512


class SmallModel:
    """The configuration of a CPU engine for the small model, and the parts that read it."""

    def __init__(self, transfer: KVTransferConfig | None = None) -> None:
        self.config: VllmConfig = served_config({
            "model": str(resolve("smollm2-135m-instruct")), "dtype": "float32", "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 4, "block_size": BLOCK, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28,
            "scheduling_policy": "priority", "kv_transfer_config": transfer,
        })  # fmt: skip
        self.config.cache_config.num_gpu_blocks = BLOCKS
        self.inputs = InputProcessor(self.config)
        tokenizer = self.inputs.tokenizer
        assert tokenizer is not None
        self.tokenizer = tokenizer
        hashing = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(BLOCK, hashing)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def request(self, request_id: str, tokens: list[int], params: SamplingParams) -> EngineCoreRequest:
        """A request as the core gets it, with everything that the model's files add to its parameters."""
        params.output_kind = RequestOutputKind.DELTA
        request = self.inputs.process_inputs(
            request_id, tokens_input(tokens), params, supported_tasks=("generate",)
        )
        self.inputs.assign_request_id(request)
        return request

    def scheduler(self, kind: type[Any]) -> Any:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=BLOCK)
        return kind(
            vllm_config=self.config, kv_cache_config=cache, block_size=BLOCK, hash_block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(self.config), log_stats=True,
        )  # fmt: skip

    def add(self, scheduler: Any, request: EngineCoreRequest) -> Request:
        """Gives the scheduler the request as the core does."""
        record = Request.from_engine_core_request(request, self._hasher)
        scheduler.structured_output_manager.grammar_init(record)
        scheduler.add_request(record)
        return record
