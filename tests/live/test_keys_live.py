"""API keys through Ray Serve: both ports ask for one, the running ingresses notice changes of the file, and what was
used is in the bill."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.admin_key import authorize
from sluice import ApiError, RateLimitedError, RetryPolicy, Sluice
from tests.live.serving import PATIENCE_S, ROOT, App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def key_command(folder: Path, *args: str) -> str:
    """Runs `sluice key` on the file of the application. Returns what it printed, without the line's end."""
    command = [
        sys.executable,
        "-m",
        "sluice.cli",
        "key",
        args[0],
        "--file",
        str(folder / "keys.json"),
        *args[1:],
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def secret(folder: Path) -> str:
    return key_command(folder, "create", "--tenant", "acme", "--parallel", "2")


@pytest.fixture(scope="module")
def app(folder: Path, secret: str) -> Iterator[App]:
    def change(args: dict[str, Any]) -> None:
        options = {"key_file": str(folder / "keys.json"), "usage_log": str(folder / "usage")}
        args["ingress"] = {"options": options}

    with serving(config_file(folder, "sim.yaml", change, proxy=True)) as running:
        yield running


def ask(url: str, key: str | None, **more: object) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": "hello there", "max_tokens": 5} | more
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)


def test_both_ports_ask_for_a_key(app: App, secret: str) -> None:
    for url in (app.url, app.serve_url):
        assert ask(url, None).status_code == 401
        assert ask(url, "sk-of-nobody").status_code == 401
        answer = ask(url, secret)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
    # an API key gives no right to administer, and the admin key asks without limits
    closed = httpx.get(
        f"{app.url}/sluice/admin/policy", headers={"authorization": f"Bearer {secret}"}, timeout=30
    )
    assert closed.status_code == 401
    body = {"prompt": "hello", "max_tokens": 3}
    assert app.http.post(f"{app.url}/v1/completions", json=body, auth=authorize).status_code == 200


def test_the_sdk_names_what_a_key_does_not_allow(app: App, secret: str) -> None:
    with Sluice(base_url=app.url, api_key=secret, retry=RetryPolicy(max_retries=0)) as client:
        assert client.chat("hello", max_tokens=4).choices[0].message.content
        with pytest.raises(RateLimitedError, match="parallel"):
            client.chat("hello", max_tokens=4, n=3)
        with pytest.raises(ApiError, match="priorities of 0") as refused:
            client.chat("hello", max_tokens=4, priority="interactive")
        assert refused.value.status_code == 403


def test_running_ingresses_notice_new_revoked_and_rotated_keys(app: App, folder: Path) -> None:
    def until(key: str, status: int) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while (seen := ask(app.url, key).status_code) != status:
            assert time.monotonic() < end_s, f"still {seen}"
            time.sleep(0.2)

    key = key_command(folder, "create", "--tenant", "short")
    until(key, 200)
    (shown,) = [
        line
        for line in map(orjson.loads, key_command(folder, "list", "--json").splitlines())
        if line["tenant"] == "short"
    ]
    second = key_command(folder, "rotate", shown["id"], "--grace", "1h")
    until(second, 200)
    assert ask(app.url, key).status_code == 200
    key_command(folder, "revoke", shown["id"])
    until(second, 401)
    assert ask(app.url, key).status_code == 401
    assert app.status()["api_keys"]["tenants"] == 1


def test_the_bill_has_what_the_answer_said(app: App, folder: Path, secret: str) -> None:
    answer = ask(app.url, secret, n=2)
    end_s = time.monotonic() + PATIENCE_S
    while True:
        lines = [
            orjson.loads(line)
            for file in sorted((folder / "usage").glob("*.jsonl"))
            for line in file.read_bytes().splitlines()
        ]
        mine = [line for line in lines if line["request_id"] == answer.json()["id"]]
        if mine:
            break
        assert time.monotonic() < end_s, lines
        time.sleep(0.1)
    (line,) = mine
    usage = answer.json()["usage"]
    assert (line["tenant"], line["status"], line["choices"]) == ("acme", 200, 2)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert app.metric("sluice_tenant_requests_total", tenant="acme") >= 1
