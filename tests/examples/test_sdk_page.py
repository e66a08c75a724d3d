"""Every block of Python and every command of docs/sdk.md runs as it stands, against an application on sim engines."""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.app.dashboard.parts import ADMIN as DASHBOARD_KEY
from tests.app.dashboard.parts import dashboard
from tests.app.ingress.rig import ADMIN_KEY, Rig, until
from tests.examples.test_examples import application, url_of

__all__ = ["application"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sdk.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for line in re.findall(r"^sluice .*$", PAGE, re.MULTILINE) if "..." not in line]
OF_AUTOSCALER = [line for line in COMMANDS if line.startswith("sluice scale")]


async def run(url: str, *arguments: str, **environment: str) -> str:
    """Standard output of Python with these arguments, which must end with status 0."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=ROOT,
        env={**os.environ, "SLUICE_BASE_URL": url, "SLUICE_ADMIN_KEY": ADMIN_KEY, "PYTHONPATH": str(ROOT)}
        | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_every_block_runs(application: Rig) -> None:
    assert len(PYTHON) == 7
    said = [await run(url_of(application), "-c", block) for block in PYTHON[:-1]]
    calls, stream, coroutines, errors, limits, administration = said
    assert "completion_tokens=32" in calls
    assert "length" in stream
    assert coroutines.count("'") >= 4
    assert errors.startswith("temperature ")
    assert limits.strip()
    assert "RoutePrefill" in administration and "RouteDecode" in administration


async def test_the_block_of_the_dashboard_runs(application: Rig, tmp_path: Path) -> None:
    assert "sluice.admin" in PYTHON[-1]
    async with dashboard(tmp_path, application.router) as board:
        await until(lambda: len(board.feed.ingresses) == 1, "an ingress")
        named = {"SLUICE_DASHBOARD_URL": board.url, "SLUICE_ADMIN_KEY": DASHBOARD_KEY}
        said = await run(url_of(application), "-c", PYTHON[-1], **named)
    assert "'netkv'" in said and "snapshot" in said


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(OF_AUTOSCALER)))
async def test_every_command_runs(application: Rig, command: str) -> None:
    assert (await run(url_of(application), "-m", "sluice.cli", *shlex.split(command)[1:])).strip()


async def test_scale_says_what_to_set_where_no_autoscaler_is(application: Rig) -> None:
    """The live test of scaling gives the same command to an application that has one."""
    [command] = OF_AUTOSCALER
    with pytest.raises(AssertionError, match=r"(?s)no_autoscaler.*set scaling\.enabled"):
        await run(url_of(application), "-m", "sluice.cli", *shlex.split(command)[1:])
