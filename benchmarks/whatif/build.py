"""Builds the simulator's inputs (engines, network, predictor, workload) from a checked configuration, and runs it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.experiments.base import Config, Metrics
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import EngineSpec, Forecasting, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.sim.network.background import Background, Static
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.network.topology import Topology, TopologyConfig
from benchmarks.whatif.config import Base, EngineGroup, NetworkModel, WhatIfError, Workload, validated
from benchmarks.whatif.terms import with_terms
from benchmarks.workloads.catalog import WorkloadSpec, build, outcomes_of
from benchmarks.workloads.prefixes import Sharing
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.transform import LengthFilter
from policies.dispatch.dispatcher import DispatchConfig
from policies.state.views import Role
from predictors.memorise import Memorised
from predictors.oracle import Oracle
from predictors.protocol import Outcome, Predictor
from predictors.survival import EmpiricalSurvival

# A predictor is fitted on requests drawn with this number added to the seed, so that they differ from those that run.
_TRAIN_SEED = 1_000_003


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates the variant with the configuration `config` and returns its metrics.

    `benchmarks.runner` calls this in its worker processes.
    """
    base: Base = validated(Base, config, "variant")
    return summarise(simulate(sim_config(base, seed), workload(base, seed)))


def sim_config(base: Base, seed: int) -> SimConfig:
    """Returns the simulator's configuration of one run of `base`.

    Raises WhatIfError, or a ValueError from the simulator's own checks.
    """
    topology = None if base.network is None else Topology.build(scaled(base.network))
    places = _places(base, topology)
    policies = base.policies
    network = None
    if base.network is not None and topology is not None:
        background = (Background("all", Static(base.network.background)),) if base.network.background else ()
        network = Fabric(topology, background, base.network.oracle_s, use_from_s=base.run.warmup_s)
    return SimConfig(
        engines=tuple(_spec(group, places.get(group.name)) for group in base.cluster.engines),
        prefill=(policies.prefill.name, policies.prefill.params),
        decode=(policies.decode.name, policies.decode.params),
        admission=(policies.admission.name, policies.admission.params),
        fairness=(policies.fairness.name, policies.fairness.params),
        dispatch=DispatchConfig(**policies.dispatch, seed=seed),
        network=network,
        forecasts=_forecasts(base, seed),
        scaling=None if base.scaling is None else base.scaling.setup(_free(base, topology, places)),
        seed=seed,
        warmup_s=base.run.warmup_s,
        measure_s=base.run.measure_s,
    )


def scaled(network: NetworkModel) -> TopologyConfig:
    """Returns the topology with its rack and core links scaled.

    A scale multiplies a level's link bandwidth, or divides its oversubscription where the level has that instead.
    """
    t = network.topology
    rack, core = network.rack_bandwidth_scale, network.core_bandwidth_scale
    return t.model_copy(
        update={
            "rack_oversubscription": _over(t.rack_oversubscription, rack),
            "rack_link_gbit_per_s": _times(t.rack_link_gbit_per_s, rack),
            "pod_oversubscription": _over(t.pod_oversubscription, core),
            "core_link_gbit_per_s": _times(t.core_link_gbit_per_s, core),
        }
    )


