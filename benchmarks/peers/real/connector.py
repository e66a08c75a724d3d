"""vLLM's NIXL connector for the engines of the other sides, with the two corrections that Sluice's own has on CPUs.

vLLM loads it by `kv_connector_module_path`. The protocol of its requests is vLLM's own.
"""

import os
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

from actors.engine.nixl_agents import CPU_DELAY_US
from actors.engine.vllm.connector.transfer import tuned_agents

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NixlConnector(nixl.NixlConnector):
    """vLLM's connector, whose progress thread naps, and which leaves the thread that computes on its core."""

    def __init__(
        self, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig"
    ) -> None:
        affinity = os.sched_getaffinity(0)
        with tuned_agents(CPU_DELAY_US):
            super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, affinity)
