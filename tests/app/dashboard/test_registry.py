"""The sums over ingress replicas are what one scrape shows."""

import re

from prometheus_client import generate_latest

from actors.wire.messages import Figures
from app.dashboard.registry import WAIT_S, Registry, exposition
from app.fleet.figures import Seen
from app.fleet.moved import PAIR_BYTES, TIER_BYTES
from app.ingress.metrics import IngressMetrics
from policies.request.events import Admitted
from tests.app.dashboard.parts import engine, report, status


def text(registry: Registry, *engines: str) -> str:
    """The text of one scrape, without the name of the process that has added it up."""
    infos = [engine(name) for name in engines]
    told = status(*(report(name, running=3, decode_tokens=5.0) for name in ("decode-1", "decode-2")))
    return unnamed(exposition(registry, lambda: Seen(infos, told, True)).decode())


def unnamed(shown: str) -> str:
    return re.sub(r',?observer="[^"]*"', "", shown).replace("{,", "{").replace("{}", "")


def observers(registry: Registry, name: str) -> set[str]:
    """The processes by which the series of a metric are named."""
    shown = exposition(registry, lambda: Seen([], None, True)).decode()
    return {found for labels in values(shown, name) for found in re.findall(r'observer="(.*?)"', labels)}


def values(shown: str, name: str) -> dict[str, float]:
    found = re.findall(rf"^{re.escape(name)}(\{{.*?\}})? (\S+)$", shown, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def test_an_engine_has_one_series_of_role_duty_and_state_and_none_when_it_is_gone() -> None:
    infos = [engine(), engine("decode-2", duty="warm"), engine("prefill-1", "prefill", state="quarantined")]

    def shown() -> dict[str, float]:
        text = exposition(Registry(set), lambda: Seen(infos, status(), True)).decode()
        return values(text, "sluice_engine_state")

    assert shown() == {
        '{duty="active",engine="decode-1",role="decode",state="ready"}': 1.0,
        '{duty="warm",engine="decode-2",role="decode",state="ready"}': 1.0,
        '{duty="active",engine="prefill-1",role="prefill",state="quarantined"}': 1.0,
    }
    infos = [engine("decode-2", "prefill", state="draining")]
    assert shown() == {'{duty="active",engine="decode-2",role="prefill",state="draining"}': 1.0}


def test_two_replicas_show_what_one_would_that_had_served_both() -> None:
    one, other, both = IngressMetrics("m"), IngressMetrics("m"), IngressMetrics("m")
    for metrics in (one, both):
        metrics.answered(200, "batch")
        metrics.ttft.observe(0.004, "batch")
    for metrics in (other, both):
        metrics.answered(200, "batch")
        metrics.answered(429, "none")
        metrics.ttft.observe(3.0, "batch")
        metrics.generation_tokens.inc(17)
    one.bind(lambda: 2.0)
    other.bind(lambda: 3.0)
    both.bind(lambda: 5.0)
    registry = Registry(set)
    registry.take("one", one.figures())
    registry.take("other", other.figures())
    shown = unnamed(exposition(registry, lambda: Seen([], None, False)).decode())
    alone = both.render().decode()
    assert set(alone.splitlines()) <= set(shown.splitlines())


def test_sums_are_shown_once_all_replicas_that_the_router_knows_have_told_what_they_count() -> None:
    registry, figures = Registry(set), IngressMetrics("m").figures()
    told: list[tuple[float, int | None, str | None]] = [
        # the router is not found yet
        (0.0, None, "0 ingress"),
        # a router that has just started: the other ingress still looks for it
        (1.0, 1, "0 of 1"),
        (2.0, 1, "1 of 1"),
        (6.9, 2, "1 of 2"),
        (7.0, 2, "2 of 2"),
        (11.9, 2, "2 of 2"),
        (12.0, 2, None),
    ]
    for now_s, known, words in told:
        if words is not None and words[0] != "0":
            registry.take("a", figures)
        if words is None or words[0] == "2":
            registry.take("b", figures)
        registry.tick(now_s, known)
        assert registry.missing is None if words is None else words in (registry.missing or ""), now_s
    # from then on replicas may come and go
    registry.lost("a")
    registry.tick(13.0, 5)
    assert registry.missing is None
    registry.take("c", figures)
    assert observers(registry, "sluice_generation_tokens_total") == {"dashboard"}


def test_a_replica_that_comes_after_the_sums_were_shown_without_it_begins_new_series() -> None:
    registry, metrics = Registry(set, "dashboard-1"), IngressMetrics("m")
    metrics.answered(200, "batch")
    registry.take("a", metrics.figures())
    registry.tick(0.0, 2)
    registry.tick(WAIT_S - 0.1, 2)
    assert "1 of 2" in (registry.missing or "")
    registry.tick(WAIT_S, 2)
    assert registry.missing is None
    name = "sluice_requests_total"
    assert observers(registry, name) == {"dashboard-1"}
    registry.take("a", metrics.figures())
    registry.lost("a")
    registry.take("a", metrics.figures())
    assert observers(registry, name) == {"dashboard-1"}
    for ingress in ("b", "b"):
        registry.take(ingress, metrics.figures())
    assert observers(registry, name) == {"dashboard-1-2"}
    assert values(text(registry), name) == {'{class="batch",code="200",model="m"}': 2.0}


def test_the_sums_of_a_dashboard_that_has_started_again_are_series_of_their_own() -> None:
    """Prometheus would count the sums again if a series fell by what replicas that have gone had counted."""
    metrics, gone = IngressMetrics("m"), IngressMetrics("m")
    metrics.bind(lambda: 2.0)
    for one in (metrics, gone):
        one.answered(200, "batch")
        one.ttft.observe(0.004, "batch")
    before, after = Registry(set, "dashboard-1"), Registry(set, "dashboard-2")
    before.take("gone", gone.figures())
    before.lost("gone")
    for registry in (before, after):
        registry.take("a", metrics.figures())
    first, second = (
        dict(line.rsplit(" ", 1) for line in generate_latest(one).decode().splitlines() if line[0] != "#")
        for one in (before, after)
    )
    go_on = {name.partition("{")[0] for name in first.keys() & second.keys()}
    assert "sluice_in_flight" in go_on
    assert go_on <= {family.name for family in metrics.registry.collect() if family.type == "gauge"}
    assert any("sluice_ttft_seconds_bucket" in name for name in first)


def test_a_replica_that_has_gone_still_counts_and_one_that_comes_back_counts_once() -> None:
    registry, metrics = Registry(set), IngressMetrics("m")
    metrics.bind(lambda: 1.0)
    for _ in range(3):
        metrics.answered(200, "batch")
    registry.take("a", metrics.figures())
    registry.lost("a")
    name = "sluice_requests_total"
    assert values(text(registry), name) == {'{class="batch",code="200",model="m"}': 3.0}
    assert values(text(registry), "sluice_in_flight") == {}
    metrics.answered(200, "batch")
    registry.take("a", metrics.figures())
    assert values(text(registry), name) == {'{class="batch",code="200",model="m"}': 4.0}
    for number in range(200):
        registry.take(f"a{number}", metrics.figures())
        registry.lost(f"a{number}")
    assert values(text(registry), name) == {'{class="batch",code="200",model="m"}': 4.0 * 201}


def test_series_of_engines_that_are_gone_disappear() -> None:
    registry = Registry(set)
    running = values(text(registry, "decode-1", "decode-2"), "sluice_engine_running")
    assert len(running) == 2
    assert list(values(text(registry, "decode-2"), "sluice_engine_running")) == [
        '{engine="decode-2",role="decode"}'
    ]


def test_series_of_nodes_that_are_gone_disappear_whoever_counted_them() -> None:
    nodes = {"n1", "n2", "n3"}
    registry, metrics = Registry(lambda: nodes), IngressMetrics("m")
    for target in ("n2", "n3", None):
        metrics.transferred(Admitted(10, 0.001), 1, "n1", target)
    for number in range(100):
        registry.take(f"a{number}", metrics.figures())
        registry.lost(f"a{number}")
    registry.take("b", metrics.figures())

    def shown(name: str) -> dict[str, float]:
        return values(text(registry), name)

    rest = {'{source="other",target="other"}': 1010.0}
    there = {'{source="n1",target="n2"}': 1010.0} | rest
    assert shown(PAIR_BYTES) == there | {'{source="n1",target="n3"}': 1010.0}
    nodes.remove("n3")
    assert shown(PAIR_BYTES) == there
    assert shown(TIER_BYTES) == {'{tier="1"}': 3030.0}
    # of n3, what 37 replicas that have long gone had counted is not kept
    registry.take("c", metrics.figures())
    registry.lost("c")
    nodes.add("n3")
    assert shown(PAIR_BYTES)['{source="n1",target="n3"}'] == 650.0


def test_buckets_of_another_version_are_left_out() -> None:
    registry = Registry(set)
    labels = (("batch",),)
    for ingress, bounds in (("a", (0.1, 1.0)), ("b", (0.2, 1.0))):
        figures = Figures(
            "x_seconds", "histogram", "h", ("class",), bounds, [(labels[0], (2.5, 1.0, 2.0, 3.0))]
        )
        registry.take(ingress, [figures])
    shown = unnamed(exposition(registry, lambda: Seen([], None, False)).decode())
    assert values(shown, "x_seconds_count") == {'{class="batch"}': 6.0}
    assert values(shown, "x_seconds_bucket")['{class="batch",le="1.0"}'] == 3.0
