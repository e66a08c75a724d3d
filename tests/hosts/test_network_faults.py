"""Two hosts whose network fails in ways that close no connection: silent, open in one direction only, late, lossy.

Sim engines, one prefill and one decode engine on each host, once without Ray (`rayless`) and once with it.
"""

import time
from collections.abc import Iterator

import pytest

from benchmarks.hosts.network import Impairment
from tests.hosts.checks import (
    check_streams,
    grow,
    needs_hosts,
    streams_on_both,
    wait_back,
)
from tests.hosts.cluster import Cluster, HostsApp, cluster
from tests.hosts.load import load
from tests.hosts.rayless import Rayless, RaylessApp, rayless

pytestmark = [pytest.mark.timeout(1200), needs_hosts]

CLIENTS, TOKENS = 12, 100
SECONDS = 8.0
DOWN_S = 10.0
Running = tuple[Cluster | Rayless, HostsApp | RaylessApp]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(rayless, marks=[pytest.mark.live, pytest.mark.nightly]),
        pytest.param(cluster, marks=pytest.mark.hosts),
    ],
    ids=["rayless", "ray"],
)
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    with request.param() as made:
        yield made


@pytest.fixture
def between(running: Running) -> Iterator[Impairment]:
    """An impairment, which does nothing yet, between the worker and the switch."""
    cluster, _ = running
    with cluster.lan.impaired(cluster.away, seed=11) as made:
        yield made


def test_a_host_that_falls_silent_delays_no_stream_for_long(running: Running) -> None:
    cluster, app = running
    there = app.engines_on(cluster.away)
    with load(app.url, CLIENTS, TOKENS) as streams:
        streams_on_both(app)
        cluster.away.link("down")
        began_s = time.monotonic()
        grow(app, streams, 2 * CLIENTS, "while the worker cannot be reached")
        still = there & app.ready_engines()
        time.sleep(max(0.0, DOWN_S - (time.monotonic() - began_s)))
        cluster.away.link("up")
        wait_back(app, there)
        grow(app, streams, CLIENTS, "after it came back")
    assert not still
    check_streams(app, streams, "link down", TOKENS)


@pytest.mark.hosts
@pytest.mark.parametrize(("delay_s", "loss"), [(0.05, 0.0), (0.0, 0.05)], ids=["late 50 ms", "loses 5 %"])
def test_a_slow_or_lossy_network_loses_no_engine_and_fails_no_request(
    running: Running, between: Impairment, delay_s: float, loss: float
) -> None:
    cluster, app = running
    there = app.engines_on(cluster.away)
    missing = set()
    with load(app.url, CLIENTS, TOKENS) as streams:
        streams_on_both(app)
        carried, dropped = between.set(delay_s, loss)["to_host"]
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            missing |= there - app.ready_engines()
            time.sleep(0.2)
        grow(app, streams, 2 * CLIENTS, "over the bad network")
        counts = between.set()
    assert counts["to_host"][0] > carried + 100
    assert (counts["to_host"][1] > dropped) == (loss > 0)
    assert not missing
    check_streams(app, streams, f"delay {delay_s} s, loss {loss}", TOKENS)


@pytest.mark.parametrize("lost", ["to_host", pytest.param("from_host", marks=pytest.mark.hosts)])
def test_a_connection_open_in_one_direction_counts_as_lost(
    running: Running, between: Impairment, lost: str
) -> None:
    """No side gets a FIN or an RST, and one of them even hears the other."""
    cluster, app = running
    there = app.engines_on(cluster.away)
    with load(app.url, CLIENTS, TOKENS) as streams:
        streams_on_both(app)
        between.set(**{f"loss_{lost}": 1.0})
        grow(app, streams, 3 * CLIENTS, "while the worker is half cut off")
        still = there & app.ready_engines()
        between.set()
        wait_back(app, there)
        grow(app, streams, 2 * CLIENTS, "after it came back")
    assert not still
    check_streams(app, streams, f"{lost} lost", TOKENS)


@pytest.mark.hosts
def test_requests_go_on_while_the_router_cannot_be_reached() -> None:
    """The router is on the worker's host: the ingress decides alone over the engines that are left."""
    with rayless(router_on="worker") as (hosts, app):
        there = app.engines_on(hosts.away)
        with load(app.url, CLIENTS, TOKENS) as streams:
            streams_on_both(app)
            hosts.away.link("down")
            grow(app, streams, 2 * CLIENTS, "without the router and half of the engines")
            alone = app.status()["router"]
            hosts.away.link("up")
            app.wait(lambda s: s["router"]["connected"] and not s["router"]["fallback"], "the router")
            wait_back(app, there)
            grow(app, streams, CLIENTS, "with the router again")
        assert alone["fallback"]
        check_streams(app, streams, "router's link down", TOKENS)
