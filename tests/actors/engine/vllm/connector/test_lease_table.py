"""The lease table over two real NIXL agents, and lenders that do not answer."""

import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
pytest.importorskip("nixl._api", reason="NIXL is not installed; `make setup` installs it")

from actors.engine.vllm.connector.lease_table import (
    BACK_OFF_S,
    PATIENCE,
    GenerationProbe,
    Probe,
    Source,
)
from tests.actors.engine.vllm.connector.pair import Pair, until


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def looked_up(pair: Pair, slot: int, generation: int) -> Probe:
    """A read of a lease's entry that has ended."""
    probe = pair.probe.post(pair.source, pair.table.address, slot, generation, time.monotonic())
    until(lambda: pair.probe.poll(probe, time.monotonic()) is not None)
    return probe


def holds(pair: Pair, slot: int, generation: int) -> bool | None:
    return looked_up(pair, slot, generation).valid


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


def test_an_entry_says_whether_the_checksums_of_this_lease_are_known(pair: Pair) -> None:
    pair.table.open("sums", 9, 50)
    assert (looked_up(pair, 9, 50).valid, looked_up(pair, 9, 50).summed) == (True, False)
    pair.table.summed("sums", 49)
    pair.table.summed("unknown", 50)
    assert not looked_up(pair, 9, 50).summed
    pair.table.summed("sums", 50)
    assert looked_up(pair, 9, 50).summed
    pair.table.close("sums")
    pair.table.open("next", 9, 51)
    assert (looked_up(pair, 9, 51).valid, looked_up(pair, 9, 51).summed) == (True, False)
    pair.table.close("next")


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


def test_a_table_behind_a_read_that_took_long_may_take_long_as_well() -> None:
    """The entry waits behind the bytes that were asked for before it. With 5 s fixed, a full link of unscheduled reads
    had KV refused that was good, and then that of everybody for the back-off.
    """
    probe = GenerationProbe(Silent(), [], timeout_s=5.0)
    read = probe.post(GONE, 0, 0, 1, now_s=100.0, read_s=12.0)
    assert probe.poll(read, 100.0 + 5.0 + PATIENCE * 12.0) is None
    with pytest.raises(TimeoutError, match=r"was not read in 29\.0 s"):
        probe.poll(read, 100.1 + 5.0 + PATIENCE * 12.0)


def test_a_lender_from_which_bytes_come_is_not_silent() -> None:
    """The reads before it end one after the other; the entry is the last in the queue."""
    probe = GenerationProbe(Silent(), [], timeout_s=5.0)
    read = probe.post(GONE, 0, 0, 1, now_s=100.0)
    probe.heard(GONE.agent, 104.0)
    probe.heard(HERE.agent, 109.0)
    assert probe.poll(read, 108.9) is None
    with pytest.raises(TimeoutError, match="was not read"):
        probe.poll(read, 109.1)


def test_the_memory_of_an_overdue_read_is_not_used_until_the_read_has_ended() -> None:
    agent = Silent()
    probe = GenerationProbe(agent, [], timeout_s=5.0)
    read = probe.post(GONE, 0, 0, 1, now_s=0.0)
    with pytest.raises(TimeoutError):
        probe.poll(read, 6.0)
    probe.give_up(read)
    probe.sweep()
    assert (probe.overdue, agent.released) == (1, [])
    assert probe.post(HERE, 0, 0, 1, now_s=6.0).place != read.place
    agent.state = "DONE"
    probe.sweep()
    assert (probe.overdue, agent.released) == (0, ["handle 1"])
    # An answer, although it is late, ends the back-off.
    assert probe.post(GONE, 0, 0, 1, now_s=7.0).place == read.place
