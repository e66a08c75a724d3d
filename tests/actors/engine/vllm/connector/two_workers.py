"""Worker halves of two engines in this process, with vLLM's own code around real NIXL agents, but without a model:
`python two_workers.py SCENARIO` prints a JSON object of what was seen. Each scenario reads prompts from `p` to `d`.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
# A temporary socket finds a free port for the side channel; only `p` listens on one.
with socket.create_server(("127.0.0.1", 0)) as free:
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free.getsockname()[1])

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from actors.engine.vllm.config import VllmEngineConfig, engine_args
from actors.engine.vllm.connector import LEASE, TRANSFERS
from actors.engine.vllm.connector.messages import SluiceMetadata
from actors.engine.vllm.connector.scheduler import SluiceScheduler
from actors.engine.vllm.connector.worker import SluiceWorker
from app.models import resolve

PATIENCE_S = 60.0
BLOCKS = 48
BLOCK_TOKENS, HEADS, CONTENT = 128, 3, 128
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
MODEL = "smollm2-135m-instruct"


def vllm_config(engine_id: str, role: str, options: dict[str, Any]) -> VllmConfig:
    given: dict[str, Any] = {"engine_id": engine_id, "role": role, "model": str(resolve(MODEL)), **options}
    args = engine_args(
        VllmEngineConfig(**given, device="cpu", dtype="float32", kv_space_gib=0.05, max_model_len=1024), "cpu"
    )
    args["kv_transfer_config"] = KVTransferConfig(**args["kv_transfer_config"], engine_id=engine_id)
    made = AsyncEngineArgs(**args).create_engine_config()
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


class Side:
    """The worker half of one engine, and its KV cache."""

    def __init__(self, engine_id: str, role: str, **options: Any) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32
        )
        self.cache_config = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)]
        )
        self.config = vllm_config(engine_id, role, options)
        with set_current_vllm_config(self.config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, "tcp://127.0.0.1:29871", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            self.worker = SluiceWorker(self.config, engine_id, self.cache_config)
            fill = torch.randn if role == "prefill" else torch.zeros
            self.caches = {name: fill(BLOCKS, HEADS, BLOCK_TOKENS, CONTENT) for name in LAYERS}
            self.worker.register_kv_caches(self.caches)

    def step(self, metadata: SluiceMetadata | None = None, aborted: tuple[str, ...] = ()) -> Any:
        """One step of the engine."""
        self.worker.start_load_kv(metadata or SluiceMetadata())
        return self.worker.transfer_results(set(aborted))


class Pair:
    """A lender `p` and a reader `d`."""

    def __init__(self, **options: Any) -> None:
        self.p = Side("p", "prefill", **options)
        self.d = Side("d", "decode", **options)
        self.scheduler = SluiceScheduler(self.p.config, "p", self.p.cache_config)
        self.scheduler.set_xfer_handshake_metadata({(0, 0): self.p.worker.xfer_handshake_metadata})
        self.generation = 100

    def lend(self, request_id: str, blocks: list[int]) -> dict[str, Any]:
        """Opens a lease on these blocks, and returns its handle."""
        self.generation += 1
        metadata = SluiceMetadata()
        metadata.opened[request_id] = (self.generation % 50, self.generation)
        metadata.lent[request_id] = (self.generation, (blocks,))
        metadata.reqs_in_batch.add(request_id)
        metadata.reqs_to_send[request_id] = time.perf_counter() + 60.0
        self.p.step(metadata)
        lease: dict[str, Any] = {
            "slot": self.generation % 50, "generation": self.generation, "node": "there",
            "tables": self.scheduler._tables, "sums": self.scheduler._sums,
        }  # fmt: skip
        return {
            "remote_block_ids": (blocks,), "remote_engine_id": "p", "remote_request_id": request_id,
            "remote_host": "127.0.0.1", "remote_port": self.scheduler.side_channel_port, "tp_size": 1,
            LEASE: lease,
        }  # fmt: skip

    def read(self, request_id: str, handle: dict[str, Any], blocks: list[int]) -> None:
        """Begins to read what the handle names into these blocks."""
        metadata = SluiceMetadata()
        metadata.add_new_req_to_recv(request_id, (blocks,), handle, awaiting_kvs=True)
        metadata.leases[request_id] = handle[LEASE]
        metadata.flows[request_id] = {"source": "there", "due_s": 30.0}
        self.d.step(metadata)

    def ended(self, request_id: str, aborted: tuple[str, ...] = ()) -> dict[str, Any]:
        """Steps both engines until the reader reports the request and the lender has its blocks back."""
        seen: dict[str, Any] = {}

        def over() -> bool:
            results = self.d.step(aborted=aborted)
            if request_id in results.finished_recving:
                seen["failed"] = request_id in results.failed_recving
                for entry in self.d.worker.xfer_stats.data[TRANSFERS]:
                    if entry[0] == request_id:
                        seen["bytes"], seen["corrupt"], seen["unscheduled"] = entry[2], entry[6], entry[7]
            if request_id in self.p.step().finished_sending:
                seen["given_back"] = True
            return "failed" in seen and (seen["failed"] or "given_back" in seen)

        until(over)
        return seen

    def same(self, theirs: list[int], mine: list[int]) -> bool:
        """Whether these blocks have been read."""
        return all(torch.equal(self.p.caches[n][theirs], self.d.caches[n][mine]) for n in LAYERS)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.p.worker.shutdown()
        self.d.worker.shutdown()


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def plain(pair: Pair) -> dict[str, Any]:
    """A read in a wild order of blocks; one whose lease has ended; one that is aborted."""
    theirs, mine = [7, 3, 4, 20, 19], [10, 9, 30, 31, 2]
    pair.read("r", pair.lend("r", theirs), mine)
    seen = {"read": pair.ended("r"), "same": pair.same(theirs, mine)}
    stale = pair.lend("stale", [5, 6])
    pair.p.worker._table.close("stale")
    pair.read("stale", stale, [12, 13])
    seen["stale"] = pair.ended("stale")
    pair.read("gone", pair.lend("gone", [5, 6]), [14, 15])
    seen["gone"] = pair.ended("gone", aborted=("gone",))["given_back"]
    return seen


def corrupt(pair: Pair) -> dict[str, Any]:
    """A read whose block changes at the lender behind its checksum, then one that is right."""
    handle = pair.lend("flip", [5, 6])
    table = pair.p.worker._table
    until(lambda: int(table._entries[handle[LEASE]["slot"], 1]) == handle[LEASE]["generation"])
    pair.p.caches[LAYERS[2]][6, 1, 5, 7] += 1.0
    pair.read("flip", handle, [12, 13])
    seen = {"flip": pair.ended("flip")}
    pair.read("right", pair.lend("right", [5, 6]), [12, 13])
    return seen | {"right": pair.ended("right"), "same": pair.same([5, 6], [12, 13])}


if __name__ == "__main__":
    scenario, given = sys.argv[1], json.loads(sys.argv[2])
    pair = Pair(**given)
    print("SEEN " + json.dumps({"plain": plain, "corrupt": corrupt}[scenario](pair)), flush=True)
    pair.close()
    # NIXL's threads may wait for each other.
    os._exit(0)
