"""vLLM's KV events become Sluice's: hashes from tokens, no gaps, a mirror, and replay of what was missed.

The publisher is vLLM's own, over real sockets.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from actors.engine.vllm import kv_events
from actors.engine.vllm.config import VllmEngineConfig
from actors.engine.vllm.kv_events import KvEventFeed, Translator
from actors.engine.vllm.launch import kv_events_config, remove_kv_sockets
from benchmarks.live.servers import free_ports
from policies.engine_model import blocks
from policies.engine_model.blocks import Cleared, Removed, Stored, block_hashes, salt_of


@dataclass
class Blocks:
    """The part of vLLM's BlockStored that is read."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int = 2
    medium: str | None = "GPU"
    group_idx: int | None = 0
    locality: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


def gone(*hashes: bytes, group_idx: int = 0) -> Blocks:
    """A BlockRemoved as vLLM sends it."""
    return Blocks(list(hashes), None, [], group_idx=group_idx)


CHAIN = block_hashes([1, 2, 3, 4, 5, 6], 2)


def test_a_stored_chain_has_the_hashes_of_its_tokens_whatever_vllm_calls_them() -> None:
    feed = Translator()
    feed.stored(Blocks([b"x", b"y"], None, [1, 2, 3, 4]))
    feed.stored(Blocks([b"z"], b"y", [5, 6]))
    assert feed.drain() == [Stored(CHAIN[:2]), Stored(CHAIN[2:], CHAIN[1])]
    assert feed.blocks == 3
    assert feed.drain() == []


def test_a_block_without_a_known_parent_is_left_out() -> None:
    feed = Translator()
    feed.stored(Blocks([b"z"], b"never seen", [5, 6]))
    assert feed.drain() == []
    assert feed.blocks == 0


@pytest.mark.parametrize(
    "named_otherwise",
    [
        # an image, the digest of embeddings, a salt with an image, and keys of later blocks
        {"extra_keys": [(("image", 0),), None]},
        {"extra_keys": [(b"digest",), (b"digest",)]},
        {"extra_keys": [("salt", ("image", 0)), None]},
        {"extra_keys": [None, ("salt",)]},
        {"lora_name": "x"},
        {"medium": "CPU"},
        {"group_idx": 1},
        {"locality": "REMOTE"},
    ],
)
def test_blocks_that_plain_tokens_do_not_name_or_that_lie_elsewhere_are_left_out(
    named_otherwise: dict[str, Any],
) -> None:
    feed = Translator()
    feed.stored(Blocks([b"x", b"y"], None, [1, 2, 3, 4], **named_otherwise))
    feed.stored(Blocks([b"z"], b"y", [5, 6]))  # hangs on them
    assert feed.drain() == []


def test_a_cache_salt_salts_the_chain_to_its_end() -> None:
    feed = Translator()
    feed.stored(Blocks([b"x", b"y"], None, [1, 2, 3, 4], extra_keys=[("mine",), None]))
    feed.stored(Blocks([b"z"], b"y", [5, 6]))
    salted = block_hashes([1, 2, 3, 4, 5, 6], 2, salt_of("mine"))
    assert feed.drain() == [Stored(salted[:2]), Stored(salted[2:], salted[1])]
    assert not set(salted) & set(CHAIN)


def test_a_block_that_is_cached_twice_is_announced_once() -> None:
    feed = Translator()
    feed.stored(Blocks([b"x", b"y"], None, [1, 2, 3, 4]))
    feed.stored(Blocks([b"x", b"y", b"z"], None, [1, 2, 3, 4, 5, 6]))
    assert feed.drain()[1:] == [Stored(CHAIN[2:], CHAIN[1])]


def test_removed_and_cleared_update_the_mirror() -> None:
    feed = Translator()
    feed.stored(Blocks([b"x", b"y"], None, [1, 2, 3, 4]))
    feed.removed(gone(b"y", b"unknown"))
    feed.removed(gone(b"unknown"))
    feed.removed(gone(b"x", group_idx=1))
    assert feed.blocks == 1
    feed.cleared()
    assert feed.drain()[1:] == [Removed((CHAIN[1],)), Cleared()]
    assert feed.blocks == 0


