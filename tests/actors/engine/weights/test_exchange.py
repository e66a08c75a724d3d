"""Engines that read their weights from others over NIXL, and what is left of it when something goes wrong."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.engine.weights import lender as lending
from actors.engine.weights import reader as reading
from actors.engine.weights.checkpoint import Checkpoint
from actors.engine.weights.exchange import WeightsExchange
from actors.engine.weights.lender import Lender, Lot
from actors.engine.weights.pages import PagesAgent, PagesError
from actors.engine.weights.reader import FlowSettings
from actors.flow.agent import FlowAgent
from actors.wire.channel import Identity
from policies.flow.base import WEIGHTS_LEVEL
from policies.weights.tree import FAN_OUT
from tests.actors.engine.weights.rig import (
    PATIENCE_S,
    PIECE_BYTES,
    descriptors,
    exchange,
    landed,
    model,
    on_disk,
    wait,
)

RIG = Path(__file__).with_name("rig.py")
ROOT = Path(__file__).parents[4]

Make = Callable[..., WeightsExchange]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes exchanges that end with the test. Nothing of them may be left then."""
    made: list[WeightsExchange] = []
    before = descriptors()

    def start(name: str, folder: Path, *sources: Any, **options: Any) -> WeightsExchange:
        named = [source.addresses if isinstance(source, WeightsExchange) else source for source in sources]
        made.append(exchange(name, folder, f"unix:{tmp_path}/{name}.sock", *named, **options))
        return made[-1]

    yield start
    for one in made:
        one.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "sluice-weights"]
    assert not list(tmp_path.glob("*.sock"))
    assert [one._lender.registered for one in made] == [0] * len(made)
    assert descriptors() == before


def copy(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.parent / name))


def weightless(folder: Path, name: str) -> Path:
    """Returns a copy of a model's folder without its weights."""
    return Path(shutil.copytree(folder, folder.parent / name, ignore=shutil.ignore_patterns("*.safetensors")))


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# ----------------------------------------------------------------------------------------------------- from a peer


