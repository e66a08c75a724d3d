"""The dashboard of an application with two ingresses: its figures are those of the client, and it may die unnoticed."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.admin_key import key_path
from benchmarks.live.servers import free_ports
from sluice import Sluice
from tests.live.serving import PATIENCE_S, App, config_file, serving
from tests.processes import still_running

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.nightly]

REQUESTS, TOKENS = 40, 5


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[App]:
    def two(args: dict[str, Any]) -> None:
        args["ingress"] = {"replicas": 2}

    with serving(config_file(tmp_path_factory.mktemp("dash"), "sim.yaml", two, board=port)) as running:
        yield running


@pytest.fixture(scope="module")
def board(app: App, port: int) -> Iterator[httpx.Client]:
    deadline_s = time.monotonic() + PATIENCE_S
    while not key_path(port).exists():
        assert time.monotonic() < deadline_s, app.log.read_text()[-2000:]
        time.sleep(0.2)
    bearer = {"authorization": f"Bearer {key_path(port).read_text().strip()}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=bearer, timeout=30) as client:
        yield client


def until(condition: Any, what: str) -> Any:
    """Polls until the condition returns something true, and returns that."""
    deadline_s, last = time.monotonic() + PATIENCE_S, None
    while time.monotonic() < deadline_s:
        try:
            last = condition()
            if last:
                return last
        except httpx.HTTPError as error:
            last = error
        time.sleep(0.2)
    raise AssertionError(f"{what} did not come about within {PATIENCE_S} s; last: {last}")


def total(board: httpx.Client, name: str) -> float:
    text = board.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def counted_by_the_ingresses(app: App) -> float:
    """The number of requests that both ingresses have answered, from their own ports."""
    first = int(app.url.rpartition(":")[2]) + 1000
    texts = [
        httpx.get(f"http://127.0.0.1:{number}/metrics", timeout=PATIENCE_S).text
        for number in (first, first + 1)
    ]
    return sum(
        float(value)
        for text in texts
        for value in re.findall(r"^sluice_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
    )


def test_the_sums_are_what_the_client_sent_and_the_status_is_the_ingress_s(
    app: App, board: httpx.Client
) -> None:
    until(lambda: board.get("/api/status").json()["replica"]["ingresses"] == 2, "two ingresses")
    greeting = f"The dashboard is at {str(board.base_url).rstrip('/')}; its key is in "
    until(lambda: greeting in app.log.read_text(), "the greeting")
    # another test may have sent requests before
    before = counted_by_the_ingresses(app)
    until(lambda: total(board, "sluice_requests_total") == before, "all earlier requests in the sums")
    tokens, firsts = (
        total(board, f"sluice_{name}") for name in ("generation_tokens_total", "ttft_seconds_count")
    )
    # a client for each request, so that connections and with them requests reach both replicas
    for number in range(REQUESTS):
        with Sluice(app.url) as client:
            answer = client.completions(f"request number {number}", max_tokens=TOKENS)
        assert answer.text
    until(lambda: total(board, "sluice_requests_total") == before + REQUESTS, "all requests in the sums")
    assert total(board, "sluice_generation_tokens_total") - tokens == REQUESTS * TOKENS
    assert total(board, "sluice_ttft_seconds_count") - firsts == REQUESTS
    assert counted_by_the_ingresses(app) == before + REQUESTS

    def same() -> bool:
        ours, theirs = board.get("/api/status").json(), app.status()
        return all(
            ours[part] == theirs[part]
            for part in ("ready", "model", "router", "engines", "requests", "leases")
        )

    until(same, "the status of the ingress on the dashboard")
    seen = until(lambda: snapshot(board)["requests"]["latest"], "requests")
    assert {part["name"] for part in seen[0]["parts"]} >= {"queue", "prefill", "transfer", "decode"}
    explained = board.get(f"/api/requests/{seen[0]['id']}").json()
    assert explained["explain"]["decisions"], explained["explain_message"]


def snapshot(board: httpx.Client) -> dict[str, Any]:
    with board.stream("GET", "/api/stream") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found
    raise AssertionError("the stream ended without a snapshot")


def test_it_is_killed_under_load_and_requests_go_on(app: App, board: httpx.Client) -> None:
    pid = app.replica_pid("Dashboard")
    (process,) = [one for one in app.processes() if one.pid == pid]
    os.kill(pid, signal.SIGSTOP)
    try:
        for number in range(20):
            with Sluice(app.url) as client:
                assert client.completions(f"while it hangs {number}", max_tokens=3).text
    finally:
        os.kill(pid, signal.SIGKILL)
    assert not still_running([process], timeout_s=30)
    for number in range(20):
        with Sluice(app.url) as client:
            assert client.completions(f"without it {number}", max_tokens=3).text
    until(lambda: board.get("/api/status").json()["replica"]["ingresses"] == 2, "the next dashboard")
