"""NetKV's simulated cluster and its scale-ups (VI-A, VI-I), and where its engines stand.

2 pods x 2 racks x 2 servers x 8 GPUs; B = 450 GB/s, 100, 50 (2:1), 25 Gbit/s (4:1); L = 1, 3, 8, 15 us; instances of 4
GPUs, one in four does prefill. The paper gives no numbers of links. ASSUMPTION: every level has as many links as there
are NICs below it, so that oversubscription r makes a link B_1 / r, as the paper's bandwidths say: 50 = 100 / 2,
25 = 100 / 4. Its sweep of the cross-pod ratio ends at 1:1 with "no bandwidth gap": a rack's ratio is at most the pod's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sim.network.topology import Topology, TopologyConfig, TopologyError

GPUS_PER_POD = 32
GPUS_PER_INSTANCE = 4  # TP = 4


@dataclass(frozen=True, slots=True)
class Instance:
    """An engine on a node; `slot` counts the instances of a node, which share its NICs evenly."""

    name: str
    node: str
    slot: int
    prefill: bool


def netkv_config(gpus: int = 64, pod_oversubscription: float = 4.0, nics_per_node: int = 2) -> TopologyConfig:
    """NetKV's fat tree with `gpus` (64 to 1,024 there). Raises TopologyError for a number that fills no pods."""
    if gpus < GPUS_PER_POD or gpus % GPUS_PER_POD:
        raise TopologyError(
            f"NetKV cluster of {gpus} GPUs: must be a multiple of {GPUS_PER_POD}, the GPUs of a pod"
        )
    return TopologyConfig(
        pods=gpus // GPUS_PER_POD,
        racks_per_pod=2,
        nodes_per_rack=2,
        gpus_per_node=8,
        nics_per_node=nics_per_node,  # ASSUMPTION: one for each instance of a node, "sharing the source NIC"
        aggs_per_pod=2 * nics_per_node,
        cores_per_agg=2,
        nvlink_gbyte_per_s=450.0,
        nic_gbit_per_s=100.0,
        rack_oversubscription=min(2.0, pod_oversubscription),
        pod_oversubscription=pod_oversubscription,
        latency_us=(1.0, 3.0, 8.0, 15.0),
    )


def netkv_cluster(gpus: int = 64, pod_oversubscription: float = 4.0, nics_per_node: int = 2) -> Topology:
    """The network of `netkv_config`."""
    return Topology.build(netkv_config(gpus, pod_oversubscription, nics_per_node))


def netkv_instances(topology: Topology) -> tuple[Instance, ...]:
    """The paper's placement: the prefill instances fill the first rack of every second pod.

    Table VI has no transfer on tiers 0 and 1 and CLA* at 32:68 on tiers 2 and 3: four prefill instances fill one of
    four racks, then 4 of the 12 decode instances are in their pod, 33:67. Larger clusters repeat the two pods.
    """
    per_node = topology.config.gpus_per_node // GPUS_PER_INSTANCE
    racks_per_pod = topology.config.racks_per_pod
    return tuple(
        Instance(
            f"{node.name}-{slot}",
            node.name,
            slot,
            prefill=node.pod % 2 == 0 and node.rack % racks_per_pod == 0,
        )
        for node in topology.nodes.values()
        for slot in range(per_node)
    )


def nic_of(topology: Topology, instance: Instance, gpu: int = 0) -> int:
    """The NIC of an instance's `gpu`-th GPU: a node's GPUs are spread evenly and in order over its NICs."""
    config = topology.config
    on_node = instance.slot * GPUS_PER_INSTANCE + gpu
    if not 0 <= on_node < config.gpus_per_node:
        raise TopologyError(f"{instance.name} has no GPU {gpu}: its node has {config.gpus_per_node}")
    return on_node * config.nics_per_node // config.gpus_per_node


def prefill_and_decode(instances: Sequence[Instance]) -> tuple[list[Instance], list[Instance]]:
    """The instances split by role, in their order."""
    return [i for i in instances if i.prefill], [i for i in instances if not i.prefill]
