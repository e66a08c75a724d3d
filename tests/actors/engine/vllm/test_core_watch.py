"""The watch over cores: pings, stalls and their end, a dead core, and real stopped processes that it kills.

The cores here answer pings when the test says so; tests/live/test_vllm_failures.py stops real ones.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from actors.engine.vllm import core_watch
from actors.engine.vllm.core_watch import CoreWatch
from actors.engine.watchdog import FIRST_STEPS, StallLimits
from tests.processes import ended, kill_all

STALL_S = 1.0
FAMILY = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"


class Cores:
    """The part of vLLM's AsyncLLM that the watch uses, with two cores."""

    def __init__(self) -> None:
        self.errored = False
        self.engine_core = self
        self.core_engines = [b"0", b"1"]
        self.answering = {b"0", b"1"}
        self.pinged: list[tuple[str, bytes]] = []
        self.resources: Any = SimpleNamespace(engine_manager=SimpleNamespace(processes=[]))

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> bool:
        self.pinged.append((method, engine))
        while engine not in self.answering:
            await asyncio.sleep(0.01)
        return False


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Cores, CoreWatch]]:
    monkeypatch.setattr(core_watch, "TICK_S", 0.02)
    monkeypatch.setattr(core_watch, "PING_S", 0.1)
    cores = Cores()
    watch = CoreWatch(cores, StallLimits(STALL_S))  # type: ignore[arg-type]
    for _ in range(FIRST_STEPS):
        watch.step(0)
        watch.step(1)
    watch.start()
    yield cores, watch
    watch.stop()


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A process with a child, both stopped."""
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    tree = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
    assert len(tree) == 2
    for process in tree:
        process.suspend()
    yield parent, tree
    kill_all(tree)
    parent.wait(60)
    parent.stdout.close()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


async def test_idle_cores_that_answer_are_ready(watched: tuple[Cores, CoreWatch]) -> None:
    cores, watch = watched
    await until(lambda: len(cores.pinged) >= 20)
    assert {engine for _, engine in cores.pinged} == {b"0", b"1"}
    assert (watch.state, watch.stalls) == ("ready", 0)
    watch.check()


async def test_one_core_that_stands_still_stalls_the_engine_until_it_answers(
    watched: tuple[Cores, CoreWatch],
) -> None:
    cores, watch = watched
    cores.answering = {b"0"}
    await until(lambda: watch.state == "stalled")
    # One ping is under way; a core that stands still is not sent more of them.
    assert len([engine for _, engine in cores.pinged if engine == b"1"]) <= 2
    cores.answering = {b"0", b"1"}
    await until(lambda: watch.state == "ready")
    assert watch.stalls == 1


async def test_a_dead_core_is_down_at_once(watched: tuple[Cores, CoreWatch]) -> None:
    cores, watch = watched
    cores.errored = True
    assert watch.state == "down"


async def test_a_lost_core_is_killed_with_its_workers_although_they_are_stopped(
    watched: tuple[Cores, CoreWatch], family: tuple[subprocess.Popen[bytes], list[psutil.Process]]
) -> None:
    (cores, watch), (core, tree) = watched, family
    cores.resources.engine_manager.processes.append(core)
    cores.answering = {b"0"}
    await until(lambda: watch.state == "down")
    with pytest.raises(RuntimeError, match="engine core 1 has given no sign of life"):
        watch.check()
    await until(lambda: all(ended(process.pid) for process in tree))
    # A sign of life that comes too late changes nothing.
    watch.step(1)
    assert watch.state == "down"
