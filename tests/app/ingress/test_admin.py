"""The administrator's endpoints over real HTTP and a real router: who may, what is answered, and by which ids."""

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.telemetry import logs
from actors.wire import messages as wire
from actors.wire.channel import Identity
from app.admin_key import KeyFile, keys_of_environment
from app.fleet.calls import AdminCalls
from app.ingress.admin import AdminApi
from app.ingress.config import IngressConfig
from tests.app.ingress.rig import ADMIN_KEY, MODEL, Rig, pair, rig, until

KEY = "a-good-admin-key"
POLICY, EXPLAIN = "/sluice/admin/policy", "/sluice/admin/explain/"
SCALE = "/sluice/admin/scale"
LOGS = "/sluice/admin/logs"


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, pair(tmp_path)) as started:
        yield started


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that nothing else uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def keyed(**more: Any) -> IngressConfig:
    return IngressConfig(
        served_names=(MODEL,), sweep_interval_s=0.02, admin_keys=(KEY, "another-key"), **more
    )


# ------------------------------------------------------------------------------------------------------------- who may


NGINX = {"host": "127.0.0.1:8000", "connection": "close", "authorization": ""}
"""The headers that nginx adds with nothing but `proxy_pass http://127.0.0.1:8000`: nothing names the proxy."""


@pytest.mark.parametrize(
    "headers",
    [
        NGINX,
        {"authorization": ""},
        {"authorization": "", "host": "localhost"},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {ADMIN_KEY}"},
    ],
)
async def test_no_address_gives_the_right_to_administer(made: Rig, headers: dict[str, str]) -> None:
    for answer in (
        await made.client.get(POLICY, headers=headers),
        await made.client.put(POLICY, headers=headers, json={"dispatch": {"max_queue": 1}}),
        await made.client.get(EXPLAIN + "x", headers=headers),
        await made.client.get("/sluice/admin/journal/9", headers=headers),
        await made.client.put(SCALE, headers=headers, json={"counts": {"d": 2}}),
        await made.client.put(LOGS, headers=headers, json={"level": "DEBUG"}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "admin_key")
    for path in ("/sluice/status", "/metrics", "/health", "/version", "/", "/v1/models"):
        assert (await made.client.get(path, headers=headers)).status_code == 200


async def test_without_configured_keys_the_key_is_that_in_the_file_which_the_answer_names(
    tmp_path: Path, own_folder: Path
) -> None:
    key_file = KeyFile(8000)
    async with rig(tmp_path, pair(tmp_path), key_file=key_file) as made:
        answer = await made.client.get(POLICY, headers=NGINX)
        assert answer.status_code == 401 and str(key_file.path) in answer.json()["error"]["message"]
        key = key_file.path.read_text().strip()
        assert key not in answer.text

        async def status(given: str) -> int:
            headers = {"authorization": f"Bearer {given}"}
            return (await made.client.get(POLICY, headers=headers)).status_code

        assert [await status(key), await status(key[:-1]), await status(key + "x")] == [200, 401, 401]
        # whoever removes the file has the key replaced
        key_file.path.unlink()
        assert await status(key) == 401
        assert await status(key_file.path.read_text().strip()) == 200
        # and what others can read is no key
        key_file.path.chmod(0o644)
        answer = await made.client.get(POLICY, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 401 and "mode 644" in answer.json()["error"]["message"]


async def test_an_application_without_any_key_lets_nobody_administer(made: Rig) -> None:
    made.app._admin = AdminApi((), None, made.connections, made.app._respond_json)
    answer = await made.client.get(POLICY, headers={"authorization": "Bearer"})
    assert answer.status_code == 401 and "set its SLUICE_ADMIN_KEYS" in answer.json()["error"]["message"]


async def test_serves_own_port_needs_a_key(made: Rig) -> None:
    assert (await asgi(made, "GET", POLICY))[0] == 401
    assert (await asgi(made, "GET", POLICY, (b"authorization", f"Bearer {ADMIN_KEY}".encode())))[0] == 200


async def test_with_keys_only_a_key_counts_on_every_port(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path), keyed()) as made:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            answer = await made.client.get(POLICY, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        for key in (KEY, "another-key"):
            assert (
                await made.client.get(POLICY, headers={"authorization": f"bearer {key}"})
            ).status_code == 200
        status, body = await asgi(made, "GET", POLICY, (b"authorization", f"Bearer {KEY}".encode()))
        assert status == 200 and json.loads(body)["prefill"]["name"] == "join_shortest_queue"


def test_short_keys_are_refused_and_keys_are_not_shown() -> None:
    with pytest.raises(ValueError, match="at least 8 characters"):
        IngressConfig(served_names=("m",), admin_keys=("short",))
    assert KEY not in repr(keyed())


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_ADMIN_KEYS", f" {KEY}, another-key,")
    assert keys_of_environment() == (KEY, "another-key")
    monkeypatch.delenv("SLUICE_ADMIN_KEYS")
    assert keys_of_environment() == ()


# ------------------------------------------------------------------------------------------------------------ policies


async def test_a_change_of_policy_shows_everywhere_and_serving_goes_on(made: Rig) -> None:
    change = {"prefill": "round_robin", "decode": {"name": "netkv", "params": {"step_base_s": 0.5}}}
    answer = await made.client.put(POLICY, json=change)
    assert answer.status_code == 200
    assert answer.json()["decode"]["params"]["step_base_s"] == 0.5
    done = await made.client.post("/v1/chat/completions", json=made.chat())
    assert done.status_code == 200
    status = (await made.client.get("/sluice/status")).json()
    assert status["router"]["policy"] == {"prefill": "round_robin", "decode": "netkv"}
    await made.idle()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"decode": "fastest"}', "decode policy 'fastest' is not known: choose one of"),
        (
            b'{"dispatch": {"max_queue": 0}}',
            "max_queue is 0: it must be a whole number >= 1; nothing was changed",
        ),
        (b"{", "The body is not valid JSON"),
        (b'{"prefill": {"name": "combined", "params": {"heatmap": "nowhere"}}}', "'nowhere' is not shipped"),
    ],
)
async def test_a_change_that_is_wrong_is_400_and_changes_nothing(
    made: Rig, body: bytes, message: str
) -> None:
    answer = await made.client.put(POLICY, content=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert made.router.dispatcher.decode.name == "join_shortest_queue"


async def test_paths_and_methods_that_there_are_not_are_named(made: Rig) -> None:
    for path in ("/sluice/admin/", "/sluice/admin/policies", f"{POLICY}/x", "/sluice/admin/explain"):
        answer = await made.client.get(path)
        assert answer.status_code == 404 and "/sluice/admin/policy" in answer.json()["error"]["message"]
    assert (await made.client.post(POLICY)).status_code == 405
    assert (await made.client.get("/sluice/admin/journal")).status_code == 404  # the rig's router keeps none
    assert (await made.client.get("/sluice/admin/journal/-1")).status_code == 400


async def test_without_an_autoscaler_scaling_says_what_to_set(made: Rig) -> None:
    for asked in (made.client.get(SCALE), made.client.put(SCALE, json={"counts": {"d": 2}})):
        answer = await asked
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "no_autoscaler")
        assert "scaling" in error["message"]
    assert (await made.client.get(f"{SCALE}/x")).status_code == 404
    assert (await made.client.post(SCALE)).status_code == 405


