"""Leases and attribution over two real NIXL agents in this process."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
nixl = pytest.importorskip("nixl._api", reason="NIXL is not installed; `make setup` installs it")

from actors.engine.vllm.connector.transfer import (  # noqa: E402
    BACK_OFF_S,
    CPU_DELAY_US,
    GenerationProbe,
    GenerationTable,
    Source,
    TransferAgent,
    napping_progress,
)


class Pair:
    """A lender with a lease table and some data, and a borrower that knows it."""

    def __init__(self) -> None:
        configuration = nixl.nixl_agent_config(num_threads=1, capture_telemetry=True)
        with napping_progress(CPU_DELAY_US):
            self.lender = nixl.nixl_agent("lender", configuration)
            self.borrower = TransferAgent(nixl.nixl_agent("borrower", configuration))
        self.table = GenerationTable(self.lender, ["UCX"])
        self.probe = GenerationProbe(self.borrower, ["UCX"])
        self.data, self.copy = np.arange(1024, dtype=np.uint64), np.zeros(1024, dtype=np.uint64)
        self.kept = [self.lender.register_memory(self.data_region(self.data), "DRAM")]
        self.kept.append(self.borrower.register_memory(self.data_region(self.copy), "DRAM"))
        self.source = Source(self.borrower.add_remote_agent(self.lender.get_agent_metadata()), (0, 0))

    @staticmethod
    def data_region(array: Any) -> list[tuple[int, int, int, str]]:
        return [(array.ctypes.data, array.nbytes, 0, "")]

    def read(self, notification: bytes, indices: tuple[int, int] = (0, 1)) -> Any:
        """A prepared read of the first two 512-byte pieces of the lender's data, as vLLM makes them."""
        pieces = [(self.data.ctypes.data + i * 512, 512, 0) for i in range(2)]
        mine = [(self.copy.ctypes.data + i * 512, 512, 0) for i in range(2)]
        local = self.borrower.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM")
        remote = self.borrower.prep_xfer_dlist(self.source.agent, pieces, "DRAM")
        self.kept += [local, remote]
        return self.borrower.make_prepped_xfer(
            "READ", local, list(indices), remote, list(indices), notif_msg=notification
        )

    def finish(self, handle: Any) -> None:
        state = self.borrower.transfer(handle)
        for _ in range(2000):
            if state != "PROC":
                break
            time.sleep(0.001)
            state = self.borrower.check_xfer_state(handle)
        assert state == "DONE"

    def notifications(self) -> list[bytes]:
        return [message for messages in self.lender.get_new_notifs().values() for message in messages]


def holds(pair: Pair, slot: int, generation: int) -> bool:
    """Reads a generation to the end of the read."""
    probe = pair.probe.post(pair.source, pair.table.address, slot, generation, 0.0)
    pair.probe.wait([probe], limit_s=30.0)
    assert probe.valid is not None
    return probe.valid


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def test_a_lease_holds_from_open_to_close(pair: Pair) -> None:
    pair.table.open("a", 7, 1001)
    assert holds(pair, 7, 1001)
    assert not holds(pair, 7, 1000)
    assert not holds(pair, 8, 1001)
    pair.table.close("a")
    pair.table.close("a")
    assert not holds(pair, 7, 1001)


def test_a_slot_that_is_lent_anew_does_not_serve_the_old_lease(pair: Pair) -> None:
    pair.table.open("old", 3, 5)
    pair.table.close("old")
    pair.table.open("new", 3, 6)
    assert not holds(pair, 3, 5)
    assert holds(pair, 3, 6)
    pair.table.close("old")
    assert holds(pair, 3, 6)
    pair.table.close("new")


def test_a_read_of_a_request_is_accounted_and_its_message_held_back(pair: Pair) -> None:
    pair.copy[:] = 0
    pair.borrower.begin("r")
    handle = pair.read(b"done:1")
    assert pair.borrower.end() == (1, b"done:1")
    pair.finish(handle)
    assert (pair.copy[:128] == pair.data[:128]).all()
    pair.borrower.get_xfer_telemetry(handle)
    facts = pair.borrower.facts.pop("r")
    assert facts.bytes == 1024
    assert facts.descriptors >= 1
    pair.borrower.release_xfer_handle(handle)
    assert pair.notifications() == []


