"""The application of deploy/multi-node.yaml on two hosts: it serves, one host falls silent, and it comes back.

The engines are sim engines, one prefill and one decode engine on each host; ingress, router and the head of Ray are on
the first host. `make test-hosts` runs the longer list of faults: `test_network_faults`, `test_host_faults` and
`test_vllm_on_hosts`.
"""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from actors.wire.channel import Channel, Identity, WireError
from actors.wire.sockets import connect
from benchmarks.hosts.network import ROOT
from sluice import Sluice
from tests.hosts.checks import check_streams, grow, needs_hosts, streams_on_both, wait_back
from tests.hosts.cluster import (
    ADMIN_KEY,
    FIRST_PORT,
    HEAD,
    LAST_PORT,
    NO_FIREWALL,
    OPEN_PORTS,
    SECRET,
    WORKER,
    Cluster,
    HostsApp,
    cluster,
    refused_attempts,
    wire_addresses,
)
from tests.hosts.load import load

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), needs_hosts]

CLIENTS, TOKENS = 12, 100
DOWN_S = 10.0


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Cluster, HostsApp]]:
    with cluster() as made:
        yield made


def test_both_hosts_serve_and_kv_crosses_between_them(running: tuple[Cluster, HostsApp]) -> None:
    cluster, app = running
    here, there = (app.engines_on(host) for host in (cluster.head, cluster.away))
    assert [sorted(e.partition("-")[0] for e in engines) for engines in (here, there)] == [
        ["decode", "prefill"],
        ["decode", "prefill"],
    ]
    ways = set()
    with Sluice(base_url=app.url, admin_key=ADMIN_KEY) as client:
        # a decode engine drawn at random: 40 requests miss one of the two ways across once in half a million runs
        client.set_policies(decode="random")
        for n in range(40):
            answer = client.completions(f"request {n}", max_tokens=3)
            chosen = [d.decision.worker in here for d in client.explain(answer.id).decisions if d.decision]
            ways.add(tuple(chosen))
        client.set_policies(decode="round_robin")
    assert ways >= {(True, False), (False, True)}
    assert app.metric("sluice_kv_transfer_failures_total") == 0
    app.wait_idle()


def test_sockets_between_hosts_are_on_each_hosts_own_address(running: tuple[Cluster, HostsApp]) -> None:
    cluster, _ = running
    # the router, and an engine of each role on each host
    assert wire_addresses(cluster.head) == [f"{HEAD}:{FIRST_PORT + n}" for n in range(3)]
    assert wire_addresses(cluster.away) == [f"{WORKER}:{FIRST_PORT + n}" for n in range(2)]


@pytest.mark.skipif(NO_FIREWALL is not None, reason=str(NO_FIREWALL))
def test_no_process_needs_another_port_than_the_documented_ones(running: tuple[Cluster, HostsApp]) -> None:
    cluster, app = running
    for n in range(4):
        assert app.http.post(f"{app.url}/v1/completions", json={"prompt": f"{n}", "max_tokens": 2}).is_success
    assert [refused_attempts(host) for host in (cluster.head, cluster.away)] == [0, 0]
    with pytest.raises(TimeoutError):
        socket.create_connection((WORKER, LAST_PORT + 1), timeout=1)
    assert refused_attempts(cluster.away) > 0
    documented = (ROOT / "docs/gpu-and-clusters.md").read_text()
    assert not [ports for ports in OPEN_PORTS if ports.replace(":", "-") not in documented]


@pytest.mark.parametrize("secret", [b"another secret", None])
async def test_a_peer_without_the_secret_is_refused(
    running: tuple[Cluster, HostsApp], secret: bytes | None
) -> None:
    cluster, _ = running
    address = f"tcp:{wire_addresses(cluster.away)[0]}"

    def channel(known: bytes | None) -> Channel:
        return Channel(Identity("ingress", "stranger", known), lambda *_: None)

    friend = await connect((address,), lambda: channel(SECRET.encode()))
    assert friend.open
    friend.close()
    # a stranger without any secret believes itself connected until the engine hangs up
    with contextlib.suppress(WireError):
        stranger = await connect((address,), lambda: channel(secret))
        assert "secret" in await stranger.closed


@pytest.mark.nightly
def test_a_host_that_falls_silent_delays_no_stream_for_long(running: tuple[Cluster, HostsApp]) -> None:
    cluster, app = running
    worker = cluster.away
    there = app.engines_on(worker)
    with load(app.url, CLIENTS, TOKENS) as streams:
        streams_on_both(app)
        worker.link("down")
        began_s = time.monotonic()
        grow(app, streams, 2 * CLIENTS, "while the worker cannot be reached")
        still = there & app.ready_engines()
        time.sleep(max(0.0, DOWN_S - (time.monotonic() - began_s)))
        worker.link("up")
        wait_back(app, there)
        grow(app, streams, CLIENTS, "after it came back")
    assert not still
    check_streams(app, streams, "link down", TOKENS)