def test_weights_of_a_peer_are_those_on_disk(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    one = make("one", folder)
    two = make("two", copy(folder, "n"), one)
    assert landed(two) == (on_disk(folder), True)
    wait(lambda: two.read.source == "peer", "the read has ended")
    assert (two.read.bytes, two.read.peer, two.read.reason) == (size(folder), "one", "")
    assert one.lent_bytes == size(folder)
    assert one.read.source == "disk"
    wait(lambda: not one._lender.readers, "the reader has left")
    assert one._lender.registered == 0


def test_an_engine_that_has_read_its_weights_lends_its_own_files(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    one = make("one", folder)
    two = make("two", copy(folder, "n"), one)
    landed(two)
    two.loaded()
    wait(lambda: not two.landing._descriptors, "the landing is given back")
    one.stop()
    three = make("three", copy(folder, "o"), two)
    assert landed(three) == (on_disk(folder), True)
    assert two.lent_bytes == size(folder)


def test_a_node_without_files_gets_them_from_a_peer(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    one = make("one", folder)
    two = make("two", weightless(folder, "n"), one)
    assert landed(two) == (on_disk(folder), True)
    # it lends what it has until its engine has loaded it
    three = make("three", weightless(folder, "o"), two)
    assert landed(three) == (on_disk(folder), True)
    two.loaded()
    wait(lambda: not two.landing._descriptors, "the landing is given back")
    four = make("four", copy(folder, "p"), two)
    assert landed(four) == ({}, False)
    wait(lambda: "lends none" in four.read.reason, "it is refused")


def there(one: WeightsExchange) -> int:
    """Returns how many pieces an engine has."""
    return int(one.landing._word[0]) % 2**40


class Source:
    """A lender that has as much of a checkpoint as the test says."""

    def __init__(self, folder: Path, address: str) -> None:
        checkpoint = Checkpoint(folder, PIECE_BYTES)
        self.lot = Lot(checkpoint, checkpoint.fingerprint, checkpoint.config)
        self.pieces = checkpoint.layout.pieces
        self.lender = Lender(Identity("engine", "source"), "")
        self._address = address

    async def start(self) -> None:
        await self.lender.start((self._address,))
        self.lender.lend(self.lot, 1)

    async def have(self, pieces: int, readers: Sequence[WeightsExchange]) -> None:
        """Has the first `pieces`, and waits until all readers have them."""
        self.lender.lend(self.lot, pieces)
        async with asyncio.timeout(PATIENCE_S):
            while min(map(there, readers)) < pieces:
                await asyncio.sleep(0.01)
        assert {there(one) for one in readers} == {pieces}


async def test_pieces_are_passed_on_as_they_come(tmp_path: Path) -> None:
    """The last of a chain has the first piece while the source has no second one."""
    folder = model(tmp_path / "m")
    source = Source(folder, f"unix:{tmp_path}/source.sock")
    await source.start()
    middle = exchange("middle", weightless(folder, "n"), f"unix:{tmp_path}/m.sock", source.lender.addresses)
    last = exchange("last", weightless(folder, "o"), f"unix:{tmp_path}/l.sock", middle.addresses)
    for pieces in (1, 2, source.pieces):
        await source.have(pieces, (middle, last))
    assert source.lender.lent_bytes == middle.lent_bytes == size(folder)
    for one in (last, middle):
        await asyncio.to_thread(one.stop)
    await source.lender.stop()


async def test_readers_beyond_the_fan_out_read_from_readers(tmp_path: Path) -> None:
    """Six engines that start at once, and know one source, form a tree of two levels."""
    folder = model(tmp_path / "m")
    source = Source(folder, f"unix:{tmp_path}/source.sock")
    await source.start()
    readers = [
        exchange(f"n{i}", copy(folder, f"n{i}"), f"unix:{tmp_path}/{i}.sock", source.lender.addresses)
        for i in range(6)
    ]
    await source.have(1, readers)
    assert source.lender.readers == FAN_OUT
    assert sorted(one._lender.readers for one in readers) == [0, 0, 0, 0, 2, 2]
    await source.have(source.pieces, readers)
    for one in readers:
        assert await asyncio.to_thread(landed, one) == (on_disk(folder), True)
    assert source.lender.lent_bytes == FAN_OUT * size(folder)
    assert sum(one.lent_bytes for one in readers) == 4 * size(folder)
    for one in readers:
        await asyncio.to_thread(one.stop)
    await source.lender.stop()


def test_reads_are_flows_of_the_lowest_level(make: Make, tmp_path: Path) -> None:
    """With the node's flow agent, every chunk of the weights has a permit."""
    address, stop, started = f"unix:{tmp_path}/agent.sock", threading.Event(), threading.Event()
    totals: dict[str, float] = {}

    async def serve() -> None:
        agent = FlowAgent(Identity("agent", "agent"), "here", {"here", "there"})
        await agent.start([address])
        started.set()
        await asyncio.to_thread(stop.wait)
        totals.update(agent.desk.totals)
        await agent.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        folder = model(tmp_path / "m")
        one = make("one", folder, flow=FlowSettings("", "there"))
        # patient, because this machine's cores may be busy
        two = make("two", copy(folder, "n"), one, flow=FlowSettings(address, "here", 5.0))
        assert landed(two) == (on_disk(folder), True)
        wait(lambda: two.read.source == "peer", "the read has ended")
    finally:
        stop.set()
        thread.join()
    assert totals[f"bytes_level_{WEIGHTS_LEVEL}"] == size(folder)
    assert totals["moved_bytes"] == size(folder)


# ---------------------------------------------------------------------------------------------------------- to disk


def nothing_came(one: WeightsExchange, why: str) -> None:
    assert landed(one) == ({}, False)
    wait(lambda: why in one.read.reason, one.read.reason)
    assert one.read.source == "disk"


def test_without_a_source_the_loader_goes_to_the_disk_at_once(make: Make, tmp_path: Path) -> None:
    nothing_came(make("one", model(tmp_path / "m")), "no engine is known")


def test_another_checkpoint_of_the_same_shapes_is_refused(make: Make, tmp_path: Path) -> None:
    one = make("one", model(tmp_path / "m"))
    nothing_came(make("two", model(tmp_path / "n", seed=1), one), "another checkpoint")


def test_a_node_without_files_takes_no_other_model(make: Make, tmp_path: Path) -> None:
    one = make("one", model(tmp_path / "m"))
    other = weightless(model(tmp_path / "n", rows=200), "o")
    nothing_came(make("two", other, one), "config.json")


@pytest.mark.parametrize("secret", [None, b"another"])
def test_a_reader_must_know_the_secret(make: Make, tmp_path: Path, secret: bytes | None) -> None:
    folder = model(tmp_path / "m")
    one = make("one", folder, secret=b"secret")
    two = make("two", copy(folder, "n"), one, secret=secret)
    assert landed(two, 60.0) == ({}, False)
    assert one.lent_bytes == 0
    three = make("three", copy(folder, "o"), one, secret=b"secret")
    assert landed(three) == (on_disk(folder), True)


def test_a_source_that_is_not_there_is_not_waited_for(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    nothing_came(make("two", folder, (f"unix:{tmp_path}/none.sock",)), "no address answers")


def test_the_next_source_is_asked(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    one = make("one", folder)
    two = make("two", copy(folder, "n"), (f"unix:{tmp_path}/none.sock",), one)
    assert landed(two) == (on_disk(folder), True)


def test_a_source_that_says_nothing_is_given_up(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp:127.0.0.1:{silent.getsockname()[1]}"
        nothing_came(make("two", model(tmp_path / "m"), (address,)), "no connection within")


def test_a_lender_that_never_has_the_next_piece_is_given_up(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "OFFER_S", 0.5)
    monkeypatch.setattr(lending.Lender, "_serve", lambda self, reader: None)
    folder = model(tmp_path / "m")
    nothing_came(make("two", copy(folder, "n"), make("one", folder)), "did not answer within")


def test_a_piece_that_is_not_what_the_lender_hashed_is_not_used(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    one = make("one", folder)
    one._lender._digests[3] = b"x" * 16
    two = make("two", copy(folder, "n"), one)
    hashes, whole = landed(two)
    assert not whole
    known = on_disk(folder)
    assert hashes.items() < known.items()
    wait(lambda: "its hash differs" in two.read.reason, two.read.reason)
    assert two.read.bytes == 3 * PIECE_BYTES


def test_too_little_memory_leaves_the_weights_on_disk(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    folder = model(tmp_path / "m")
    free = psutil.virtual_memory()._replace(available=size(folder) - 1)
    one = make("one", folder)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    nothing_came(make("two", copy(folder, "n"), one), "of memory are needed")


def test_without_nixl_weights_come_from_disk(make: Make, tmp_path: Path) -> None:
    class Broken(PagesAgent):
        def __init__(self, name: str) -> None:
            raise PagesError("no NIXL here")

    folder = model(tmp_path / "m")
    nothing_came(make("two", copy(folder, "n"), make("one", folder), new_agent=Broken), "no NIXL here")
    nothing_came(make("four", copy(folder, "o"), make("three", folder, new_agent=Broken)), "no NIXL here")


@pytest.mark.parametrize("before", [(), ("one",)])
def test_an_address_that_is_taken_costs_the_exchange_and_not_the_start(
    tmp_path: Path, before: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = (
            *(f"unix:{tmp_path}/{name}" for name in before),
            f"tcp:127.0.0.1:{taken.getsockname()[1]}",
        )
        one = exchange("one", model(tmp_path / "m"), addresses)
        wait(lambda: one.addresses == (), "nobody is told of an address at which nobody listens")
        assert landed(one) == ({}, False)
        assert not (tmp_path / "one").exists()
        one.stop()


def test_files_that_have_changed_are_lent_no_more(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    one = make("one", folder)
    other = copy(folder, "n")
    wait(lambda: "no engine" in one.read.reason, "it has seen its files")
    (folder / "model-2.safetensors").touch()
    two = make("two", other, one)
    hashes, whole = landed(two)
    assert not whole
    assert hashes.keys() <= {"1.weight", "1.bias", "1.empty"}
    wait(lambda: "has changed" in two.read.reason, two.read.reason)


@contextlib.contextmanager
def lends_elsewhere(folder: Path, address: str) -> Iterator[subprocess.Popen[str]]:
    """A lender in a process of its own, which is reached over TCP as one on another machine would be."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_TLS": "tcp"}
    with subprocess.Popen(
        [sys.executable, str(RIG), str(folder), address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
    ) as lender:  # fmt: skip
        try:
            assert lender.stdout is not None
            assert lender.stdout.readline() == "lends\n"
            yield lender
        finally:
            lender.kill()


@pytest.mark.parametrize("other_source", [False, True])
def test_a_lender_that_dies_in_the_middle(make: Make, tmp_path: Path, other_source: bool) -> None:
    """The reader has what came, and the rest is another lender's, or is left to the disk soon after the death."""
    folder = model(tmp_path / "m", rows=8000)
    address = f"unix:{tmp_path}/lender"
    with lends_elsewhere(folder, address) as lender:
        sources = [(address,), make("spare", folder)] if other_source else [(address,)]
        two = make("two", copy(folder, "n"), *sources)
        wait(lambda: there(two) > 20, "pieces come")
        lender.kill()
        lender.wait()
        hashes, whole = landed(two)
    known = on_disk(folder)
    if other_source:
        assert (hashes, whole) == (known, True)
        wait(lambda: two.read.source == "peer", "the read has ended")
        assert two.read.peer == "spare"
        assert two.read.bytes == size(folder)
    else:
        assert not whole
        assert hashes.items() < known.items()
        wait(lambda: two.read.reason, "the reason is known")
        assert 0 < two.read.bytes < size(folder)


def test_a_reader_that_leaves_holds_nothing(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", rows=5000)
    one = make("one", folder)
    two = make("two", copy(folder, "n"), one)
    wait(lambda: one.lent_bytes, "pieces are lent")
    two.stop()
    wait(lambda: not one._lender.readers and not one._lender.registered, "nothing is held")
    three = make("three", copy(folder, "o"), one)
    assert landed(three) == (on_disk(folder), True)


@pytest.mark.nightly
def test_a_lender_that_stands_still_is_left_for_another_one(make: Make, tmp_path: Path) -> None:
    """Nobody can say whether its last read will still write, so the reader's agent stays until that has ended."""
    folder = model(tmp_path / "m", rows=8000)
    address = f"unix:{tmp_path}/lender"
    with lends_elsewhere(folder, address) as lender:
        two = make("two", weightless(folder, "n"), (address,), make("spare", folder))
        wait(lambda: there(two) > 20, "pieces come")
        lender.send_signal(signal.SIGSTOP)
        assert landed(two) == (on_disk(folder), True)
        wait(lambda: two.read.source == "peer", "the read has ended")
        assert two.read.peer == "spare"
        two.loaded()
        lender.kill()
        wait(lambda: not two.landing._descriptors, "the landing is given back")


def test_a_reader_ends_while_its_lender_stands_still(make: Make, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", rows=8000)
    address = f"unix:{tmp_path}/lender"
    with lends_elsewhere(folder, address) as lender:
        two = make("two", copy(folder, "n"), (address,))
        wait(lambda: there(two) > 20, "pieces come")
        lender.send_signal(signal.SIGSTOP)
        two.stop()
        # it has not only been waited for in vain
        assert not two._thread.is_alive()
