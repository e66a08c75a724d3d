"""Observations of KV transfers reach the router's oracle, where the router wants them, and /metrics."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.engine.report import Reporter
from actors.engine.server import EngineServer
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.engine.sim.links import SimLink
from actors.router.network.feed import NetworkConfig, RouterNetwork
from actors.wire.channel import Identity
from policies.network.oracle import PairEstimate
from tests.app.ingress.rig import Rig, pair, rig, until


async def ask(made: Rig, max_tokens: int = 2) -> None:
    answer = await made.client.post("/v1/chat/completions", json=made.chat(max_tokens=max_tokens))
    assert answer.status_code == 200


def observed(made: Rig) -> float:
    return made.router.status().totals["network_transfers"]


def told_of(made: Rig, transfers: int) -> bool:
    return observed(made) == transfers


async def test_transfers_become_estimates_in_snapshot_and_metrics(tmp_path: Path) -> None:
    """The scripted decode engine says 4096 bytes in 3 ms. News of a transfer are not counted that come more than a
    refresh after the end of its request.
    """
    network = RouterNetwork(NetworkConfig(estimate=True, min_samples=1, refresh_s=2.0))
    async with rig(tmp_path, pair(tmp_path), network=network) as made:
        # This request closes before the ingress has told of its transfer.
        await ask(made, max_tokens=1)
        await ask(made)
        await until(lambda: observed(made) == 2, "two transfers at the estimator")
        await until(lambda: made.router.dispatcher.state.snapshot(0.0).oracle is not None, "an oracle")
        oracle = made.router.dispatcher.state.snapshot(0.0).oracle
        assert oracle is not None
        assert oracle.pairs["n", "n"].bytes_per_s == pytest.approx(4096 / 0.003)
        await until(
            lambda: made.metric("sluice_router_network_transfers_total") == 2, "the total in /metrics"
        )
        # a status may tell of the transfers before the oracle is made of them
        await until(lambda: made.metric("sluice_router_network_source") == 3.0, "the oracle in /metrics")
        await made.idle()


async def test_nobody_tells_what_nobody_wants(tmp_path: Path) -> None:
    """The default policy, join shortest queue, does not look at the network."""
    async with rig(tmp_path, pair(tmp_path)) as made:
        await ask(made)
        await made.idle()
        assert not made.connections._transferred
        assert observed(made) == 0
        assert made.router.dispatcher.state.snapshot(0.0).oracle is None


async def test_contention_is_learnt_once_a_policy_that_reads_it_is_set(tmp_path: Path) -> None:
    """4096 bytes in 3 ms of which 1 ms is latency, where the file says 4 MB/s: a slowdown of 2 / 1.024."""
    file = tmp_path / "network.yaml"
    file.write_text("tiers: {3: {bandwidth_bytes_per_s: 4.0e+6, latency_s: 0.001}}")
    network = RouterNetwork(NetworkConfig(str(file), min_samples=1))
    async with rig(tmp_path, pair(tmp_path), network=network) as made:
        state = made.router.dispatcher.state
        await ask(made)
        change = {"decode": {"name": "netkv", "params": {"contention": "own"}}}
        answer = await made.client.put("/sluice/admin/policy", json=change)
        assert answer.status_code == 200, answer.text

        def wanted() -> bool:
            fleet = made.connections.fleet
            return fleet is not None and fleet.wants_transfers

        await until(wanted, "the wish for transfers")
        await until(lambda: state.snapshot(0.0).oracle is not None, "an oracle")
        await ask(made)

        def levels() -> list[float]:
            oracle = state.snapshot(0.0).oracle
            return [] if oracle is None else [c.level for c in oracle.contention.get("own", {}).values()]

        await until(levels, "a curve")
        assert levels() == [pytest.approx((2 / 1.024 + 8) / 9)]
        await made.idle()


LINKS = {"near-*": SimLink(4e6, 0.002), "far-*": SimLink(1e6, 0.004)}
TIERS = """
tiers:
  1: {bandwidth_bytes_per_s: 8.0e+6, latency_s: 0.002}
  3: {bandwidth_bytes_per_s: 8.0e+6, latency_s: 0.004}
"""


async def start_sim(
    made: Rig, directory: Path, name: str, role: Any, rack: str
) -> tuple[EngineServer, Reporter]:
    config = SimEngineConfig(name, role, timing={"kv_bytes_per_token": 2000}, links=LINKS)
    me, address = Identity("engine", name), f"unix:{directory}/{name}.sock"
    labels = {"sluice.io/rack": rack}
    server = EngineServer(SimEngine(config), me, [address], node=f"host-{name}", labels=labels)
    await server.start()

    async def find() -> tuple[str, ...]:
        return made.router.addresses

    reporter = Reporter(me, server, find)
    reporter.start()
    return server, reporter


async def test_the_links_of_sim_engines_are_learned_whatever_the_file_says(tmp_path: Path) -> None:
    """Requests come one after the other, so every transfer has its link alone; the file says 8 MB/s of both."""
    (tmp_path / "network.yaml").write_text(TIERS)
    # news of a transfer that come later than this after its request's end are not counted
    config = NetworkConfig(str(tmp_path / "network.yaml"), estimate=True, min_samples=1, refresh_s=2.0)
    async with rig(tmp_path, [], network=RouterNetwork(config)) as made:
        kinds = (("p", "prefill", "r1"), ("near-1", "decode", "r1"), ("far-1", "decode", "r2"))
        engines = [await start_sim(made, tmp_path, *kind) for kind in kinds]
        await until(
            lambda: len(made.connections.engines()) == 3 and made.connections.ready() is None,
            "a ready ingress",
        )
        state = made.router.dispatcher.state

        def places() -> int:
            oracle = state.snapshot(0.0).oracle
            return len(oracle.places) if oracle is not None else 0

        await until(lambda: places() == 3, "every engine's rack")

        def pairs() -> dict[tuple[str, str], PairEstimate]:
            oracle = state.snapshot(0.0).oracle
            return dict(oracle.pairs) if oracle is not None else {}

        near, far = ("host-p", "host-near-1"), ("host-p", "host-far-1")
        for i in range(200):  # ties are drawn: both are hit soon
            text = " ".join(f"w{i}-{n}" for n in range(40))
            answer = await made.client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
            assert answer.status_code == 200
            await until(partial(told_of, made, i + 1), "its transfer at the estimator")
            if {near, far} <= pairs().keys():
                break
        found = pairs()
        assert found[near].bytes_per_s == pytest.approx(4e6, rel=0.01)
        assert found[far].bytes_per_s == pytest.approx(1e6, rel=0.01)
        oracle = state.snapshot(0.0).oracle
        assert oracle is not None
        assert oracle.congestion == {1: pytest.approx(0.5, rel=0.05), 3: pytest.approx(0.875, rel=0.05)}
        await made.idle()
        for server, reporter in engines:
            await reporter.stop()
            await server.stop()
