"""The agent between vLLM and NIXL: attribution, held messages and facts, over two real NIXL agents in this process."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
nixl = pytest.importorskip("nixl._api", reason="NIXL is not installed; `make setup` installs it")

from actors.engine.vllm.connector.transfer import LOCAL, TransferAgent, tuned_agents  # noqa: E402
from tests.actors.engine.vllm.connector.pair import DESCRIPTORS, Pair, until  # noqa: E402


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def test_a_read_of_a_request_is_accounted_and_its_message_held_back(pair: Pair) -> None:
    pair.forget()
    given: list[Any] = []
    pair.borrower.submit = given.append
    read = pair.read("r", notification=b"done:1")
    assert pair.borrower.transfer(read) == "PROC"
    assert given == [read]
    read.divide(read.bytes / 2)
    for chunk in range(2):
        assert pair.borrower.check_xfer_state(read) == "PROC"
        read.post(chunk, 1, time.monotonic())
        until(lambda: read.poll(time.monotonic()))
    read.end(time.monotonic(), "for a reason")
    assert pair.borrower.check_xfer_state(read) == "DONE"
    assert pair.same()
    assert pair.borrower.get_xfer_telemetry(read).totalBytes == read.bytes
    pair.borrower.release_xfer_handle(read)
    facts = pair.borrower.facts.pop("r")
    assert facts.bytes == DESCRIPTORS * pair.block_bytes
    assert (facts.descriptors >= 2, facts.refused) == (True, "for a reason")
    assert pair.notifications() == []


def test_a_read_of_descending_blocks_is_one_descriptor(pair: Pair) -> None:
    pair.forget()
    read = pair.read("down", indices=np.array([1, 0], dtype=np.int32))
    read.post(0, 1, time.monotonic())
    until(lambda: read.poll(time.monotonic()))
    assert read.descriptors == 1
    assert pair.same([0, 1])
    read.end(time.monotonic())
    read.release()


def test_a_read_of_nobody_keeps_its_message(pair: Pair) -> None:
    pair.forget()
    indices = np.arange(2, dtype=np.int32)
    borrower = pair.borrower
    handle = borrower.make_prepped_xfer("READ", pair.local, indices, pair.remote, indices, notif_msg=b"plain")
    borrower.transfer(handle)
    until(lambda: borrower.check_xfer_state(handle) == "DONE")
    borrower.get_xfer_telemetry(handle)
    borrower.release_xfer_handle(handle)
    assert borrower.facts == {}
    assert pair.same(indices)
    messages: list[bytes] = []
    until(lambda: messages.extend(pair.notifications()) or messages)
    assert messages == [b"plain"]


def test_a_list_whose_lengths_are_hidden_is_refused() -> None:
    with pytest.raises(TypeError, match="get_xfer_descs"):
        TransferAgent(SimpleNamespace()).prep_xfer_dlist("NIXL_INIT_AGENT", object())


def test_a_prepared_list_is_not_kept(pair: Pair) -> None:
    """vLLM describes a whole pool, of which only addresses and lengths are needed later."""
    described = [(int(address), int(length), 0) for address, length, _ in pair.mine[:8]]
    before = sys.getrefcount(described)
    handle = pair.borrower.prep_xfer_dlist(LOCAL, pair.borrower.get_xfer_descs(described, "DRAM"))
    assert sys.getrefcount(described) == before
    pair.borrower.release_dlist_handle(handle)


def test_agents_get_the_delay_and_nixl_is_left_as_it_was() -> None:
    module = sys.modules[nixl.nixl_agent.__module__]
    bindings = module.nixlBind
    made: list[Any] = []
    stand_in = SimpleNamespace(
        nixlAgent=lambda name, config: made.append((name, config.pthrDelay, config.syncMode)),
        NIXL_THREAD_SYNC_STRICT="strict",
        other=5,
    )
    module.nixlBind = stand_in
    try:
        with tuned_agents(250):
            module.nixlBind.nixlAgent("a", SimpleNamespace(pthrDelay=0))
            assert module.nixlBind.other == 5
        assert module.nixlBind is stand_in
    finally:
        module.nixlBind = bindings
    assert made == [("a", 250, "strict")]
