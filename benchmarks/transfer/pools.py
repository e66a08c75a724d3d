"""The block pools of a prefill engine and a decode engine that grow old under requests, on vLLM's KV cache manager.

Nothing is computed: both engines allocate, cache and free blocks as vLLM's scheduler has them do. A prompt is a prefix
that others share, chosen by Zipf's law, and a part of its own. The prefill engine allocates it in chunks, and holds it
until some more have come; then the decode engine allocates it whole, reads it, and generates a block for each request
that arrives meanwhile.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from actors.engine.vllm.blocks import allocate_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests and the two pools. Lengths are in tokens, pools in blocks; ranges are inclusive.

    `held` prompts wait at the prefill engine. `zipf` is the exponent of the law by which prefixes are chosen.
    """

    requests: int = 1500
    pool_blocks: int = 2000
    block_tokens: int = 32
    prompts: tuple[int, int] = (2000, 4000)
    prefixes: int = 60
    prefix_lengths: tuple[int, int] = (500, 1900)
    zipf: float = 1.0
    chunk: int = 2048
    held: int = 4
    output_blocks: tuple[int, int] = (4, 10)
    caching: bool = True


@dataclass(frozen=True, slots=True)
class Read:
    """One request's read: block ids of the decode engine (`local`) and of the prefill engine (`remote`), in the order
    of the prompt. `turnovers` is the number of pools that had been allocated at the decode engine before.
    """

    turnovers: float
    local: list[int]
    remote: list[int]


@dataclass(slots=True)
class Pool:
    """One engine's pool. `allocated` counts its blocks, `asked` and `hits` the tokens of prompts."""

    manager: KVCacheManager
    caching: bool
    allocated: int = 0
    asked: int = 0
    hits: int = 0

    def blocks(self, request: Request) -> list[int]:
        """Returns the request's block ids in the order of its tokens."""
        return list(self.manager.get_block_ids(request.request_id)[0])

    def begin(self, request: Request, chunk: int | None) -> int:
        """Allocates a prompt in chunks, or whole as KV that is to be read (None). Returns the tokens found in the
        prefix cache. Raises RuntimeError if the pool is full.
        """
        cached, hit, _ = self.manager.get_computed_blocks(request)
        left = request.num_prompt_tokens - hit
        self.asked += request.num_prompt_tokens
        self.hits += hit
        if chunk is None:
            self._allocate(
                request,
                0,
                num_new_computed_tokens=hit,
                new_computed_blocks=cached,
                num_external_computed_tokens=left,
                delay_cache_blocks=True,
            )
            request.num_computed_tokens = request.num_prompt_tokens
            self.manager.cache_blocks(request, request.num_computed_tokens)
            return hit
        first = min(chunk, left)
        self._allocate(request, first, num_new_computed_tokens=hit, new_computed_blocks=cached)
        request.num_computed_tokens = hit + first
        while request.num_computed_tokens < request.num_prompt_tokens:
            size = min(chunk, request.num_prompt_tokens - request.num_computed_tokens)
            self._allocate(request, size)
            request.num_computed_tokens += size
        return hit

    def grow(self, request: Request, tokens: list[int]) -> None:
        """Allocates and caches `tokens` of output."""
        request.append_output_token_ids(tokens)
        self._allocate(request, len(tokens))
        request.num_computed_tokens += len(tokens)

    def _allocate(self, request: Request, tokens: int, **more: Any) -> None:
        before = len(self.blocks(request)) if request.num_computed_tokens else 0
        if self.manager.allocate_slots(request, tokens, **more) is None:
            raise RuntimeError("the pool is full: give it more blocks, or fewer and shorter requests")
        self.allocated += len(self.blocks(request)) - before


@dataclass(slots=True)
class _Decode:
    request: Request
    left: int = field(compare=False)


def pool(allocator: str, load: Load) -> Pool:
    """Returns a new pool whose blocks are allocated by `allocator` (`actors.engine.vllm.blocks`)."""
    spec = FullAttentionSpec(block_size=load.block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32)
    group = KVCacheGroupSpec(["layer"], spec)
    config = KVCacheConfig(load.pool_blocks, [], [group], hash_block_size=load.block_tokens)
    manager = KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=load.block_tokens,
        hash_block_size=load.block_tokens,
        enable_caching=load.caching,
    )
    allocate_by(allocator, manager)
    return Pool(manager, load.caching)


def reads(allocator: str, load: Load, seed: int) -> Iterator[tuple[Read, Pool, Pool]]:
    """Yields each request's read, with the prefill engine's pool and the decode engine's as they are then."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(load.block_tokens, sha256)
    rng = random.Random(seed)
    prefill, decode = pool(allocator, load), pool(allocator, load)
    weights = list(accumulate(1 / (rank + 1) ** load.zipf for rank in range(load.prefixes)))
    prefixes = [_tokens(rng, rng.randint(*load.prefix_lengths)) for _ in range(load.prefixes)]
    held: deque[Request] = deque()
    running: list[_Decode] = []
    for n in range(load.requests):
        prefix = rng.choices(prefixes, cum_weights=weights)[0]
        prompt = prefix + _tokens(rng, rng.randint(*load.prompts) - len(prefix))
        asked = Request(f"p{n}", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        prefill.begin(asked, load.chunk)
        held.append(asked)
        for one in running:
            decode.grow(one.request, _tokens(rng, load.block_tokens))
            one.left -= 1
        for one in [one for one in running if one.left == 0]:
            decode.manager.free(one.request)
            running.remove(one)
        if len(held) <= load.held:
            continue
        ready = held.popleft()
        turnovers = decode.allocated / load.pool_blocks
        given = Request(
            f"d{n}", ready.prompt_token_ids, SamplingParams(max_tokens=1 << 16), None, block_hasher=hasher
        )
        known = decode.begin(given, None) // load.block_tokens
        yield Read(turnovers, decode.blocks(given)[known:], prefill.blocks(ready)[known:]), prefill, decode
        prefill.manager.free(ready)
        running.append(_Decode(given, rng.randint(*load.output_blocks)))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1 << 30) for _ in range(count)]
