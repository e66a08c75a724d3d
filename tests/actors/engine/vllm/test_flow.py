"""The thread that reads KV, over two real NIXL agents, with and without a real flow agent in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
pytest.importorskip("nixl._api", reason="NIXL is not installed; `make setup` installs it")

from actors.engine.vllm.connector.chunked_read import ChunkedRead
from actors.engine.vllm.connector.integrity import SumsTable
from actors.engine.vllm.connector.read_check import CORRUPT, GIVEN_BACK
from actors.engine.vllm.flow import FlowThread
from actors.flow.client import ReadsClient
from actors.flow.reader import Post
from policies.flow.base import Flow, Stage
from tests.actors.engine.vllm.connector.pair import DESCRIPTORS, Pair, until

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture
def alone(pair: Pair) -> Iterator[FlowThread]:
    """A thread without a flow agent."""
    pair.forget()
    thread = FlowThread(pair.checks, ReadsClient("", "here", "w"), "w", scheduled=False)
    yield thread
    thread.stop()


def ended(thread: FlowThread, read: ChunkedRead) -> ChunkedRead:
    thread.submit(read)
    until(lambda: read.state != "PROC")
    return read


# ------------------------------------------------------------------------------------------------ without an agent


def test_a_read_is_one_chunk_posted_at_once_and_checked(pair: Pair, alone: FlowThread) -> None:
    read = ended(alone, pair.read("r", pair.lend("r")))
    assert (read.state, read.refused, read.unscheduled, read.chunks) == ("DONE", "", "", 1)
    assert pair.same()
    read.release()
    pair.table.close("r")


def test_a_read_without_a_known_lease_is_not_checked(pair: Pair, alone: FlowThread) -> None:
    assert ended(alone, pair.read("plain")).refused == ""
    assert pair.same()


def test_kv_whose_generation_differs_is_refused(pair: Pair, alone: FlowThread) -> None:
    lease = pair.lend("old")
    pair.lend("new")  # the same slot
    read = ended(alone, pair.read("old", lease))
    assert (read.state, read.refused) == ("DONE", GIVEN_BACK)
    pair.table.close("new")


def test_descriptors_that_nixl_does_not_know_fail_the_read(pair: Pair, alone: FlowThread) -> None:
    read = pair.read("bad")
    read.remote.indices[-1] = 10 * DESCRIPTORS
    assert ended(alone, read).state == "ERR"
    read.release()


def test_a_stopped_thread_fails_what_it_is_given(pair: Pair) -> None:
    thread = FlowThread(pair.checks, ReadsClient("", "here", "w"), "w", scheduled=False)
    thread.stop()
    read = pair.read("late")
    thread.submit(read)
    assert read.state == "ERR"


# ------------------------------------------------------------------------------------------------------- integrity


@pytest.fixture
def checked(pair: Pair, alone: FlowThread) -> Iterator[FlowThread]:
    """A thread that compares all checksums."""
    before = pair.data.copy()
    pair.checks.sums = SumsTable(pair.borrower.nixl, ["UCX"], pair.mine, share=1)
    yield alone
    pair.checks.sums.close()
    pair.checks.sums = None
    pair.data[:] = before


def test_checksums_that_agree_pass(pair: Pair, checked: FlowThread) -> None:
    read = ended(checked, pair.read("sums", pair.lend("sums", sums=True)))
    assert (read.state, read.refused) == ("DONE", "")
    assert pair.same()


def test_a_reader_waits_until_the_lender_knows_its_checksums(pair: Pair, checked: FlowThread) -> None:
    lease = pair.lend("slow", sums=True)
    until(lambda: int(pair.table._entries[lease.slot, 1]) == lease.generation)
    pair.table._entries[lease.slot, 1] = 0
    read = pair.read("slow", lease)
    checked.submit(read)
    until(lambda: pair.same() and len(pair.checks))
    assert read.state == "PROC"
    pair.table.summed("slow", lease.generation)
    until(lambda: read.state == "DONE")
    assert read.refused == ""


def test_a_block_that_changes_after_its_checksum_is_found(pair: Pair, checked: FlowThread) -> None:
    lease = pair.lend("flip", sums=True)
    until(lambda: int(pair.table._entries[lease.slot, 1]) == lease.generation)
    pair.data[17] ^= np.uint64(1)
    read = ended(checked, pair.read("flip", lease))
    assert read.state == "DONE"
    assert read.refused == f"{CORRUPT} in 1 of {DESCRIPTORS} descriptors"


def test_blocks_that_a_wrong_order_swaps_are_found(pair: Pair, checked: FlowThread) -> None:
    lease = pair.lend("swap", sums=True)
    read = pair.read("swap", lease)
    read.local.indices[[3, 9]] = 9, 3
    assert ended(checked, read).refused == f"{CORRUPT} in 2 of {DESCRIPTORS} descriptors"


def test_a_lender_of_another_layout_is_not_compared(pair: Pair, checked: FlowThread) -> None:
    """The remote descriptors are then parts of the lender's, whose checksums say nothing of them."""
    lease = pair.lend("layout", sums=True)
    read = pair.read("layout", lease)
    object.__setattr__(read.remote, "extent", (DESCRIPTORS, 1))
    pair.data[17] ^= np.uint64(1)
    assert ended(checked, read).refused == ""


