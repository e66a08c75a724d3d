"""Real vLLM engines on two hosts: prefill on one, decode on the other, and the KV over the network between them.

UCX, which moves the KV for NIXL, is held to TCP on the hosts' own devices. Without that it would find that both hosts
are one machine, and use its shared memory.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.hosts.network import Host
from tests.hosts.checks import grow, needs_hosts
from tests.hosts.cluster import FIRST_PORT, LAST_PORT, Cluster, HostsApp, cluster, without_files
from tests.hosts.load import load
from tests.live.serving import PATIENCE_S
from tests.live.vllm_app import DTYPE, KV_TOKEN_BYTES, cpu_only

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    needs_hosts,
    cpu_only("its hosts are Ray nodes of one machine that would all offer the same GPU"),
]

LEASE_S = 12
NIXL_PORTS, UCX_PORTS = "20000:32767", "40000:40099"
QUESTION = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}


def one_of_each(args: dict[str, Any]) -> None:
    """Makes deploy/multi-node.yaml small: SmolLM2-135M on CPUs, a prefill engine on the head, a decode engine away."""
    args["model"] = {"path": "smollm2-135m-instruct"}
    without_files(args)
    args["wire"]["ports"] = f"{FIRST_PORT}-{LAST_PORT}"
    args["ingress"]["replicas"] = 1
    for group in args["engines"]:
        group |= {"replicas": 1, "num_cpus": 0.1, "num_gpus": 0, "resources": {group["role"]: 1}}
        group["options"] = {
            "dtype": DTYPE,
            "slots": 16,
            "max_model_len": 2048,
            "kv_space_gib": 1,
            "lease_s": LEASE_S,
        }
        group["env"] = {
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "eth0",
            "UCX_TCP_PORT_RANGE": UCX_PORTS.replace(":", "-"),
        }
    args["router"]["dispatch"]["lease_margin_s"] = 4.0


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Cluster, HostsApp]]:
    head = {"ingress": 1.0, "router": 1.0, "prefill": 1.0}
    with cluster(one_of_each, head, {"decode": 1.0}, more_ports=(NIXL_PORTS, UCX_PORTS)) as made:
        yield made


def received_bytes(host: Host) -> int:
    """Returns how many bytes the host's network device has received so far."""
    (link,) = json.loads(host.run(["ip", "-s", "-j", "link", "show", "eth0"]))
    return int(link["stats64"]["rx"]["bytes"])


def listening(host: Host, ports: str) -> set[str]:
    """Returns the addresses on which the host's processes listen at a port of this range, without loopback."""
    first, last = map(int, ports.split(":"))
    found = set()
    for line in host.run(["ss", "--no-header", "--listening", "--tcp", "--numeric"]).splitlines():
        address, _, port = line.split()[3].rpartition(":")
        if first <= int(port) <= last:
            found.add(address)
    return found - {"127.0.0.1", "[::1]"}


def answers(app: HostsApp) -> None:
    """The application still answers, and sensibly; the prompt's continuation is no near tie in any dtype."""
    answer = httpx.post(f"{app.url}/v1/completions", json=QUESTION, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]


def test_kv_moves_over_the_network_between_the_hosts(running: tuple[Cluster, HostsApp]) -> None:
    cluster, app = running
    assert [e.partition("-")[0] for e in app.engines_on(cluster.head)] == ["prefill"]
    assert [e.partition("-")[0] for e in app.engines_on(cluster.away)] == ["decode"]
    # the first transfer between two engines pays for their handshake
    answers(app)
    moved, received = app.metric("sluice_kv_transfer_bytes_total"), received_bytes(cluster.away)
    # tests in which the network fails may have come before
    failed = app.metric("sluice_kv_transfer_failures_total")
    words = " ".join(f"station {n}" for n in range(200))
    reply = httpx.post(
        f"{app.url}/v1/completions", json=QUESTION | {"prompt": words, "max_tokens": 2}, timeout=PATIENCE_S
    ).json()
    moved = app.metric("sluice_kv_transfer_bytes_total") - moved
    received = received_bytes(cluster.away) - received
    print(
        f"{reply['usage']['prompt_tokens']} tokens: {moved:.0f} bytes of KV, {received} bytes over the network"
    )
    assert moved >= reply["usage"]["prompt_tokens"] * KV_TOKEN_BYTES
    assert received >= moved
    assert app.metric("sluice_kv_transfer_failures_total") == failed
    app.wait_idle()


def test_nixls_side_channel_listens_on_the_private_address_only(running: tuple[Cluster, HostsApp]) -> None:
    """NIXL authenticates nobody, and whoever reaches its side channel can read and write the engine's KV."""
    cluster, app = running
    answers(app)
    for host in (cluster.head, cluster.away):
        assert listening(host, NIXL_PORTS) == {host.address}


@pytest.mark.parametrize(("delay_s", "loss"), [(0.05, 0.0), (0.0, 0.05)], ids=["late 50 ms", "loses 5 %"])
def test_kv_arrives_over_a_slow_or_lossy_network(
    running: tuple[Cluster, HostsApp], delay_s: float, loss: float
) -> None:
    cluster, app = running
    with cluster.lan.impaired(cluster.away, seed=5) as between:
        between.set(delay_s, loss)
        with load(app.url, clients=4, tokens=24, ignore_eos=True) as streams:
            grow(app, streams, 12, "over the bad network")
        between.set()
    print(
        f"delay {delay_s} s, loss {loss}: {len(streams.answers)} streams, waited {streams.longest_wait_s():.2f} s"
    )
    assert not streams.failed(), streams.failed()[:3]
    answers(app)
    app.wait_idle()


@pytest.mark.parametrize("down_s", [10.0])
def test_a_decode_host_that_falls_silent_frees_both_sides_and_serves_again(
    running: tuple[Cluster, HostsApp], down_s: float
) -> None:
    """The only decode engine is away, so requests may fail; they must end, and leave nothing behind on either side."""
    cluster, app = running
    with load(app.url, clients=6, tokens=100, ignore_eos=True) as streams:
        app.wait(lambda s: any(e["running"] for e in s["engines"] if e["role"] == "decode"), "streams")
        cluster.away.link("down")
        began_s = time.monotonic()
        app.wait(lambda _: len(app.ready_engines()) == 1, "the decode engine to count as lost")
        noticed_s = time.monotonic() - began_s
        time.sleep(max(0.0, down_s - noticed_s))
        cluster.away.link("up")
        app.wait(lambda _: len(app.ready_engines()) == 2, "the decode engine")
        grow(app, streams, 6, "after it came back")
    codes = sorted({(a.error or "")[:120] for a in streams.failed()})
    print(
        f"noticed after {noticed_s:.1f} s; {len(streams.answers)} streams, {len(streams.failed())} failed: {codes}"
    )
    print(f"waited {streams.longest_wait_s():.2f} s")
    answers(app)
    app.wait_idle()
