"""A simulated cluster that lends prefixes. Request `d` computes on p-1 a prompt whose head p-0 has cached.

A prompt of n tokens takes 0.01 + n / 1000 s, 1,600 tokens are 1.6 MB of KV, and the network has 10 MB/s. Messages take
no time.

    0 s     a on p-0, 1,616 tokens        b on p-1, as many
    10 s    c on p-0                      (round robin)
    20 s    d on p-1, 1,650 tokens, of which the first 1,600 are those of a
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.sim.cluster import Cluster
from benchmarks.sim.config import IDEAL, EngineSpec, SimConfig
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.links import FixedLinks, KvNetwork
from benchmarks.sim.records import RequestRecord, RunResult
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TimingProfile
from policies.network.oracle import Oracle
from policies.state.views import Role

BLOCK, HEAD = 16, 1600
PROFILE = TimingProfile(
    source="test",
    prefill_base_s=0.01,
    prefill_per_token_s=0.001,
    decode_base_s=0.02,
    decode_per_seq_s=0.0,
    decode_per_kv_token_s=0.0,
    kv_bytes_per_token=1000,
    transfer_bandwidth_bytes_per_s=10e6,
    transfer_latency_s=0.0,
)
PREFILL = EngineSpec("p", Role.PREFILL, 2, PROFILE, block_size_tokens=BLOCK)
DECODE = EngineSpec("d", Role.DECODE, 1, PROFILE, block_size_tokens=BLOCK, prefix_cache=False)


@dataclasses.dataclass(frozen=True)
class Links:
    """Links without contention, and an oracle that knows them."""

    profile: TimingProfile = PROFILE
    oracle_s: float | None = 1.0

    def build(self, kernel: Kernel, seed: int) -> tuple[KvNetwork, Callable[[float], Oracle]]:
        oracle = Oracle({3: self.profile.transfer_bandwidth_bytes_per_s}, {3: 0.0})
        return FixedLinks(kernel, self.profile), lambda now_s: oracle


def prompt(name: str, at_s: float, tokens: int, first: int, head: int = 0) -> WorkloadRequest:
    """A request whose first `head` blocks are those of `a`, and all others its own, from the hash `first` on."""
    own = range(first + head, first + tokens // BLOCK)
    return WorkloadRequest(
        name, at_s, tokens, 4, block_hashes=(*range(1000, 1000 + head), *own), block_tokens=BLOCK
    )


WORK = [
    prompt("a", 0.0, 1616, 1000),
    prompt("b", 0.0, 1616, 2000),
    prompt("c", 10.0, 1616, 3000),
    prompt("d", 20.0, 1650, 4000, head=HEAD // BLOCK),
]


def config(lend: bool = True, **changes: Any) -> SimConfig:
    base = SimConfig(
        (PREFILL, DECODE),
        prefill=("round_robin", {}),
        decode=("round_robin", {}),
        dispatch=DispatchConfig(lend_prefixes=lend),
        control=IDEAL,
        network=Links(),
    )
    return dataclasses.replace(base, **changes)


def run(
    config: SimConfig,
    *at: tuple[float, Callable[[Cluster], Any]],
    journal: Any = None,
    work: Sequence[WorkloadRequest] = tuple(WORK),
) -> tuple[Cluster, RequestRecord, RunResult]:
    """A run of `work`, with `d`'s record. At the times of `at` something is done to the cluster."""
    cluster = Cluster(config, iter(work), journal, None)
    for at_s, what in at:
        cluster.kernel.at(at_s, lambda what=what: what(cluster))  # type: ignore[misc]
    result = cluster.run()
    return cluster, next(r for r in result.requests if r.request_id == "d"), result


def at_rest(cluster: Cluster) -> bool:
    """Whether no engine holds a block, a lease or a sequence, and no charge is left at the router."""
    state = cluster.dispatcher.state.snapshot(cluster.kernel.now_s)
    return all(
        not (w.pool.used or len(w.leases) or w.n_active or w.n_waiting) for w in cluster.workers.values()
    ) and all(not (w.prefilling or w.kv_tokens or w.slots_used) for w in state.workers.values())
