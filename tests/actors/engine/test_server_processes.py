"""Engines in processes of their own (`actors.engine.host`): transfers between them, and the death of either side."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.wire.messages import EngineInfo, Failed, PrefillDone, Reading
from tests.actors.engine.rig import WAIT_S, Client, Rig, until
from tests.processes import ended

PROMPT = list(range(10, 60))
LEASE_S = 8.0


class Host:
    """One `python -m actors.engine.host`."""

    def __init__(self, directory: Path, role: str, **config: Any) -> None:
        self.address = f"unix:{directory}/{role}.sock"
        command = [
            sys.executable, "-m", "actors.engine.host", "--kind", "sim", "--role", role, "--id", role,
            "--listen", self.address, "--config", json.dumps(config),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"ready "), line
        self.info = msgspec.json.decode(line[6:], type=EngineInfo)

    async def client(self) -> Client:
        client = Client()
        await client.connect((self.address,))
        return client

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Any]:
    started: list[Host] = []

    def start(role: str, **config: Any) -> Host:
        started.append(Host(tmp_path, role, **config))
        return started[-1]

    yield start
    for host in started:
        host.end()


async def test_split_over_two_processes_and_a_clean_end(hosts: Any, tmp_path: Path) -> None:
    p, d = hosts("prefill"), hosts("decode")
    assert (p.info.id, p.info.role, p.info.pid) == ("prefill", "prefill", p.process.pid)
    assert p.info.group == d.info.group
    to_p, to_d = await p.client(), await d.client()
    for i in range(50):
        to_p.prefill(f"r{i}", [i, *PROMPT])
    for i in range(50):
        done = await to_p.wait(f"r{i}", PrefillDone)
        to_d.decode(f"r{i}", [i, *PROMPT], done.handle)
    for i in range(50):
        assert await to_d.text(f"r{i}")
    for host in (p, d):
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(timeout=WAIT_S) == 0
    assert os.listdir(tmp_path) == []  # the sockets are gone


async def test_kill_of_the_prefill_engine_fails_its_pulls_only(hosts: Any, tmp_path: Path) -> None:
    p = hosts("prefill")
    async with Rig(tmp_path) as rig:
        d = await rig.node(SimEngine(SimEngineConfig("d", "decode", hold_transfers_s=30.0)), "d")
        to_p = await p.client()
        d.client.decode("local", PROMPT, max_tokens=200)
        for i in range(10):
            to_p.prefill(f"r{i}", [i, *PROMPT])
            done = await to_p.wait(f"r{i}", PrefillDone)
            d.client.decode(f"r{i}", [i, *PROMPT], done.handle)
        await until(lambda: len(d.engine._reads) == 10, "transfers")  # type: ignore[attr-defined]
        d.client.cancel("r9")
        await until(lambda: "r9" not in d.engine._decodes, "cancel")  # type: ignore[attr-defined]
        p.process.kill()
        for i in range(9):
            failed = await d.client.wait(f"r{i}", Failed)
            assert (failed.code, failed.retryable) == ("kv_load", True)
        assert await d.client.text("local")
        await d.rests()
        assert {type(message) for message in d.client.of("r9")} <= {Reading}


async def test_kill_of_the_decode_engine_frees_the_prefill_side(hosts: Any, tmp_path: Path) -> None:
    d = hosts("decode", hold_transfers_s=60.0)
    async with Rig(tmp_path) as rig:
        p = await rig.node(SimEngine(SimEngineConfig("p", "prefill", lease_s=LEASE_S)), "p")
        to_d = await d.client()
        for i in range(10):
            done = await p.prefilled(f"r{i}", [i, *PROMPT])
            to_d.decode(f"r{i}", [i, *PROMPT], done.handle)
        reads = p.engine._leases._reads  # type: ignore[attr-defined]
        await until(lambda: sum(map(len, reads.values())) == 10, "reads")
        await asyncio.sleep(LEASE_S)
        assert p.engine.status().leases == 10  # past their time, but read
        d.process.kill()
        await p.rests()


async def test_unreachable_prefill_engine(hosts: Any, tmp_path: Path) -> None:
    p = hosts("prefill")
    to_p = await p.client()
    to_p.prefill("r", PROMPT)
    done = await to_p.wait("r", PrefillDone)
    p.process.kill()
    p.process.wait()
    async with Rig(tmp_path) as rig:
        d = await rig.node(SimEngine(SimEngineConfig("d", "decode")), "d")
        d.client.decode("r", PROMPT, done.handle)
        failed = await d.client.wait("r", Failed)
        assert failed.code == "kv_load"
        assert "prefill" in failed.message
        d.client.decode("again", PROMPT, done.handle)
        await d.client.wait("again", Failed)
        await d.rests()


def test_the_host_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, os\n"
        "p = subprocess.Popen([sys.executable, '-m', 'actors.engine.host', '--listen',"
        f" 'unix:{tmp_path}/h.sock'], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\n"
        "print(p.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    pid = int(done.stdout)
    end_s = time.monotonic() + WAIT_S
    while not ended(pid):
        assert time.monotonic() < end_s, "the host outlived its parent"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("config", "named"),
    [('{"slot": 3}', "slots"), ('{"slots": "many"}', "slots"), ("[]", "JSON object"), ("{", "line 1"),
     ('{"kv_blocks": 1}', "kv_blocks")],
)  # fmt: skip
def test_bad_options_are_named(config: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    from actors.engine.host import main

    assert main(["--listen", "unix:/nowhere/x.sock", "--config", config]) == 2
    assert named in capsys.readouterr().err
