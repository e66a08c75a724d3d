"""Two ingress replicas on one port: one is killed under streams, and only its own connections are lost. Prometheus adds
both up, and answers every query of rules and boards; so it does where it scrapes the dashboard alone.
"""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.ingress.metrics import INGRESS
from benchmarks.live.servers import free_ports
from tests.deploy.test_prometheus import RECORDED
from tests.live.prometheus import Prometheus, has_prometheus, prometheus
from tests.live.serving import PATIENCE_S, App, config_file, serving
from tests.processes import command_line, ended
from tests.scripts.test_grafana_boards import NAMES, queries

pytestmark = [pytest.mark.live, pytest.mark.chaos, pytest.mark.timeout(900)]

BURNS = {"SluiceSloBurnsFast", "SluiceSloBurnsSlowly"}
"""Alerts that the load below is made for: interactive requests whose objective cannot be met."""
STREAMS = 40
TOKENS = 600


def two_ingresses(network: Path) -> Any:
    """Returns a change of the configuration: two ingresses, and every part that has figures of its own."""

    def change(args: dict[str, Any]) -> None:
        # 600 tokens of 20 ms take 12 s: longer than it takes to look at the replicas and to kill one
        engine = {"kind": "sim", "options": {"slots": 64, "timing": {"decode_base_s": 0.02}}}
        args["engines"] = [
            {"name": "prefill", "role": "prefill", **engine},
            {"name": "decode", "role": "decode", **engine, "scaling": {"max": 2, "warm": 1}},
        ]
        args["ingress"] = {"replicas": 2, "options": {"ceiling": "interactive"}}
        args["flow"] = {"enabled": True}
        args["scaling"] = {"enabled": True, "policy": "fixed"}
        args["router"] = {
            "network": {"file": str(network)},
            "predictor": {"enabled": True},
            # requests that cannot meet their objective are to be answered, and counted as missed
            "admission": {"name": "open"},
        }

    return change


