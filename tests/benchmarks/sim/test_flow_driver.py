"""Flows by a policy: MFS's Figures 6 and 7, least rates, and a prefill by layer groups; ideally and by permits."""

import dataclasses

import pytest

from benchmarks.sim.batches import Batches
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import IDEAL, EngineSpec, FlowSetup, LayerPlan, Permits, SimConfig
from benchmarks.sim.flow_driver import FlowDriver, IdealSwitches
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.metrics import summarise
from benchmarks.sim.network.background import Background, Static
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.topology import Topology, TopologyConfig
from benchmarks.sim.permits import ByPermit
from benchmarks.workloads.record import WorkloadRequest
from policies.engine_model.timing import TimingProfile
from policies.flow.base import Flow, Port, Side, Stage
from policies.state.views import NodeLoad, Role

GB = 10**9
ONE_SWITCH = Topology.build(
    TopologyConfig(
        pods=1,
        racks_per_pod=1,
        nodes_per_rack=6,
        nvlink_gbyte_per_s=1.0,
        nic_gbit_per_s=8.0,  # 1e9 bytes/s
        rack_oversubscription=1.0,
        pod_oversubscription=1.0,
    )
)
CHUNKS = Permits(chunk_s=0.01, window=1, whole_reads=False)


def driver(
    policy: str, permits: Permits | None, background: tuple[Background, ...] = ()
) -> tuple[FlowDriver, Kernel]:
    setup, kernel = FlowSetup((policy, {}), permits=permits), Kernel()
    network = Network(ONE_SWITCH, kernel, 1, background)
    kind = IdealSwitches if permits is None else ByPermit
    return kind(setup, kernel, network, lambda: True), kernel


class Sender:
    """Sends named flows through a driver and notes when they end."""

    def __init__(
        self, policy: str, permits: Permits | None = None, background: tuple[Background, ...] = ()
    ) -> None:
        self.driver, self.kernel = driver(policy, permits, background)
        self.ended: dict[str, float] = {}

    def send(
        self,
        name: str,
        stage: Stage,
        size_gb: float,
        source: int,
        target: int,
        weight: float = 1.0,
        **more: object,
    ) -> object:
        flow = Flow(
            flow_id=name,
            request_id=name,
            batch="b",
            stage=stage,
            source=f"node{source}",
            target=f"node{target}",
            size=round(size_gb * GB),
            **more,  # type: ignore[arg-type]
        )
        return self.driver.send(flow, lambda: self.ended.__setitem__(name, self.kernel.now_s), weight)


@pytest.mark.parametrize("permits", [None, CHUNKS])
@pytest.mark.parametrize(("policy", "starts_s"), [("fair", 3), ("sjf", 3), ("edf", 3), ("mfs", 2)])
def test_figure_6_layer_2_starts_at_2_instead_of_3(
    policy: str, starts_s: float, permits: Permits | None
) -> None:
    """A collective of 2 for layer 1 and a KV flow of 1 for a later layer meet at one ingress (MFS, Figure 6).

    Fair: 0.5 each until the KV flow ends at 2, the collective at 3. Shortest first: the KV flow ends at 1.
    """
    sender = Sender(policy, permits)
    sender.send("reuse", Stage.REUSE, 1, 2, 0, rli=2)
    sender.send("collective", Stage.COLLECTIVE, 2, 1, 0)
    sender.kernel.run()
    assert sender.ended["collective"] == pytest.approx(starts_s, abs=0.03)
    assert max(sender.ended.values()) == pytest.approx(3, abs=0.03)


@pytest.mark.parametrize("permits", [None, CHUNKS])
@pytest.mark.parametrize(("policy", "ends_s"), [("fair", 4), ("sjf", 4), ("edf", 4), ("mfs", 3)])
def test_figure_7_layer_2_ends_at_3_instead_of_4(policy: str, ends_s: float, permits: Permits | None) -> None:
    """Layer 2 computes for 1; then its collective of 2 meets layer 1's KV of 1 at one egress (MFS, Figure 7)."""
    sender = Sender(policy, permits)

    def computed() -> None:
        sender.send("kv", Stage.P2D, 1, 0, 2, due_s=60.0)
        sender.send("collective", Stage.COLLECTIVE, 2, 0, 1)

    sender.kernel.at(1.0, computed)
    sender.kernel.run()
    assert sender.ended["collective"] == pytest.approx(ends_s, abs=0.03)
    assert max(sender.ended.values()) == pytest.approx(4, abs=0.03)


