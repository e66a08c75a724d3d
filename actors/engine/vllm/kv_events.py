"""Translation of vLLM's KV-cache events into the changes `Stored`, `Removed` and `Cleared`, which the sim engine
reports too.

vLLM publishes numbered batches over ZeroMQ. It has a replay socket for missed batches, but no snapshot. Its hashes
differ from process to process, so each stored block is hashed again from its tokens with `block_hashes`. Equal prefixes
then have equal hashes on every engine, real or sim; a request's cache salt, which vLLM names in the extra keys of the
first block, salts ours too (`salt_of`). Three kinds of blocks are left out: those that tokens and salt do not identify
(LoRA, images, embeddings), those on another medium than the engine's own memory, and those of a hybrid model's further
cache groups. The reader then knows less than is cached, but nothing wrong (of a hybrid model it knows the first
group's cache at most).

If vLLM's publisher no longer has a missed batch (its buffer holds 10,000), everything known is dropped with a
`Cleared`. The same is done after any surprise, such as a batch that cannot be decoded: an error ends no feed, because a
router would otherwise believe in a cache that changed long ago.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from policies.engine_model.blocks import (
    BlockHash,
    Change,
    Cleared,
    Removed,
    Stored,
    add_change,
    block_hashes,
    salt_of,
)

log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
REPLAY_TIMEOUT_S = 10.0

RETRY_S = 1.0
"""Seconds between an error of the feed and the next subscription, so that an error that repeats costs little."""


class _Place(Protocol):
    """The fields of vLLM's BlockStored and BlockRemoved that say where blocks are stored."""

    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None
    locality: str | None


class _Blocks(_Place, Protocol):
    """The fields of vLLM's BlockStored that are used here."""

    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None


def _in_own_memory(event: _Place) -> bool:
    # "GPU" is vLLM's name for the memory of any device, a CPU's included.
    return (
        event.medium in (None, "GPU") and event.group_idx in (None, 0) and event.locality in (None, "LOCAL")
    )


class _ForeignKeys(Exception):
    """The blocks are named by more than tokens and a cache salt."""


def _cache_salt(keys: Sequence[tuple[Any, ...] | None], starts: bool) -> str | None:
    """Returns the cache salt that the extra keys of blocks name, the first of which begins a prompt if `starts`.

    A salt is a text, alone, at a prompt's first block (`generate_block_hash_extra_keys` of vLLM 0.32); the key of an
    image is a tuple, and that of embeddings is bytes. Raises _ForeignKeys for any other key.
    """
    if not any(keys):
        return None
    first = keys[0]
    if not starts or any(keys[1:]) or first is None or len(first) != 1 or not isinstance(first[0], str):
        raise _ForeignKeys
    return first[0]


