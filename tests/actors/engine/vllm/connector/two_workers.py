"""Worker halves of two engines in one process, with vLLM's own code around real NIXL agents, but without a model.

Each scenario reads prompts from `p` to `d`. `seen` runs one in a process of its own, which is forked from a process
with the imports of this file: they take more time than a scenario.
"""

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from nixl._bindings import nixlRemoteDisconnectError
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from actors.engine.vllm.config import VllmEngineConfig, engine_args
from actors.engine.vllm.connector import LEASE, TRANSFERS
from actors.engine.vllm.connector.acquaintance import Peer
from actors.engine.vllm.connector.messages import SluiceMetadata
from actors.engine.vllm.connector.scheduler import SluiceScheduler
from actors.engine.vllm.connector.worker import SluiceWorker
from actors.engine.vllm.launch import reserve_ports
from actors.engine.vllm.stats import Ledger, Transfer
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

    def __init__(self, engine_id: str, role: str, store: str, **options: Any) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32
        )
        self.cache_config = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)]
        )
        self.config = vllm_config(engine_id, role, options)
        with set_current_vllm_config(self.config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, store, 0, "gloo")
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
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        # Only `p` listens on the side channel. Its port is held, as by an engine, and is none that the kernel gives to
        # the tests beside this one; that of torch is needed at once.
        port, self._held = reserve_ports("127.0.0.1", 1)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        with socket.create_server(("127.0.0.1", 0)) as other:
            store = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        self.p = Side("p", "prefill", store, **options)
        self.d = Side("d", "decode", store, **options)
        self.scheduler = SluiceScheduler(self.p.config, "p", self.p.cache_config)
        self.scheduler.set_xfer_handshake_metadata({(0, 0): self.p.worker.xfer_handshake_metadata})
        self.generation = 100
        self.first_results: list[Any] = []

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
        """Begins to read what the handle names into these blocks. A short read may have ended within this step."""
        self.first_results.append(self.read_all({request_id: (handle, blocks)}))

    def read_all(self, reads: dict[str, tuple[dict[str, Any], list[int]]]) -> Any:
        """Begins several reads in one step, and returns its results."""
        metadata = SluiceMetadata()
        for request_id, (handle, blocks) in reads.items():
            metadata.add_new_req_to_recv(request_id, (blocks,), handle, awaiting_kvs=True)
            metadata.leases[request_id] = handle[LEASE]
            metadata.flows[request_id] = {"source": "there", "due_s": 30.0}
        return self.d.step(metadata)

    def look(self, into: dict[str, bool]) -> None:
        """Steps the reader, and puts `into` a dictionary whether the requests that it reports have failed."""
        results = self.d.step()
        into.update((name, name in results.failed_recving) for name in results.finished_recving)

    def ended(
        self, request_id: str, aborted: tuple[str, ...] = (), into: dict[str, bool] | None = None
    ) -> dict[str, Any]:
        """Steps both engines until the reader reports the request and the lender has its blocks back. Whether others
        failed that the reader reports meanwhile goes `into` a dictionary.
        """
        seen: dict[str, Any] = {}

        def take(results: Any) -> None:
            if into is not None:
                into.update((other, other in results.failed_recving) for other in results.finished_recving)
            if request_id in results.finished_recving:
                seen["failed"] = request_id in results.failed_recving
                for entry in self.d.worker.xfer_stats.data[TRANSFERS]:
                    if entry[0] == request_id:
                        seen["bytes"], seen["corrupt"], seen["unscheduled"] = entry[2], entry[6], entry[7]
                        seen["level"] = entry[8]

        def over() -> bool:
            while self.first_results:
                take(self.first_results.pop())
            take(self.d.step(aborted=aborted))
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
    """One that is aborted while the engines make each other's acquaintance; a read in a wild order of blocks; one whose
    lease has ended; one that is aborted; some whose handles do not fit, in one step with one that is right.
    """
    handshake = pair.d.worker._nixl_handshake

    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return handshake(*args)

    pair.d.worker._nixl_handshake = slow
    pair.read("early", pair.lend("early", [5, 6]), [40, 41])
    seen: dict[str, Any] = {"early": pair.ended("early", aborted=("early",))}
    seen["early_moved"] = any(bool(pair.d.caches[name][[40, 41]].any()) for name in LAYERS)
    theirs, mine = [7, 3, 4, 20, 19], [10, 9, 30, 31, 2]
    pair.read("r", pair.lend("r", theirs), mine)
    seen |= {"read": pair.ended("r"), "same": pair.same(theirs, mine)}
    stale = pair.lend("stale", [5, 6])
    pair.p.worker._table.close("stale")
    pair.read("stale", stale, [12, 13])
    seen["stale"] = pair.ended("stale")
    pair.read("gone", pair.lend("gone", [5, 6]), [14, 15])
    seen["gone"] = pair.ended("gone", aborted=("gone",))["given_back"]
    right = pair.lend("right", [5, 6])
    odd = {
        "no table": {**right, LEASE: {**right[LEASE], "tables": []}},
        "no number": {**right, LEASE: {**right[LEASE], "generation": "x"}},
        "no group": {**right, "remote_block_ids": ()},
        "no such block": {**right, "remote_block_ids": ([5, 10 * BLOCKS],)},
    }
    reads = {name: (handle, [2 * n + 16, 2 * n + 17]) for n, (name, handle) in enumerate(odd.items())}
    pair.first_results.append(pair.read_all({**reads, "right": (right, [12, 13])}))
    ends: dict[str, bool] = {}
    seen["right"] = pair.ended("right", into=ends)
    until(lambda: ends.keys() >= odd.keys() or pair.look(ends))
    seen["odd"] = {name: ends[name] for name in odd}
    seen["right_same"] = pair.same([5, 6], [12, 13])
    return seen


