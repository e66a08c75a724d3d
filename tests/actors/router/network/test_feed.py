"""The oracle: its sources and how they are merged, estimates from reported transfers, and when it becomes an event."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actors.router.network.feed import NetworkConfig, RouterNetwork
from actors.router.network.file import read_network_file
from actors.wire.messages import EngineInfo, Transfer, Transferred
from policies.journal.codec import loads
from policies.journal.lines import event_line, parse_event
from policies.network.contention import FORMS
from policies.network.oracle import NodePlace, Oracle, OracleError, PathSource, TransferIntent
from policies.routing.base import Needs
from policies.state.events import OracleRefreshed

TIERS = """
tiers:
  1: {bandwidth_bytes_per_s: 1000, latency_s: 0.5}
  3: {bandwidth_bytes_per_s: 250}
"""


LEARNS = Needs.NETWORK | Needs.CONTENTION


def info(name: str, node: str, **labels: str) -> EngineInfo:
    named = {f"sluice.io/{key}": value for key, value in labels.items()}
    return EngineInfo(name, "decode", "sim", "m", "g", (), 2, 100, 16, 1024, node, 1, 30.0, labels=named)


def prefill(node: str) -> EngineInfo:
    return replace(info("p", node), role="prefill")


def ray_node(node_id: str, host: str, labels: dict[str, str], alive: bool = True) -> dict[str, Any]:
    return {"NodeID": node_id, "Alive": alive, "NodeManagerHostname": host, "Labels": labels}


def network(tmp_path: Path, text: str | None = TIERS, **config: Any) -> RouterNetwork:
    file = tmp_path / "network.yaml"
    if text is not None:
        file.write_text(text)
    found = RouterNetwork(NetworkConfig(file=None if text is None else str(file), **config))
    for name, node in (("p", "np"), ("near", "nn"), ("far", "nf")):
        rack = "r2" if name == "far" else "r1"
        found.engine(info(name, node, rack=rack) if text is not None else info(name, node))
    return found


def told(found: RouterNetwork, now_s: float) -> Oracle:
    event = found.refresh(now_s)
    assert event is not None
    assert event.oracle is not None
    return event.oracle


def move(
    found: RouterNetwork, to: str, seconds: float, now_s: float, tier: int, attempt_id: str = "r"
) -> None:
    found.routed(TransferIntent(attempt_id, "p", to, 1000, 0, tier), now_s - seconds)
    found.transferred(Transferred([Transfer(attempt_id, 1000, seconds, 3, 0.0)]), now_s)


def test_announced_racks_and_the_files_tiers_make_the_oracle_once(tmp_path: Path) -> None:
    found = network(tmp_path)
    oracle = told(found, 0.0)
    assert oracle.places == {"np": NodePlace("r1"), "nn": NodePlace("r1"), "nf": NodePlace("r2")}
    assert oracle.tier("p", "np", "near", "nn") == 1
    assert oracle.tier("p", "np", "far", "nf") == 3
    assert found.refresh(1.0) is None  # nothing changed
    assert [found.configured(tier) for tier in (1, 3, None)] == [1, 3, None]
    seen = found.paths([prefill("np"), info("near", "nn"), info("far", "nf")])
    assert [(one.target, one.tier, one.configured_bytes_per_s) for one in seen] == [
        ("nn", 1, 1000),
        ("nf", 3, 250),
    ]


def test_nothing_known_is_nothing_told(tmp_path: Path) -> None:
    found = network(tmp_path, None)
    assert found.refresh(0.0) is None
    assert found.gauges(0.0) == {"network_source": 0.0}


def test_precedence_of_rack_and_pod_label_by_label(tmp_path: Path) -> None:
    """The file gives h1 (Ray's node a) a rack, b's engine announces one; zone, then region, gives the pod."""
    found = network(tmp_path, TIERS + "nodes: {h1: {rack: file}}\n")
    zone, region = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
    found.sources.set_nodes([
        ray_node("a", "h1", {"sluice.io/rack": "ray", zone: "z1", region: "e"}),
        ray_node("b", "h2", {"sluice.io/rack": "ray", region: "e"}),
        ray_node("c", "h3", {"topology.kubernetes.io/rack": "k8s"}),
        ray_node("dead", "h4", {"sluice.io/rack": "ray"}, alive=False),
    ])  # fmt: skip
    found.engine(info("on-a", "a", rack="announced"))
    found.engine(info("on-b", "b", rack="announced"))
    places = told(found, 0.0).places
    assert {node: places[node] for node in ("a", "b", "c")} == {
        "a": NodePlace("file", "z1"),
        "b": NodePlace("announced", "e"),
        "c": NodePlace("k8s"),
    }
    assert "dead" not in places


def test_pairs_of_the_file_are_found_by_host_name_and_win_over_racks(tmp_path: Path) -> None:
    found = network(tmp_path, TIERS + "pairs: [{from: h1, to: nn, tier: 3}]\n")
    found.sources.set_nodes([ray_node("np", "h1", {})])
    oracle = told(found, 0.0)
    assert oracle.tier("p", "np", "near", "nn") == 3
    assert oracle.tier("near", "nn", "p", "np") == 1  # the other way was not named


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tiers: {4: {bandwidth_bytes_per_s: 1}}", r"tiers.4.*less than or equal to 3"),
        (
            "tiers: {1: {bandwidth_bytes_per_s: 0}}",
            r"tiers.1.bandwidth_bytes_per_s: .*greater than 0 \(got 0\)",
        ),
        ("tiers: {1: {bandwidth: 1}}", r"tiers.1.bandwidth_bytes_per_s: Field required"),
        (TIERS.replace("1000,", "100,"), r"tier 3 has more bandwidth than the nearer tier 1"),
        (TIERS + "congestion: {3: 1.0}", r"congestion.3: .*less than 1"),
        (TIERS + "congestion: {2: 0.5}", r"congestion names tier 2, which has no bandwidth"),
        (TIERS + "pairs: [{from: a, to: b, tier: 2}]", r"puts a -> b on tier 2, which has no bandwidth"),
        (TIERS + "racks: {}", r"racks: Extra inputs are not permitted"),
        (
            TIERS.replace("latency_s: 0.5", "uplinks: 0"),
            r"tiers.1.uplinks: .*greater than or equal to 1 \(got 0\)",
        ),
        ("", r"tiers: Field required"),
        ("tiers: [", r"cannot be read"),
        ("tiers: 2026-02-31", r"cannot be read"),  # a date that YAML itself cannot make
    ],
)
def test_a_wrong_file_is_refused_with_the_key_and_what_is_allowed(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "n.yaml"
    file.write_text(text)
    with pytest.raises(OracleError, match=says):
        read_network_file(str(file))


def test_a_missing_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OracleError, match=r"does not exist or may not be read; create it"):
        RouterNetwork(NetworkConfig(file=str(tmp_path / "none")))


def test_the_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    found, file = network(tmp_path), tmp_path / "network.yaml"
    told(found, 0.0)
    file.write_text(TIERS.replace("250", "200"))
    assert told(found, 1.0).bandwidth_bytes_per_s[3] == 200
    file.write_text("tiers: nonsense")
    assert found.refresh(2.0) is None
    assert found.refresh(3.0) is None
    file.unlink()
    assert found.refresh(4.0) is None
    assert found.totals()["network_errors"] == 2.0  # once for each change
    file.write_text(TIERS.replace("250", "125"))
    assert told(found, 5.0).bandwidth_bytes_per_s[3] == 125


def test_the_files_congestion_ages_with_the_file(tmp_path: Path) -> None:
    found = network(tmp_path, TIERS + "congestion: {3: 0.5}")
    os.utime(tmp_path / "network.yaml", (1000.0, 1000.0))
    oracle = told(found, 1030.0)
    path = oracle.path("p", "np", "far", "nf", 1030.0)
    assert path is not None
    assert (path.residual_bytes_per_s, path.source) == (125.0, PathSource.CONGESTION)
    late = oracle.path("p", "np", "far", "nf", 1061.0)
    assert late is not None
    assert late.source is PathSource.STATIC


def test_reported_transfers_become_pair_estimates_and_congestion(tmp_path: Path) -> None:
    """1000 B in 2.5 s, of which 0.5 s are the tier's latency: 500 B/s of 1000."""
    found = network(tmp_path)
    told(found, 0.0)
    for i in range(3):
        move(found, "near", 2.5, 10.0 * i + 10, tier=1)
    oracle = told(found, 31.0)
    path = oracle.path("p", "np", "near", "nn", 31.0)
    assert path is not None
    assert path.residual_bytes_per_s == pytest.approx(500)
    assert (path.latency_s, path.source) == (0.5, PathSource.PAIR)
    assert oracle.congestion == {1: pytest.approx(0.5)}
    assert oracle.own_flows_excluded
    assert found.gauges(31.0) == {
        "network_source": 3.0,
        "network_pairs": 1.0,
        "network_pair_age_seconds_min": 1.0,
        "network_pair_age_seconds_max": 1.0,
        "network_tier1_bytes_per_second": 1000.0,
        "network_tier3_bytes_per_second": 250.0,
        "network_tier1_congestion": pytest.approx(0.5),
        "network_tier1_estimated_bytes_per_second": pytest.approx(500),
    }
    assert found.totals()["network_transfers"] == 3.0
    assert found.totals()["network_transfer_descriptors"] == 9.0


def test_uplinks_of_the_file_are_told_and_count_in_what_is_learned(tmp_path: Path) -> None:
    """Two transfers of 1000 B at once, 2.5 s each, 0.5 s of it latency: 2 s at 1 + 1/4 a link are 1.6 s of one link."""
    found = network(tmp_path, TIERS.replace("latency_s: 0.5", "latency_s: 0.5, uplinks: 4"), min_samples=2)
    assert told(found, 0.0).uplinks == {1: 4}
    for attempt_id in ("a", "b"):
        found.routed(TransferIntent(attempt_id, "p", "near", 1000, 0, 1), 0.0)
    found.transferred(
        Transferred([Transfer(attempt_id, 1000, 2.5, 3, 0.0) for attempt_id in ("a", "b")]), 2.5
    )
    path = told(found, 3.0).path("p", "np", "near", "nn", 3.0)
    assert path is not None
    assert path.residual_bytes_per_s == pytest.approx(1000 / 1.6)
    (tmp_path / "network.yaml").write_text(TIERS)
    # another time than before, whatever the resolution of the clock
    os.utime(tmp_path / "network.yaml", (1e9, 1e9))
    assert told(found, 4.0).uplinks == {}


def test_what_is_told_survives_the_journal_exactly(tmp_path: Path) -> None:
    found = network(tmp_path, TIERS.replace("latency_s: 0.5", "latency_s: 0.5, uplinks: 4"))
    found.want(LEARNS)
    told(found, 0.0)
    for i in range(3):
        move(found, "near", 2.5, 10.0 * i + 10, tier=1)
    event = found.refresh(31.0)
    assert event is not None
    assert event.oracle is not None
    assert event.oracle.congestion_learnt == (1,)
    assert event.oracle.contention["ends"].keys() == {1}
    line = event_line(1, 0, event)
    assert parse_event(loads(line)) == event


def test_without_tiers_pairs_are_learned_and_the_rest_counts_as_their_median(tmp_path: Path) -> None:
    found = network(tmp_path, None)
    for i in range(3):
        move(found, "near", 1.0, 10.0 + i, tier=3)
        move(found, "far", 4.0, 10.0 + i, tier=3, attempt_id="s")
    oracle = told(found, 13.0)
    assert not oracle.own_flows_excluded
    rates = {
        to: oracle.path("p", "np", to, node, 13.0)
        for to, node in (("near", "nn"), ("far", "nf"), ("new", "nx"))
    }
    assert {to: path and path.residual_bytes_per_s for to, path in rates.items()} == {
        "near": pytest.approx(1000),
        "far": pytest.approx(250),
        "new": pytest.approx(625),
    }
    # no tier is known, whatever the oracle calls them all
    assert found.configured(3) is None
    (seen,) = found.paths([prefill("np"), info("near", "nn")])
    assert (seen.tier, seen.learnt_bytes_per_s, seen.configured_bytes_per_s) == (
        None,
        pytest.approx(1000),
        None,
    )


def test_the_dispatcher_hears_of_changes_above_the_ratio_and_before_data_look_stale(tmp_path: Path) -> None:
    found = network(tmp_path, change_ratio=0.2, window=3)
    told(found, 0.0)
    for i in range(3):
        move(found, "far", 4.0, 10.0 + 5 * i, tier=3)
    assert told(found, 20.0).pairs["np", "nf"].bytes_per_s == pytest.approx(250)
    for i in range(3):
        move(found, "far", 4.4, 25.0 + 5 * i, tier=3)  # 10 % slower
    assert found.refresh(35.0) is None
    for i in range(3):
        move(found, "far", 8.0, 45.0 + 9 * i, tier=3)
    assert told(found, 63.0).pairs["np", "nf"].bytes_per_s == pytest.approx(125)
    move(found, "far", 8.0, 72.0, tier=3)
    assert found.refresh(72.0) is None
    # the last event is more than a third of 60 s old
    assert told(found, 84.0).pairs["np", "nf"].at_s == 72.0
    assert found.refresh(150.0) is not None  # all of it is forgotten
    assert found.gauges(150.0)["network_source"] == 1.0


def test_a_transfer_that_is_reported_just_after_its_request_closed_counts(tmp_path: Path) -> None:
    found = network(tmp_path, min_samples=1)
    found.routed(TransferIntent("r", "p", "far", 1000, 0, 3), 0.0)
    found.closed("r")
    found.refresh(3.9)
    found.transferred(Transferred([Transfer("r", 1000, 4.0, 1, 0.0)]), 4.0)
    assert told(found, 4.5).pairs["np", "nf"].bytes_per_s == pytest.approx(250)
    found.routed(TransferIntent("gone", "p", "far", 1000, 0, 3), 5.0)
    found.closed("gone")
    found.refresh(6.0)
    found.refresh(7.0)
    found.transferred(Transferred([Transfer("gone", 1000, 4.0, 1, 0.0)]), 7.0)
    assert found.totals()["network_transfers_unusable"] == 1.0


def level(oracle: Oracle, tier: int = 1) -> float:
    """The level of each form, which is the same for all while transfers are alone."""
    (found,) = {form[tier].level for form in oracle.contention.values()}
    return found


def test_the_level_of_contention_is_learnt_on_the_files_bandwidth(tmp_path: Path) -> None:
    """1000 B in 2.5 s, of which 0.5 s are the latency: twice the 1 s that the file's 1000 B/s take, also after the
    pair's estimate of 500 B/s was told. The prior is eight transfers of slowdown 1.
    """
    found = network(tmp_path)
    found.want(LEARNS)
    assert told(found, 0.0).contention["own"] == {}
    for i in range(8):
        move(found, "near", 2.5, 3.0 * i + 3, tier=1)
    oracle = told(found, 25.0)
    assert oracle.pairs["np", "nn"].bytes_per_s == pytest.approx(500)
    assert (oracle.congestion, oracle.congestion_learnt) == ({1: pytest.approx(0.5)}, (1,))
    assert level(oracle) == pytest.approx((8 * 2 + 8) / 16)
    # the prior of a slope is 0, and each transfer was alone: 8 more in flight cost nothing, as far as is known
    assert {k: v for k, v in found.gauges(25.0).items() if "slowdown" in k} == {
        f"network_tier1_slowdown_{form}_{others}": pytest.approx(1.5) for form in FORMS for others in (0, 8)
    } | {"network_tier1_slowdown_transfers": 8.0}
    for i in range(8):
        move(found, "near", 2.5, 3.0 * i + 28, tier=1)
    assert level(told(found, 50.0)) == pytest.approx((16 * 2 + 8) / 24)
    assert told(found, 150.0).contention["own"] == {}
    assert not any("slowdown" in name for name in found.gauges(150.0))


def test_the_files_congestion_is_others_and_no_part_of_the_level(tmp_path: Path) -> None:
    found = network(tmp_path, TIERS + "congestion: {1: 0.5}")
    os.utime(tmp_path / "network.yaml", (1000.0, 1000.0))
    found.want(LEARNS)
    told(found, 1000.0)
    for i in range(8):
        move(found, "near", 2.5, 1003.0 + 3 * i, tier=1)
    oracle = told(found, 1025.0)
    assert (oracle.congestion, oracle.congestion_learnt) == ({1: 0.5}, ())
    assert level(oracle) == 1.0


@pytest.mark.parametrize(
    ("facts", "slowdown"),
    [
        # a flow scheduler held it back for 1 s: as long for its request as if it had been slow
        ({"seconds": 1.5, "held_s": 1.0}, 2.0),
        ({"seconds": 1e5}, 20.0),  # it hung
        ({"seconds": 0.0}, None),
        ({"seconds": float("nan")}, None),
        ({"seconds": float("inf")}, None),
        ({"seconds": 2.5, "n_bytes": 0}, None),
        ({"seconds": 2.5, "attempt_id": "unknown"}, None),
    ],
)
def test_a_transfer_teaches_by_its_duration_as_its_request_saw_it(
    tmp_path: Path, facts: dict[str, Any], slowdown: float | None
) -> None:
    found = network(tmp_path)
    found.want(LEARNS)
    told(found, 0.0)
    found.routed(TransferIntent("r", "p", "near", 1000, 0, 1), 0.0)
    one = {"attempt_id": "r", "n_bytes": 1000, "descriptors": 3, "ended_ago_s": 0.0} | facts
    found.transferred(Transferred([Transfer(**one)]), 3.0)
    if slowdown is None:
        assert found.refresh(4.0) is None
    else:
        assert level(told(found, 4.0)) == pytest.approx((slowdown + 8) / 9)


def test_a_transfer_is_in_flight_until_its_request_is_admitted_or_closed(tmp_path: Path) -> None:
    """The slowdowns are 2, and a count of 0 leaves all of the excess to the level."""
    found = network(tmp_path)
    found.want(LEARNS)
    told(found, 0.0)
    for attempt_id in ("admitted", "closed", "gone"):
        found.routed(TransferIntent(attempt_id, "p", "near", 1000, 0, 1), 0.0)
    found.admitted("admitted")
    found.closed("closed")
    found.closed("gone")
    move(found, "near", 2.5, 2.5, tier=1)
    assert level(told(found, 2.6)) == pytest.approx(1 + 1 / 9)
    late = [Transfer(attempt_id, 1000, 2.5, 3, 0.0) for attempt_id in ("admitted", "closed")]
    found.transferred(Transferred(late), 2.7)
    oracle = told(found, 2.8)
    found.transferred(Transferred([Transfer("gone", 1000, 2.5, 3, 0.0)]), 2.9)
    assert found.refresh(3.0) is None
    # counts of 0, 1 and 0 when they were decided
    assert oracle.contention["own"][1].slopes[0] > 0
    assert found._own is not None
    assert (found._own._estimator._open, found._own._estimator._stopped) == ({}, {})


def test_contention_is_learnt_only_while_it_is_read_and_transfers_are_told(tmp_path: Path) -> None:
    found = network(tmp_path)
    found.want(Needs.NETWORK)
    assert told(found, 0.0).contention == {}
    found.want(LEARNS)
    assert found.refresh(1.0) is None  # nothing is known yet
    move(found, "near", 2.5, 5.0, tier=1)
    # for another policy that reads it nothing is forgotten
    found.want(LEARNS)
    assert level(told(found, 6.0)) > 1
    found.want(Needs.NETWORK)
    assert told(found, 7.0).contention == {}
    silent = network(tmp_path, estimate=False)
    silent.want(LEARNS)
    assert told(silent, 0.0).contention == {}


def test_contention_is_not_learnt_without_tiers(tmp_path: Path) -> None:
    found = network(tmp_path, None, min_samples=1)
    found.want(LEARNS)
    move(found, "near", 2.5, 5.0, tier=3)
    assert told(found, 6.0).contention == {}
    assert found._told is not None
    move(found, "near", 2.5, 9.0, tier=3)
    assert found._own is not None
    assert found._own._estimator.curves(10.0)["own"] == {}


def test_the_dispatcher_hears_of_contention_that_changed_by_more_than_the_ratio(tmp_path: Path) -> None:
    found = network(tmp_path, change_ratio=0.2, min_samples=9)
    found.want(LEARNS)
    told(found, 0.0)
    move(found, "near", 2.5, 3.0, tier=1)
    assert level(told(found, 4.0)) == pytest.approx((2 + 8) / 9)
    move(found, "near", 2.5, 7.0, tier=1)  # (2 * 2 + 8) / 10, which is 8 % more
    assert found.refresh(8.0) is None
    for i in range(4):
        move(found, "near", 2.5, 12.0 + 3 * i, tier=1)
    assert level(told(found, 22.0)) == pytest.approx((6 * 2 + 8) / 14)


async def test_a_new_engine_is_told_long_before_the_next_refresh(tmp_path: Path) -> None:
    found = network(tmp_path, refresh_s=3600.0)
    events: list[OracleRefreshed] = []
    found.start(events.append)
    async with asyncio.timeout(60):
        while len(events) < 1:
            await asyncio.sleep(0.005)
        found.engine(info("new", "nx", rack="r1"))
        while len(events) < 2:
            await asyncio.sleep(0.005)
    found.stop()
    assert events[1].oracle is not None
    assert events[1].oracle.places["nx"] == NodePlace("r1")


async def test_neither_a_silent_control_plane_nor_a_bug_stops_the_refreshes(tmp_path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def nodes() -> list[dict[str, Any]]:
        asked.set()
        answer.wait(60)
        raise ConnectionError("no control plane")

    found = RouterNetwork(network(tmp_path).config, nodes)
    events: list[OracleRefreshed] = []

    def take(event: OracleRefreshed) -> None:
        events.append(event)
        if len(events) == 1:
            raise ZeroDivisionError("a bug")

    found.start(take)
    async with asyncio.timeout(60):
        while not (events and asked.is_set()):
            await asyncio.sleep(0.005)
        found.engine(info("new", "nx", rack="r1"))  # the control plane has not answered yet
        while len(events) < 2:
            await asyncio.sleep(0.005)
        assert found.totals()["network_errors"] == 1
        answer.set()
        while found.totals()["network_errors"] < 2:
            await asyncio.sleep(0.005)
    found.stop()


def test_ingresses_are_asked_while_the_network_decides() -> None:
    auto = RouterNetwork(NetworkConfig())
    assert auto.wants_transfers(Needs.HITS | Needs.NETWORK)
    assert not auto.wants_transfers(Needs.NONE)
    assert RouterNetwork(NetworkConfig(estimate=True)).wants_transfers(Needs.NONE)
    assert not RouterNetwork(NetworkConfig(estimate=False)).wants_transfers(Needs.HITS | Needs.NETWORK)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"refresh_s": 0.0}, "router.network.refresh_s is 0.0: it must be above 0"),
        ({"stale_after_s": float("inf")}, "router.network.stale_after_s is inf"),
        ({"change_ratio": -0.1}, "router.network.change_ratio is -0.1"),
        ({"window": 0}, "network estimator: allowed is"),
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        NetworkConfig(**bad)
