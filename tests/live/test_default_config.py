"""README's promise after `make serve`: the default configuration answers the commands that README shows.

On a GPU the configuration is deploy/one-gpu.yaml. Its dtype is vLLM's choice, and in bfloat16 the first token is a near
tie, so there any answer counts.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.live.serving import PATIENCE_S, ROOT, App, serving
from tests.live.vllm_app import ON_CPU

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(900)]

ANSWER = "The capital of France is Paris."
README_URL = "http://127.0.0.1:8000"
CONFIG = "cpu.yaml" if ON_CPU else "one-gpu.yaml"


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(ROOT / "deploy" / CONFIG) as running:
        yield running


def shown(program: str) -> list[str]:
    """The words of README's first command of `program` that asks for the capital of France."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith(program) and "capital of France" in line:
            return shlex.split(line, comments=True)
    raise AssertionError(
        f"README shows no command that begins with {program!r} and asks for the capital of France"
    )


def right(said: str) -> bool:
    """Whether this is the answer on CPUs; on a GPU, whether it is one."""
    return ANSWER in said if ON_CPU else len(said.split()) > 2


def test_the_shown_curl_answers_paris(app: App) -> None:
    words = shown("curl")
    url = next(word for word in words if word.startswith("http"))
    body = words[words.index("-d") + 1]
    assert json.loads(body)["temperature"] == 0
    with httpx.stream(
        "POST", url.replace(README_URL, app.url), content=body, headers={"content-type": "application/json"},
        timeout=PATIENCE_S,
    ) as answer:  # fmt: skip
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    said = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert right(said), said
    assert choices[-1]["finish_reason"] == "stop" or not ON_CPU


def test_the_shown_sdk_command_answers_the_same(app: App) -> None:
    words = shown(".venv/bin/sluice")[1:]
    done = subprocess.run(
        [sys.executable, "-m", "sluice.cli", *words], cwd=ROOT, env={**os.environ, "SLUICE_BASE_URL": app.url},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert right(done.stdout.strip()), done.stdout
