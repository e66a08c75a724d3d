"""The role switch in the simulator: idle decode engines are lent to prefill, come home, and lose no request."""

import dataclasses

import pytest

from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import IDEAL, EngineSpec, LayerPlan, RoleSwitching, SimConfig
from benchmarks.sim.roles import Roles
from benchmarks.workloads.record import WorkloadRequest
from policies.engine_model.timing import TICK_1MS
from policies.journal.replay import replay
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.state.reducer import ClusterState
from policies.state.views import Role

SLOW = dataclasses.replace(TICK_1MS, prefill_per_token_s=1e-3, decode_base_s=0.02)
SWITCHING = RoleSwitching(
    RoleSwitchConfig(switch_s=5.0, after_s=1.0), RegimeThresholds(prefill_low=0.05, decode_low=0.3)
)
# A prompt takes a second and three come in a second, for thirty seconds; streams are short.
LONG_PROMPTS = [WorkloadRequest(f"r{i}", i / 3.0, 1_000, 20) for i in range(90)]


def config(roles: RoleSwitching | None) -> SimConfig:
    engines = tuple(
        EngineSpec(name, role, 3, SLOW, slots=16, kv_blocks=4_096, prefix_cache=False, lease_s=600.0)
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    )
    small = dataclasses.replace(engines[0], count=1), dataclasses.replace(engines[1], count=3)
    return SimConfig(small, control=IDEAL, roles=roles)


def test_idle_decode_engines_prefill_for_a_while() -> None:
    """One prefill engine for 3 s of work a second: the last of 90 waits a minute. Two more engines nearly triple it."""
    fixed, lent = (simulate(config(roles), LONG_PROMPTS) for roles in (None, SWITCHING))
    for run in (fixed, lent):
        assert len(run.requests) == 90
        assert all(r.finished_s is not None and r.rejected is None for r in run.requests)
    last = [max(r.finished_s or 0.0 for r in run.requests) for run in (fixed, lent)]
    assert last[0] == pytest.approx(91.0, abs=2.0)
    assert last[1] < 0.7 * last[0]
    assert "role_switches" not in fixed.peaks and lent.peaks["role_switches"] >= 2.0


def test_the_router_knows_how_many_prompts_and_sequences_a_lent_engine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each look its charges are the engine's queues, also where an engine has work of both phases."""
    plain = Roles.look
    mixed: list[bool] = []

    def look(roles: Roles, state: ClusterState) -> None:
        for name, seen in state.snapshot(roles._kernel.now_s, ()).workers.items():
            engine = roles._workers[name]
            assert seen.prefilling + seen.slots_used == engine.n_active + engine.n_waiting
            assert len(engine.model.running) <= seen.slots_used
            mixed.append(seen.role is not engine.spec.role and seen.prefilling > 0 < seen.slots_used)
        plain(roles, state)

    monkeypatch.setattr(Roles, "look", look)
    # streams of 4 s, so that an engine still decodes when it is lent
    long = [dataclasses.replace(r, output_tokens=200) for r in LONG_PROMPTS]
    lent = dataclasses.replace(SWITCHING, thresholds=RegimeThresholds(0.05, 0.9, 0.3, 0.9, idle=0.4))
    simulate(config(lent), long)
    assert any(mixed)


def test_a_run_with_switches_is_the_same_again_and_replays() -> None:
    logs: list[str] = []
    for _ in range(2):
        lines: list[str] = []
        simulate(config(SWITCHING), LONG_PROMPTS, lines.append)
        logs.append("".join(lines))
    assert logs[0] == logs[1]
    assert logs[0].count('"EngineUp"') >= 6
    assert all(step.recorded == step.replayed for step in replay(logs[0].splitlines()))


def test_engines_that_cannot_switch_are_refused() -> None:
    layered = dataclasses.replace(config(None).engines[0], layers=LayerPlan(2))
    with pytest.raises(ValueError, match="cannot switch roles"):
        SimConfig((layered,), roles=SWITCHING)
    with pytest.raises(ValueError, match="every_s"):
        RoleSwitching(RoleSwitchConfig(5.0), every_s=0.0)
