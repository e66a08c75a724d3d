"""Functions that build a simulation's engines and links from its configuration, and a prompt's block hashes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.sim.batches import Batches
from benchmarks.sim.config import EngineSpec, FlowSetup, SimConfig
from benchmarks.sim.engine import BarrierGroup, Meter, Owner, StepGroup, Worker
from benchmarks.sim.flow_driver import FlowDriver, IdealSwitches
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.kv_store import KvStore, LentModel
from benchmarks.sim.layers import LayeredGroup
from benchmarks.sim.links import FixedLinks, KvNetwork
from benchmarks.sim.network.network import Network
from benchmarks.sim.permits import ByPermit
from benchmarks.sim.staged import StagedGroup
from benchmarks.sim.unlimited import NoSteps, UnlimitedPrefill
from benchmarks.workloads.record import WorkloadRequest

MASK64 = 2**64 - 1


class Links:
    """The links between engines: the configured network, or without one a fixed bandwidth per engine kind.

    `network` and `oracle` are None where the configuration has no network.
    """

    def __init__(self, config: SimConfig, kernel: Kernel) -> None:
        self.network: KvNetwork | None = None
        self.oracle: Callable[[float], Any] | None = None
        self._kernel = kernel
        self._fixed: dict[str, KvNetwork] = {}
        if config.network is not None:
            self.network, self.oracle = config.network.build(kernel, config.seed)

    def of(self, spec: EngineSpec) -> KvNetwork:
        """Returns the network that moves KV into engines of the kind `spec`."""
        if self.network is not None:
            return self.network
        if spec.name not in self._fixed:
            self._fixed[spec.name] = FixedLinks(self._kernel, spec.profile)
        return self._fixed[spec.name]


@dataclass(slots=True)
class Flows:
    """The scheduling of a run's flows, where one is configured: the driver, the batches in progress, and the store of
    reusable KV, which is None without reuse.
    """

    driver: FlowDriver
    batches: Batches
    store: KvStore | None


def build_flows(config: SimConfig, kernel: Kernel, meter: Meter, links: Links) -> Flows | None:
    """Builds what schedules the run's flows; None where no flow policy is configured.

    Raises ValueError for a network other than a `Fabric`, which alone has priorities.
    """
    setup: FlowSetup | None = config.flows
    if setup is None:
        return None
    if not isinstance(links.network, Network):
        raise ValueError(
            f"flows: the network is a {type(links.network).__name__}, which has no priorities: use a Fabric"
        )
    kind = IdealSwitches if setup.permits is None else ByPermit
    driver = kind(setup, kernel, links.network, lambda: meter.measuring)
    batches = Batches(driver, kernel, links.network.topology.class_bytes_per_s["nic"], setup.drop_share)
    return Flows(driver, batches, KvStore(setup.known) if setup.reuse else None)


def build_engines(
    config: SimConfig, kernel: Kernel, owner: Owner, meter: Meter, links: Links, flows: Flows | None = None
) -> tuple[dict[str, Worker], list[StepGroup]]:
    """Builds the workers and the groups in which they step.

    Returns (workers by name in the configuration's order, step groups).
    """
    workers: dict[str, Worker] = {}
    groups: list[StepGroup] = []
    barriers: dict[str, list[Worker]] = {}
    for spec in config.engines:
        for number, (name, node, nic) in enumerate(spec.workers()):
            kind = Worker if spec.prefill_queue else UnlimitedPrefill
            worker = workers[name] = kind(name, node, nic, spec, owner, config.control.kv_events)
            worker.span = spec.span_of(number)
            if isinstance(worker, UnlimitedPrefill):
                groups.append(NoSteps(kernel, worker, meter))
            elif spec.barrier:
                barriers.setdefault(spec.barrier, []).append(worker)
            elif spec.layers is not None and flows is not None:
                model = LentModel(
                    spec.profile, worker.pool, spec.slots, spec.prefill_budget_tokens, spec.chunked_prefill
                )
                model.store, model.span, worker.model = flows.store, worker.span, model
                plan, network = spec.layers, links.of(spec)
                staged = StagedGroup(kernel, worker, meter, plan, network, flows.driver, flows.batches, model)
                groups.append(staged)
            elif spec.layers is not None:
                groups.append(LayeredGroup(kernel, worker, meter, spec.layers, links.of(spec)))
            else:
                groups.append(StepGroup(kernel, [worker], meter))
    return workers, groups + [BarrierGroup(kernel, members, meter) for members in barriers.values()]


def build_worker(
    spec: EngineSpec, name: str, node: str, kernel: Kernel, owner: Owner, meter: Meter, record_kv: bool
) -> Worker:
    """Builds one engine of the kind `spec`, which steps alone, at `node`; it draws its NICs."""
    worker = Worker(name, node, None, spec, owner, record_kv)
    StepGroup(kernel, [worker], meter)
    return worker


def hashes_of(work: WorkloadRequest, engines: Sequence[EngineSpec], reuse: bool = False) -> tuple[int, ...]:
    """Returns the hashes of the prompt's full blocks in the engines' block size.

    They are made from the hashes of the workload's blocks, which are as large or larger.
    Returns () where no engine caches prefixes; with `reuse`, engines with layers do in any case. Raises ValueError
    where the workload's block size is no multiple of the engines', or where the engines that cache prefixes differ in
    block size.
    """
    if not work.block_hashes:
        return ()
    sizes = {
        spec.block_size_tokens for spec in engines if spec.prefix_cache or (reuse and spec.layers is not None)
    }
    if not sizes:
        return ()
    if len(sizes) > 1:
        raise ValueError(
            f"engines cache prefixes in blocks of {sorted(sizes)} tokens: give them one block size"
        )
    size = sizes.pop()
    ratio, rest = divmod(work.block_tokens, size)
    if rest or not ratio:
        raise ValueError(
            f"request {work.request_id} has hashes of {work.block_tokens} tokens, the engines blocks of {size}: "
            f"set block_size_tokens to a divisor of {work.block_tokens}"
        )
    full = work.prompt_tokens // size
    if ratio == 1:
        return work.block_hashes[:full]
    fine = [(block * ratio + i) & MASK64 for block in work.block_hashes for i in range(ratio)]
    return tuple(fine[:full])