class Translator:
    """Translates vLLM's events into Sluice's changes; without I/O."""

    def __init__(self) -> None:
        self._ours: dict[Any, BlockHash] = {}  # vLLM's hash -> Sluice's
        self._changes: list[Change] = []

    @property
    def blocks(self) -> int:
        """Number of cached blocks."""
        return len(self._ours)

    def stored(self, event: _Blocks) -> None:
        """Takes new blocks in the order of their chain. Blocks whose parent is not known are left out, and so are all
        that follow them.
        """
        if not _in_own_memory(event) or event.lora_name is not None:
            return
        starts = event.parent_block_hash is None
        try:
            salt = salt_of(_cache_salt(event.extra_keys or (), starts))
        except _ForeignKeys:
            return
        parent = None if starts else self._ours.get(event.parent_block_hash)
        if not starts and parent is None:
            return
        run: list[BlockHash] = []
        chain = block_hashes(event.token_ids, event.block_size, salt if parent is None else parent)
        for theirs, ours in zip(event.block_hashes, chain, strict=True):
            if theirs in self._ours:  # cached twice, already announced
                self._emit_run(run, parent)
                run, parent = [], ours
            else:
                self._ours[theirs] = ours
                run.append(ours)
        self._emit_run(run, parent)

    def removed(self, event: _Place) -> None:
        """Takes evicted blocks, and ignores unknown ones."""
        if not _in_own_memory(event):
            return
        gone = tuple(h for h in (self._ours.pop(h, None) for h in event.block_hashes) if h is not None)
        if gone:
            add_change(self._changes, Removed(gone))

    def cleared(self) -> None:
        """Drops all blocks, because the cache was emptied or its content is no longer known."""
        self._ours.clear()
        add_change(self._changes, Cleared())

    def drain(self) -> list[Change]:
        """Returns the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _emit_run(self, run: list[BlockHash], parent: BlockHash | None) -> None:
        if run:
            add_change(self._changes, Stored(tuple(run), parent))


class KvEventFeed:
    """Subscribes to one engine's publisher. `endpoint` and `replay_endpoint` are ZeroMQ addresses (tcp://host:port)."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.translator = Translator()
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._next = 0  # number of vLLM's next batch
        self._task: asyncio.Task[None] | None = None
        self.errors = 0

    @property
    def alive(self) -> bool:
        """Whether the feed reads, or is about to subscribe again."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Subscribes, and reads in the background until `stop`."""
        self._task = asyncio.create_task(self._follow(), name="vLLM KV events")

    async def stop(self) -> None:
        """Stops reading and closes the sockets. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _follow(self) -> None:
        while True:
            try:
                await self._read()
            except Exception:
                # Nothing that a publisher sends may end the feed.
                self.errors += 1
                log.exception(
                    "the feed of KV events failed at batch %d: the prefix cache is announced anew", self._next
                )
            self.translator.cleared()
            await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        """Subscribes and takes batches until one of them, or the socket, is an error."""
        import zmq
        import zmq.asyncio
        from vllm.distributed.kv_events import KVEventBatch

        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.LINGER, 0)
            sub.connect(self._endpoint)
            sub.subscribe(b"")
            while True:
                _, number, payload = await sub.recv_multipart()
                await self._take(context, int.from_bytes(number, "big"), payload, decode)

    async def _take(self, context: Any, number: int, payload: bytes, decode: Any) -> None:
        """Takes a batch after those that were missed. `_next` is beyond a batch before it is applied, so that one that
        fails is not fetched again.
        """
        if number < self._next:
            return  # already replayed
        if number > self._next:
            await self._replay(context, number, decode)
        self._next = number + 1
        self._apply(decode(payload))

    async def _replay(self, context: Any, until: int, decode: Any) -> None:
        """Fetches the missed batches before `until`. If the publisher no longer has them, everything known is
        dropped.
        """
        import zmq

        with context.socket(zmq.DEALER) as request:  # a REQ socket takes only one answer
            request.setsockopt(zmq.LINGER, 0)
            request.connect(self._replay_endpoint)
            await request.send_multipart((b"", self._next.to_bytes(8, "big")))
            missed = await self._answers(request, until)
        if [number for number, _ in missed] != list(range(self._next, until)):
            log.warning(
                "KV events %d to %d are lost: the prefix cache is announced anew", self._next, until - 1
            )
            self.translator.cleared()
            return
        for number, payload in missed:
            self._next = number + 1
            self._apply(decode(payload))

    async def _answers(self, request: Any, until: int) -> list[tuple[int, bytes]]:
        """Returns the replayed (number, payload) pairs below `until`. The publisher sends each batch as a message of
        its own, and then an end mark.
        """
        found: list[tuple[int, bytes]] = []
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                while True:
                    _, _, number, payload = await request.recv_multipart()
                    if number == _END:
                        return found
                    if int.from_bytes(number, "big") < until:
                        found.append((int.from_bytes(number, "big"), payload))
        except TimeoutError:
            return found

    def _apply(self, batch: Any) -> None:
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    self.translator.stored(event)
                case "BlockRemoved":
                    self.translator.removed(event)
                case "AllBlocksCleared":
                    self.translator.cleared()
