"""The dashboard's routes for experiments and what-if questions, with the real command against a real application."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.applications import Starlette

from app.dashboard.run_routes import routes
from app.dashboard.runs import Runs
from app.dashboard.store import BEFORE, RUN, RunsConfig, write
from app.dashboard.whatif import WhatIf, checked
from tests.benchmarks.live.experiment.bare_app import Bare, bare_app

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    folder = tmp_path_factory.mktemp("bare")
    with bare_app(folder, router={"journal": {"ring_events": 2048}}) as made:
        yield made


class Page:
    """A client of the routes, mounted alone: the server that mounts them knows who may."""

    def __init__(self, runs: Runs, whatif: WhatIf) -> None:
        self.runs, self.whatif = runs, whatif
        transport = httpx.ASGITransport(Starlette(routes=routes(runs, whatif)))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://page", timeout=PATIENCE_S)

    async def get(self, path: str, status: int = 200) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        answer = await self.http.post(path, json={} if body is None else body)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
async def page(app: Bare, tmp_path: Path) -> AsyncIterator[Page]:
    config = RunsConfig(folder=str(tmp_path / "runs"), rate_per_s=100.0, duration_s=120.0)
    made = Page(Runs(config, app.url, None, app.key), WhatIf(config, app.url, app.key))
    yield made
    await made.runs.close()
    await made.whatif.close()
    await made.http.aclose()


def plan(seconds: float = 4, **keys: Any) -> str:
    load = {
        "classes": {"interactive": {"prompt_tokens": 40, "output_tokens": 20, "ttft_slo_ms": 500}},
        "phases": [{"name": "all", "for_s": seconds, "rate_per_s": 15}],
    }
    return yaml.safe_dump({"name": "from the page", "load": load, **keys})


FILE = "name: x\nload: {trace: {file: /etc/passwd, for_s: 1, rate_per_s: 1}}"
POLICY = {"actions": [{"at_s": 0.5, "policy": {"decode": "round_robin"}}]}


async def ended(page: Page, run_id: str) -> dict[str, Any]:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        found: dict[str, Any] = (await page.get(f"/api/experiments/runs/{run_id}"))["run"]
        if found["state"] != "running":
            return found
        await asyncio.sleep(0.3)
    raise AssertionError("the run does not end")


async def test_a_file_is_checked_started_watched_compared_and_reported(page: Page) -> None:
    listed = await page.get("/api/experiments")
    assert {one["name"] for one in listed["shipped"]} == {
        "burst",
        "ratio-shift",
        "policy-ab",
        "drain",
        "kill",
    }
    assert (listed["runs"], listed["running"]) == ([], None)
    assert listed["bounds"] == {
        "rate_per_s": 100.0,
        "duration_s": 120.0,
        "disk_bytes": 512 << 20,
        "may_kill": False,
    }
    found = await page.post("/api/experiments/check", {"text": plan()})
    assert found["ok"] and found["plan"]["duration_s"] == 4 and found["plan"]["requests"] > 30
    assert found["plan"]["phases"] == [{"name": "all", "from_s": 0.0, "to_s": 4.0, "rate_per_s": 15.0}]
    ids = []
    for _ in range(2):
        run = await page.post("/api/experiments/start", {"text": plan()})
        assert run["state"] == "running" and run["name"] == "from the page"
        told = await page.post("/api/experiments/start", {"text": plan()}, status=409)
        assert run["id"] in told["message"]
        assert (await page.get("/api/experiments"))["running"]["id"] == run["id"]
        done = await ended(page, run["id"])
        assert (done["state"], done["summary"]["failed"], done["progress"]) == ("done", 0, 1.0), done
        ids.append(run["id"])
        while page.runs.run_id is not None:
            await asyncio.sleep(0.05)
    detail = await page.get(f"/api/experiments/runs/{ids[0]}")
    assert detail["requests"]["n"] == found["plan"]["requests"] and detail["text"] == plan()
    assert {"ttft_p95_s/interactive", "queued", "requests_per_s"} <= set(detail["samples"])
    compared = await page.get(f"/api/experiments/compare?ids={ids[0]},{ids[1]}")
    assert [run["id"] for run in compared["runs"]] == ids
    for line in compared["table"]:
        assert len(line["values"]) == 2 and {"difference", "interval", "unit"} <= set(line)
    for kind, begins in (("html", b"<!doctype html>"), ("json", b"{"), ("png", b"\x89PNG")):
        answer = await page.http.get(f"/api/experiments/runs/{ids[0]}/report.{kind}")
        assert answer.content.startswith(begins)
        assert answer.headers["content-disposition"] == f'attachment; filename="{ids[0]}.{kind}"'
    assert (await page.http.delete(f"/api/experiments/runs/{ids[0]}")).status_code == 200
    assert [run["id"] for run in (await page.get("/api/experiments"))["runs"]] == [ids[1]]


async def test_a_run_is_stopped_and_what_it_changed_put_back(page: Page, app: Bare) -> None:
    with app.client() as client:
        before = client.policies().decode.name
        run = await page.post("/api/experiments/start", {"text": plan(60, **POLICY)})
        while client.policies().decode.name != "round_robin":
            await asyncio.sleep(0.1)
        stopped = await page.post("/api/experiments/stop")
        assert (stopped["id"], stopped["state"]) == (run["id"], "stopped")
        assert client.policies().decode.name == before
    assert (await page.post("/api/experiments/stop", status=409))["message"] == "no experiment is running"


async def test_the_end_of_the_server_ends_the_run_and_a_later_start_puts_back_the_rest(
    page: Page, app: Bare, tmp_path: Path
) -> None:
    with app.client() as client:
        before = client.policies().decode
        await page.post("/api/experiments/start", {"text": plan(60, **POLICY)})
        while client.policies().decode.name != "round_robin":
            await asyncio.sleep(0.1)
        await page.runs.close()
        assert client.policies().decode.name == before.name
        later = Runs(page.runs.config, app.url, None, app.key)
        # what a killed run with a killed guardian would have left
        client.set_policies(decode="round_robin")
        run_id, folder = page.runs.store.new("left")
        write(
            folder / RUN, {"id": run_id, "name": "left", "state": "running", "pid": 2**30, "pid_started": 0.0}
        )
        policy = {"decode": {"name": before.name, "params": before.params}}
        write(folder / BEFORE, {"url": app.url, "dashboard": None, "policy": policy})
        later.start_up()
        end_s = time.monotonic() + PATIENCE_S
        while (folder / BEFORE).exists() and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
        assert client.policies().decode.name == before.name
    assert "put back" in page.runs.store.read(run_id)["message"]
    await later.close()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "text is missing"),
        ({"text": 7}, "text is missing"),
        ({"text": "x" * 70_000}, "longer than 64 kB"),
        ({"text": "name: [}"}, "no YAML"),
        ({"text": plan(actions=[{"at_s": 1, "kill": "decode"}])}, "kill is not allowed"),
        ({"text": plan(actions=[{"at_s": 1, "policy": {"decode": "nope"}}])}, "no decode policy 'nope'"),
        ({"text": plan(500)}, "the bound is 120 s"),
        ({"text": FILE}, "by the command only"),
    ],
)  # fmt: skip
async def test_a_wrong_file_is_refused_in_words(page: Page, body: Any, problem: str) -> None:
    told = await page.post("/api/experiments/start", body, status=400)
    assert problem in told["message"]
    assert (await page.get("/api/experiments"))["runs"] == []


async def test_bodies_that_are_no_objects_or_too_long_are_refused(page: Page) -> None:
    for content, status in ((b"[]", 400), (b"{", 400), (b'{"text": "' + b"x" * 600_000 + b'"}', 413)):
        answer = await page.http.post("/api/experiments/check", content=content)
        assert answer.status_code == status and answer.json()["message"]


@pytest.mark.parametrize("name", ["%2e%2e", "..%2f..%2fetc", "20260101T000000-..-abcdef", "x" * 300])
async def test_a_name_that_no_run_has_leads_nowhere(page: Page, name: str) -> None:
    for method, path in (
        ("GET", f"/api/experiments/runs/{name}"),
        ("DELETE", f"/api/experiments/runs/{name}"),
        ("GET", f"/api/experiments/runs/{name}/report.html"),
        ("GET", f"/api/experiments/compare?ids={name}"),
    ):
        assert (await page.http.request(method, path)).status_code in (400, 404, 405)


async def test_a_full_folder_takes_no_run(app: Bare, tmp_path: Path) -> None:
    config = RunsConfig(folder=str(tmp_path / "runs"), disk_bytes=1 << 20)
    made = Page(Runs(config, app.url, None, app.key), WhatIf(config, app.url, app.key))
    _, folder = made.runs.store.new("big")
    (folder / "requests.jsonl").write_bytes(b"x" * (1 << 20))
    told = await made.post("/api/experiments/start", {"text": plan()}, status=507)
    assert "delete some" in told["message"]


@pytest.mark.nightly
async def test_a_what_if_question_is_described_and_answered(page: Page, app: Bare) -> None:
    run = await page.post("/api/experiments/start", {"text": plan(15)})
    base = await page.post("/api/whatif/base")
    assert "policies" in base["text"] and base["facts"]["engines"] == "2 decode (decode), 1 prefill (prefill)"
    assert "no journal is kept in a folder" in base["facts"]["workload"]
    await ended(page, run["id"])
    changes = [{"name": "more engines", "set": {"cluster.engines.decode.count": 4}}]
    asked = {"text": base["text"], "changes": changes, "base": base["base"]}
    await page.post("/api/whatif/start", asked)
    told = await page.post("/api/whatif/start", {"text": base["text"]}, status=409)
    assert "another what-if question" in told["message"]
    result = await answer(page)
    assert [column["name"] for column in result["columns"]] == ["base", "more engines"]
    assert result["columns"][0]["figures"]["ttft_mean_s"] > 0
    assert result["measured"]["ttft_mean_s"] == base["measured"]["ttft_mean_s"]
    assert isinstance(result["trust"]["ok"], bool) and ", measured " in result["trust"]["text"]
    # an edited base is not the one that was measured, and a file that names no base has no workload
    edited = base["text"].replace("role: decode\n    count: 2", "role: decode\n    count: 3")
    assert edited != base["text"]
    await page.post("/api/whatif/start", {"text": edited, "base": base["base"]})
    result = await answer(page)
    assert (
        not any(result["measured"].values())
        and "nothing was measured of this file" in result["trust"]["text"]
    )
    await page.post("/api/whatif/start", {"text": base["text"]})
    assert "workload.jsonl" in (await ended_question(page))["message"]


async def ended_question(page: Page) -> dict[str, Any]:
    end_s = time.monotonic() + PATIENCE_S
    while (state := await page.get("/api/whatif"))["state"] == "running":
        assert time.monotonic() < end_s
        await asyncio.sleep(0.3)
    found: dict[str, Any] = state
    return found


async def answer(page: Page) -> dict[str, Any]:
    state = await ended_question(page)
    assert state["state"] == "done", state
    found: dict[str, Any] = state["result"]
    return found


@pytest.mark.parametrize(
    ("text", "changes", "problem"),
    [
        ("cluster: 1", None, "cluster"),
        ("{", None, "not YAML"),
        ("a: &x 1\nb: *x", None, "aliases"),
        (None, [{"name": "x", "set": {"cluster.engines.nope.count": 1}}], "no such key"),
        (
            None,
            [{"name": "x", "set": {"cluster.engines.decode.count": 100_000}}],
            "less than or equal to 4096",
        ),
    ],
)
async def test_a_question_that_cannot_be_simulated_fails_in_words(
    page: Page, text: str | None, changes: Any, problem: str
) -> None:
    good = {
        "cluster": {
            "engines": [
                {"name": name, "role": name, "count": 1, "profile": "cpu_smollm2"}
                for name in ("prefill", "decode")
            ]
        },
        "workload": {"name": "synthetic-chat", "requests": 10, "rate_per_s": 1},
    }
    await page.post("/api/whatif/start", {"text": text or yaml.safe_dump(good), "changes": changes})
    end_s = time.monotonic() + PATIENCE_S
    while (state := await page.get("/api/whatif"))["state"] == "running":
        assert time.monotonic() < end_s
        await asyncio.sleep(0.2)
    assert state["state"] == "failed" and problem in state["message"], state


async def test_a_question_is_stopped(page: Page) -> None:
    slow = {
        "cluster": {
            "engines": [
                {"name": name, "role": name, "count": 8, "profile": "cpu_smollm2"}
                for name in ("prefill", "decode")
            ]
        },
        "workload": {"name": "synthetic-chat", "requests": 20_000, "rate_per_s": 50},
        "run": {"seeds": 50},
    }
    await page.post("/api/whatif/start", {"text": yaml.safe_dump(slow)})
    await asyncio.sleep(1.0)
    began_s = time.monotonic()
    state = await page.post("/api/whatif/stop")
    assert state["state"] == "failed" and time.monotonic() - began_s < 20
    # and the next one may come
    await page.post("/api/whatif/start", {"text": "cluster: 1"})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ("x", "must be a list"),
        ([1], "has a name and what it sets"),
        ([{"name": "x"}], "has a name and what it sets"),
        ([{"name": "base", "set": {"a": 1}}], "not `base`"),
        ([{"name": "x", "set": {}}], "sets nothing"),
        ([{"name": "x", "set": {"a b": 1}}], "no path of keys"),
        ([{"name": "x", "set": {"a": 1}}, {"name": "x", "set": {"a": 1}}], "two changes are called"),
        ([{"name": str(i), "set": {"a": 1}} for i in range(9)], "at most 8"),
    ],
)
def test_changes_that_no_file_can_have_are_refused(changes: Any, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        checked(changes)
