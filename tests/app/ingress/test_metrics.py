"""The lists of metrics: they name what is exported, and what router and engines report; docs/metrics.md shows them."""

import dataclasses
import runpy
from pathlib import Path
from typing import get_args

from prometheus_client.parser import text_string_to_metric_families

from actors.engine.protocol import EngineMetrics
from actors.router.forecasts import Forecasts, PredictorConfig
from actors.router.journal import JournalConfig, RouterJournal
from actors.router.network.feed import NetworkConfig, RouterNetwork
from actors.wire.messages import Status, UnscheduledReason
from app.fleet.figures import ENGINES, HERE, ROUTER, router_metric
from app.fleet.metric import Metric
from app.ingress.metrics import INGRESS, IngressMetrics
from policies.routing.base import Reason
from tests.app.ingress.rig import MODEL, Rig, pair, rig, until

REPO = Path(__file__).parents[3]
ALL: tuple[Metric, ...] = (*INGRESS, *HERE, *ROUTER.values(), *ENGINES.values())


def test_every_metric_is_named_and_described_once() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    assert len({metric.help for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert metric.help[0].isupper() and metric.help.endswith("."), metric
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric
        assert metric.unit, metric


def test_every_entry_of_the_list_is_an_attribute() -> None:
    exported = {family.name for family in IngressMetrics(MODEL).registry.collect()}
    assert exported == {metric.name.removesuffix("_total") for metric in INGRESS}


def test_the_page_is_the_one_that_the_lists_give() -> None:
    script = runpy.run_path(str(REPO / "scripts" / "document_metrics.py"))
    assert (REPO / "docs" / "metrics.md").read_text() == script["page"](), (
        "run python scripts/document_metrics.py"
    )


def test_every_reason_for_a_read_without_a_permit_is_named() -> None:
    told = ROUTER[r"flow_unscheduled_reads_(\w+)"].help
    assert [reason for reason in get_args(UnscheduledReason) if f"`{reason}`" not in told] == []


def test_all_that_engines_report_is_listed() -> None:
    reported = {field.name for field in dataclasses.fields(EngineMetrics)}
    assert reported - {"kv_blocks_total", "kv_blocks_used", "kv_blocks_free"} <= set(ENGINES)


async def test_all_that_the_router_reports_is_listed(tmp_path: Path) -> None:
    """The parts that are off by default are asked by themselves."""
    async with rig(tmp_path, pair(tmp_path)) as made:
        status = made.router.status()
        journal = RouterJournal(JournalConfig(), made.router.dispatcher, "0")
        forecasts = Forecasts(PredictorConfig(enabled=True))
        network = RouterNetwork(NetworkConfig(estimate=True))
        totals = [*status.totals, *journal.totals(), *forecasts.totals(), *network.totals()]
        gauges = [*status.gauges, *forecasts.gauges(), *network.gauges(0.0)]
    totals += [f"decisions_{name}" for name in ("prefill", "prefill_degraded", "reject_queue_full")]
    totals += [f"decisions_decode_{reason.value}" for reason in Reason]
    for names, kind in ((totals, "counter"), (gauges, "gauge")):
        for name in names:
            metric, labels = router_metric(name, kind)
            assert (metric.unit, metric.kind) != ("unknown", kind), name
            assert len(labels) == len(metric.labels)


def test_a_tier_and_a_decision_are_labels() -> None:
    assert router_metric("network_tier3_bytes_per_second", "gauge") == (
        ROUTER[r"network_tier(\d+)_bytes_per_second"],
        ("3",),
    )
    assert router_metric("network_tier1_estimated_bytes_per_second", "gauge")[1] == ("1",)
    slowdown, labels = router_metric("network_tier2_slowdown_fleet_8", "gauge")
    assert (slowdown.name, dict(zip(slowdown.labels, labels, strict=True))) == (
        "sluice_router_network_tier_slowdown",
        {"tier": "2", "form": "fleet", "others": "8"},
    )
    learnt_from, labels = router_metric("network_tier2_slowdown_transfers", "gauge")
    assert (learnt_from.name, labels) == ("sluice_router_network_tier_slowdown_transfers", ("2",))
    assert router_metric("decisions_reject_queue_full", "counter")[1] == ("reject_queue_full",)


async def families(made: Rig) -> dict[str, str]:
    """Name and help text of every family in a scrape."""
    text = (await made.client.get("/metrics")).text
    return {family.name: family.documentation for family in text_string_to_metric_families(text)}


async def test_a_scrape_shows_what_the_lists_say_and_what_they_do_not_know(tmp_path: Path) -> None:
    engines = pair(tmp_path)
    async with rig(tmp_path, engines) as made:
        await made.client.post("/v1/chat/completions", json=made.chat())
        assert engines[0].link is not None
        engines[0].link.send(Status("p", 0, 0, 0, 0, 0.0, totals={"prefill_tokens": 7.0, "of_tomorrow": 1.0}))

        async def newest() -> dict[str, str]:
            made.router._broadcast_status()
            return await families(made)

        shown = await newest()
        while "sluice_engine_of_tomorrow" not in shown:
            shown = await newest()
        unknown = shown.pop("sluice_engine_of_tomorrow")
        assert "does not know" in unknown
        listed = {metric.name.removesuffix("_total"): metric.help for metric in ALL}
        assert {name: listed[name] for name in shown} == shown
        assert made.metric("sluice_router_decisions_total", decision="prefill") == 1
        assert made.metric("sluice_engine_prefill_tokens_total", engine="p", role="prefill") == 7
        spent = {"engine": "p", "role": "prefill"}
        assert made.metric("sluice_engine_state", state="ready", duty="active", **spent) == 1
        assert made.metric("sluice_engine_start_seconds", step="process", **spent) > 0
        assert made.metric("sluice_engine_start_seconds", step="weights", **spent) == 0
        assert made.metric("sluice_engine_start_weights_bytes", source="peer", **spent) == 9
        assert made.metric("sluice_engine_start_weights_read_seconds", source="peer", **spent) == 0.5
        await until(lambda: not made.connections.live)
