"""Sluice's KV connector: vLLM's NIXL pull connector with leases that can be given back, renewed, checked, and
counted.

vLLM loads `SluiceConnector` by `kv_connector_module_path`. One half runs in the engine core beside the scheduler, the
other half in each worker. The scheduler half gives its orders in the step's metadata. The workers report in the
connector's stats, which the engine's stat logger reads (`actors/engine/vllm/stats.py`). This connector adds to vLLM's:

- **Release**: a finished prefill that nobody will pull gives its blocks back at once, not when the lease expires. The
  release is sent as a request that names the lease (`RELEASE`) and is aborted on arrival, so it needs no RPC and
  keeps its order among adds and aborts. A decode engine that knows the request has sent a heartbeat; this connector
  also sends one right before it reads. From the first heartbeat on, the prefill engine waits for that engine's "done"
  message instead, so blocks are never given back while they are read.
- **Renewal**: a finished prefill may wait for a decode engine for longer than its lease. A request like that of a
  release names leases that are to last longer (`RENEW`); each worker moves their ends and says so in its stats.
- **Validity**: a read is checked against the prefill worker's lease table (`lease_table`), and with the option
  `integrity` against its checksums (`integrity`). An invalid read fails the request.
- **Facts**: bytes, seconds and descriptors of each request's transfer.
- **Scheduled reads**: each read is cut into chunks (`chunked_read`), which a thread of the worker posts when the node's
  flow agent permits it (`actors.engine.vllm.flow`); without an agent they are posted at once. The tests' option
  `hold_reads_s` keeps reads from that thread for a while. If a request is aborted, nothing more of its KV is posted.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector

from actors.engine.vllm.connector.messages import SluiceStats
from actors.engine.vllm.connector.scheduler import SluiceScheduler
from actors.engine.vllm.connector.worker import SluiceWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class SluiceConnector(NixlPullConnector):
    """The connector class that KVTransferConfig names. vLLM makes one instance for each half."""

    connector_scheduler: SluiceScheduler | None
    connector_worker: SluiceWorker | None

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = SluiceScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = SluiceWorker(vllm_config, self.engine_id, kv_cache_config)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        assert self.connector_worker is not None
        results = self.connector_worker.transfer_results(finished_req_ids)
        replica = self.connector_worker.pcp_rank > 0 and not self.connector_worker.pcp_dcp_sharded
        if self.kv_transfer_config.kv_role == "kv_producer" and replica:
            results.finished_sending.clear()
        return results

    def get_kv_connector_stats(self) -> Any:
        if self.connector_worker is not None:
            return super().get_kv_connector_stats()
        assert self.connector_scheduler is not None
        stats = self.connector_scheduler.stats
        return None if stats.is_empty() else stats.clone_and_reset()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns no blocks. `failed_recving` names the requests whose reads failed, once all workers have ended
        theirs. vLLM takes blocks from the first worker that names some: it would fail a prefill whose lent prefix
        cannot be read, and a decode whose other workers still write.
        """
        super().get_block_ids_with_load_errors()
        return set()

    def has_pending_push_work(self) -> bool:
        """Whether the core must step although it has no request: vLLM's hook for connectors that push, used here for
        KV that is given back unread. An idle core would leave the message, and the lender its lease, until new work.
        """
        return self.connector_scheduler is not None and self.connector_scheduler.gives_back()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SluiceStats:
        return SluiceStats(data=data) if data is not None else SluiceStats()
