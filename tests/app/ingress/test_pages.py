"""`/`, `/docs` and `/openapi.json`: what they show, that nothing comes from elsewhere, and that answers match them."""

import asyncio
import gzip
import hashlib
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter

from app.api import answers
from app.ingress.http.reply import Reply, Request
from app.ingress.pages import EXPLORER_SHA256
from tests.app.ingress.rig import MODEL, Rig, until
from tests.app.ingress.rig import rig as make_rig
from tests.app.ingress.test_with_sim import Sim, events

CHAT = {"messages": [{"role": "user", "content": "tell me something about rivers"}], "max_tokens": 4}
CHROMIUM = shutil.which("chromium")


@pytest.fixture
async def sim(tmp_path: Path) -> AsyncIterator[Rig]:
    """An ingress with sim engines of every role, so that each `x-sluice-mode` can be served."""
    async with make_rig(tmp_path, []) as made:
        roles = {"p": "prefill", "d": "decode", "c": "colocated"}
        engines = [await Sim.start(made, tmp_path, name, role) for name, role in roles.items()]
        await until(
            lambda: len(made.connections.engines()) == len(roles) and made.connections.ready() is None
        )
        await until(lambda: made.connections.fleet_status is not None)
        yield made
        await made.idle()
        for engine in engines:
            await engine.stop()


async def test_every_link_of_the_first_page_leads_somewhere(sim: Rig) -> None:
    page = await sim.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert f"http://127.0.0.1:{sim.listener.port}/v1/chat/completions" in page.text and MODEL in page.text
    links = re.findall(r'href="([^"]+)"', page.text)
    assert {"docs", "openapi.json", "metrics", "sluice/status", "health/ready"} <= set(links)
    for link in links:
        assert (await sim.client.get(f"/{link}")).status_code == 200, link


async def test_the_host_is_no_way_into_the_page(sim: Rig) -> None:
    page = await sim.client.get("/", headers={"host": "<script>x</script>"})
    assert "<script>" not in page.text


async def test_the_script_is_the_one_that_was_published(sim: Rig) -> None:
    shipped = gzip.decompress(files("app.ingress.pages").joinpath("openapi-explorer.min.js.gz").read_bytes())
    assert hashlib.sha256(shipped).hexdigest() == EXPLORER_SHA256
    for encoding in ("gzip", "identity"):
        answer = await sim.client.get("/docs/openapi-explorer.js", headers={"accept-encoding": encoding})
        assert answer.content == shipped
        assert answer.headers.get("content-encoding", "identity") == encoding


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
async def test_a_browser_draws_the_documentation_without_any_other_host(sim: Rig, tmp_path: Path) -> None:
    """The script reads /openapi.json only when it runs; the console names what the page was refused."""
    asked: list[str] = []
    method, openapi = sim.app._routes["/openapi.json"]

    def noted(request: Request, reply: Reply, request_id: str) -> None:
        asked.append(request.path)
        openapi(request, reply, request_id)

    sim.app._routes["/openapi.json"] = (method, noted)
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--virtual-time-budget=10000", f"--user-data-dir={tmp_path}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--screenshot={tmp_path}/docs.png", f"{sim.url}/docs",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await asyncio.wait_for(process.communicate(), 90)
    assert asked == ["/openapi.json"]
    assert b"CONSOLE" not in said, said.decode()
    assert (tmp_path / "docs.png").stat().st_size > 50_000, "an empty page makes a smaller picture"


@pytest.mark.timeout(400)
async def test_a_schema_fuzzer_finds_no_5xx_and_no_answer_beside_the_document(
    sim: Rig, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).parent / "schemathesis", "run", f"{sim.url}/openapi.json",
        "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "response_headers_conformance,unsupported_method",
        "--phases", "examples,coverage,fuzzing", "--max-examples", "5", "--seed", "1", "--generation-database", "none",
        "--request-timeout", "30", "--continue-on-failure", "--no-color",
        # a request that limits its own time may well end with 504
        "--header", "x-sluice-timeout-s: 60",
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "120"},
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), 360)
    assert process.returncode == 0, said.decode()
    tested = re.search(r"Tested: +(\d+)", said.decode())
    assert tested and int(tested[1]) == sum(
        method != "parameters" for path in (await document(sim))["paths"].values() for method in path
    )
    assert await counted(sim, "200") > 10, "the fuzzer was refused everything"


async def document(made: Rig) -> Any:
    return (await made.client.get("/openapi.json")).json()


async def counted(made: Rig, code: str) -> float:
    labels = {"code": code, "model": MODEL}
    return sum(
        made.metric("sluice_requests_total", **labels, **{"class": one})
        for one in ("standard", "interactive")
    )


SHAPES: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/chat/completions", CHAT, answers.ChatCompletion),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}, answers.ChatCompletion),
    ("/v1/chat/completions", CHAT | {"stream": True}, answers.ChatCompletionChunk),
    ("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True}, answers.ChatCompletionChunk),
    ("/v1/completions", {"prompt": "a b", "logprobs": 2, "echo": True, "max_tokens": 3}, answers.Completion),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True, "max_tokens": 3}, answers.Completion),
]


@pytest.mark.parametrize(("path", "body", "shape"), SHAPES)
async def test_answers_have_the_documented_fields_and_no_others(
    sim: Rig, path: str, body: dict[str, Any], shape: Any
) -> None:
    """Validation drops what a shape does not name, so that an undocumented field makes a difference."""
    usage = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    answer = await sim.client.post(path, json=body | usage)
    said = events(answer.text) if body.get("stream") else [orjson.loads(answer.content)]
    assert said
    for one in said:
        assert TypeAdapter(shape).validate_python(one, strict=True) == one


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/models", answers.ModelList),
        (f"/v1/models/{MODEL}", answers.Model),
        ("/health/ready", answers.Ready),
        ("/health/live", answers.Live),
        ("/version", answers.Versions),
        ("/sluice/status", answers.Status),
        ("/sluice/admin/policy", answers.Policies),
        ("/nothing", answers.Error),
    ],
)
async def test_the_other_endpoints_too(sim: Rig, path: str, shape: Any) -> None:
    answer = orjson.loads((await sim.client.get(path)).content)
    assert TypeAdapter(shape).validate_python(answer, strict=True) == answer
