"""A fleet that changes while it serves: engine-seconds by hand, and no request is lost whatever engines do."""

import dataclasses
from typing import Any

import pytest

from benchmarks.sim.cluster import Cluster, simulate
from benchmarks.sim.config import IDEAL, EngineSpec, LayerPlan, RoleSwitching, SimConfig
from benchmarks.sim.fleet_setup import STARTS, FleetSetup, StartSteps
from benchmarks.sim.metrics import summarise
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.network.topology import Topology, TopologyConfig
from benchmarks.sim.planned import Planned
from benchmarks.sim.records import RunResult
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TICK_1MS
from policies.journal.replay import replay
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.scaling.base import Counts, Limits
from policies.scaling.observation import Duty, Observation
from policies.scaling.registry import SCALING, make
from policies.state.views import Role

# A prompt of 1,000 tokens takes a second, a step 20 ms.
SLOW = dataclasses.replace(TICK_1MS, prefill_per_token_s=1e-3, decode_base_s=0.02)
FIVE_S = StartSteps(1.0, 1.0, 1.0, 1.0, 1.0)
# (from s, prefill, decode, warm)
Row = tuple[float, int, int, int]


def planned(*rows: Row) -> Planned:
    return Planned(tuple((at_s, Counts(p, d), warm) for at_s, p, d, warm in rows))


def config(scaling: FleetSetup | None, prefill: int = 1, decode: int = 1, **more: Any) -> SimConfig:
    engines = tuple(
        EngineSpec(name, role, count, SLOW, slots=4, kv_blocks=1_024, prefix_cache=False, lease_s=600.0)
        for name, role, count in (("p", Role.PREFILL, prefill), ("d", Role.DECODE, decode))
    )
    return SimConfig(engines, control=more.pop("control", IDEAL), scaling=scaling, **more)


def setup(*rows: Row, **more: Any) -> FleetSetup:
    return FleetSetup(planned(*rows), **({"start": FIVE_S} | more))


def work(n: int, every_s: float, prompt: int = 100, output: int = 50) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(f"r{i}", i * every_s, prompt, output, ttft_slo_s=2.0, tpot_slo_s=0.1)
        for i in range(n)
    ]


def run(made: SimConfig, requests: list[WorkloadRequest]) -> tuple[RunResult, Cluster]:
    """Runs a cluster; whatever it did, every request got all its tokens and nothing is held afterwards."""
    cluster = Cluster(made, iter(requests), None, None)
    result = cluster.run()
    assert len(result.requests) == len(requests)
    for record in result.requests:
        assert record.rejected is None and record.finished_s is not None
        assert record.generated_tokens == record.output_tokens
    state = cluster.dispatcher.state
    assert (state.in_flight, state.leases, state.pool_size) == (0, 0, 0)
    for worker in cluster.workers.values():
        assert (worker.n_active, worker.n_waiting, len(worker.leases), worker.pool.used) == (0, 0, 0, 0)
    return result, cluster


def test_engine_seconds_of_a_plan_by_hand() -> None:
    """Two engines serve for 30 s. At 10 s a third is started: it is warm at 14.5 s, serves from the look at 15 s, is
    stopped at 20 s, and the look at 21 s finds it empty: 11 s more, of which 4.5 s starting, 0.5 s warm, 5 s active and
    1 s draining.
    """
    start = dataclasses.replace(FIVE_S, process_s=0.5)
    scaling = setup((0.0, 1, 1, 0), (10.0, 1, 2, 0), (20.0, 1, 1, 0), start=start)
    result, _ = run(config(scaling, measure_s=30.0), work(30, 1.0))
    stats = result.fleet
    assert stats is not None
    assert stats.engine_s[Duty.STARTING] == pytest.approx(4.5)
    assert stats.engine_s[Duty.WARM] == pytest.approx(0.5)
    assert stats.engine_s[Duty.DRAINING] == pytest.approx(1.0)
    assert stats.engine_s[Duty.ACTIVE] == pytest.approx(2 * result.duration_s + 5.0)
    assert stats.total_s == pytest.approx(2 * result.duration_s + 11.0)
    assert (stats.starts, stats.activations, stats.stops) == (1, 1, 1)
    # (time, P, D, C, warm, starting, draining) at each change that a look found
    assert [row[:6] for row in stats.timeline][:2] == [(1.0, 1, 1, 0, 0, 0), (10.0, 1, 1, 0, 0, 1)]
    assert summarise(result)["fleet/engine_s"] == stats.total_s


