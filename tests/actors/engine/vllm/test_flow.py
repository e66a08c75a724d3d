"""The thread that reads KV, over two real NIXL agents, with and without a real flow agent in a process of its own."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
pytest.importorskip("nixl._api", reason="NIXL is not installed; `make setup` installs it")

from actors.engine.vllm.connector.chunked_read import ChunkedRead
from actors.engine.vllm.connector.integrity import SAMPLE, SumsTable, chosen
from actors.engine.vllm.connector.read_check import CORRUPT, GIVEN_BACK
from actors.engine.vllm.flow import LONGEST_POLL_S, POLL_S, FlowThread, poll_pause_s
from actors.flow.chunks import CHUNK_BYTES
from actors.flow.client import ReadsClient
from actors.flow.reader import Post, ReaderConfig
from tests.actors.engine.vllm.connector.pair import DESCRIPTORS, Pair, until
from tests.actors.engine.vllm.connector.test_chunked_read import Scripted, scripted
from tests.actors.flow.narrow import NarrowAgent, Occupant


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
    assert read.level is None
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


class Recorded(ReadsClient):
    """A client that keeps the order of its calls."""

    def __init__(self) -> None:
        super().__init__("", "here", "w")
        self.calls: list[Any] = []

    def wait(self, timeout_s: float, *also: int) -> None:
        self.calls.append("wait")
        super().wait(timeout_s, *also)

    def step(self) -> list[Any]:
        self.calls.append("step")
        return super().step()

    def advanced(self, flow_id: str, rli: int) -> None:
        self.calls.append((flow_id, rli))
        super().advanced(flow_id, rli)

    def chunk_done(self, post: Post, seconds: float | None) -> list[Any]:
        self.calls.append(("done", seconds is not None))
        return super().chunk_done(post, seconds)


class Stuck(Scripted):
    """An agent whose transfers stay in flight until the test ends them, and which counts how often it is asked."""

    polls = 0

    def check_xfer_state(self, handle: str) -> str:
        self.polls += 1
        return super().check_xfer_state(handle)


@pytest.mark.parametrize(("state", "arrived"), [("DONE", True), ("ERR", False)])
def test_what_has_ended_is_reported_before_the_agent_is_heard(pair: Pair, state: str, arrived: bool) -> None:
    nixl, client = Stuck(), Recorded()
    thread = FlowThread(pair.checks, client, "w", scheduled=False)
    read = scripted(nixl, 1)
    thread.submit(read)
    until(lambda: nixl.polls)
    nixl.states["h0"] = state
    until(lambda: read.state == state)
    thread.stop()
    done = client.calls.index(("done", arrived))
    assert (client.calls[done - 1], client.calls[done + 1]) == ("wait", "step")


def test_a_read_that_is_stuck_is_polled_ever_more_rarely(pair: Pair) -> None:
    assert [poll_pause_s(quiet_s) for quiet_s in (0.0, 0.01, 0.1, 1.0, 500.0)] == pytest.approx(
        [POLL_S, POLL_S, 0.002, 0.02, LONGEST_POLL_S]
    )
    nixl = Stuck()
    thread = FlowThread(pair.checks, ReadsClient("", "here", "w"), "w", scheduled=False)
    read = scripted(nixl, 1)
    thread.submit(read)
    until(lambda: nixl.polls)
    time.sleep(1.2)
    began_s, before = time.monotonic(), nixl.polls
    time.sleep(1.0)
    polls = nixl.polls - before
    # every 20 ms, however long this thread has slept
    assert polls <= 60 * (time.monotonic() - began_s)
    nixl.states["h0"] = "DONE"
    until(lambda: read.state == "DONE")
    thread.stop()


def test_the_agent_hears_that_a_read_is_needed_sooner(pair: Pair) -> None:
    nixl, client = Stuck(), Recorded()
    thread = FlowThread(pair.checks, client, "w", scheduled=False)
    read = scripted(nixl, 1)
    thread.submit(read)
    thread.advance("unknown", 0)
    thread.advance(read.terms.request_id, 2)
    until(lambda: ("w/1", 2) in client.calls)
    nixl.states["h0"] = "DONE"
    until(lambda: read.state == "DONE")
    thread.stop()
    assert [call for call in client.calls if call[0] == "w/1"] == [("w/1", 2)]


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
    read = ended(checked, pair.read("sums", pair.lend("sums", sums=pair.sums)))
    assert (read.state, read.refused) == ("DONE", "")
    assert pair.same()


def test_a_reader_waits_until_the_lender_knows_its_checksums(pair: Pair, checked: FlowThread) -> None:
    lease = pair.lend("slow", sums=pair.sums)
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
    lease = pair.lend("flip", sums=pair.sums)
    until(lambda: int(pair.table._entries[lease.slot, 1]) == lease.generation)
    pair.data[17] ^= np.uint64(1)
    read = ended(checked, pair.read("flip", lease))
    assert read.state == "DONE"
    assert read.refused == f"{CORRUPT} in 1 of {DESCRIPTORS} descriptors"


def test_blocks_that_a_wrong_order_swaps_are_found(pair: Pair, checked: FlowThread) -> None:
    lease = pair.lend("swap", sums=pair.sums)
    read = pair.read("swap", lease)
    read.local.indices[[3, 9]] = 9, 3
    assert ended(checked, read).refused == f"{CORRUPT} in 2 of {DESCRIPTORS} descriptors"


def test_a_sample_finds_what_it_has_chosen_and_no_more(pair: Pair, checked: FlowThread) -> None:
    """Lender and reader both have one checksum in 16."""
    assert pair.checks.sums is not None
    pair.checks.sums.close()
    pair.checks.sums = SumsTable(pair.borrower.nixl, ["UCX"], pair.mine, share=SAMPLE)
    for found in (True, False):
        lease = pair.lend("sample", sums=pair.sampled)
        until(lambda at=lease: int(pair.table._entries[at.slot, 1]) == at.generation)
        picked = chosen(np.arange(DESCRIPTORS), lease.generation, SAMPLE)
        victim = int(np.flatnonzero(picked == found)[0])
        pair.data[victim * pair.block_bytes // 8] ^= np.uint64(1)
        read = ended(checked, pair.read("sample", lease))
        expected = f"{CORRUPT} in 1 of {picked.sum()} descriptors" if found else ""
        assert (read.state, read.refused) == ("DONE", expected)


def test_a_lender_of_another_layout_is_not_compared(pair: Pair, checked: FlowThread) -> None:
    """The remote descriptors are then parts of the lender's, whose checksums say nothing of them."""
    lease = pair.lend("layout", sums=pair.sums)
    read = pair.read("layout", lease)
    object.__setattr__(read.remote, "extent", (DESCRIPTORS, 1))
    pair.data[17] ^= np.uint64(1)
    assert ended(checked, read).refused == ""


