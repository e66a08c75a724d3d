"""KV that has moved is counted once by tier and once by pair of nodes, of which few have names."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import yaml

from actors.router.network.feed import NetworkConfig, RouterNetwork
from actors.wire import messages as wire
from app.fleet.moved import MOST_PAIRS, OTHER, PAIR_BYTES, PAIR_TRANSFERS, TIER_BYTES, TIER_TRANSFERS
from app.ingress.metrics import IngressMetrics
from policies.request.events import Admitted
from tests.app.ingress.rig import ScriptedEngine, rig, until


def series(metrics: IngressMetrics, name: str) -> dict[tuple[str, ...], float]:
    (one,) = (figures for figures in metrics.figures() if figures.name == name)
    return {labels: count for labels, (count,) in one.series}


def moved(metrics: IngressMetrics, source: str | None, target: str | None, tier: int | None = 1) -> None:
    metrics.transferred(Admitted(10, 0.001), tier, source, target)


def test_each_transfer_counts_in_its_tier_and_in_its_pair() -> None:
    metrics = IngressMetrics("m")
    for tier, source, target, n_bytes in (
        (0, "a", "a", 100), (2, "a", "b", 30), (2, "a", "b", 4), (None, "b", "a", 5), (2, None, "b", 1000),
    ):  # fmt: skip
        metrics.transferred(Admitted(n_bytes, 0.001), tier, source, target)
    assert series(metrics, TIER_TRANSFERS) == {("0",): 1, ("2",): 3, ("unknown",): 1}
    assert series(metrics, TIER_BYTES) == {("0",): 100, ("2",): 1034, ("unknown",): 5}
    by_pair = {("a", "a"): 1, ("a", "b"): 2, ("b", "a"): 1, (OTHER, OTHER): 1}
    assert series(metrics, PAIR_TRANSFERS) == by_pair
    assert series(metrics, PAIR_BYTES) == {
        ("a", "a"): 100, ("a", "b"): 34, ("b", "a"): 5, (OTHER, OTHER): 1000,
    }  # fmt: skip


def test_pairs_beyond_the_bound_are_one_and_take_the_names_of_those_that_have_gone() -> None:
    metrics, nodes = IngressMetrics("m"), {"t"}
    metrics.bind_nodes(lambda: nodes)
    pairs = [(f"s{number}", "t") for number in range(MOST_PAIRS + 36)]
    nodes.update(source for source, _ in pairs)
    for _ in range(3):
        for source, target in pairs:
            moved(metrics, source, target)
    named = dict.fromkeys(pairs[:MOST_PAIRS], 3.0)
    assert series(metrics, PAIR_TRANSFERS) == named | {(OTHER, OTHER): 108.0}
    # s0 has gone: its series ends, at once and for good
    nodes.remove("s0")
    del named["s0", "t"]
    assert series(metrics, PAIR_TRANSFERS) == named | {(OTHER, OTHER): 108.0}
    assert b'source="s0"' not in metrics.render()
    moved(metrics, *pairs[-1])
    moved(metrics, *pairs[-2])
    assert series(metrics, PAIR_BYTES)[pairs[-1]] == 10.0
    assert series(metrics, PAIR_TRANSFERS)[OTHER, OTHER] == 109.0
    # no transfer is lost where none has gone
    assert series(metrics, TIER_TRANSFERS) == {("1",): 302.0}


def network_of_two_tiers(directory: Path) -> RouterNetwork:
    """A network in which `n2` is of tier 2 for `n1`."""
    file = directory / "network.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "tiers": {2: {"bandwidth_bytes_per_s": 1e9}, 3: {"bandwidth_bytes_per_s": 1e8}},
                "pairs": [{"from": "n1", "to": "n2", "tier": 2}],
            }
        )
    )
    return RouterNetwork(NetworkConfig(file=str(file)))


@pytest.mark.parametrize("tier", [None, 2])
async def test_an_ingress_learns_tiers_from_the_router_and_nodes_from_the_engines(
    tmp_path: Path, tier: int | None
) -> None:
    engines = [
        ScriptedEngine("p", "prefill", tmp_path, node="n1"),
        ScriptedEngine("d", "decode", tmp_path, node="n2"),
        ScriptedEngine("c", "colocated", tmp_path, node="n3"),
    ]
    network = None if tier is None else network_of_two_tiers(tmp_path)
    async with rig(tmp_path, engines, network=network) as made:
        await until(lambda: network is None or network.gauges(0.0)["network_source"] >= 1, "an oracle")
        for _ in range(6):
            assert (await made.client.post("/v1/chat/completions", json=made.chat())).status_code == 200
        transfers = made.metric("sluice_kv_transfers_total")
        assert transfers > 0
        assert made.metric(PAIR_TRANSFERS, source="n1", target="n2") == transfers
        assert made.metric(PAIR_BYTES, source="n1", target="n2") == 4096 * transfers
        assert made.metric(TIER_BYTES, tier="unknown" if tier is None else "2") == 4096 * transfers
        assert sum(series(made.app.metrics, TIER_TRANSFERS).values()) == transfers
        await made.idle()
        engines[1].kill()
        await until(
            lambda: made.connections.engines() == [engines[2].info(), engines[0].info()], "two engines"
        )

        await until(lambda: not series(made.app.metrics, PAIR_TRANSFERS), "the end of the pair's series")
        assert PAIR_TRANSFERS + "{" not in (await made.client.get("/metrics")).text
        assert made.metric("sluice_kv_transfers_total") == transfers
        assert Counter(series(made.app.metrics, TIER_TRANSFERS)).total() == transfers


async def test_the_tier_of_an_attempt_that_failed_is_not_that_of_the_next(tmp_path: Path) -> None:
    """The router sends the first attempt over tier 2. It is lost, and the ingress decides about the second one."""
    p = ScriptedEngine("p", "prefill", tmp_path, node="n1")
    d = ScriptedEngine("d", "decode", tmp_path, auto=False, node="n2")
    network = network_of_two_tiers(tmp_path)
    async with rig(tmp_path, [p, d], network=network) as made:
        await until(lambda: network.gauges(0.0)["network_source"] >= 1, "an oracle")
        post = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
        await until(lambda: d.of(wire.Decode), "the first attempt")
        (first,) = d.of(wire.Decode)
        assert [life.tier for life in made.connections.live.values()] == [2]
        await made.router.stop()
        await until(made.connections.decides_here, "decisions without a router")
        d.send(wire.Failed(first.attempt_id, "decode", "kv_load", "the read failed", True))
        await until(lambda: len(d.of(wire.Decode)) == 2, "the second attempt")
        d.admit(d.of(wire.Decode)[1].attempt_id)
        d.token(d.of(wire.Decode)[1].attempt_id, finish="stop")
        assert (await post).status_code == 200
        assert made.metric("sluice_fallback_decisions_total", task="decode") == 1
        assert series(made.app.metrics, TIER_TRANSFERS) == {("unknown",): 1.0}