def test_a_read_of_descending_blocks_is_one_descriptor(pair: Pair) -> None:
    pair.copy[:] = 0
    pair.borrower.begin("down")
    handle = pair.read(b"", indices=(1, 0))
    pair.borrower.end()
    pair.finish(handle)
    pair.borrower.get_xfer_telemetry(handle)
    assert pair.borrower.facts.pop("down").descriptors == 1
    assert (pair.copy[:128] == pair.data[:128]).all()
    pair.borrower.release_xfer_handle(handle)


def test_a_read_of_nobody_keeps_its_message(pair: Pair) -> None:
    handle = pair.read(b"plain")
    pair.finish(handle)
    pair.borrower.get_xfer_telemetry(handle)
    pair.borrower.release_xfer_handle(handle)
    assert pair.borrower.facts == {}
    for _ in range(2000):
        if messages := pair.notifications():
            break
        time.sleep(0.001)
    assert messages == [b"plain"]


class Silent:
    """An agent whose lender answers when the test says so."""

    def __init__(self) -> None:
        self.state = "PROC"
        self.released: list[Any] = []
        self.posted = 0

    def register_memory(self, *args: Any, **kwargs: Any) -> None: ...
    def get_reg_descs(self, *args: Any) -> None: ...
    def get_xfer_descs(self, *args: Any) -> None: ...

    def initialize_xfer(self, *args: Any) -> str:
        self.posted += 1
        return f"handle {self.posted}"

    def transfer(self, handle: Any) -> str:
        return self.state

    def check_xfer_state(self, handle: Any) -> str:
        return self.state

    def release_xfer_handle(self, handle: Any) -> None:
        self.released.append(handle)


GONE, HERE = Source("gone", (0, 0)), Source("here", (0, 0))


def test_a_lender_that_never_answers_is_an_error_and_then_left_alone() -> None:
    """A second request fails at once; after the back-off the lender is asked again; others are asked all along."""
    agent = Silent()
    probe = GenerationProbe(agent, [], timeout_s=5.0)
    read = probe.post(GONE, 0, 0, 1, now_s=100.0)
    assert probe.poll(read, 105.0) is None
    with pytest.raises(TimeoutError, match="lease table of gone"):
        probe.poll(read, 105.1)
    with pytest.raises(TimeoutError, match="a moment ago"):
        probe.post(GONE, 0, 0, 1, now_s=105.2)
    probe.post(HERE, 0, 0, 1, now_s=105.2)
    probe.post(GONE, 0, 0, 1, now_s=105.1 + BACK_OFF_S)
    assert agent.posted == 3


def test_the_memory_of_an_overdue_read_is_not_used_until_the_read_has_ended() -> None:
    agent = Silent()
    probe = GenerationProbe(agent, [], timeout_s=5.0)
    read = probe.post(GONE, 0, 0, 1, now_s=0.0)
    with pytest.raises(TimeoutError):
        probe.poll(read, 6.0)
    probe.give_up(read)
    probe.sweep()
    assert (probe.overdue, agent.released) == (1, [])
    assert probe.post(HERE, 0, 0, 1, now_s=6.0).word != read.word
    agent.state = "DONE"
    probe.sweep()
    assert (probe.overdue, agent.released) == (0, ["handle 1"])
    # An answer, although it is late, ends the back-off.
    assert probe.post(GONE, 0, 0, 1, now_s=7.0).word == read.word


def test_waiting_for_a_silent_lender_is_bounded() -> None:
    agent = Silent()
    probe = GenerationProbe(agent, [])
    reads = [probe.post(GONE, 0, 0, 1, now_s=0.0) for _ in range(20)]
    started_s = time.process_time()
    probe.wait(reads, limit_s=0.01)
    # One bound for all reads of a step together, counted in this process's own time.
    assert time.process_time() - started_s < 0.2
    assert [read.valid for read in reads] == [None] * 20


def test_agents_get_the_delay_and_nixl_is_left_as_it_was() -> None:
    module = sys.modules[nixl.nixl_agent.__module__]
    bindings = module.nixlBind
    made: list[Any] = []
    stand_in = SimpleNamespace(nixlAgent=lambda name, config: made.append((name, config.pthrDelay)), other=5)
    module.nixlBind = stand_in
    try:
        with napping_progress(250):
            module.nixlBind.nixlAgent("a", SimpleNamespace(pthrDelay=0))
            assert module.nixlBind.other == 5
        assert module.nixlBind is stand_in
    finally:
        module.nixlBind = bindings
    assert made == [("a", 250)]