def test_what_nobody_reads_is_given_up_at_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_UNREAD_CHANGES", 2)
    feed = Translator()
    for n in range(3):
        feed.stored(Blocks([b"%d" % n], None, [n, n]))
    assert feed.drain() == [Cleared(), Stored(block_hashes([2, 2], 2))]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
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
    await until(lambda: feed.translator.blocks == 4)
    assert feed.translator.drain() == [Stored(block_hashes([n, n], 2)) for n in range(4)]


async def test_what_cannot_be_replayed_any_more_clears_the_mirror(pair) -> None:  # type: ignore[no-untyped-def]
    feed, publisher = pair
    for n in range(9):  # the publisher keeps the last four
        publisher.publish(stored(n))
    await asyncio.sleep(0.5)
    feed.start()
    await asyncio.sleep(0.5)
    publisher.publish(stored(9))
    await until(lambda: feed.translator.blocks == 1)
    assert feed.translator.drain() == [Cleared(), Stored(block_hashes([9, 9], 2))]


def broken() -> object:
    """A batch whose event has two hashes for one block, over which the translation raises."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    event = BlockStored(
        block_hashes=[901, 902], parent_block_hash=None, token_ids=[9, 9], block_size=2, lora_id=None,
        medium=None, lora_name=None,
    )  # fmt: skip
    return KVEventBatch(ts=0.0, events=[event])


@pytest.mark.parametrize("live", [True, False], ids=["while_it_reads", "among_what_it_missed"])
async def test_a_batch_that_cannot_be_taken_ends_no_feed(pair, monkeypatch, live: bool) -> None:  # type: ignore[no-untyped-def]
    """All that was known is dropped, and later batches are known again."""
    monkeypatch.setattr(kv_events, "RETRY_S", 0.01)
    feed, publisher = pair
    if live:
        feed.start()
        await asyncio.sleep(0.5)
    publisher.publish(stored(1))
    publisher.publish(broken())
    if not live:
        await asyncio.sleep(0.5)
        feed.start()
        await asyncio.sleep(0.5)
        publisher.publish(stored(2))
    await until(lambda: feed.errors == 1)
    assert feed.alive
    for n in range(3, 40):
        publisher.publish(stored(n))
        await asyncio.sleep(0.05)
        if feed.translator.blocks:
            break
    changes = feed.translator.drain()
    assert Cleared() in changes
    assert isinstance(changes[-1], Stored)
    assert feed.errors == 1
    await feed.stop()
    assert not feed.alive


async def test_each_data_parallel_rank_has_sockets_of_its_own() -> None:
    """vLLM adds the rank to the endpoints of `kv_events_config`, and tells where it publishes."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    config = kv_events_config(VllmEngineConfig(engine_id="e", model="m", role="decode"))
    try:
        ranks = [ZmqEventPublisher(rank, config.endpoint, config.replay_endpoint) for rank in (0, 1)]
        sources = [publisher.get_publisher_config() for publisher in ranks]
        assert len({source.endpoint for source in sources}) == 2
        feed = KvEventFeed(sources[1].endpoint, sources[1].replay_endpoint)
        feed.start()
        await asyncio.sleep(0.5)
        ranks[1].publish(stored(1))
        await until(lambda: feed.translator.blocks == 1)
        await feed.stop()
        for publisher in ranks:
            publisher.shutdown()
    finally:
        remove_kv_sockets(config)


def test_an_engine_starts_beside_what_a_killed_one_of_its_name_and_process_id_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new pid namespace the ids of processes begin again, and /tmp has what a killed engine left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = VllmEngineConfig(engine_id="e", model="m", role="decode")
    killed, mine = kv_events_config(config), kv_events_config(config)
    assert killed.endpoint != mine.endpoint
    assert [folder.stat().st_mode & 0o777 for folder in tmp_path.iterdir()] == [0o700, 0o700]
    remove_kv_sockets(mine)
    assert [str(folder) in killed.endpoint for folder in tmp_path.iterdir()] == [True]
