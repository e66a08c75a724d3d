"""Messages go into the feed; series, engines, events and requests come out, in a snapshot and in deltas."""

from typing import Any

import orjson
import pytest

from actors.wire import messages as wire
from app.dashboard.engines import NEW_ROUTER_S
from app.dashboard.feed import Feed
from app.dashboard.ingresses import STALE_S, WINDOW_S
from app.dashboard.rings import KEEP
from app.ingress.metrics import IngressMetrics
from policies.request.events import Admitted
from tests.app.dashboard.parts import (
    SLO,
    answered,
    engine,
    fleet,
    moved,
    objectives,
    observed,
    report,
    requests_total,
    status,
)

T = 1_700_000_000.0


def started() -> Feed:
    """A feed that knows a fleet of two engines and has ended its first second."""
    feed = Feed(SLO)
    feed.router_up(T - 100)
    feed.fleet_is(fleet(engine("prefill-1", "prefill"), engine()))
    feed.status_is(status(report("prefill-1"), report()), T)
    feed.tick(T)
    return feed


def replayed(snapshot: dict[str, Any], deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a page that got this snapshot and then these deltas."""
    state = orjson.loads(orjson.dumps(snapshot))
    for delta in deltas:
        assert delta["seq"] == state["seq"] + 1
        for name, value in delta.items():
            if name == "series":
                for series in set(value) - set(state["series"]):
                    state["series"][series] = [None] * len(state["series"]["t"])
                for series, values in state["series"].items():
                    values.append(value.get(series))
                    del values[:-KEEP]
            elif name == "engines":
                for one, facts in value.items():
                    if facts is None:
                        del state["engines"][one]
                    else:
                        state["engines"][one] = facts
            elif name == "events":
                state["events"] = (state["events"] + value)[-500:]
            elif name == "requests":
                state["requests"]["latest"] = (value["latest"] + state["requests"]["latest"])[:50]
                state["requests"]["worst"] = value.get("worst", state["requests"]["worst"])
            else:
                state[name] = value
    return state


def test_a_page_that_applies_deltas_has_what_a_new_snapshot_says() -> None:
    feed = started()
    first, deltas = orjson.loads(orjson.dumps(feed.snapshot())), []
    for second in range(1, 41):
        now_s = T + second
        if second == 5:
            feed.fleet_is(fleet(engine("prefill-1", "prefill"), engine(state="stalled"), engine("decode-2")))
        if second == 9:
            feed.fleet_is(
                fleet(engine("prefill-1", "prefill", duty="warm"), engine("decode-2"), decode="netkv")
            )
            for max_queue in (9, 77):
                feed.policies_are(now_s, {"dispatch": {"max_queue": max_queue}})
        feed.status_is(
            status(report("prefill-1"), report(running=second % 3, decode_tokens=10.0 * second)), now_s
        )
        one = answered(str(second), 50.0 + second, request_class="batch" if second % 2 else "of tomorrow")
        feed.observed("i", observed(50.0 + second, requests_total(3.0 * second), requests=[one]), now_s)
        deltas.append(orjson.loads(orjson.dumps(feed.tick(now_s))))
    assert replayed(first, deltas) == orjson.loads(orjson.dumps(feed.snapshot()))


def test_rates_come_from_the_replicas_own_clocks() -> None:
    feed = started()
    feed.observed("a", observed(10.0, requests_total(100.0)), T)
    # the first report is what later ones are compared with: 100 requests were before our time
    assert feed.tick(T + 1)["series"]["requests_per_s"] is None
    feed.observed("a", observed(12.0, requests_total(110.0), requests_total(0.0)), T + 1.1)
    feed.observed("b", observed(500.0, requests_total(7.0)), T + 1.2)
    feed.observed("b", observed(501.0, requests_total(10.0)), T + 1.3)
    # 10 in 2 s, and 3 in 1 s
    assert feed.tick(T + 2)["series"]["requests_per_s"] == 8.0
    feed.ingress_down("b", T + 2.5, "killed")
    assert feed.tick(T + 3)["series"]["requests_per_s"] == 5.0
    assert feed.tick(T + 1.1 + STALE_S)["series"]["requests_per_s"] is None


@pytest.mark.parametrize("code", [499, 502])
def test_times_of_requests_that_were_not_answered_well_are_in_no_quantile(code: int) -> None:
    feed = started()
    left = answered("left", first_s=100.9, ended_s=101.0, status=code)
    feed.observed("a", observed(101.0, requests=[answered("good"), left]), T + 1)
    series = feed.tick(T + 1)["series"]
    assert [series[f"{what}_p95_s/interactive"] for what in ("ttft", "tpot", "e2e")] == [0.05, 0.01, 0.14]


def test_tokens_per_second_come_from_the_engines_that_were_there_before() -> None:
    feed = started()
    feed.status_is(status(report(decode_tokens=1000.0)), T + 1)
    feed.status_is(status(report(decode_tokens=1500.0), report("decode-9", decode_tokens=9e9)), T + 3)
    assert feed.tick(T + 3)["series"]["tokens_per_s"] == 250.0
    feed.router_down(T + 4, "killed")
    assert feed.tick(T + 4)["series"]["tokens_per_s"] is None


def test_attainment_is_of_the_prompts_that_ended_in_the_window() -> None:
    feed = started()
    feed.observed("a", observed(10.0, objectives(1000.0, 0.0)), T)
    feed.observed("a", observed(11.0, objectives(1003.0, 1.0)), T + 1)
    line = feed.tick(T + 1)["line"]
    assert line["attainment"]["interactive"] == 0.75
    assert [one["text"] for one in line["warnings"]] == [
        "Only 75% of class interactive meet their objectives."
    ]
    feed.observed("a", observed(30.0, objectives(1003.0, 1.0)), T + 2 + WINDOW_S)
    assert feed.tick(T + 2 + WINDOW_S)["line"]["attainment"]["interactive"] is None


def test_a_request_is_seen_whole() -> None:
    feed = started()
    # the ingress's clock stands at 100.2 when ours says T + 1
    feed.observed("a", observed(100.2, requests=[answered()]), T + 1)
    delta = feed.tick(T + 1)
    (shown,) = delta["requests"]["latest"]
    assert shown == {
        "id": "req-1", "attempts": ["1-1"], "at": T + 0.8, "class": "interactive", "status": 200, "result": "met",
        "ttft_s": 0.05, "tpot_s": 0.01, "e2e_s": 0.14, "prompt_tokens": 7, "output_tokens": 10, "cached_tokens": 4,
        "trace_id": None,
        "parts": shown["parts"],
    }  # fmt: skip
    parts = [(p["name"], p["start_s"], p["end_s"], p["engine"], p["note"]) for p in shown["parts"]]
    assert parts == [
        ("queue", 0.0, 0.01, None, None),
        ("prefill", 0.01, 0.03, "prefill-1", "4 tokens cached"),
        ("pool", 0.03, 0.035, "prefill-1", None),
        ("transfer", 0.035, 0.05, "decode-1", "3.00 MB in 3.0 ms"),
        ("decode", 0.05, 0.14, "decode-1", "10 tokens"),
    ]
    assert delta["series"]["ttft_p50_s/interactive"] == 0.05
    assert [one["id"] for one in delta["transfers"]["slowest"]] == ["req-1"]
    assert feed.requests.find("req-1") == feed.requests.find("1-1") == feed.requests.find("cmpl-1") == shown


def pairs_of(delta: dict[str, Any]) -> list[tuple[str, str, float, int]]:
    told = delta["transfers"]["pairs"]
    return [(one["from"], one["to"], one["bytes_per_s"], one["transfers"]) for one in told]


def test_a_thousand_transfers_in_a_second_sum_exactly() -> None:
    """An ingress keeps the facts of 256 requests of a second; it counts the transfers of all."""
    feed, metrics = started(), IngressMetrics("m")
    pair = "node of prefill", "node of decode"
    metrics.transferred(Admitted(7, 0.001), 2, *pair)
    feed.observed("a", observed(10.0, *metrics.figures()), T + 1)
    assert pairs_of(feed.tick(T + 1)) == []
    for number in range(1000):
        metrics.transferred(Admitted(3_000_000 + number, 0.001), 2 if number % 4 else None, *pair)
    feed.observed("a", observed(11.0, *metrics.figures(), requests=[answered()] * 256), T + 2)
    delta = feed.tick(T + 2)
    # 1000 of 3 MB, and 0 + 1 + ... + 999 bytes; a fourth of them, 0 + 4 + ... + 996 bytes, at no known tier
    whole, unknown = 3_000_499_500, 250 * 3_000_000 + 124_500
    assert pairs_of(delta) == [(*pair, round(whole / WINDOW_S, 1), 1000)]
    tiers = {name: rate for name, rate in delta["series"].items() if name.startswith("bytes_per_s/tier/")}
    assert tiers == {
        "bytes_per_s/tier/2": round((whole - unknown) / WINDOW_S, 6),
        "bytes_per_s/tier/unknown": round(unknown / WINDOW_S, 6),
    }
    # the counters stand still for a window
    feed.observed("a", observed(26.0, *metrics.figures()), T + 2 + WINDOW_S)
    delta = feed.tick(T + 2 + WINDOW_S)
    assert pairs_of(delta) == [(*pair, 0.0, 1000)]
    assert delta["series"]["bytes_per_s/tier/2"] == 0.0


def test_transfers_of_several_replicas_add_up_and_a_restart_takes_nothing_away() -> None:
    feed = started()
    pair = "node of prefill", "node of decode"
    feed.observed("a", observed(1.0, *moved(10, 1500.0)), T + 1)
    feed.observed("b", observed(1.0, *moved(100, 15_000.0)), T + 1)
    feed.observed("a", observed(2.0, *moved(11, 3000.0)), T + 2)
    feed.observed("b", observed(2.0, *moved(102, 18_000.0)), T + 2)
    assert pairs_of(feed.tick(T + 2)) == [(*pair, 300.0, 3)]
    # the series of b began again, and a is another process, whose first report is compared with nothing
    feed.ingress_down("a", T + 3, "killed")
    feed.observed("b", observed(3.0, *moved(4, 1500.0)), T + 3)
    feed.observed("a", observed(3.0, *moved(500, 1e9)), T + 3)
    assert pairs_of(feed.tick(T + 3)) == [(*pair, 400.0, 7)]


def test_a_pair_of_a_node_that_has_gone_is_shown_no_more_and_the_rest_of_the_pairs_is() -> None:
    feed = started()
    feed.observed("a", observed(1.0, *moved(0, 0.0), *moved(0, 0.0, ("other", "other"))), T + 1)
    feed.observed("a", observed(2.0, *moved(1, 1500.0)), T + 2)
    feed.observed("b", observed(1.0, *moved(0, 0.0, ("other", "other"))), T + 1)
    feed.observed("b", observed(2.0, *moved(1, 15.0, ("other", "other"))), T + 2)
    rest = "other", "other", 1.0, 1
    assert pairs_of(feed.tick(T + 2)) == [("node of prefill", "node of decode", 100.0, 1), rest]
    feed.fleet_is(fleet(engine("prefill-1", "prefill")))
    assert pairs_of(feed.tick(T + 3)) == [rest]
    feed.fleet_is(fleet(engine("prefill-1", "prefill"), engine("decode-1", "decode")))
    # nothing that was counted is lost with a router that knows no engine at first
    assert pairs_of(feed.tick(T + 4)) == [("node of prefill", "node of decode", 100.0, 1), rest]


def agent(**held: int) -> wire.FlowAgentStatus:
    by_level = {level.removeprefix("level_"): n for level, n in held.items()}
    return wire.FlowAgentStatus("n", "mfs", 9, sum(held.values()), 3, 0.0, {}, by_level)


def test_priority_levels_have_bytes_reads_that_are_held_and_the_time_of_holding() -> None:
    feed = started()
    by_level = {"flow_bytes_level_1": 0.0, "flow_bytes_level_12": 0.0}
    feed.status_is(status(report(), totals=by_level, flows=(agent(level_12=2),)), T + 1)
    by_level = {"flow_bytes_level_1": 6000.0, "flow_bytes_level_12": 0.0}
    agents = (agent(level_12=2, level_3=1), agent(level_12=3))
    feed.status_is(status(report(), totals=by_level, flows=agents), T + 3)
    slow = answered("slow")
    slow.kept.attempts[0] = slow.kept.attempts[0]._replace(transfer_s=0.5, held_s=0.25, level=12)
    feed.observed("a", observed(100.2, requests=[slow, answered("by nobody's leave")]), T + 3)
    told = feed.tick(T + 3)["transfers"]
    assert told["levels"] == [
        {"level": 1, "bytes_per_s": 3000.0, "held": 0, "held_s": None},
        {"level": 3, "bytes_per_s": 0.0, "held": 1, "held_s": None},
        {"level": 12, "bytes_per_s": 0.0, "held": 5, "held_s": 0.25},
    ]
    assert [(one["level"], one["held_s"]) for one in told["slowest"]] == [(12, 0.25), (None, 0.0)]
    # without an agent nobody knows what is held
    feed.status_is(status(report(), totals=by_level), T + 4)
    assert {one["held"] for one in feed.tick(T + 4)["transfers"]["levels"]} == {None}


def test_the_fleet_has_a_router_and_can_serve_where_every_ingress_does() -> None:
    feed = started()
    # nobody can serve while no ingress reports; of the router the dashboard knows by itself
    assert feed.seen()[2:] == (True, False)
    feed.observed("a", observed(10.0), T)
    assert feed.seen()[2:] == (True, True)
    feed.observed("b", observed(10.0, detail="no engine is ready"), T)
    assert feed.seen()[2:] == (True, False)
    feed.observed("b", observed(11.0, router_connected=False), T + 1)
    assert feed.seen()[2:] == (False, True)
    feed.ingress_down("b", T + 2, "killed")
    assert feed.seen()[2:] == (True, True)


def test_the_worst_requests_are_failed_ones_then_missed_ones_then_slow_ones() -> None:
    feed = started()
    good, slow = answered("good"), answered("slow", first_s=109.0, ended_s=110.0)
    missed, failed = answered("missed"), answered("failed", status=502)
    missed.kept.results[0] = "tpot"
    feed.observed("a", observed(110.0, requests=[good, missed, slow, failed]), T + 1)
    assert [one["id"] for one in feed.tick(T + 1)["requests"]["worst"]] == [
        "req-failed", "req-missed", "req-slow", "req-good",
    ]  # fmt: skip
    assert "worst" not in feed.tick(T + 2)["requests"]
    assert feed.tick(T + 2000)["requests"]["worst"] == []


def events(delta: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(one["kind"], one["engine"]) for one in delta["events"]]


def test_what_changes_in_the_fleet_is_an_event() -> None:
    feed = started()
    assert events(feed.tick(T + 1)) == []
    changed = engine("prefill-1", "decode"), engine(state="quarantined"), engine("decode-2")
    feed.fleet_is(fleet(*changed))
    assert sorted(events(feed.tick(T + 2)), key=str) == [
        ("engine_role", "prefill-1"), ("engine_state", "decode-1"), ("engine_up", "decode-2"),
    ]  # fmt: skip
    feed.fleet_is(fleet(*changed[:2]))
    delta = feed.tick(T + 3)
    assert events(delta) == [("engine_down", "decode-2")]
    assert delta["engines"] == {"decode-2": None}


def test_an_engine_that_the_router_calls_quarantined_is_counted_as_that_and_not_as_active() -> None:
    """The router says so in its fleet (`actors.router.fleet`); an engine with only one bad rank stays ready."""
    feed = started()
    feed.fleet_is(fleet(engine("prefill-1", "prefill"), engine(state="quarantined")))
    delta = feed.tick(T + 1)
    assert delta["line"]["engines"] == {"ready": 1, "quarantined": 1}
    assert delta["series"]["engines_active"] == 1
    assert delta["engines"]["decode-1"]["state"] == "quarantined"


def test_a_change_of_policies_or_of_scaling_is_an_event_and_what_is_there_at_first_is_none() -> None:
    feed = started()
    group = {"name": "decode", "min": 1, "max": 2, "keeps_warm": 0, "warm_max": 0, "wanted": None}
    scale = {"mode": "auto", "policy": {"name": "fixed", "params": {}}, "groups": [group]}
    feed.policies_are(T + 1, {"admission": {"name": "open", "params": {}}})
    feed.scaled(T + 1, scale, "")
    assert events(feed.tick(T + 1)) == []
    feed.policies_are(T + 2, {"admission": {"name": "by_wait", "params": {"margin": 0.5}}})
    feed.scaled(T + 2, {**scale, "groups": [{**group, "max": 3}]}, "")
    delta = feed.tick(T + 2)
    assert events(delta) == [("policy", None), ("policy", None)]
    assert [one["text"] for one in delta["events"]] == [
        "admission policy: open -> by_wait (margin 0.5)", "bounds of decode: max 2 -> 3",
    ]  # fmt: skip


def test_a_router_that_has_just_started_has_not_lost_its_engines() -> None:
    feed = started()
    feed.router_down(T + 1, "killed")
    feed.router_up(T + 2)
    feed.fleet_is(fleet())
    assert events(feed.tick(T + 3)) == [("router_lost", None), ("router_found", None)]
    feed.fleet_is(fleet(engine()))
    assert events(feed.tick(T + 4)) == []
    assert events(feed.tick(T + 3 + NEW_ROUTER_S)) == [("engine_down", "prefill-1")]


def test_without_a_router_the_line_counts_what_ingresses_have() -> None:
    feed = started()
    feed.router_down(T + 1, "killed")
    stages = {"queued": 2, "pooled": 1, "decoding": 4}
    feed.observed("a", observed(1.0, stages=stages, decides_here=True, router_connected=False), T + 1)
    line = feed.tick(T + 1)["line"]
    assert (line["queued"], line["pool"], line["in_flight"], line["leases"]) == (2, 1, 7, 1)
    assert line["router"] == {"connected": False, "fallback": 1}
    assert line["ready"]
    assert "router is not connected" in line["warnings"][0]["text"]


def test_what_does_not_exist_is_absent_with_its_reason_and_not_zero() -> None:
    feed = started()
    absent = feed.snapshot()["absent"]
    assert set(absent) == {"scaling", "flow", "predictor"}
    assert feed.snapshot()["line"]["plan"] is None
    plan = {"serving": {"prefill": 1, "decode": 2, "colocated": 0}, "warm": 1}
    feed.scaled(T + 1, {"plan": plan, "reasons": ["load"]}, "")
    delta = feed.tick(T + 1)
    assert "scaling" not in delta["absent"]
    assert delta["series"]["engines_planned"] == 4
    assert delta["events"][-1]["text"] == "plan: 1 prefill, 2 decode, 1 warm (load)"
    feed.scaled(T + 2, None, "no autoscaler")
    assert feed.tick(T + 2)["absent"]["scaling"] == "no autoscaler"


@pytest.mark.parametrize("late_s", [0.0, 5.0])
def test_rings_keep_fifteen_minutes(late_s: float) -> None:
    feed = started()
    for second in range(1, KEEP + 50):
        feed.tick(T + second + late_s)
    snapshot = feed.snapshot()
    assert len(snapshot["series"]["t"]) == KEEP
    assert {len(values) for values in snapshot["series"].values()} == {KEEP}
    assert snapshot["series"]["t"][-1] == T + KEEP + 49 + late_s


def test_notes_of_ingresses_are_events_at_their_time() -> None:
    feed = started()
    note = wire.Note("retry", 0.5, "retry after a failed decode (kv_load)", "decode-1")
    feed.observed("a", observed(1.0, notes=[note]), T + 1)
    (event,) = feed.tick(T + 1)["events"]
    assert (event["kind"], event["at"], event["engine"], event["level"]) == (
        "retry",
        T + 0.5,
        "decode-1",
        "warn",
    )