def test_karuna_gives_a_deadline_its_least_rate() -> None:
    """1 GB due in 4 s has a quarter of the port, though it could have more after the other's 2 / 0.75 s."""
    sender = Sender("karuna")
    sender.send("kv", Stage.P2D, 1, 0, 2, due_s=4.0)
    sender.send("other", Stage.REUSE, 2, 0, 1)
    sender.kernel.run()
    assert sender.ended == pytest.approx({"other": 2 / 0.75, "kv": 4.0})


def test_mfs_promotes_a_transfer_as_its_laxity_shrinks() -> None:
    """KV of 1 due at 10 with reuse of 20 before it: it is served once its MLU is that of P_1, 0.125, at 10 - 8 = 2.

    From 2 on it has the port, and is there at 3 (at most one check of 5 ms later); without a deadline it waits for all.
    """
    sender = Sender("mfs")
    sender.send("reuse", Stage.REUSE, 20, 0, 1)
    sender.send("kv", Stage.P2D, 1, 0, 2, due_s=10.0)
    sender.send("free", Stage.P2D, 1, 0, 3)
    sender.kernel.run()
    assert sender.ended == pytest.approx({"kv": 3.0, "reuse": 21.0, "free": 22.0}, abs=0.01)


@pytest.mark.parametrize("permits", [None, CHUNKS])
def test_scheduled_flows_are_no_load_that_lessens_the_bandwidth(permits: Permits | None) -> None:
    """The port has been full of scheduled flows for 5 s. KV of 1 due 10 s later needs a tenth of it all the same: it is
    promoted 8 s before it is due, as on an idle port, and reuse goes on until then. The arbiter learns the same.
    """
    sender = Sender("mfs", permits)
    for number in range(5):
        sender.send(f"before{number}", Stage.REUSE, 1, 0, 1)

    def later() -> None:
        sender.send("reuse", Stage.REUSE, 20, 0, 1)
        sender.send("kv", Stage.P2D, 1, 0, 2, due_s=10.0)

    sender.kernel.at(5.5, later)
    sender.kernel.run()
    assert sender.ended["before4"] == pytest.approx(5.0, abs=0.03)
    assert sender.ended["kv"] == pytest.approx(5.5 + 2 + 1, abs=0.05)


def test_messages_that_take_longer_than_a_chunk_do_not_shrink_chunks_to_nothing() -> None:
    """Two chunks of 10 ms at a time, and 40 ms of messages for each. A chunk grows until 3 GB at 1 GB/s take 7.7 s.
    With chunks that shrink as the port looks slower they would take minutes.
    """
    sender = Sender("fair", Permits(chunk_s=0.01, window=2, delay_s=0.02, whole_reads=False))
    for number in range(3):
        sender.send(f"flow{number}", Stage.REUSE, 1, 0, number + 1)
    sender.kernel.run()
    assert max(sender.ended.values()) < 9


@pytest.mark.parametrize("permits", [None, CHUNKS])
def test_a_flow_that_stands_for_three_gets_three_shares(permits: Permits | None) -> None:
    """3 GB and 1 GB over a port of 1 GB/s: with weights of 3 and 1 both end at 4, with equal ones the smaller at 2."""
    sender = Sender("fair", permits)
    sender.send("three", Stage.REUSE, 3, 0, 1, weight=3.0)
    sender.send("one", Stage.REUSE, 1, 0, 2)
    sender.kernel.run()
    assert sender.ended == pytest.approx({"three": 4.0, "one": 4.0}, abs=0.05)


def test_a_collective_without_permits_shares_with_what_is_posted() -> None:
    """KV of 2 GB has its port's permits when a collective of 1 GB comes: both have half until the latter ends at 2."""
    free = dataclasses.replace(CHUNKS, collectives=False)
    for permits, ends in ((free, {"collective": 2.0, "kv": 3.0}), (CHUNKS, {"collective": 1.0, "kv": 3.0})):
        sender = Sender("mfs", permits)
        sender.send("kv", Stage.P2D, 2, 0, 1, due_s=90.0)
        sender.send("collective", Stage.COLLECTIVE, 1, 0, 2)
        sender.kernel.run()
        assert sender.ended == pytest.approx(ends, abs=0.05)
        assert sender.driver.stats.stages[Stage.COLLECTIVE].flows == 1