def test_engine_seconds_count_in_the_measured_window_only() -> None:
    scaling = setup((0.0, 1, 1, 1), warm=1)
    result = simulate(config(scaling, warmup_s=5.0, measure_s=10.0), work(30, 1.0))
    assert result.fleet is not None
    assert result.fleet.engine_s == {Duty.ACTIVE: pytest.approx(20.0), Duty.WARM: pytest.approx(10.0)}


def test_a_fleet_that_never_changes_serves_as_one_without_a_policy() -> None:
    """The life of every request is the same, to the bit."""
    fixed = simulate(config(None, prefill=2, decode=2), work(60, 0.3))
    same = simulate(config(setup((0.0, 2, 2, 0)), prefill=2, decode=2), work(60, 0.3))
    assert same.requests == fixed.requests


def test_a_warm_engine_gets_no_request_until_it_is_activated() -> None:
    scaling = setup((0.0, 1, 1, 1), (10.0, 1, 2, 0), warm=1)
    result, _ = run(config(scaling), work(80, 0.25))
    routed = {r.decode_worker: r.decode_routed_s for r in reversed(result.requests)}
    assert set(routed) == {"d-0", "scaled-0"}
    first_s = routed["scaled-0"]
    assert first_s is not None and 10.2 <= first_s < 12.0


def test_streams_of_a_drained_engine_end_where_they_are() -> None:
    """Streams of 20 s run on both decode engines; one has to stop at 5 s, and leaves after its last stream."""
    scaling = setup((0.0, 1, 2, 0), (5.0, 1, 1, 0), drain_s=60.0)
    requests = [*work(4, 0.5, output=1_000), WorkloadRequest("late", 40.0, 100, 10)]
    result, cluster = run(config(scaling, decode=2), requests)
    assert result.fleet is not None
    assert (result.fleet.stops, result.fleet.moved) == (1, 0)
    assert result.peaks["retries"] == 0.0
    assert sorted(cluster.workers) in (["d-0", "p-0"], ["d-1", "p-0"])
    gone = ({"d-0", "d-1"} - set(cluster.workers)).pop()
    ends = [r.finished_s for r in result.requests if r.decode_worker == gone]
    left = next(row[0] for row in result.fleet.timeline if row[0] > 5.0 and row[6] == 0)
    assert (
        ends and max(e for e in ends if e is not None) <= left <= max(e for e in ends if e is not None) + 1.5
    )


def test_streams_that_outlast_the_drain_move_and_lose_no_token() -> None:
    scaling = setup((0.0, 1, 2, 0), (5.0, 1, 1, 0), drain_s=3.0)
    requests = [*work(4, 0.5, output=1_000), WorkloadRequest("late", 60.0, 100, 10)]
    result, cluster = run(config(scaling, decode=2), requests)
    assert result.fleet is not None
    assert result.fleet.moved == 2
    assert len(cluster.workers) == 2
    assert len({r.decode_worker for r in result.requests}) == 1


@pytest.mark.parametrize("drain_s", [1.0, 300.0])
def test_a_drained_prefill_engine_loses_no_lease(drain_s: float) -> None:
    """The one decode engine has four slots, so KV waits under leases on both prefill engines when one is stopped."""
    scaling = setup((0.0, 2, 1, 0), (4.0, 1, 1, 0), drain_s=drain_s)
    result, cluster = run(config(scaling, prefill=2), work(30, 0.1, output=200))
    assert result.fleet is not None
    assert result.fleet.stops == 1
    assert (result.fleet.moved > 0) == (drain_s < 2.0)
    assert sum(name.startswith("p-") for name in cluster.workers) == 1