# ------------------------------------------------------------------------------------------------------------- explain


async def test_a_request_is_explained_by_the_ids_that_its_client_got(made: Rig) -> None:
    done = await made.client.post("/v1/chat/completions", json=made.chat())
    ids = [done.json()["id"], done.headers["x-request-id"]]
    assert ids[0].startswith("chatcmpl-") and ids[1].startswith("req-")
    own = await made.client.post(
        "/v1/completions", json={"prompt": "a b"}, headers={"x-request-id": "order 66/b".replace(" ", "-")}
    )
    for name in (*ids, own.json()["id"], own.headers["x-request-id"]):
        told = (await made.client.get(EXPLAIN + name)).json()
        assert [d["action"] for d in told["decisions"]] == ["RoutePrefill", "RouteDecode"], name
        assert [d["decision"]["worker"] for d in told["decisions"]] == ["p", "d"]
    missing = await made.client.get(EXPLAIN + "chatcmpl-0")
    assert missing.status_code == 404 and "no decision is known" in missing.json()["error"]["message"]


async def test_every_prompt_and_attempt_of_a_request_is_explained(made: Rig) -> None:
    done = await made.client.post("/v1/completions", json={"prompt": ["a", "b c"], "max_tokens": 2})
    told = (await made.client.get(EXPLAIN + done.json()["id"])).json()
    assert len({d["attempt_id"] for d in told["decisions"]}) == 2 and len(told["decisions"]) == 4


async def test_status_and_metrics_say_how_loaded_the_fleet_is(made: Rig) -> None:
    def known() -> bool:
        report = made.connections.fleet_status
        return bool(report and report.load and report.load.decode is not None)

    await until(known, "the router's figures of its engines")
    load = (await made.client.get("/sluice/status")).json()["load"]
    assert load["regime"] == "normal" and load["prefill"] == load["decode"] == 0.0
    assert set(load["idle"]) == {one.id for one in made.connections.engines()}
    assert made.metric("sluice_router_load_regime", regime="normal") == 1
    assert made.metric("sluice_router_load_regime", regime="extreme") == 0