def test_other_tenants_traffic_lessens_the_bandwidth() -> None:
    """Half of each NIC is others': KV of 1 due at 40 takes 2 s, and is promoted 16 s before, at 24."""
    sender = Sender("mfs", background=(Background("nic", Static(0.5)),))
    sender.send("reuse", Stage.REUSE, 20, 0, 1)
    sender.send("kv", Stage.P2D, 1, 0, 2, due_s=40.0)
    sender.kernel.run()
    assert sender.ended == pytest.approx({"kv": 26.0, "reuse": 42.0}, abs=0.01)


def test_reuse_for_the_next_layer_overtakes_when_the_computation_advances() -> None:
    """Two flows of 2 for layers 5 and 3 away; at 1 the first is needed next. It had nothing yet, and ends at 3."""
    sender = Sender("mfs")
    first = sender.send("first", Stage.REUSE, 2, 0, 1, rli=5)
    sender.send("second", Stage.REUSE, 2, 0, 2, rli=3)
    sender.kernel.at(1.0, lambda: sender.driver.advanced(first, 0))  # type: ignore[arg-type]
    sender.kernel.run()
    assert sender.ended == pytest.approx({"first": 3.0, "second": 4.0})


@pytest.mark.parametrize("permits", [None, CHUNKS])
def test_a_cancelled_flow_never_ends_and_frees_its_port(permits: Permits | None) -> None:
    sender = Sender("fair", permits)
    gone = sender.send("gone", Stage.REUSE, 5, 0, 1)
    sender.send("other", Stage.REUSE, 1, 0, 2)
    sender.kernel.at(1.0, lambda: sender.driver.cancel(gone))  # type: ignore[arg-type]
    sender.kernel.run()
    assert sender.ended == pytest.approx({"other": 1.5}, abs=0.02)


def test_the_order_between_batches_decides_among_equal_layers() -> None:
    """Batch b is due before batch a, so its collective goes first, though it came later."""
    sender = Sender("mfs")
    batches = Batches(sender.driver, sender.kernel, 1e9, 0)
    load = {Port("node0", Side.EGRESS): 2 * GB}
    batches.began("a", {"ra": (50.0, load)}, 0.0)
    for name in "ab":
        flow = Flow(
            flow_id=name, request_id=f"r{name}", batch=name, stage=Stage.COLLECTIVE, source="node0",
            target="node1", size=2 * GB,
        )  # fmt: skip
        sender.driver.send(flow, lambda n=name: sender.ended.__setitem__(n, sender.kernel.now_s))  # type: ignore[misc]
    sender.kernel.at(1.0, lambda: batches.began("b", {"rb": (20.0, load)}, 0.0))
    sender.kernel.run()
    assert sender.ended == pytest.approx({"b": 3.0, "a": 4.0})


@pytest.mark.parametrize(
    ("drop_share", "ended", "pruned"),
    [(0.5, {"small": 2.0, "big": 12.0}, {"big"}), (0.4, {"small": 4.0, "big": 12.0}, set())],
)
def test_algorithm_1_prunes_what_cannot_be_in_time(
    drop_share: float, ended: dict[str, float], pruned: set[str]
) -> None:
    """10 GB due in 4 s cannot be moved at 1 GB/s: pruned, its flow waits behind a later one of 2 GB. Two fifths of two
    requests are none, so the flows share the port fairly.
    """
    sender = Sender("mfs")
    batches = Batches(sender.driver, sender.kernel, 1e9, drop_share)
    port = Port("node0", Side.EGRESS)
    batches.began("b", {"big": (4.0, {port: 10 * GB}), "small": (8.0, {port: 2 * GB})}, 0.0)
    for name, size in (("big", 10), ("small", 2)):
        sender.send(name, Stage.REUSE, size, 0, 1)
    sender.kernel.run()
    assert sender.ended == pytest.approx(ended)
    assert sender.driver.stats.pruned == pruned


# ------------------------------------------------------------------------------------------------- a whole prefill

SECOND_A_TOKEN = TimingProfile("test", 0.0, 1.0, 0.0, 1e-9, 0.0, GB, 1e9, 0.0)