def corrupt(pair: Pair) -> dict[str, Any]:
    """The reader meets its lender. Then a read whose block changes at the lender behind its checksum, and one that is
    right; neither makes a handshake.
    """
    asked: list[str] = []
    handshake = pair.d.worker._nixl_handshake

    def counted(*args: Any) -> Any:
        asked.append(args[3])
        return handshake(*args)

    pair.d.worker._nixl_handshake = counted
    peer = msgspec.structs.asdict(Peer("p", "127.0.0.1", pair.scheduler.side_channel_port, 1, 1, 1))
    pair.d.worker.meet([peer, peer])
    until(lambda: "p" in pair.d.worker._remote_agents)
    pair.d.worker.meet([peer])
    handle = pair.lend("flip", [5, 6])
    table = pair.p.worker._table
    until(lambda: int(table._entries[handle[LEASE]["slot"], 1]) == handle[LEASE]["generation"])
    pair.p.caches[LAYERS[2]][6, 1, 5, 7] += 1.0
    pair.read("flip", handle, [12, 13])
    seen = {"flip": pair.ended("flip")}
    pair.read("right", pair.lend("right", [5, 6]), [12, 13])
    seen |= {"right": pair.ended("right"), "same": pair.same([5, 6], [12, 13])}
    heard: list[Transfer] = []
    ledger = Ledger(heard.append, lambda request_id: None)
    ledger.connector(pair.d.worker.xfer_stats.data)
    totals = ledger.totals
    seen["counted"] = [totals.transfers, totals.transfer_failures, totals.transfer_mismatches]
    seen["heard"] = [[transfer.request_id, transfer.ok] for transfer in heard]
    seen["handshakes"] = asked
    return seen


def disconnected(pair: Pair) -> dict[str, Any]:
    """A read; then the reader's connection to the lender dies, as UCX reports it until the lender is forgotten, and
    there is a read whose request has told the lender of it in vain, one that begins while another is under way, and one
    more.
    """
    worker, nixl = pair.d.worker, pair.d.worker._agent.nixl
    send_notif, forgotten = nixl.send_notif, nixl.remove_remote_agent
    dead: set[str] = set()
    asked: list[str] = []
    handshake = worker._nixl_handshake

    def counted(*args: Any) -> Any:
        asked.append(args[3])
        return handshake(*args)

    def refused(agent: str, *args: Any, **kwargs: Any) -> Any:
        if agent in dead:
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        return send_notif(agent, *args, **kwargs)

    def removed(agent: str) -> None:
        dead.discard(agent)
        forgotten(agent)

    worker._nixl_handshake = counted
    nixl.send_notif, nixl.remove_remote_agent = refused, removed
    seen: dict[str, Any] = {}

    def read(name: str) -> None:
        pair.read(name, pair.lend(name, [5, 6]), [12, 13])
        seen[name] = pair.ended(name)["failed"]

    read("before")
    dead.update(worker._remote_agents["p"].values())
    read("after")
    seen["same"] = pair.same([5, 6], [12, 13])
    # what is in flight over the dead connection still uses its descriptors
    dead.update(worker._remote_agents["p"].values())
    in_flight = worker._engines_with_inflight_transfers
    worker._engines_with_inflight_transfers = lambda: {"p"}
    read("beside another one")
    worker._engines_with_inflight_transfers = in_flight
    seen["kept"] = "p" in worker._remote_agents
    until(lambda: bool(pair.d.step()) and "p" not in worker._remote_agents)
    read("at last")
    return seen | {"handshakes": asked}


def by_permit(pair: Pair, agent_pid: int) -> dict[str, Any]:
    """A read by permits of a flow agent, one while it stands still, and one after its death."""
    theirs, mine = [7, 3, 4, 20, 19], [10, 9, 30, 31, 2]

    def scheduled() -> bool:
        # The worker's line to its agent may still be on its way up.
        pair.read("r", pair.lend("r", theirs), mine)
        seen["permitted"] = pair.ended("r")
        pair.d.worker.xfer_stats.reset()
        return seen["permitted"]["unscheduled"] == ""

    seen: dict[str, Any] = {}
    until(scheduled)
    seen["same"] = pair.same(theirs, mine)
    os.kill(agent_pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    pair.read("silent", pair.lend("silent", [8, 11]), [14, 15])
    seen["silent"] = pair.ended("silent")
    seen["silent_s"] = time.monotonic() - begun_s
    os.kill(agent_pid, signal.SIGKILL)
    pair.read("alone", pair.lend("alone", [5, 6]), [12, 13])
    return seen | {"alone": pair.ended("alone"), "still_same": pair.same([5, 6], [12, 13])}


def seen(
    scenario: Callable[..., dict[str, Any]], *arguments: Any, timeout_s: float = 300.0, **options: Any
) -> dict[str, Any]:
    """Returns what the scenario saw with a pair of these options, in a process of their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, scenario, arguments, options))
    process.start()
    theirs.close()
    try:
        assert ours.poll(timeout_s), f"nothing was seen within {timeout_s} s"
        result: dict[str, Any] | str = ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
    assert isinstance(result, dict), result
    return result


def _run(
    to: Connection,
    scenario: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    try:
        to.send(scenario(Pair(**options), *arguments))
    except BaseException:
        to.send(traceback.format_exc())
    # Whoever asked ends this process by force: NIXL's threads may wait for each other.
    time.sleep(PATIENCE_S)
