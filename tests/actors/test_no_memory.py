"""A process that gets no memory ends at once, with a text that says so."""

import subprocess
import sys

import pytest

from actors import no_memory

PROGRAM = """
import asyncio
from actors import no_memory

async def work():
    {work}

asyncio.run(no_memory.or_end(work()))
print("lives on")
"""


def run(work: str) -> "subprocess.CompletedProcess[str]":
    program = PROGRAM.format(work=work)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("work", ["raise MemoryError", "bytes(1 << 62)"])
def test_work_that_gets_no_memory_ends_the_process(work: str) -> None:
    ended = run(work)
    assert ended.returncode == no_memory.EXIT_STATUS
    assert "gets no memory" in ended.stderr and not ended.stdout


def test_work_that_gets_memory_ends_nothing() -> None:
    ended = run("bytes(1 << 20)")
    assert (ended.returncode, ended.stdout.strip()) == (0, "lives on")


def test_another_error_is_the_callers() -> None:
    ended = run("raise KeyError('x')")
    assert ended.returncode == 1 and "KeyError" in ended.stderr


CALLBACK = """
import asyncio
from actors import no_memory

async def main():
    no_memory.watch()
    asyncio.get_running_loop().call_soon({callback})
    await asyncio.sleep(0.1)

asyncio.run(main())
print("lives on")
"""


@pytest.mark.parametrize(
    ("callback", "status", "out"),
    [("bytes, 1 << 62", no_memory.EXIT_STATUS, ""), ("int, 'x'", 0, "lives on")],
)
def test_a_callback_that_gets_no_memory_ends_the_process(callback: str, status: int, out: str) -> None:
    program = CALLBACK.format(callback=callback)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (status, out)
    assert ("gets no memory" in ended.stderr) == bool(status) and ("ValueError" in ended.stderr) != bool(
        status
    )


STARVED = """
import asyncio, resource
from actors import no_memory

async def work():
    raise SystemError("error return without exception set")

def starve():
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
    taken, size = [], 1 << 20
    while size > 1 << 12:
        try:
            taken.append(bytearray(size))
        except MemoryError:
            size //= 2
    return taken

async def main():
    {before}
    {work}

asyncio.run(main())
"""
OR_END = "await no_memory.or_end(work())"
WATCHED = "no_memory.watch(); asyncio.create_task(work()); await asyncio.sleep(0.1)"


@pytest.mark.parametrize("work", [OR_END, WATCHED])
@pytest.mark.parametrize(("before", "ends"), [("taken = starve()", True), ("pass", False)])
def test_an_internal_error_ends_the_process_if_there_is_no_memory(work: str, before: str, ends: bool) -> None:
    program = STARVED.format(before=before, work=work)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode == no_memory.EXIT_STATUS) == ends, ended.stderr
    assert ("gets no memory" in ended.stderr) == ends
    assert ("SystemError" in ended.stderr) != ends
