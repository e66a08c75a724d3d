"""The whole application through Ray Serve on sim engines: API on both ports, SDK, CLI, and a clean end."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from app.admin_key import key_path
from sluice import Sluice
from tests.live.serving import PATIENCE_S, ROOT, App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("sim"), "sim.yaml", proxy=True)) as running:
        yield running
    assert not key_file(running).exists()


def key_file(app: App) -> Path:
    return key_path(int(app.url.rpartition(":")[2]))


def chat(url: str, **kw: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8} | kw
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


def test_both_ports_answer_the_same(app: App) -> None:
    answers = [chat(url).json() for url in (app.url, app.serve_url)]
    texts = [a["choices"][0]["message"]["content"] for a in answers]
    assert texts[0] == texts[1]
    assert texts[0].strip()
    assert [a["usage"]["completion_tokens"] for a in answers] == [8, 8]


def test_serve_s_port_streams_too(app: App) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    with httpx.stream(
        "POST", f"{app.serve_url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3


def test_the_official_client_works_unmodified(app: App) -> None:
    client = OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "hello"}], max_tokens=6
    )
    stream = client.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "hello"}], max_tokens=6, stream=True
    )
    pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6


def test_the_sdk_and_the_command_work_against_it(app: App) -> None:
    with Sluice(base_url=app.url) as client:
        assert client.models()
        status = client.status()
        assert status.ready
        result = client.chat("hello", max_tokens=5, priority="standard")
        with client.stream_chat("hello", max_tokens=5) as stream:
            text = "".join(chunk.text for chunk in stream)
    assert text == result.text
    command = [sys.executable, "-m", "sluice.cli"]
    env = {"SLUICE_BASE_URL": app.url, "PATH": "/usr/bin:/bin"}
    for words in (["status"], ["models"], ["chat", "hello", "--max-tokens", "5"]):
        done = subprocess.run(
            [*command, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_admin_key_is_in_a_file_that_the_command_reads_and_a_restart_keeps(app: App) -> None:
    path = key_file(app)
    key = path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    app.wait(lambda _: str(path) in app.log.read_text(), "the greeting names the file")
    assert key not in app.log.read_text()
    for url in (app.url, app.serve_url):
        refused = httpx.get(f"{url}/sluice/admin/policy", timeout=PATIENCE_S)
        assert refused.status_code == 401 and str(path) in refused.json()["error"]["message"]
        told = httpx.get(
            f"{url}/sluice/admin/policy", headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S
        )
        assert told.status_code == 200

    def show() -> None:
        env = {**os.environ, "SLUICE_BASE_URL": app.url}
        command = [sys.executable, "-m", "sluice.cli", "policy", "show"]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr

    show()
    killed = app.replica_pid("Ingress")
    os.kill(killed, signal.SIGKILL)
    app.wait(
        lambda status: status["ready"] and killed not in app.replica_pids("Ingress"),
        "another ingress serves",
    )
    assert path.read_text().strip() == key
    show()


def test_requests_go_through_prefill_pool_and_decode(app: App) -> None:
    before = app.metric("sluice_kv_transfer_bytes_total")
    assert chat(app.url, max_tokens=3).status_code == 200
    assert app.metric("sluice_kv_transfer_bytes_total") > before
    status = app.wait_idle()
    assert {e["role"] for e in status["engines"]} == {"prefill", "decode"}
    assert status["router"]["connected"]


def test_version_says_which_path_is_on(app: App) -> None:
    version = httpx.get(f"{app.url}/version", timeout=PATIENCE_S).json()
    assert version["transport"] == "fast"
    assert version["version"]
