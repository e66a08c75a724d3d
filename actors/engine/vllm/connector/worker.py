"""The half of the KV connector in a worker, which lends blocks under checked leases and reads the blocks of others (see
`connector`).
"""

import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger
from vllm.platforms import current_platform

from actors.engine.nixl_agents import CPU_DELAY_US
from actors.engine.vllm import plugin, resume
from actors.engine.vllm.connector import OVERDUE, RENEWED, TRANSFERS
from actors.engine.vllm.connector.chunked_read import FlowTerms, Lease, ReadTerms
from actors.engine.vllm.connector.integrity import SumsAt, SumsTable, share_of
from actors.engine.vllm.connector.lease_table import GenerationProbe, GenerationTable, Source
from actors.engine.vllm.connector.messages import SluiceMetadata, SluicePayload, SluiceStats
from actors.engine.vllm.connector.read_check import CORRUPT, ReadChecks
from actors.engine.vllm.connector.scheduler import terms_later
from actors.engine.vllm.connector.transfer import TransferAgent, TransferFacts, tuned_agents
from actors.engine.vllm.flow import FlowThread
from actors.flow.chunks import FLOOR_BYTES_PER_S
from actors.flow.client import ReadsClient
from actors.flow.reader import SILENT_S, ReaderConfig
from actors.wire.environment import secret_of_environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

READ_TIMEOUT_S = 10.0
"""Seconds that a read may take beside the time for its bytes: handshake, connection, and a lender that is busy.
ASSUMPTION: vLLM's handshake gives up after 5 s, and NIXL connects in less."""

DISCONNECTED = "NIXL_ERR_REMOTE_DISCONNECT"
"""NIXL's words where the connection to another agent has died."""

HOLD_SHARE = 2 / 3
"""Longest hold of a read as a share of the lease: the margin is for the read itself, and heartbeats renew the lease
only as long as the core steps. A request that must end earlier is held until then at most."""


@dataclass
class _HeldRead:
    due_s: float
    since_s: float
    meta: ReqMeta


def _empty(meta: ReqMeta) -> None:
    """Leaves nothing to be read for a request; vLLM then only tells the lender so."""
    meta.local_block_ids = tuple([] for _ in meta.local_block_ids)
    meta.local_physical_block_ids = ()