def _over(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def _times(value: float | None, by: float) -> float | None:
    return None if value is None else value * by


def _spec(group: EngineGroup, place: tuple[tuple[str, ...], tuple[int, ...]] | None) -> EngineSpec:
    nodes, nics = place or ((), ())
    return EngineSpec(
        name=group.name,
        role=Role(group.role),
        count=group.count,
        profile=group.timing(),
        slots=group.slots,
        kv_blocks=group.kv_blocks,
        block_size_tokens=group.block_size_tokens,
        prefill_budget_tokens=group.prefill_budget_tokens,
        chunked_prefill=group.chunked_prefill,
        prefix_cache=group.prefix_cache,
        lease_s=group.lease_s,
        max_lease_s=group.max_lease_s,
        barrier=group.barrier,
        nodes=nodes,
        nics=nics,
        transfer_flows=group.transfer_flows,
    )


def _places(base: Base, topology: Topology | None) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Places all engines; returns (nodes, NICs) of each group's engines by group name, or {} without a topology.

    An engine goes to the first node with room for all its GPUs, unless its group names nodes. Its NIC is that of its
    first GPU; a node's GPUs are spread evenly over its NICs. Raises WhatIfError where an engine finds no room.
    """
    if topology is None:
        return {}
    used = dict.fromkeys(topology.nodes, 0)
    config = topology.config
    found = {}
    for group in base.cluster.engines:
        if group.nodes and len(group.nodes) != group.count:
            raise WhatIfError(
                f"cluster.engines.{group.name}.nodes: {len(group.nodes)} nodes for {group.count} engines; "
                "give one each, or none"
            )
        nodes, nics = [], []
        for i in range(group.count):
            node = group.nodes[i] if group.nodes else _room(used, group.gpus, config.gpus_per_node)
            if node is None or used.get(node, 0) + group.gpus > config.gpus_per_node:
                raise WhatIfError(
                    f"cluster.engines.{group.name}: no room for engine {i} of {group.gpus} GPUs"
                    f"{'' if node is None else f' on {node}'}: the topology has {len(used)} nodes of "
                    f"{config.gpus_per_node}; enlarge it or use fewer engines"
                )
            # The call raises TopologyError for an unknown node.
            topology.node(node)
            nodes.append(node)
            nics.append(used[node] * config.nics_per_node // config.gpus_per_node)
            used[node] += group.gpus
        found[group.name] = (tuple(nodes), tuple(nics))
    return found


def _free(
    base: Base, topology: Topology | None, places: dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
) -> tuple[str, ...]:
    """Returns a node for each engine that still finds room beside those of the configuration, node by node.

    Raises WhatIfError where the groups' engines take different numbers of GPUs.
    """
    if topology is None:
        return ()
    gpus = {group.gpus for group in base.cluster.engines}
    if len(gpus) > 1:
        raise WhatIfError("scaling: all engine groups must have the same `gpus`, since engines switch roles")
    taken = Counter(node for nodes, _ in places.values() for node in nodes)
    most = topology.config.gpus_per_node // gpus.pop()
    return tuple(node for node in topology.nodes for _ in range(most - taken[node]))


def _room(used: Mapping[str, int], gpus: int, gpus_per_node: int) -> str | None:
    return next((node for node, taken in used.items() if taken + gpus <= gpus_per_node), None)


def workload(base: Base, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of `base`. They are cached, because variants often have the same ones."""
    return list(_workload(base.workload, base.workload.part, seed))


@functools.lru_cache(maxsize=4)
def _workload(w: Workload, part: str, seed: int) -> tuple[WorkloadRequest, ...]:
    bounds = (w.min_prompt_tokens, w.max_prompt_tokens, w.min_output_tokens, w.max_output_tokens)
    spec = WorkloadSpec(
        name=w.name,
        path=w.file,
        requests=w.requests,
        part=part,
        spread_ticks=w.spread_ticks,
        lengths=None if bounds == (None,) * 4 else LengthFilter(*bounds),
        prompt_tokens=w.prompt_tokens,
        compression=w.compression,
        rate_per_s=w.rate_per_s,
        start_s=w.start_s if part == w.part else 0.0,
        end_s=w.end_s if part == w.part else None,
        sharing=None if w.sharing is None else Sharing(**w.sharing.model_dump()),
        ttft_slo_s=w.ttft_slo_s,
        tpot_slo_s=w.tpot_slo_s,
    )
    made = build(spec, seed)
    return tuple(made if w.file is None else with_terms(made, Path(w.file)))


def _forecasts(base: Base, seed: int) -> Forecasting | None:
    kind = base.policies.predictor
    if kind == "none":
        return None

    def source(lengths: Mapping[str, int]) -> Predictor:
        if kind == "oracle":
            return Oracle(lengths)
        history: list[Outcome] = outcomes_of(_workload(base.workload, "train", seed + _TRAIN_SEED))
        if kind == "survival":
            return EmpiricalSurvival.fit(history, frozen=False)
        memory = Memorised()
        for outcome in history:
            memory.observe(outcome)
        return memory

    return Forecasting(source, window_tokens=base.policies.window_tokens)
