"""NetKV's simulated cluster, its larger versions (VI-A, VI-I), and the placement of its engines.

The cluster has 2 pods x 2 racks x 2 servers x 8 GPUs. By tier, B = 450 GB/s, then 100, 50 (2:1) and 25 Gbit/s (4:1),
and L = 1, 3, 8 and 15 us. An instance has 4 GPUs, and one instance in four does prefill.

The paper gives no numbers of links. ASSUMPTION: every level has as many links as there are NICs below it. Then
oversubscription r makes a link B_1 / r, which agrees with the paper's bandwidths: 50 = 100 / 2 and 25 = 100 / 4. The
paper's sweep of the cross-pod ratio ends at 1:1 with "no bandwidth gap", so a rack's ratio is at most the pod's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sim.network.topology import Topology, TopologyConfig, TopologyError

GPUS_PER_POD = 32
GPUS_PER_INSTANCE = 4  # TP = 4
# B_1 (VI-A)
NIC_GBIT = 100.0


@dataclass(frozen=True, slots=True)
class Instance:
    """An engine on a node. `slot` numbers the instances of one node, which share its NICs evenly."""

    name: str
    node: str
    slot: int
    prefill: bool


def netkv_config(
    gpus: int = 64,
    pod_oversubscription: float = 4.0,
    nics_per_node: int = 2,
    nic_gbit_per_s: float = NIC_GBIT,
) -> TopologyConfig:
    """Returns the configuration of NetKV's fat tree with `gpus` GPUs (64 to 1,024 in the paper).

    Raises TopologyError for a number of GPUs that does not fill whole pods.
    """
    if gpus < GPUS_PER_POD or gpus % GPUS_PER_POD:
        raise TopologyError(
            f"NetKV cluster of {gpus} GPUs: must be a multiple of {GPUS_PER_POD}, the GPUs of a pod"
        )
    return TopologyConfig(
        pods=gpus // GPUS_PER_POD,
        racks_per_pod=2,
        nodes_per_rack=2,
        gpus_per_node=8,
        # ASSUMPTION: a node has one NIC for each of its instances; the paper says "sharing the source NIC".
        nics_per_node=nics_per_node,
        aggs_per_pod=2 * nics_per_node,
        cores_per_agg=2,
        nvlink_gbyte_per_s=450.0,
        nic_gbit_per_s=nic_gbit_per_s,
        rack_oversubscription=min(2.0, pod_oversubscription),
        pod_oversubscription=pod_oversubscription,
        latency_us=(1.0, 3.0, 8.0, 15.0),
    )


def netkv_cluster(
    gpus: int = 64,
    pod_oversubscription: float = 4.0,
    nics_per_node: int = 2,
    nic_gbit_per_s: float = NIC_GBIT,
) -> Topology:
    """Returns the topology that `netkv_config` describes."""
    return Topology.build(netkv_config(gpus, pod_oversubscription, nics_per_node, nic_gbit_per_s))


def netkv_instances(topology: Topology) -> tuple[Instance, ...]:
    """Returns all instances in the paper's placement: prefill instances fill the first rack of every second pod.

    The placement is inferred from Table VI, which has no transfer on tiers 0 and 1, and 32:68 on tiers 2 and 3 for
    CLA*. If the four prefill instances fill one of the four racks, then 4 of the 12 decode instances are in their pod,
    which makes 33:67. Larger clusters repeat the two pods.
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
    """Returns the number of the NIC of an instance's `gpu`-th GPU.

    A node's GPUs are spread evenly and in order over its NICs. Raises TopologyError for a GPU that the node lacks.
    """
    config = topology.config
    on_node = instance.slot * GPUS_PER_INSTANCE + gpu
    if not 0 <= on_node < config.gpus_per_node:
        raise TopologyError(f"{instance.name} has no GPU {gpu}: its node has {config.gpus_per_node}")
    return on_node * config.nics_per_node // config.gpus_per_node


def prefill_and_decode(instances: Sequence[Instance]) -> tuple[list[Instance], list[Instance]]:
    """Returns (prefill instances, decode instances), each in the given order."""
    return [i for i in instances if i.prefill], [i for i in instances if not i.prefill]