# ------------------------------------------------------------------------------------------------- with an agent


class Node:
    """A flow agent in a process of its own. At each port it posts one chunk at a time."""

    def __init__(self, directory: Path) -> None:
        self.address = f"unix:{directory / 'flow.sock'}"
        self.process = self.start()

    def start(self) -> "subprocess.Popen[str]":
        command = [
            sys.executable, "-m", "actors.flow.host", "--node", "here", "--knows", "there",
            "--listen", self.address, "--config", '{"arbiter": {"window": 1}}',
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        return process

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.stop()


@pytest.fixture
def by_permit(pair: Pair, node: Node) -> Iterator[FlowThread]:
    """A thread whose reads wait for the agent's permits."""
    pair.forget()
    client = ReadsClient(node.address, "here", "w")
    thread = FlowThread(pair.checks, client, "w", scheduled=True)
    until(lambda: client.connected)
    yield thread
    thread.stop()


class Occupant:
    """Another worker, whose read is in flight at the same ports until the test ends it."""

    def __init__(self, node: Node) -> None:
        self.client = ReadsClient(node.address, "here", "occupant")
        posts: list[Any] = []
        until(lambda: self.client.step() or self.client.connected)
        flow = Flow(
            flow_id="occupant/1", request_id="o", batch="o", stage=Stage.P2D,
            source="there", target="here", size=1000, due_s=60.0,
        )  # fmt: skip
        posts += self.client.submit(flow, [1000], 60.0)
        until(lambda: posts.extend(self.client.step()) or posts)
        (self.post,) = posts
        assert isinstance(self.post, Post)
        assert self.post.level is not None

    def done(self) -> None:
        self.client.chunk_done(self.post, 0.01)

    def stays(self, seconds: float) -> None:
        """Lets time pass."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.client.step()
            time.sleep(0.002)


def test_a_read_goes_by_permits_chunk_by_chunk(pair: Pair, node: Node, by_permit: FlowThread) -> None:
    other = Occupant(node)
    by_permit._bytes_per_s["there"] = pair.block_bytes * DESCRIPTORS / 8 / 0.010
    read = pair.read("r", pair.lend("r"), due_s=30.0)
    by_permit.submit(read)
    other.stays(0.3)
    assert (read.state, read.read_bytes, read.in_flight) == ("PROC", 0, [])
    assert not pair.copy.any()
    other.done()
    until(lambda: other.client.step() or read.state == "DONE")
    assert (read.refused, read.unscheduled) == ("", "")
    assert read.chunks == 8
    assert pair.same()
    assert read.held_s(time.monotonic()) > 0.2


def test_a_dead_agents_reads_are_posted_without_permits(
    pair: Pair, node: Node, by_permit: FlowThread
) -> None:
    other = Occupant(node)
    read = pair.read("r", pair.lend("r"), due_s=30.0)
    by_permit.submit(read)
    other.stays(0.1)
    assert read.state == "PROC"
    node.process.kill()
    until(lambda: read.state == "DONE")
    assert (read.refused, read.unscheduled) == ("", "agent_lost")
    assert pair.same()


def test_a_silent_agents_reads_are_posted_and_it_schedules_again_when_it_speaks(
    pair: Pair, node: Node, by_permit: FlowThread
) -> None:
    other = Occupant(node)
    node.process.send_signal(signal.SIGSTOP)
    read = ended(by_permit, pair.read("r", due_s=30.0))
    assert read.unscheduled == "silent"
    node.process.send_signal(signal.SIGCONT)
    other.done()

    def scheduled() -> bool:
        other.client.step()
        return ended(by_permit, pair.read("again", due_s=30.0)).unscheduled == ""

    until(scheduled)
    assert pair.same()


def test_a_hold_has_a_bound(pair: Pair, node: Node, by_permit: FlowThread) -> None:
    other = Occupant(node)
    read = pair.read("r", hold_s=0.1)
    by_permit.submit(read)
    until(lambda: other.client.step() or read.state == "DONE")
    assert read.unscheduled == "bound"
    assert pair.same()


def test_a_held_read_that_is_aborted_is_never_posted(pair: Pair, node: Node, by_permit: FlowThread) -> None:
    other = Occupant(node)
    read, bystander = pair.read("gone"), pair.read("stays")
    by_permit.submit(read)
    by_permit.submit(bystander)
    other.stays(0.05)
    by_permit.abort("gone")
    until(lambda: other.client.step() or read.state == "DONE")
    assert (read.read_bytes, read.telemetry()) == (0, None)
    assert not pair.copy.any()
    assert bystander.state == "PROC"
    other.done()
    until(lambda: other.client.step() or bystander.state == "DONE")
    assert bystander.unscheduled == ""
    assert pair.same()


def test_an_agent_that_starts_again_is_used_again(pair: Pair, node: Node, by_permit: FlowThread) -> None:
    node.process.kill()
    node.process.wait()
    assert ended(by_permit, pair.read("without", due_s=30.0)).unscheduled in ("agent_lost", "no_agent")
    node.process = node.start()
    until(lambda: ended(by_permit, pair.read("with", due_s=30.0)).unscheduled == "")
