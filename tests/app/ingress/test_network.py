"""What an ingress observes of KV transfers reaches the router's oracle, where the router wants it, and /metrics."""

from pathlib import Path

import pytest

from actors.router.network import NetworkConfig, RouterNetwork
from tests.app.ingress.rig import Rig, pair, rig, until


async def ask(made: Rig, max_tokens: int = 2) -> None:
    answer = await made.client.post("/v1/chat/completions", json=made.chat(max_tokens=max_tokens))
    assert answer.status_code == 200


def observed(made: Rig) -> float:
    return made.router.status().totals["network_transfers"]


async def test_transfers_become_estimates_in_snapshot_and_metrics(tmp_path: Path) -> None:
    """The scripted decode engine says 4096 bytes in 3 ms."""
    network = RouterNetwork(NetworkConfig(estimate=True, min_samples=1, refresh_s=0.02))
    async with rig(tmp_path, pair(tmp_path), network=network) as made:
        await ask(made, max_tokens=1)  # it closes before the ingress has told of its transfer
        await ask(made)
        await until(lambda: observed(made) == 2, "two transfers at the estimator")
        await until(lambda: made.router.dispatcher.state.snapshot(0.0).oracle is not None, "an oracle")
        oracle = made.router.dispatcher.state.snapshot(0.0).oracle
        assert oracle is not None
        assert oracle.pairs["n", "n"].bytes_per_s == pytest.approx(4096 / 0.003)
        await until(
            lambda: made.metric("sluice_router_network_transfers_total") == 2, "the total in /metrics"
        )
        assert made.metric("sluice_router_network_source") == 3.0
        await made.idle()


async def test_nobody_tells_what_nobody_wants(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:  # join shortest queue does not look at the network
        await ask(made)
        await made.idle()
        assert not made.hub._transferred
        assert observed(made) == 0
        assert made.router.dispatcher.state.snapshot(0.0).oracle is None
