"""Two ingress replicas on one port: one is killed under streams, and only its own connections are lost."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.live.serving import PATIENCE_S, App, config_file, serving, still_running

pytestmark = [pytest.mark.live, pytest.mark.chaos, pytest.mark.timeout(900)]

STREAMS = 40
TOKENS = 600


def two_ingresses(args: dict[str, Any]) -> None:
    # 600 tokens of 20 ms take 12 s: longer than it takes to look at the replicas and to kill one
    options = {"slots": 64, "timing": {"decode_base_s": 0.02}}
    args["engines"] = [
        {"name": "prefill", "role": "prefill", "kind": "sim", "options": options},
        {"name": "decode", "role": "decode", "kind": "sim", "options": options},
    ]
    args["ingress"] = {"replicas": 2}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("two"), "sim.yaml", two_ingresses)) as running:
        yield running


def metrics_urls(app: App) -> list[str]:
    first = int(app.url.rpartition(":")[2]) + 1000
    return [f"http://127.0.0.1:{port}" for port in (first, first + 1)]


def replicas(app: App) -> dict[str, dict[str, Any]]:
    """The part `replica` of the status of each replica that answers on its metrics port, by URL."""
    found = {}
    for url in metrics_urls(app):
        try:
            found[url] = app.http.get(f"{url}/sluice/status").json()["replica"]
        except httpx.HTTPError:
            continue
    return found


async def stream(app: App, number: int) -> bool:
    """Whether one stream came to its end; it has a connection of its own."""
    body = {"prompt": f"stream {number}", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    last = ""
    try:
        async with (
            httpx.AsyncClient(timeout=PATIENCE_S) as http,
            http.stream("POST", f"{app.url}/v1/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                last = line or last
    except httpx.HTTPError:
        return False
    return last == "data: [DONE]"


async def ask(app: App) -> int:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        answer = await http.post(f"{app.url}/v1/completions", json={"prompt": "new", "max_tokens": 2})
    return answer.status_code


def test_each_replica_answers_on_a_metrics_port_of_its_own(app: App) -> None:
    app.wait(lambda _: len(replicas(app)) == 2, "both metrics ports")
    found = replicas(app)
    assert len({one["id"] for one in found.values()}) == 2
    assert {one["pid"] for one in found.values()} == set(app.replica_pids("Ingress"))
    assert [f"http://127.0.0.1:{one['metrics_port']}" for one in found.values()] == metrics_urls(app)
    for url in metrics_urls(app):
        assert "sluice_in_flight" in app.http.get(f"{url}/metrics").text


async def test_only_the_connections_of_a_killed_replica_are_lost(app: App) -> None:
    app.wait(lambda _: len(replicas(app)) == 2, "both metrics ports")
    streams = [asyncio.create_task(stream(app, number)) for number in range(STREAMS)]
    async with asyncio.timeout(PATIENCE_S):
        while (
            sum(one["stages"]["decoding"] for one in (await asyncio.to_thread(replicas, app)).values())
            < STREAMS
        ):
            await asyncio.sleep(0.1)
    (dead_url, dead), (_, alive) = replicas(app).items()
    assert dead["in_flight"] > 0
    assert alive["in_flight"] > 0
    os.kill(dead["pid"], signal.SIGKILL)
    assert not still_running([psutil.Process(dead["pid"])], 60) if psutil.pid_exists(dead["pid"]) else True
    fresh = [await ask(app) for _ in range(20)]
    assert fresh == [200] * 20
    ended = await asyncio.gather(*streams)
    assert (ended.count(False), ended.count(True)) == (dead["in_flight"], alive["in_flight"])
    app.wait(lambda _: len(replicas(app)) == 2, "the killed replica's successor on its metrics port")
    assert replicas(app)[dead_url]["pid"] != dead["pid"]
    # the successor takes connections when it can serve them, so none of these meets a replica that cannot
    assert [await ask(app) for _ in range(20)] == [200] * 20
    app.wait_idle()