async def test_status_shows_flow_agents_and_says_nothing_of_flows_without_them(
    made: Rig, tmp_path: Path
) -> None:
    await until(lambda: made.connections.fleet_status is not None, "the router's figures")
    assert "flow" not in (await made.client.get("/sluice/status")).json()

    async def find() -> tuple[str, ...]:
        return made.router.addresses

    agent = FlowAgent(Identity("agent", "x"), "n1", {"n1"}, AgentConfig(report_s=0.02), find)
    await agent.start([f"unix:{tmp_path}/agent.sock"])

    def shown() -> bool:
        report = made.connections.fleet_status
        return report is not None and len(report.flows) == 1

    await until(shown, "the agent's figures")
    flow = (await made.client.get("/sluice/status")).json()["flow"]
    figures = {
        "open": 0,
        "held": 0,
        "granted": 0,
        "unscheduled_share": 0.0,
        "bytes_per_s": {},
        "held_by_level": {},
    }
    assert flow == {
        "policy": "mfs",
        "held": 0,
        "granted": 0,
        "agents": [{"node": "n1", "policy": "mfs", **figures}],
    }
    await agent.stop()


# -------------------------------------------------------------------------------------------------- without the router


async def test_without_the_router_it_says_so_and_serving_goes_on(made: Rig) -> None:
    await made.router.stop()
    await until(lambda: not made.connections.router_connected(), "a lost router")
    answer = await made.client.get(POLICY)
    assert answer.status_code == 503 and "not connected" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "2"
    before = made.metric("sluice_fallback_decisions_total", task="prefill")
    done = await made.client.post("/v1/chat/completions", json=made.chat())
    assert done.status_code == 200
    assert made.metric("sluice_fallback_decisions_total", task="prefill") == before + 1
    assert (await made.client.get("/sluice/status")).json()["router"]["fallback"] is True
    assert (await made.client.get("/sluice/status")).json()["load"] is None


async def test_a_question_to_a_router_that_dies_is_answered_once() -> None:
    answers: list[tuple[int, str]] = []

    def keep(status: int, body: bytes) -> None:
        answers.append((status, json.loads(body)["message"]))

    calls = AdminCalls(lambda message: True)
    calls.call("policy", b"", keep)
    calls.call("policy", b"", keep)
    calls.lost()
    calls.lost()
    assert [status for status, _ in answers] == [503, 503] and "was lost" in answers[0][1]


async def asgi(made: Rig, method: str, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, bytes]:
    """One request as Serve's proxy hands it over."""
    sent: list[dict[str, Any]] = []
    requests = asyncio.Queue[dict[str, Any]]()
    requests.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", b"127.0.0.1"), *headers]}
    await made.app(scope, requests.get, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


# ---------------------------------------------------------------------------------------------------------------- logs


@pytest.fixture
def levels_kept() -> Iterator[None]:
    names = (logs.SERVE, *logs.PACKAGES, "actors.router")
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
    logs.access.on = False


@pytest.mark.usefixtures("levels_kept")
async def test_a_change_of_log_lines_reaches_ingresses_and_engines(made: Rig) -> None:
    changed = await made.client.put(LOGS, json={"level": "DEBUG", "logger": "actors.router"})
    assert changed.status_code == 200
    assert changed.json()["levels"]["actors.router"] == "DEBUG"
    # the ingress and both engines
    assert changed.json()["told"] == 3
    change = wire.SetLogs("DEBUG", "actors.router")
    await until(lambda: all(change in engine.told for engine in made.engines.values()))
    assert (await made.client.get(LOGS)).json()["levels"]["actors.router"] == "DEBUG"
    await made.client.put(LOGS, json={"access": True})
    assert logs.access.on


@pytest.mark.usefixtures("levels_kept")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"level": "LOUD"},
        {"level": "INFO", "logger": "ray"},
        {"access": "yes"},
        {"levels": 1},
        {"logger": "app"},
    ],
)
async def test_a_change_of_log_lines_that_is_wrong_is_400(made: Rig, change: dict[str, Any]) -> None:
    answer = await made.client.put(LOGS, json=change)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, None), answer.text
    assert not logs.access.on


async def test_one_engine_is_ordered_to_wait_warm(tmp_path: Path) -> None:
    path = "/sluice/admin/engines/"
    async with rig(tmp_path, pair(tmp_path)) as made:
        answer = await made.client.put(f"{path}p", json={"duty": "warm"})
        assert answer.json() == {
            "engine": "p",
            "before": {"role": "prefill", "duty": "active"},
            "after": {"role": "prefill", "duty": "warm"},
        }
        refused = await made.client.put(f"{path}d", json={"duty": "warm"})
        assert refused.status_code == 409
        assert "activate another one first" in refused.json()["error"]["message"]
        unknown = await made.client.put(f"{path}x", json={"duty": "warm"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "engine_not_found")
        for body in (b"{", b"[]", b'{"state": "down"}', b"{}", b'{"role": "both"}'):
            assert (await made.client.put(f"{path}p", content=body)).status_code == 400
        assert (await made.client.put(path, json={"duty": "warm"})).status_code == 404
        assert (await made.client.get(f"{path}p")).status_code == 405
