"""A start that hangs: real child processes and threads, without vLLM."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from actors.engine.vllm import start_limit
from actors.engine.vllm.start_limit import StartTimeoutError, within

HANGS = "import time; time.sleep(600)"
DUMPS = f"from actors.engine.vllm import plugin; plugin.write_stacks_at_signal(); print('up', flush=True); {HANGS}"


def child(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


async def test_a_start_in_time_leaves_its_children() -> None:
    made = []

    async def start() -> None:
        made.append(child(HANGS))

    await within(60.0, start())
    try:
        assert psutil.Process(made[0].pid).is_running()
    finally:
        made[0].kill()
        made[0].communicate()


async def test_an_error_of_the_start_is_the_caller_s() -> None:
    async def start() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        await within(60.0, start())


async def test_a_hanging_start_writes_stacks_and_leaves_no_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start blocks in a thread until its child dies, then makes a second one, which is killed too."""
    older, made, thread, up = child(HANGS), [], ThreadPoolExecutor(1), threading.Event()
    # the child may have to wait for its turn to write
    monkeypatch.setattr(start_limit, "DUMP_S", 5.0)

    def blocks() -> None:
        first = child(DUMPS)
        made.append(first)
        assert first.stdout is not None
        assert first.stdout.readline() == b"up\n"
        up.set()
        first.wait()
        second = child(HANGS)
        made.append(second)
        second.wait()
        raise RuntimeError("Engine core initialization failed")

    async def start() -> None:
        ended = asyncio.get_running_loop().run_in_executor(thread, blocks)
        # the loop stands still until the child hangs, so the limit is over only afterwards
        assert up.wait(60)
        await ended

    try:
        with pytest.raises(StartTimeoutError, match="start_limit_s"):
            await within(1.0, start())
        thread.shutdown()
        assert [one.returncode for one in made] == [-9, -9]
        assert older.poll() is None
        written = capfd.readouterr().err
        assert "in blocks" in written  # this process's own stack
        assert 'File "<string>", line 1' in written  # the child's
    finally:
        for one in (older, *made):
            one.kill()
            one.communicate()


async def test_a_start_that_makes_no_process_and_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_limit, "END_S", 0.4)

    async def start() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StartTimeoutError):
        await within(0.1, start())
