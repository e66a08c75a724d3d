"""Each request for output has one access line where they are on, and never a word of prompt or answer."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry import logs
from actors.wire import messages as wire
from tests.app.ingress.rig import Rig, ScriptedEngine, pair, rig, until

SECRET = "unmistakable"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """JSON lines of Serve's logger and of all packages, from DEBUG on, with access lines."""
    names = (logs.SERVE, *logs.PACKAGES)
    before = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in names}
    passed_on = {name: logging.getLogger(name).propagate for name in names}
    stream = io.StringIO()
    logging.getLogger(logs.SERVE).handlers = [logging.StreamHandler(stream)]
    logging.getLogger(logs.SERVE).propagate = False
    logs.start("ingress", environment={logs.FORMAT: "json", logs.LEVEL: "DEBUG", logs.ACCESS: "1"})
    yield stream
    for name, (handlers, level) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, passed_on[name]
        logging.getLogger(name).setLevel(level)
    logs.access.on = False


def access(lines: io.StringIO) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [line for line in told if line["logger"] == "ray.serve.access"]


async def ask(made: Rig, **more: Any) -> Any:
    body = made.chat(messages=[{"role": "user", "content": f"{SECRET} prompt"}], **more)
    return await made.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})


async def test_each_request_has_one_line_and_no_text(lines: io.StringIO, tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        answer = await ask(made)
        text = answer.json()["choices"][0]["message"]["content"]
        await ask(made, model="nowhere")
        await ask(made, max_tokens=0)
        made.engines["d"].step_s = 0.2
        body = made.chat(stream=True, messages=[{"role": "user", "content": SECRET}])
        async with made.client.stream("POST", "/v1/chat/completions", json=body) as left:
            await anext(left.aiter_bytes())
        await until(lambda: made.app.in_flight == 0)
        await made.client.get("/health")
        await made.idle()
    told = access(lines)
    assert [(line["status"], line["path"]) for line in told] == [
        (status, "/v1/chat/completions") for status in (200, 404, 400, 499)
    ]
    whole = told[0]
    assert (whole["request_id"], whole["component"], whole["level"]) == ("mine", "ingress", "INFO")
    assert (whole["output_tokens"], whole["request_class"], whole["stream"]) == (4, "standard", False)
    assert 0 < whole["first_token_s"] <= whole["seconds"]
    assert whole["attempt_id"] and whole["retried"] == 0
    assert text.strip() and text.strip() not in lines.getvalue()
    assert SECRET not in lines.getvalue()


async def test_a_failure_s_line_names_the_request_and_no_text(lines: io.StringIO, tmp_path: Path) -> None:
    engines = [*pair(tmp_path), ScriptedEngine("q", "prefill", tmp_path)]
    prefills = engines[0], engines[2]
    for engine in prefills:
        engine.auto = False
    async with rig(tmp_path, engines) as made:
        asked = asyncio.create_task(ask(made))
        await until(lambda: any(engine.live for engine in prefills))
        failing, other = sorted(prefills, key=lambda engine: not engine.live)
        (attempt_id,) = failing.live
        other.auto = True
        del failing.live[attempt_id]
        failing.send(wire.Failed(attempt_id, "prefill", "internal", "as ordered", True))
        assert (await asked).status_code == 200
        await made.idle()
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    (retry,) = [line for line in told if line["message"].startswith("retry of a request")]
    assert (retry["request_id"], retry["attempt_id"]) == ("mine", attempt_id)
    assert SECRET not in lines.getvalue()


async def test_without_access_lines_there_are_none(lines: io.StringIO, tmp_path: Path) -> None:
    logs.change(on=False)
    async with rig(tmp_path, pair(tmp_path)) as made:
        assert (await ask(made)).status_code == 200
        assert (await ask(made, model="nowhere")).status_code == 404
    assert access(lines) == []
