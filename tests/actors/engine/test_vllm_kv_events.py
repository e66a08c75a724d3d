"""vLLM's KV events become Sluice's: hashes from tokens, no gaps, a mirror, and replay of what was missed.

The publisher is vLLM's own, over real sockets.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from actors.engine.vllm_kv_events import KvEventFeed, Translator
from policies.engine_model.blocks import Cleared, Removed, Stored, block_hashes
from tests.live.serving import free_ports


@dataclass
class Blocks:
    """The part of vLLM's BlockStored that is read."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int = 2


CHAIN = block_hashes([1, 2, 3, 4, 5, 6], 2)


def test_a_stored_chain_has_the_hashes_of_its_tokens_whatever_vllm_calls_them() -> None:
    feed = Translator()
    feed.stored(Blocks([b"x", b"y"], None, [1, 2, 3, 4]))
    feed.stored(Blocks([b"z"], b"y", [5, 6]))
    assert feed.drain() == [Stored(0, CHAIN[:2], None), Stored(1, CHAIN[2:], CHAIN[1])]
    assert feed.snapshot() == (2, frozenset(CHAIN))
    assert feed.drain() == []


def test_a_block_without_a_known_parent_is_left_out() -> None:
    feed = Translator()
    feed.stored(Blocks([b"z"], b"never seen", [5, 6]))
    assert feed.drain() == []
    assert feed.snapshot() == (0, frozenset())


def test_a_block_that_is_cached_twice_is_announced_once() -> None:
    feed = Translator()
    feed.stored(Blocks([b"x", b"y"], None, [1, 2, 3, 4]))
    feed.stored(Blocks([b"x", b"y", b"z"], None, [1, 2, 3, 4, 5, 6]))
    assert feed.drain()[1:] == [Stored(1, CHAIN[2:], CHAIN[1])]


def test_removed_and_cleared_update_the_mirror() -> None:
    feed = Translator()
    feed.stored(Blocks([b"x", b"y"], None, [1, 2, 3, 4]))
    feed.removed([b"y", b"unknown"])
    feed.removed([b"unknown"])
    feed.cleared()
    assert feed.drain()[1:] == [Removed(1, (CHAIN[1],)), Cleared(2)]
    assert feed.snapshot() == (3, frozenset())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[KvEventFeed, object]]:
    from vllm.distributed.kv_events import ZmqEventPublisher

    ports = free_ports(2)
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    publisher = ZmqEventPublisher(0, f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}", buffer_steps=4)
    feed = KvEventFeed(*endpoints)
    yield feed, publisher
    await feed.stop()
    publisher.shutdown()


def stored(n: int) -> object:
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    event = BlockStored(
        block_hashes=[n], parent_block_hash=None, token_ids=[n, n], block_size=2, lora_id=None, medium=None,
        lora_name=None,
    )  # fmt: skip
    return KVEventBatch(ts=0.0, events=[event])


async def test_what_was_published_before_the_feed_came_is_replayed(pair) -> None:  # type: ignore[no-untyped-def]
    feed, publisher = pair
    for n in range(3):
        publisher.publish(stored(n))
    await asyncio.sleep(0.5)  # published to nobody
    feed.start()
    await asyncio.sleep(0.5)  # subscribed
    publisher.publish(stored(3))
    await until(lambda: feed.translator.snapshot()[0] == 4)
    events = feed.translator.drain()
    assert [e.seq for e in events] == [0, 1, 2, 3]
    assert [e.hashes for e in events] == [block_hashes([n, n], 2) for n in range(4)]


async def test_what_cannot_be_replayed_any_more_clears_the_mirror(pair) -> None:  # type: ignore[no-untyped-def]
    feed, publisher = pair
    for n in range(9):  # the publisher keeps the last four
        publisher.publish(stored(n))
    await asyncio.sleep(0.5)
    feed.start()
    await asyncio.sleep(0.5)
    publisher.publish(stored(9))
    await until(lambda: feed.translator.snapshot()[0] >= 2)
    assert feed.translator.drain() == [Cleared(0), Stored(1, block_hashes([9, 9], 2), None)]