@pytest.fixture(scope="module")
def board() -> int:
    """The port of the dashboard."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, board: int) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("two")
    network = folder / "network.yaml"
    network.write_text("tiers: {0: {bandwidth_bytes_per_s: 1.0e+9}, 3: {bandwidth_bytes_per_s: 1.0e+8}}\n")
    lines = {"SLUICE_LOG_FORMAT": "json", "SLUICE_ACCESS_LOG": "1"}
    config = config_file(folder, "sim.yaml", two_ingresses(network), board=board)
    with serving(config, environment=lines) as running:
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


def wait_both(app: App) -> None:
    """Waits until both replicas answer on their metrics ports and take connections of the shared port."""
    taken = set()

    def both(status: dict[str, Any]) -> bool:
        # each status comes over a connection of its own; a replica opens the shared port later than its metrics port
        taken.add(status["replica"]["id"])
        return {one["id"] for one in replicas(app).values()} <= taken and len(replicas(app)) == 2

    app.wait(both, "both replicas on their metrics ports and on the shared one")


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
    await asyncio.to_thread(wait_both, app)
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
    async with asyncio.timeout(60):
        while not ended(dead["pid"]):
            await asyncio.sleep(0.05)
    fresh = [await ask(app) for _ in range(20)]
    assert fresh == [200] * 20
    completed = await asyncio.gather(*streams)
    assert (completed.count(False), completed.count(True)) == (dead["in_flight"], alive["in_flight"])
    app.wait(lambda _: len(replicas(app)) == 2, "the killed replica's successor on its metrics port")
    assert replicas(app)[dead_url]["pid"] != dead["pid"]
    # the successor takes connections when it can serve them, so none of these meets a replica that cannot
    assert [await ask(app) for _ in range(20)] == [200] * 20
    app.wait_idle()


def log_lines(app: App, deployment: str) -> list[dict[str, Any]]:
    """The lines in the log files of a deployment's replicas, which are JSON from Sluice's first one on. The last one of
    a file may not have been written to its end.
    """
    folders = {found[1] for p in app.processes() if (found := re.search(r"--log_dir=(\S+)", command_line(p)))}
    files = [
        file for folder in folders for file in Path(folder, "serve").glob(f"replica_*_{deployment}_*.log")
    ]
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


async def test_log_files_have_a_json_line_for_each_request_and_levels_change_everywhere(app: App) -> None:
    body = {"prompt": "unmistakable words", "max_tokens": 2}
    async with httpx.AsyncClient(timeout=PATIENCE_S, verify=False) as http:
        headers = {"x-request-id": "one-of-its-own"}
        answer = await http.post(f"{app.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200

    def told(level: str) -> int:
        """The number of processes that a change of level has reached."""
        change = {"level": level, "logger": "actors.wire"}
        answer = app.http.put(f"{app.url}/sluice/admin/logs", json=change)
        return int(answer.raise_for_status().json()["told"])

    # Two ingresses, three engines, the autoscaler and the dashboard. An application is ready before all of them are
    # connected, and a change reaches those that are.
    await asyncio.to_thread(app.wait, lambda _: told("DEBUG") == 7, "seven processes that a change reaches")
    assert told("INFO") == 7

    def its_lines() -> list[dict[str, Any]]:
        return [one for one in log_lines(app, "Ingress") if one.get("request_id") == "one-of-its-own"]

    def engines() -> set[str]:
        return {one["engine"] for one in log_lines(app, "DecodeEngine") if one["component"] == "engine"}

    def has_an_audit_line() -> bool:
        return any(one["logger"] == "actors.router.admin" for one in log_lines(app, "Router"))

    await asyncio.to_thread(app.wait, lambda _: its_lines() != [], "a line of the request")
    lines = log_lines(app, "Ingress")
    (line,) = its_lines()
    assert (line["component"], line["status"], line["output_tokens"]) == ("ingress", 200, 2)
    assert "unmistakable" not in json.dumps(lines)
    await asyncio.to_thread(app.wait, lambda _: len(engines()) == 2, "lines of both decode engines")
    await asyncio.to_thread(app.wait, lambda _: has_an_audit_line(), "the router's line of the change")


async def load(app: App, seconds: float) -> Counter[tuple[int, str]]:
    """Asks for short answers of both classes over new connections, and for a model that is not there. Returns how many
    were answered, by status and class.
    """
    answered: Counter[tuple[int, str]] = Counter()
    end_s = asyncio.get_running_loop().time() + seconds

    async def client(number: int) -> None:
        request_class = ("interactive", "batch")[number % 2]
        body = {"prompt": "some words " * 40, "max_tokens": 5, "priority": request_class, "ignore_eos": True}
        # the interactive ones miss their objective, the others meet it
        body["slo"] = {"ttft_ms": 0.01 if number % 2 == 0 else 60_000}
        while asyncio.get_running_loop().time() < end_s:
            async with httpx.AsyncClient(timeout=PATIENCE_S, verify=False) as http:
                for _ in range(5):
                    answer = await http.post(f"{app.url}/v1/completions", json=body)
                    answered[answer.status_code, request_class] += 1
                answer = await http.post(f"{app.url}/v1/completions", json={**body, "model": "nowhere"})
                answered[answer.status_code, "none"] += 1

    await asyncio.gather(*(client(number) for number in range(8)))
    return answered


COUNTED = [
    name
    for metric in INGRESS
    if metric.kind != "gauge"
    for name in (
        [f"{metric.name}{end}" for end in ("_bucket", "_sum", "_count")] if metric.buckets else [metric.name]
    )
]
"""The series that ingresses count."""
REPLICAS, BOARD = "sluice", "sluice-dashboard"
"""The jobs that scrape the replicas and the dashboard."""

Sums = dict[tuple[str, frozenset[tuple[str, str]]], float]


def sums(made: Prometheus, job: str) -> Sums:
    """The counts of ingresses, added up over the targets of a job, by name and labels."""
    return {
        (name, frozenset(labels.items())): value
        for name in COUNTED
        for labels, value in made.query(f'sum without (job, instance, observer) ({name}{{job="{job}"}})')
    }


def growth(before: Sums, after: Sums) -> Sums:
    """The counts since `before`, without those that stand still."""
    grown = {one: value - before.get(one, 0.0) for one, value in after.items()}
    return {one: value for one, value in grown.items() if abs(value) > 1e-6}


async def settled(made: Prometheus) -> tuple[Sums, Sums]:
    """The sums of both jobs once they stand still, which they do while nobody asks for anything: what an ingress has
    counted is on the dashboard a second later, and in Prometheus with the next scrape.
    """
    before = None
    while True:
        found = await asyncio.to_thread(lambda: (sums(made, REPLICAS), sums(made, BOARD)))
        if found == before:
            return found
        before = found
        await asyncio.sleep(4)


def engines(made: Prometheus, job: str) -> Counter[tuple[str, str, str]]:
    """The engines by role, duty and state, as the targets of a job tell."""
    each = f'max by (engine, role, duty, state) (sluice_engine_state{{job="{job}"}})'
    return Counter((one["role"], one["duty"], one["state"]) for one, _ in made.query(each))


def without_data(made: Prometheus) -> list[str]:
    """The recorded rules, and queries of panels, that have no data."""
    asked = [(name, name) for name in RECORDED]
    asked += [(f"{name}: {title}", expr) for name in NAMES for title, expr in queries(name)]
    return [what for what, expr in asked if not made.query(expr.replace("$__rate_interval", "1m"))]


def alerts(made: Prometheus) -> set[str]:
    return {one["alertname"] for one, _ in made.query("ALERTS")}


@pytest.mark.skipif(
    not has_prometheus(), reason="prometheus is not installed (Debian, Ubuntu: apt-get install prometheus)"
)
async def test_prometheus_adds_the_replicas_up_and_every_rule_and_panel_has_data(
    app: App, board: int, tmp_path: Path
) -> None:
    """The replicas are targets in one Prometheus, and the dashboard is the only one in another; its sums are theirs."""
    await asyncio.to_thread(wait_both, app)
    targets = [url.removeprefix("http://") for url in metrics_urls(app)]
    sum_of_all = [f"127.0.0.1:{board}"]
    with (
        prometheus(tmp_path / "each", {REPLICAS: targets, BOARD: sum_of_all}) as made,
        # as the shipped file says for where the replicas cannot be reached
        prometheus(tmp_path / "alone", {REPLICAS: sum_of_all}) as alone,
    ):
        counts = 'sum by (code, class) (sluice_requests_total{job="sluice"})'

        def counted() -> Counter[tuple[int, str]]:
            return Counter({(int(one["code"]), one["class"]): int(n) for one, n in made.query(counts)})

        def wait(condition: Any, what: str) -> Any:
            return asyncio.to_thread(made.wait, condition, what)

        await wait(lambda: made.value('count(up{job="sluice"} == 1)') == 2, "two targets that answer")
        # a counter of requests has no series before the first one, but both replicas show this gauge at once
        await wait(lambda: made.value('count(sluice_in_flight{job="sluice"})') == 2, "a scrape of both")
        # the dashboard answers once both replicas have told their counts for some seconds
        await wait(lambda: made.value(f'count(up{{job="{BOARD}"}} == 1)') == 1, "the dashboard's sums")
        await wait(lambda: alone.value('count(up{job="sluice"} == 1)') == 1, "the dashboard as only target")
        async with asyncio.timeout(PATIENCE_S):
            at_replicas, at_board = await settled(made)
        before = counted()
        sent = await load(app, 20.0)
        assert set(sent) == {(200, "interactive"), (200, "batch"), (404, "none")}
        await wait(lambda: counted() - before == sent, f"{sent} since {before}")
        replicas_of = made.query('sum by (instance) (sluice_generation_tokens_total{job="sluice"})')
        assert len(replicas_of) == 2

        for each in (made, alone):
            end_s = asyncio.get_running_loop().time() + 60
            while left := await asyncio.to_thread(without_data, each):
                assert asyncio.get_running_loop().time() < end_s, (each.url, left)
                await asyncio.sleep(1)
            missed = {one["class"]: n for one, n in each.query("sluice:slo_missed:ratio_rate5m")}
            assert missed == {"interactive": pytest.approx(1.0), "batch": pytest.approx(0.0)}

        serving_now = Counter(
            {
                ("prefill", "active", "ready"): 1,
                ("decode", "active", "ready"): 1,
                ("decode", "warm", "ready"): 1,
            }
        )
        for each, job in ((made, REPLICAS), (made, BOARD), (alone, REPLICAS)):
            await wait(lambda of=each, by=job: engines(of, by) == serving_now, f"{serving_now} by {job}")
        recorded = {
            (one["role"], one["duty"], one["state"]): n for one, n in made.query("sluice:engine_states:count")
        }
        assert recorded == serving_now

        for each in (made, alone):
            # the burn rate is over both of its windows, which are as long as what there is to look at
            await wait(lambda of=each: "SluiceSloBurnsFast" in alerts(of), "the alert of missed objectives")
            # nothing else is wrong here for longer than between two scrapes; the slow one has the longer windows and
            # looks at the same misses
            await wait(lambda of=each: alerts(of) <= BURNS, "no other alert")

        # what a replica had counted that was killed before stays in the dashboard's sums: growth is compared
        async with asyncio.timeout(PATIENCE_S):
            replicas_then, board_then = await settled(made)
        grown = growth(at_replicas, replicas_then)
        assert {
            "sluice_requests_total",
            "sluice_ttft_seconds_bucket",
            "sluice_kv_tier_transfer_bytes_total",
        } <= {name for name, _ in grown}
        assert growth(at_board, board_then) == pytest.approx(grown)
