"""A replica's own metrics port: which one it takes, what it answers there, and what happens when it is taken."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.ingress.config import IngressConfig
from app.ingress.http.listener import Listener, ListenerConfig
from app.ingress.metrics_port import MetricsPort, metrics_ports
from benchmarks.live.servers import free_ports
from tests.app.ingress.rig import ADMIN_KEY, MODEL, Rig, pair, rig, until


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Rig]:
    config = IngressConfig(served_names=(MODEL,), replica_id="this-one", sweep_interval_s=0.02)
    async with rig(tmp_path, pair(tmp_path), config) as running:
        yield running


@pytest.mark.parametrize(
    ("first", "replicas", "local_rank", "ports"),
    [
        (9000, 1, 0, (9000,)),
        (9000, 3, 0, (9000, 9001, 9002)),
        (9000, 3, 2, (9002, 9000, 9001)),
        # A replica that runs beside the one which it replaces has a rank beyond the range: 3 mod 3 = 0.
        (9000, 3, 3, (9000, 9001, 9002)),
    ],
)
def test_a_replica_tries_the_port_of_its_rank_first(
    first: int, replicas: int, local_rank: int, ports: tuple[int, ...]
) -> None:
    assert metrics_ports(first, replicas, local_rank) == ports


async def test_it_shows_the_replica_and_takes_no_work(made: Rig) -> None:
    (port,) = free_ports(1)
    metrics = MetricsPort(made.app, ListenerConfig(), [port])
    await metrics.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert "sluice_requests_total" in (await client.get("/metrics")).text
        replica = (await client.get("/sluice/status")).json()["replica"]
        assert (replica["id"], replica["metrics_port"]) == ("this-one", port)
        assert (await client.get("/health/ready")).status_code == 200
        refused = await client.post("/v1/chat/completions", json=made.chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert (await client.get("/sluice/admin/policy")).status_code == 404
    await metrics.stop()


async def test_status_and_metrics_need_a_viewer_or_admin_key_where_that_is_configured(tmp_path: Path) -> None:
    config = IngressConfig(
        (MODEL,),
        sweep_interval_s=0.02,
        status_needs_key=True,
        viewer_keys=("viewer-key",),
        admin_keys=(ADMIN_KEY,),
    )
    async with rig(tmp_path, pair(tmp_path), config) as made:
        (port,) = free_ports(1)
        metrics = MetricsPort(made.app, ListenerConfig(), [port])
        await metrics.start()
        made.client.headers.pop("authorization")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as own:
            for client in (made.client, own):
                for path in ("/metrics", "/sluice/status"):
                    for key, status in (
                        ("viewer-key", 200),
                        (ADMIN_KEY, 200),
                        ("another-key", 401),
                        ("", 401),
                    ):
                        headers = {"authorization": f"Bearer {key}"} if key else {}
                        answer = await client.get(path, headers=headers)
                        assert answer.status_code == status, (path, key)
                        if status == 401:
                            assert answer.json()["error"]["code"] == "viewer_key"
                assert (await client.get("/health/ready")).status_code == 200
        viewer = {"authorization": "Bearer viewer-key"}
        assert (await made.client.get("/sluice/admin/policy", headers=viewer)).status_code == 401
        await metrics.stop()


def test_viewer_keys_want_the_option() -> None:
    with pytest.raises(ValueError, match="viewer_keys needs status_needs_key"):
        IngressConfig((MODEL,), viewer_keys=("viewer-key",))
    with pytest.raises(ValueError, match="viewer_keys must be printable"):
        IngressConfig((MODEL,), viewer_keys=("short",), status_needs_key=True)


async def test_the_next_port_is_taken_and_a_full_range_is_tried_again(
    made: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ingress.metrics_port.RETRY_S", 0.01)
    ports = free_ports(2)
    first, second, third = (MetricsPort(made.app, ListenerConfig(), ports) for _ in range(3))
    await first.start()
    await second.start()
    await third.start()
    assert (first.port, second.port, third.port) == (*ports, None)
    await first.stop()
    await until(lambda: third.port == ports[0], "the freed port")
    await second.stop()
    await third.stop()


def ask_at_once(port: int, count: int) -> list[socket.socket]:
    """Connections that have sent a request, made without a turn of the event loop: nothing has accepted them yet."""
    asked = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]
    for one in asked:
        one.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    return asked


async def test_of_two_listeners_on_a_port_one_stops_without_resetting_a_connection(made: Rig) -> None:
    (port,) = free_ports(1)
    config = ListenerConfig(port=port, reuse_port=True)
    stays, stops = Listener(made.app, config), Listener(made.app, config)
    await stays.start()
    await stops.start()
    made.engines["p"].auto = False
    held = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
    await until(lambda: made.app.in_flight == 1, "a request that keeps the drain open")
    # The kernel puts about half of these connections into the queue of the listener that stops.
    early = ask_at_once(port, 20)
    stopping = asyncio.create_task(stops.stop(drain_s=60.0))
    for one in early:
        assert b"200 OK" in await asyncio.to_thread(one.recv, 4096)
    for one in ask_at_once(port, 20):
        assert b"200 OK" in await asyncio.to_thread(one.recv, 4096)
        one.close()
    assert not stopping.done()
    made.engines["p"].auto = True
    made.engines["p"].finish_prefill(next(iter(made.engines["p"].live)))
    await held
    await stopping
    await stays.stop()
    for one in early:
        one.close()