class SluiceWorker(NixlPullConnectorWorker):
    """vLLM's pull worker, which also lends its blocks under checked leases and checks the blocks that it has read."""

    def __init__(self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig") -> None:
        # vLLM makes this object when the model is loaded, and before it allocates KV blocks
        self._made_at_s = time.time()
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        on_cpu = current_platform.device_type == "cpu"
        delay_us = transfer_config.get_from_extra_config("progress_delay_us", CPU_DELAY_US if on_cpu else 0)
        affinity = os.sched_getaffinity(0)
        if not vllm_config.use_v2_model_runner:
            # Here, because every worker of an engine that starts has loaded this connector.
            resume.start_with_output()
        with tuned_agents(int(delay_us)):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        # vLLM moves this thread to the machine's last core "for KV transfer". On a CPU it is the thread that computes,
        # so the workers of all engines would share that one core and leave their own idle.
        os.sched_setaffinity(0, affinity)
        config = self.kv_transfer_config
        self.nixl_wrapper = self._agent = TransferAgent(self.nixl_wrapper)  # type: ignore[has-type]
        self.xfer_stats = SluiceStats()
        self._share = share_of(str(config.get_from_extra_config("integrity", "off")))
        self._flow_agent = str(config.get_from_extra_config("flow_agent", ""))
        self._node = str(config.get_from_extra_config("flow_node", "")) or engine_id
        self._hold_reads_s = float(config.get_from_extra_config("hold_reads_s", 0.0))
        self._lease_s = float(config.get_from_extra_config("kv_lease_duration", 30))
        # As lender:
        # Leases that a decode engine knows, which only its message or the lease's end frees.
        self._claimed: set[str] = set()
        # Released leases, with the time until which a late message is expected.
        self._given_back: dict[str, float] = {}
        self._done_sending: set[str] = set()
        # As borrower:
        self._held: dict[str, _HeldRead] = {}
        self._leases: dict[str, dict[str, Any]] = {}
        self._flows: dict[str, tuple[dict[str, Any], float]] = {}
        """The terms of each request's read, with the time by this process's clock at which its metadata came."""
        self._held_s: dict[str, float] = {}
        # The times from which reads are counted, and the reads that have been reported as overdue.
        self._reading_since_s: dict[str, float] = {}
        self._overdue: set[str] = set()
        self._read_timeout_s = float(config.get_from_extra_config("read_timeout_s", READ_TIMEOUT_S))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        # Registered before vLLM describes this worker to others, because the description names all registered memory.
        nixl, backends = self._agent.nixl, self.nixl_backends
        self._table = GenerationTable(nixl, backends)
        self._checks = ReadChecks(nixl, backends, GenerationProbe(nixl, backends))
        super().register_kv_caches(kv_caches)
        name = f"{self.engine_id}/{self.tp_rank}"
        silent_s = float(self.kv_transfer_config.get_from_extra_config("flow_silent_s", SILENT_S))
        client = ReadsClient(
            self._flow_agent, self._node, name, secret_of_environment(), ReaderConfig(silent_s)
        )
        self._reads = FlowThread(
            self._checks, client, name, scheduled=bool(self._flow_agent), begin=self._use_device
        )
        self._agent.submit = self._reads.submit
        self._kv_block_bytes = sum(self.block_len_per_layer) * self._physical_blocks_per_logical_kv_block
        payload = self.xfer_handshake_metadata  # type: ignore[has-type]
        self.xfer_handshake_metadata = SluicePayload(
            compatibility_hash=payload.compatibility_hash,
            agent_metadata_bytes=payload.agent_metadata_bytes,
            lease_table=self._table.address,
            sums=None if self._checks.sums is None else dataclasses.astuple(self._checks.sums.at),
            kv_block_bytes=self._kv_block_bytes,
            born_at_s=plugin.born_at_s(),
            imported_at_s=plugin.imported_at_s,
            loaded_at_s=self._made_at_s,
            registered_at_s=time.time(),
        )

    def register_local_xfer_handler(self, block_size: int) -> Any:
        """Describes this worker's blocks to NIXL as vLLM does. The table of their checksums is registered with them."""
        described = super().register_local_xfer_handler(block_size)
        if self._share is not None and self._checks.sums is None:
            if set(self.region_mem_types) != {"DRAM"}:
                raise ValueError(
                    "integrity: checksums are computed in host memory only; set integrity to off, or "
                    "kv_buffer_device to cpu"
                )
            self._checks.sums = SumsTable(self._agent.nixl, self.nixl_backends, described[1], self._share)
        return described

    def shutdown(self) -> None:
        """Ends the thread that reads, and then the rest as vLLM does."""
        reads: FlowThread | None = getattr(self, "_reads", None)
        if reads is not None:
            reads.stop()
            if self._checks.sums is not None:
                self._checks.sums.close()
        super().shutdown()

    # ------------------------------------------------------------------------------------------------ lender

    def start_load_kv(self, metadata: SluiceMetadata) -> None:
        for request_id in metadata.reqs_not_processed:
            self._forget(request_id)
        for request_id, (slot, generation) in metadata.opened.items():
            self._table.open(request_id, slot, generation)
        for request_id, (generation, blocks) in metadata.lent.items():
            self._sum(request_id, generation, blocks)
        self._leases.update(metadata.leases)
        now_s = time.monotonic()
        self._flows.update({request_id: (terms, now_s) for request_id, terms in metadata.flows.items()})
        for request_id, rli in metadata.advanced.items():
            self._advance(request_id, rli)
        self._post_due_reads()
        super().start_load_kv(metadata)
        for request_id in metadata.released:
            self._release(request_id)
        for request_id, lease_s in metadata.renewed.items():
            self._renew(request_id, lease_s)

    def _sum(self, request_id: str, generation: int, blocks: Any) -> None:
        """Computes the checksums of what this request lends, and then says so in the lease's entry."""
        if self._checks.sums is None:
            return
        ratio = self._physical_blocks_per_logical_kv_block
        indices = self._compute_desc_ids(
            block_ids=self._logical_to_kernel_block_ids(blocks, ratio),
            dst_num_blocks=self.dst_num_blocks[self.engine_id],
            block_size_ratio=None,
            physical_blocks_per_logical=ratio,
            region_num_blocks=self.dst_region_num_blocks.get(self.engine_id) or None,
            region_group_ids=self.region_group_ids or None,
            uses_region_group_mapping=self._uses_region_group_mapping,
        )
        self._checks.sums.lend(indices, generation, lambda: self._table.summed(request_id, generation))

    def _release(self, request_id: str) -> None:
        """Gives a lease back early; does nothing if it has ended or a decode engine knows the request."""
        if request_id in self._claimed or self._reqs_to_send.pop(request_id, None) is None:
            return
        self.consumer_notification_counts_by_req.pop(request_id, None)
        self.expected_consumer_notifications_by_req.pop(request_id, None)
        self._forget(request_id)
        # The id stays in _reqs_to_process, because a decode engine that gave the request up may still report that.
        self._given_back[request_id] = time.perf_counter() + self._lease_s
        self._done_sending.add(request_id)

    def _renew(self, request_id: str, lease_s: float) -> None:
        """Makes a lease last for `lease_s` from now on, unless it lasts longer already or has ended."""
        until_s = self._reqs_to_send.get(request_id)
        if until_s is None:
            return
        self._reqs_to_send[request_id] = max(until_s, time.perf_counter() + lease_s)
        self.xfer_stats.data[RENEWED].append(request_id)

    def _forget(self, request_id: str) -> None:
        self._table.close(request_id)
        self._claimed.discard(request_id)

    def _handle_heartbeat(self, payload: str) -> None:
        super()._handle_heartbeat(payload)
        known = (
            attempt_id
            for attempt_id in payload.split(",")
            if attempt_id in self._reqs_to_send or attempt_id in self._reqs_to_process
        )
        self._claimed.update(attempt_id for attempt_id in known if attempt_id not in self._given_back)

    # ---------------------------------------------------------------------------------------------- borrower

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if self._hold_reads_s > 0 and meta.awaiting_kvs and req_id not in self._held_s:
            now_s = time.perf_counter()
            self._held[req_id] = _HeldRead(now_s + self._hold_reads_s, now_s, meta)
            self._claim(meta)
            return
        if meta.awaiting_kvs:
            self._reading_since_s.setdefault(req_id, time.perf_counter())
            self._claim(meta)
        try:
            super()._read_blocks_for_req(req_id, meta)
        except Exception as error:
            # A handle comes from another process. What it names may not fit this engine: that fails its own request.
            self._log_failure(failure_type="bad_handle", req_id=req_id, error=error, meta=meta)
            self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)

    def _advance(self, request_id: str, rli: int) -> None:
        """Lowers the relative layer index of a request's reads: of those that wait for permits, and of those that still
        wait for a handshake. Does nothing for a request whose reads have ended.
        """
        if request_id in self._flows:
            told, told_at_s = self._flows[request_id]
            self._flows[request_id] = ({**told, "rli": rli}, told_at_s)
            self._reads.advance(request_id, rli)

    def meet(self, peers: Sequence[Mapping[str, Any]]) -> None:
        """Begins a handshake with each of these engines (`acquaintance.Peer`), unless there was one. A failure is
        logged and counted, and the first read tries again.
        """
        for peer in peers:
            self._ensure_handshake(**peer)

    def _claim(self, meta: ReqMeta) -> None:
        """Tells the lender that its blocks are about to be read, so that no release frees them. Where the connection to
        it has died, as one does when the network is cut for longer than TCP waits, the lender is forgotten: then the
        read begins with a handshake, as with a lender that is new. UCX does not connect a dead endpoint again.
        """
        remote = meta.remote
        assert remote is not None
        dead = False
        for agent in self._remote_agents.get(remote.engine_id, {}).values():
            try:
                self._agent.send_notif(agent, notif_msg=f"HB:{remote.request_id}".encode())
            except Exception as e:
                dead = dead or DISCONNECTED in str(e)
                self._log_failure(
                    failure_type="claim_failed", msg="A release may overtake the read", req_id=remote.request_id,
                    error=e, dst_engine_id=remote.engine_id, remote_agent_name=agent,
                )  # fmt: skip
        if dead and remote.engine_id not in self._invalid_remote_engines:
            self._mark_remote_engine_invalid(remote.engine_id, time.perf_counter())
            # at once, unless other reads from it or a handshake are under way: then this read fails
            self._cleanup_remote_engines()

    def _post_due_reads(self) -> None:
        """Posts the reads held by `hold_reads_s` whose time has come."""
        now_s = time.perf_counter()
        for req_id in [attempt_id for attempt_id, held in self._held.items() if held.due_s <= now_s]:
            held = self._held.pop(req_id)
            self._held_s[req_id] = now_s - held.since_s
            self._read_blocks_for_req(req_id, held.meta)

    def _drop_unread(self, finished_req_ids: set[str]) -> None:
        """Drops the reads of requests that were aborted before their reads began, and tells the lender that its copy is
        no longer needed: at once for held reads, and for those that wait for a handshake when it has ended.
        """
        for req_id in finished_req_ids & self._held.keys():
            held = self._held.pop(req_id)
            self._held_s[req_id] = time.perf_counter() - held.since_s
            _empty(held.meta)
            self._read_blocks_for_req(req_id, held.meta)
        for req_id in finished_req_ids & self._recving_metadata.keys() - self._recving_transfers.keys():
            _empty(self._recving_metadata[req_id])

    def _read_blocks(self, **read: Any) -> bool:  # type: ignore[override]
        """Submits one read from one remote worker. Its "done" message is kept until the read has been checked."""
        request_id, engine_id = read["request_id"], read["dst_engine_id"]
        rank = (0, read["read_spec"].remote_rank)
        agent = self._remote_agents[engine_id][rank]
        self._agent.begin(self._terms(request_id, Source(agent, rank)))
        try:
            posted = super()._read_blocks(**read)
        finally:
            _, notification = self._agent.end()
        if notification:
            self._pending_recv_notifs.setdefault(request_id, []).append((agent, notification))
        return posted

    def _use_device(self) -> None:
        """Gives the calling thread the device's context, without which UCX does without NVLink, as vLLM's handshake
        does.
        """
        if not self.use_host_buffer:
            current_platform.set_device(self.device_id)

    def _terms(self, request_id: str, source: Source) -> ReadTerms:
        """Returns what a read from `source` belongs to. Raises KeyError for a lease that names no table of that
        worker.
        """
        lease = self._leases.get(request_id)
        told, told_at_s = self._flows.get(request_id, ({}, 0.0))
        flow = terms_later(told, time.monotonic() - told_at_s)
        hold_s = min(self._lease_s * HOLD_SHARE, flow.get("hold_s", math.inf))
        terms = FlowTerms(**{**flow, "target": self._node, "hold_s": hold_s})
        if lease is None:
            return ReadTerms(request_id=request_id, source=source, flow=terms)
        tables = {(pp, tp): address for pp, tp, address in lease["tables"]}
        sums = {(pp, tp): at for pp, tp, at in lease.get("sums", ())}
        held = Lease(
            table=tables[source.rank],
            slot=lease["slot"],
            generation=lease["generation"],
            sums=SumsAt(*sums[source.rank]) if source.rank in sums else None,
        )
        return ReadTerms(request_id=request_id, source=source, lease=held, flow=terms)

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """Returns the reads that have ended as vLLM does, and those of which something must not be used as failed."""
        done, failed = super()._pop_done_transfers(transfers)
        for req_id in done:
            facts = self._agent.facts.get(req_id)
            if facts is not None and facts.refused:
                failed.add(req_id)
        return done, failed

    def _find_overdue(self) -> None:
        """Reports the reads that take too long, and refuses further reads from their lenders until these have ended.

        The engine fails and aborts the requests. vLLM keeps the blocks of an aborted read until it has ended, because
        NIXL cannot say when a read that it cancels stops writing.
        """
        now_s = time.perf_counter()
        for req_id, since_s in list(self._reading_since_s.items()):
            meta = self._recving_metadata.get(req_id)
            if meta is None or meta.remote is None:
                del self._reading_since_s[req_id]
                self._overdue.discard(req_id)
                continue
            blocks = sum(len(group) for group in meta.local_block_ids)
            limit_s = self._read_timeout_s + blocks * self._kv_block_bytes / FLOOR_BYTES_PER_S
            if self._flow_agent:
                limit_s += min(self._agent.held_s(req_id, time.monotonic()), self._lease_s * HOLD_SHARE)
            if now_s - since_s <= limit_s or req_id in self._overdue:
                continue
            self._overdue.add(req_id)
            self.xfer_stats.data[OVERDUE].append(req_id)
            engine_id = meta.remote.engine_id
            logger.warning(
                "The read of KV for request %s from engine %s has not ended in %.1f s; the request fails, and its "
                "blocks stay until the read ends.", req_id, engine_id, limit_s,
            )  # fmt: skip
            if engine_id in self._remote_agents and engine_id not in self._invalid_remote_engines:
                self._mark_remote_engine_invalid(engine_id, now_s)

    # ------------------------------------------------------------------------------------------------ results

    def transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns vLLM's results of this step, with released leases added, and without late messages about leases given
        back earlier.
        """
        self._drop_unread(finished_req_ids)
        for request_id in finished_req_ids & self._recving_transfers.keys():
            self._reads.abort(request_id)
        results = self.get_transfer_results()
        late = results.finished_sending & self._given_back.keys()
        results.finished_sending -= late
        for request_id in results.finished_sending:
            self._forget(request_id)
        results.finished_sending |= self._done_sending
        self._done_sending = set()
        self._expire_given_back(late)
        for request_id in results.finished_recving:
            self._account(request_id, request_id not in results.failed_recving)
        self._find_overdue()
        return results

    def _account(self, request_id: str, ok: bool) -> None:
        facts = self._agent.facts.pop(request_id, TransferFacts())
        held_s = self._held_s.pop(request_id, 0.0) + facts.held_s
        self._leases.pop(request_id, None)
        self._flows.pop(request_id, None)
        corrupt = facts.refused.startswith(CORRUPT)
        self.xfer_stats.data[TRANSFERS].append(
            [
                request_id,
                ok,
                facts.bytes,
                facts.seconds,
                facts.descriptors,
                held_s,
                corrupt,
                facts.unscheduled,
                facts.level,
            ]
        )

    def _expire_given_back(self, late: set[str]) -> None:
        for request_id in late:
            self._given_back.pop(request_id, None)
        now_s = time.perf_counter()
        while self._given_back:
            request_id, until_s = next(iter(self._given_back.items()))
            if until_s > now_s:
                break
            del self._given_back[request_id]
            self._reqs_to_process.discard(request_id)
