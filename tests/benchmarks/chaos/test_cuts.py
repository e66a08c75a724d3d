"""A cut between two real processes: nothing passes, nobody hears of an end, and all of it arrives afterwards."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.cuts import Cuts, Guard, give_cuts
from tests.app.ingress.rig import until

OTHER = """
import asyncio, os, sys
from pathlib import Path
from benchmarks.chaos.cuts import Cuts

heard, ends = [], []

class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        heard.append(data.decode())
        self.transport.write(data)

    def connection_lost(self, exc):
        ends.append(self)

async def main(folder):
    cuts = Cuts(folder)
    cuts.guard()
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(Echo, str(folder / "other.sock"))
    print("listens", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        while line.startswith("off") != cuts.off(os.getppid()):
            await asyncio.sleep(0.01)
        print("".join(heard), len(ends), flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""


class Said(asyncio.Protocol):
    def __init__(self) -> None:
        self.heard = ""
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.heard += data.decode()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True


@contextlib.contextmanager
def other(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def ask(process: subprocess.Popen[str], state: str) -> list[str]:
    """Returns what the other process has heard and how many connections it saw end, once it is cut off or is not."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{state}\n")
    process.stdin.flush()
    return (await asyncio.to_thread(process.stdout.readline)).split()


async def connected(folder: Path) -> Said:
    loop = asyncio.get_running_loop()
    _, said = await loop.create_unix_connection(Said, str(folder / "other.sock"))
    assert isinstance(said, Said)
    return said


@pytest.mark.timeout(120)
async def test_nothing_passes_a_cut_and_everything_arrives_after_it(tmp_path: Path) -> None:
    with other(tmp_path) as process:
        cuts, pair = Cuts(tmp_path), (os.getpid(), process.pid)
        cuts.guard()
        first, second = await connected(tmp_path), await connected(tmp_path)
        first.transport.write(b"a")
        await until(lambda: first.heard == "a", "an echo")

        give_cuts(tmp_path, [pair])
        await until(lambda: cuts.off(process.pid), "the cut")
        assert await ask(process, "off") == ["a", "0"]
        first.transport.write(b"b")
        second.transport.abort()
        late = await connected(tmp_path)
        late.transport.write(b"c")
        await until(lambda: second.ended, "the end on this side")
        # a message that is not cut overtakes what is
        assert await ask(process, "off") == ["a", "0"]
        assert (first.transport.get_write_buffer_size(), first.heard, late.heard) == (1, "a", "")

        give_cuts(tmp_path, [])
        await until(lambda: first.heard == "ab" and late.heard == "c", "the rest")
        while (await ask(process, "on"))[1] != "1":
            pass

        give_cuts(tmp_path, [pair])
        await until(lambda: cuts.off(process.pid), "the second cut")
        process.kill()
        await asyncio.to_thread(process.wait)
        late.transport.write(b"d")
        assert not first.ended and not late.ended
        give_cuts(tmp_path, [])
        await until(lambda: first.ended and late.ended, "the end of the other process")


async def test_a_third_process_is_not_concerned(tmp_path: Path) -> None:
    with other(tmp_path) as process:
        cuts = Cuts(tmp_path)
        cuts.guard()
        give_cuts(tmp_path, [(process.pid, 1), (os.getpid(), 1)])
        await until(lambda: cuts.off(1), "the cut")
        said = await connected(tmp_path)
        said.transport.write(b"a")
        await until(lambda: said.heard == "a", "an echo")
        assert all(isinstance(guard, Guard) for guard in cuts.guards)
        said.transport.abort()
        await until(lambda: said.ended and not cuts.guards, "the end")