def test_roles_are_switched_while_requests_run() -> None:
    rows = [(float(t), *((3, 1) if t // 5 % 2 else (1, 3)), 0) for t in range(0, 60, 5)]
    result, cluster = run(config(setup(*rows), prefill=1, decode=3), work(120, 0.4, prompt=400, output=80))
    assert result.fleet is not None
    assert result.fleet.switches >= 18
    assert len(cluster.workers) == 4


def test_a_later_order_replaces_one_that_has_not_arrived() -> None:
    """An activation that takes 5 s is taken back after 2 s: the engine never serves."""
    scaling = setup((0.0, 1, 1, 1), (10.0, 1, 2, 0), (12.0, 1, 1, 1), warm=1, activate_s=5.0)
    result, _ = run(config(scaling), work(80, 0.25))
    assert {r.decode_worker for r in result.requests} == {"d-0"}


def test_an_engine_leaves_only_after_what_is_on_its_way_to_it() -> None:
    """With hops of 50 ms a request is often on its way to an engine that has to stop."""
    slow = dataclasses.replace(IDEAL, hop_s=0.05)
    rows = [(float(t), 1, 2 - t % 2, 0) for t in range(40)]
    scaling = setup(*rows, start=StartSteps(), activate_s=0.0)
    result, _ = run(config(scaling, decode=2, control=slow), work(300, 0.1, prompt=10, output=3))
    assert result.fleet is not None
    assert result.fleet.stops >= 10


def test_engines_take_places_and_give_them_back() -> None:
    """A rack of four nodes has two engines and two free places: of three wanted engines two start."""
    topology = Topology.build(
        TopologyConfig(
            pods=1,
            racks_per_pod=1,
            nodes_per_rack=4,
            gpus_per_node=1,
            nvlink_gbyte_per_s=100,
            nic_gbit_per_s=100,
            rack_link_gbit_per_s=100,
            core_link_gbit_per_s=100,
        )
    )
    nodes = list(topology.nodes)
    rows = ((0.0, 1, 1, 0), (5.0, 1, 4, 0), (30.0, 1, 1, 0), (40.0, 1, 3, 0))
    made = config(setup(*rows, places=tuple(nodes[2:])))
    placed = tuple(
        dataclasses.replace(spec, nodes=(node,)) for spec, node in zip(made.engines, nodes, strict=False)
    )
    made = dataclasses.replace(made, engines=placed, network=Fabric(topology))
    result, cluster = run(made, work(240, 0.25))
    assert result.fleet is not None
    assert (result.fleet.starts, result.fleet.stops) == (4, 2)
    assert max(sum(row[1:]) for row in result.fleet.timeline) == 4
    assert len({worker.node for worker in cluster.workers.values()}) == 4


def test_the_policy_sees_what_happened() -> None:
    """One request a second, with a prompt of 100 and 50 tokens of output: 10 in a window, all in time."""
    seen: list[Observation] = []

    class Watching(Planned):
        def step(self, observation: Observation, state: None) -> Any:
            seen.append(observation)
            return super().step(observation, state)

    watching = Watching(((0.0, Counts(1, 1), 1),))
    run(config(FleetSetup(watching, start=FIVE_S, warm=1)), work(45, 1.0))
    last = seen[-1]
    assert last.windows is not None
    (window,) = last.windows
    assert (window.arrived, window.prompt_tokens, window.met, window.missed) == (10, 1_000, 10, 0)
    assert (window.ended, window.output_tokens, window.ttft_slo_s) == (10, 500, 2.0)
    assert {e.engine: e.duty for e in last.engines} == {
        "p-0": Duty.ACTIVE, "d-0": Duty.ACTIVE, "scaled-0": Duty.WARM,
    }  # fmt: skip
    assert last.leads.start_s == 5.0 and last.capability.slots == 4


@pytest.mark.parametrize(
    ("what", "row"),
    [("stops", (5.0, 1, 1, 0)), ("deactivations", (5.0, 1, 1, 1)), ("switches", (5.0, 2, 1, 0))],
)
def test_what_an_engine_serves_counts_whatever_becomes_of_the_engine_meanwhile(what: str, row: Row) -> None:
    """Four streams of 20 s run on two decode engines when one of these gets an order; all four are in time."""
    windows: dict[int, Any] = {}

    class Watching(Planned):
        def step(self, observation: Observation, state: None) -> Any:
            windows[observation.window] = observation.windows
            return super().step(observation, state)

    watching = Watching(planned((0.0, 1, 2, 0), row).timetable)
    requests = [
        *work(4, 0.5, output=1_000),
        *(WorkloadRequest(f"l{i}", 40.0 + 5 * i, 100, 10) for i in range(5)),
    ]
    result, _ = run(config(FleetSetup(watching, start=FIVE_S, drain_s=60.0), decode=2), requests)
    assert result.fleet is not None and getattr(result.fleet, what) == 1
    found = [window for one in windows.values() for window in one or () if window.ended]
    assert sum(window.ended for window in found) >= 8
    assert sum(window.met + window.missed for window in found) == sum(window.ended for window in found)


def test_what_an_engine_serves_in_its_first_seconds_does_not_count() -> None:
    """The second decode engine is activated at about 10 s and settles for 5 s, in which every other request is its."""
    counts: dict[int, tuple[int, int]] = {}

    class Watching(Planned):
        def step(self, observation: Observation, state: None) -> Any:
            for window in observation.windows or ():
                counts[observation.window] = window.ended, window.met + window.missed
            return super().step(observation, state)

    watching = Watching(planned((0.0, 1, 1, 1), (10.0, 1, 2, 0)).timetable)
    run(config(FleetSetup(watching, start=FIVE_S, warm=1)), work(120, 0.25))
    # a request takes 1.1 s: none of the first window was the new engine's
    assert counts[0][0] == counts[0][1]
    assert 5 <= counts[1][0] - counts[1][1] <= 15


def test_a_run_that_scales_is_the_same_again_and_replays() -> None:
    limits = Limits(prefill_max=6, decode_max=6, warm_max=2, budget=12)
    logs = []
    for _ in range(2):
        lines: list[str] = []
        policy = make("joint", {"limits": dataclasses.asdict(limits)})
        result = simulate(config(FleetSetup(policy, start=FIVE_S)), work(200, 0.15, prompt=800), lines.append)
        assert result.fleet is not None and result.fleet.starts >= 2
        logs.append("".join(lines))
    assert logs[0] == logs[1]
    assert all(step.recorded == step.replayed for step in replay(logs[0].splitlines()))


@pytest.mark.parametrize("name", SCALING)
def test_every_policy_carries_a_burst_and_loses_nothing(name: str) -> None:
    limits = {"prefill_max": 4, "decode_max": 4, "warm_max": 1, "budget": 8}
    burst = [
        dataclasses.replace(one, request_id=f"b{i}", at_s=60.0 + i * 0.2)
        for i, one in enumerate(work(250, 0.2, prompt=800))
    ]
    requests = sorted(work(150, 2.0) + burst, key=lambda r: r.at_s)
    patient = DispatchConfig(queue_timeout_s=600.0)
    scaling = FleetSetup(make(name, {"limits": limits}), start=FIVE_S, warm=1)
    result, _ = run(config(scaling, dispatch=patient), requests)
    assert result.fleet is not None
    assert max(sum(row[1:]) for row in result.fleet.timeline) <= 8


def test_zero_to_first_token_is_the_start_the_activation_and_the_prompt() -> None:
    """Two requests at 0 s and 0.5 s, then none: idle from the look at 20 s on, whose last window (10 to 20 s) is the
    first without an arrival. After 30 s, at 50 s, both engines stop; the look at 51 s finds them empty.

    A request at 100.25 s is asked about at once. Both engines start for 5 s, are warm at 105.25 s, are told to serve at
    the look at 106 s, and do so 0.2 s later; its prompt of 100 tokens takes 0.1 s and the first step 20 ms. The look at
    107 s finds the fleet awake.
    """
    limits = {"prefill_min": 0, "decode_min": 0}
    policy = make("fixed", {"limits": limits, "sleep": {"idle_s": 30.0, "wake_limit_s": 60.0}})
    scaling = FleetSetup(policy, start=FIVE_S)
    requests = [*work(2, 0.5), WorkloadRequest("wakes", 100.25, 100, 50)]
    lines: list[str] = []
    result = simulate(config(scaling, dispatch=DispatchConfig(queue_timeout_s=2.0)), requests, lines.append)
    woke = next(r for r in result.requests if r.request_id == "wakes")
    assert woke.rejected is None and woke.finished_s is not None
    assert woke.prefill_routed_s == pytest.approx(106.2)
    assert woke.first_token_s == pytest.approx(106.2 + 0.1 + 0.02, abs=0.005)
    assert result.fleet is not None
    changes = [(row[0], sum(row[1:])) for row in result.fleet.timeline]
    # engines of any duty; the looks at 50 s and 100.25 s find those that are told to stop and to start
    asleep_s = next(at_s for at_s, n in changes if n == 0)
    assert asleep_s == 51.0
    assert [n for at_s, n in changes if at_s < 50.0] == [2]
    assert (100.25, 2) in changes
    assert result.fleet.engine_s[Duty.STARTING] == pytest.approx(10.0)
    phases = [line for line in "".join(lines).splitlines() if "StandbyChanged" in line]
    assert [p for line in phases for p in ("asleep", "waking", "awake") if f'"{p}"' in line] == [
        "awake", "asleep", "waking", "awake",
    ]  # fmt: skip
    assert all(step.recorded == step.replayed for step in replay("".join(lines).splitlines()))


def test_a_wake_that_takes_too_long_is_refused_in_the_simulator_too() -> None:
    """A start takes 5 s and a wake 3 s at most: the look at 104 s is the first one 3 s after the request."""
    limits = {"prefill_min": 0, "decode_min": 0}
    policy = make("fixed", {"limits": limits, "sleep": {"idle_s": 30.0, "wake_limit_s": 3.0}})
    requests = [
        *work(2, 0.5),
        WorkloadRequest("early", 100.25, 100, 50),
        WorkloadRequest("late", 120.0, 100, 50),
    ]
    result = simulate(config(FleetSetup(policy, start=FIVE_S)), requests)
    ended = {r.request_id: r for r in result.requests}
    assert ended["early"].rejected == "wake_failed"
    assert ended["late"].rejected is None and ended["late"].finished_s is not None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="process_s"):
        StartSteps(process_s=-1.0)
    with pytest.raises(ValueError, match="every_s"):
        setup((0.0, 1, 1, 0), every_s=0.0)
    with pytest.raises(ValueError, match="begin at 0"):
        planned((1.0, 1, 1, 0))
    with pytest.raises(ValueError, match="alike"):
        one, two = config(None).engines
        SimConfig((one, dataclasses.replace(two, slots=9)), scaling=setup((0.0, 1, 1, 0)))
    with pytest.raises(ValueError, match="cannot be scaled"):
        SimConfig(
            (dataclasses.replace(config(None).engines[0], layers=LayerPlan(2)),),
            scaling=setup((0.0, 1, 1, 0)),
        )
    with pytest.raises(ValueError, match="both decide"):
        config(setup((0.0, 1, 1, 0)), roles=RoleSwitching(RoleSwitchConfig(5.0)))
    assert STARTS["cold"].total_s > STARTS["overlapped"].total_s > STARTS["page_cache"].total_s
