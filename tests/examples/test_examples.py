"""Every example runs as a reader would run it, against an application on sim engines; Ray alone is left out."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.graph import build
from app.serve import load
from tests.app.ingress.rig import Rig, rig, until
from tests.app.ingress.test_with_sim import Sim

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
async def application(tmp_path: Path) -> AsyncIterator[Rig]:
    """One prefill and one decode engine behind a router and an ingress."""
    engines = []
    async with rig(tmp_path, []) as made:
        for name, role in (("p", "prefill"), ("d", "decode")):
            engines.append(await Sim.start(made, tmp_path, name, role))
        await until(lambda: len(made.connections.engines()) == 2 and made.connections.ready() is None)
        yield made
        for engine in engines:
            await engine.stop()


async def run(script: str, url: str) -> str:
    """Standard output of `python examples/SCRIPT`, which must end with status 0."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / script),
        cwd=ROOT,
        env={**os.environ, "SLUICE_BASE_URL": url, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_chat(application: Rig) -> None:
    answer, tokens, engines = (await run("chat.py", url_of(application))).strip().splitlines()
    assert len(answer.split()) == 40
    assert tokens.endswith("40 generated")
    assert engines == "engines: p (prefill), d (decode)" or engines == "engines: d (decode), p (prefill)"


async def test_streaming(application: Rig) -> None:
    answer, time = (await run("streaming.py", url_of(application))).strip().splitlines()
    assert len(answer.split()) == 60
    assert time.startswith("first token after ")


async def test_async_client(application: Rig) -> None:
    lines = (await run("async_client.py", url_of(application))).strip().splitlines()
    cities = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Accra"]
    assert [line.split(":")[0] for line in lines] == cities
    assert all(len(line.split(":")[1].split()) == 16 for line in lines)


async def test_openai_client(application: Rig) -> None:
    answer, tokens = (await run("openai_client.py", url_of(application))).strip().splitlines()
    assert (len(answer.split()), tokens) == (40, "40 tokens")


def test_serve_config() -> None:
    schema = load(str(EXAMPLES / "serve.yaml"))
    assert ServeDeploySchema.model_validate(schema).applications[0].name == "sluice"
    build(schema["applications"][0]["args"])


def test_simulate_file(capsys: pytest.CaptureFixture[str]) -> None:
    from sluice.cli import main

    assert main(["simulate", str(EXAMPLES / "simulate.yaml")]) == 0
    names = [change["name"] for change in yaml.safe_load((EXAMPLES / "simulate.yaml").read_text())["what_if"]]
    head = next(line for line in capsys.readouterr().out.splitlines() if "base" in line)
    assert all(name in head for name in names)


def test_each_example_has_a_test_and_a_line_in_the_list() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    tested = {"chat.py", "streaming.py", "async_client.py", "openai_client.py", "serve.yaml", "simulate.yaml"}
    assert files == tested
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"]({name})" in listed for name in files)


def url_of(made: Rig) -> str:
    return str(made.client.base_url).rstrip("/")