def prefill(policy: str, **changes: object) -> SimConfig:
    """One instance on nodes 0 and 1, in two groups of layers with a collective of 4 GB a token; KV of 1 GB a token."""
    engine = {"prefix_cache": False, "block_size_tokens": 1}
    spec = EngineSpec(
        "p",
        Role.PREFILL,
        1,
        SECOND_A_TOKEN,
        layers=LayerPlan(2, 4.0 * GB, pattern="pairs"),
        nodes=("node0",),
        spans=(("node0", "node1"),),
        **engine,  # type: ignore[arg-type]
    )
    decode = EngineSpec("d", Role.DECODE, 1, SECOND_A_TOKEN, nodes=("node4",), **engine)  # type: ignore[arg-type]
    # Block 7 is known on node 3.
    flows = FlowSetup((policy, {}), known={7: "node3"})
    config = SimConfig((spec, decode), control=IDEAL, network=Fabric(ONE_SWITCH), flows=flows)
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


WORK = WorkloadRequest("a", 0.0, 2, 1, block_hashes=(7, 8), block_tokens=1, ttft_slo_s=100.0)


@pytest.mark.parametrize(
    ("policy", "prefilled_s", "cct_s", "stalled_s"), [("fair", 6.5, 2.25, 1.0), ("mfs", 5.5, 2.0, 0.5)]
)
def test_a_prefill_by_groups_of_layers(
    policy: str, prefilled_s: float, cct_s: float, stalled_s: float
) -> None:
    """Two tokens, one of them reused: 0.5 GB for each group from node 3. A group computes 0.5 s and exchanges 2 GB.

    fair: both groups' KV at 1.0 -> computes until 1.5 -> exchanges until 3.5 -> computes until 4.0 with 1 GB of KV on
          its way since 3.5, 0.5 of it moved; the exchange of 2 GB shares its port for the next second -> 4.5 + 2 = 6.5
    mfs:  group 0's KV at 0.5 -> computes until 1.0, when group 1's KV has arrived -> exchanges until 3.0 -> computes
          until 3.5, as 0.5 of the KV leaves; the rest waits behind the exchange until 5.5 -> prefilled at 5.5
    """
    (record,) = (result := simulate(prefill(policy), [WORK])).requests
    found = summarise(result)
    assert record.prefill_hit_tokens == 1
    assert record.prefill_done_s == pytest.approx(prefilled_s)
    assert found["cct_mean_s"] == pytest.approx(cct_s)
    assert found["reuse_stall_s"] == pytest.approx(stalled_s)
    assert found["flow_gbytes/reuse"] == pytest.approx(1.0)
    assert found["flow_gbytes/p2d"] == pytest.approx(2.0)


# --------------------------------------------------------------------------------------------------- loads of ports


@pytest.mark.parametrize("permits", [None, CHUNKS])
def test_what_is_still_to_move_at_ports_is_known_by_level(permits: Permits | None) -> None:
    """Reuse of 1 GB goes first for a second, KV without a deadline waits behind it. Half a second is over."""
    sender = Sender("mfs", permits)
    sender.send("reuse", Stage.REUSE, 1, 0, 1)
    sender.send("kv", Stage.P2D, 10, 0, 2)
    if permits is None:
        sender.send("within", Stage.P2D, 5, 4, 4)
    seen: list[NodeLoad] = []
    sender.kernel.at(0.505, lambda: seen.extend(sender.driver.loads(["node0", "node1", "node4"])))
    sender.kernel.at(11.5, lambda: seen.extend(sender.driver.loads(["node0"])))
    sender.kernel.run()
    sends, receives, apart, after = seen
    assert [load.node for load in seen] == ["node0", "node1", "node4", "node0"]
    assert [(band.level, band.flows) for band in sends.egress.bands] == [(2, 1), (8, 1)]
    assert [band.size / GB for band in sends.egress.bands] == pytest.approx([0.495, 10.0], abs=0.02)
    assert [band.size / GB for band in receives.ingress.bands] == pytest.approx([0.495], abs=0.02)
    assert (sends.ingress.bands, receives.egress.bands, after.egress.bands) == ((), (), ())
    # what moves within a node passes no NIC
    assert apart.egress.bands == apart.ingress.bands == ()
    # by permits it is learned from chunks
    assert sends.egress.bytes_per_s == pytest.approx(1e9, rel=0.02)
    assert apart.egress.bytes_per_s == (1e9 if permits is None else None)


def test_other_tenants_traffic_drains_a_port_more_slowly() -> None:
    sender = Sender("mfs", background=(Background("nic", Static(0.25)),))
    (load,) = sender.driver.loads(["node0"])
    assert (load.egress.bytes_per_s, load.ingress.bytes_per_s) == (0.75e9, 0.75e9)