# ------------------------------------------------------------------------------------------------- with an agent


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NarrowAgent]:
    """The flow agent of node `here`. At each port it posts one chunk at a time."""
    node = NarrowAgent(tmp_path / "flow.sock", "here", "there")
    yield node
    node.kill()


def scheduled(pair: Pair, node: NarrowAgent, config: ReaderConfig) -> Iterator[FlowThread]:
    pair.forget()
    client = ReadsClient(node.address, "here", "w", config=config)
    thread = FlowThread(pair.checks, client, "w", scheduled=True)
    until(lambda: client.connected)
    yield thread
    thread.stop()


@pytest.fixture
def by_permit(pair: Pair, node: NarrowAgent) -> Iterator[FlowThread]:
    """A thread whose reads wait for the agent's permits."""
    yield from scheduled(pair, node, ReaderConfig())


@pytest.fixture
def by_permit_for_long(pair: Pair, node: NarrowAgent) -> Iterator[FlowThread]:
    """A thread by permits that does without a silent or lost agent after three seconds; a living one speaks earlier,
    also on a busy machine.
    """
    yield from scheduled(pair, node, ReaderConfig(silent_s=3.0))


@pytest.fixture
def patient(pair: Pair, node: NarrowAgent) -> Iterator[FlowThread]:
    """A thread by permits that waits long for a silent agent, which on a busy machine may only wait for its turn."""
    yield from scheduled(pair, node, ReaderConfig(silent_s=30.0))


def test_a_read_goes_by_permits_chunk_by_chunk(pair: Pair, node: NarrowAgent, patient: FlowThread) -> None:
    other = Occupant(node)
    read = pair.read("r", pair.lend("r"), due_s=30.0)
    patient.submit(read)
    other.stays(0.3)
    assert (read.state, read.read_bytes, read.in_flight) == ("PROC", 0, [])
    assert not pair.copy.any()
    (held,) = patient._client.reader._reads.values()
    assert held.flow.engines == f"{pair.source.agent}>w"
    other.done()
    until(lambda: other.client.step() or read.state == "DONE")
    assert (read.refused, read.unscheduled) == ("", "")
    assert read.level is not None and read.level >= 1
    assert read.chunks == read.bytes // CHUNK_BYTES
    assert pair.same()
    assert read.held_s(time.monotonic()) > 0.2


def test_a_dead_agents_reads_are_posted_without_permits(
    pair: Pair, node: NarrowAgent, by_permit_for_long: FlowThread
) -> None:
    other = Occupant(node)
    read = pair.read("r", pair.lend("r"), due_s=30.0)
    by_permit_for_long.submit(read)
    other.stays(0.1)
    assert read.state == "PROC"
    node.process.kill()
    until(lambda: read.state == "DONE")
    assert (read.refused, read.unscheduled) == ("", "agent_lost")
    assert pair.same()


def test_a_silent_agents_reads_are_posted_and_it_schedules_again_when_it_speaks(
    pair: Pair, node: NarrowAgent, by_permit: FlowThread
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


def test_a_hold_has_a_bound(pair: Pair, node: NarrowAgent, patient: FlowThread) -> None:
    other = Occupant(node)
    read = pair.read("r", hold_s=0.1)
    patient.submit(read)
    until(lambda: other.client.step() or read.state == "DONE")
    assert read.unscheduled == "bound"
    assert pair.same()


def test_a_held_read_that_is_aborted_is_never_posted(
    pair: Pair, node: NarrowAgent, patient: FlowThread
) -> None:
    other = Occupant(node)
    read, bystander = pair.read("gone"), pair.read("stays")
    patient.submit(read)
    patient.submit(bystander)
    other.stays(0.05)
    patient.abort("gone")
    until(lambda: other.client.step() or read.state == "DONE")
    assert (read.read_bytes, read.telemetry()) == (0, None)
    assert not pair.copy.any()
    assert bystander.state == "PROC"
    other.done()
    until(lambda: other.client.step() or bystander.state == "DONE")
    assert bystander.unscheduled == ""
    assert pair.same()


def test_an_agent_that_starts_again_is_used_again(
    pair: Pair, node: NarrowAgent, by_permit: FlowThread
) -> None:
    node.process.kill()
    node.process.wait()
    assert ended(by_permit, pair.read("without", due_s=30.0)).unscheduled in ("agent_lost", "no_agent")
    node.process = node.start()
    until(lambda: ended(by_permit, pair.read("with", due_s=30.0)).unscheduled == "")
