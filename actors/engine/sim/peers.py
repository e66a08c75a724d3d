"""The decode side of a KV transfer between sim engines: its connections to prefill engines (the other side is in
`leases`).

    decode engine                          prefill engine
    Pull(lease, bytes)     ------------->  begins to read: the lease cannot end until the read does
                           <-------------  PullGrant(ok) - not ok: the KV is gone
    (the modelled transfer time passes here, or there if a link of the prefill engine fits: then Sent comes)
    Pulled(lease)          ------------->  the read ends, and the copy is freed (without a Pull before: freed unread)

A lost connection ends the reads over it: the reader reports the failure, and the prefill engine drops the protection.
One connection to each engine id is kept.
"""

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from actors import no_memory
from actors.loop_timeout import LoopTimeout
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import Message, Pull, PullChunk, Pulled, PullGrant, Sent
from actors.wire.sockets import connect

log = logging.getLogger(__name__)


class SimHandle(msgspec.Struct, array_like=True, frozen=True):
    """The content of PrefillDone.handle between sim engines. `lease` is unique within the life of the prefill engine's
    process. `batch` names the step that finished the prefill: handles of one step are one batch (MFS 4.4). `node` is
    the prefill engine's node by its name at the flow agents ("": its reads are not scheduled).
    """

    engine_id: str
    addresses: tuple[str, ...]
    lease: str
    blocks: int
    kv_bytes: int
    tokens: int
    prompt_hash: int
    batch: str = ""
    node: str = ""


_handles = msgspec.msgpack.Decoder(SimHandle)


def handle_of(data: bytes) -> SimHandle:
    """Returns the handle in the bytes of PrefillDone. Raises ValueError if no sim engine made them."""
    return _handles.decode(data)


class Reader(Protocol):
    """A task whose KV is read.

    First exactly one of `granted` and `read_failed` is called; `read_failed` may follow `granted`. After
    `granted(paced=True)`, `sent` is called when the bytes have arrived, with the seconds that they took: once, or for
    each chunk of a chunked read.
    """

    def granted(self, paced: bool) -> None: ...
    def sent(self, seconds: float, chunk: int) -> None: ...
    def read_failed(self, reason: str) -> None: ...


class _Peer:
    """The connection to one prefill engine. `channel` is None while it is being made."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.channel: Channel | None = None
        self.task: asyncio.Task[None] | None = None
        self.unsent: list[Pull | PullChunk | Pulled] = []
        self.readers: dict[str, Reader] = {}
        self.timers: dict[str, LoopTimeout] = {}


class Puller:
    """The decode side of all transfers of one engine. For each handle `pull` comes first and then `end`, or `give_up`
    where the read broke down; `end` alone frees the KV unread.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._me: Identity | None = None
        self._peers: dict[str, _Peer] = {}
        self._held: list[Callable[[], None]] | None = None

    def attach(self, me: Identity) -> None:
        """Sets this engine's name on the wire. Must be called before anything is pulled."""
        self._me = me

    def pull(self, handle: SimHandle, n_bytes: int, reader: Reader, chunked: bool = False) -> None:
        """Asks the prefill engine for `n_bytes` of the KV, which move at once, or `chunked`, by calls of `chunk`. The
        answer goes to `reader`, not before the next loop iteration.
        """
        peer = self._peer(handle)
        if handle.lease in peer.readers:
            loop = asyncio.get_running_loop()
            loop.call_soon(reader.read_failed, "another read of the same KV has not ended yet")
            return
        peer.readers[handle.lease] = reader
        peer.timers[handle.lease] = LoopTimeout(self._timeout_s, lambda: self._timed_out(peer, handle.lease))
        self._send(peer, Pull(handle.lease, n_bytes, chunked))

    def chunk(self, handle: SimHandle, chunk: int, n_bytes: int) -> None:
        """Asks for part number `chunk` of a chunked pull whose grant was paced."""
        self._send(self._peer(handle), PullChunk(handle.lease, chunk, n_bytes))

    def end(self, handle: SimHandle) -> None:
        """Tells the prefill engine to free its copy, because the read has ended or will never begin. Never raises."""
        peer = self._peer(handle)
        self._forget(peer, handle.lease)
        self._send(peer, Pulled(handle.lease))

    def give_up(self, handle: SimHandle) -> None:
        """Ends a granted read that broke down here: the prefill engine frees its copy, which it would keep for this
        engine until their connection ends. Nothing happens if the connection is what broke.
        """
        peer = self._peers.get(handle.engine_id)
        if peer is not None and handle.lease in peer.readers:
            self.end(handle)

    def cut(self, cut: bool) -> None:
        """Cuts the links to all prefill engines, or joins them again: the connections stay, and what is sent meanwhile
        in either direction arrives after the cut. Reads time out as ever.
        """
        if cut and self._held is None:
            self._held = []
        elif not cut and self._held is not None:
            held, self._held = self._held, None
            for pass_on in held:
                pass_on()

    def close(self) -> None:
        """Closes all connections; readers are not called any more."""
        for peer in self._peers.values():
            for lease in list(peer.readers):
                self._forget(peer, lease)
            if peer.task is not None:
                peer.task.cancel()
            if peer.channel is not None:
                peer.channel.close("engine stops")
        self._peers.clear()

    # ------------------------------------------------------------------------------------------------ internals

    def _peer(self, handle: SimHandle) -> _Peer:
        peer = self._peers.get(handle.engine_id)
        if peer is None:
            peer = self._peers[handle.engine_id] = _Peer(handle.engine_id)
            peer.task = asyncio.create_task(
                self._connect(peer, handle.addresses), name=f"to {handle.engine_id}"
            )
        return peer

    async def _connect(self, peer: _Peer, addresses: tuple[str, ...]) -> None:
        assert self._me is not None, "attach() comes first"
        me = self._me

        def new_channel() -> Channel:
            return Channel(me, lambda _, message: self._received(peer, message), None, on_close)

        def on_close(_: Channel, reason: str) -> None:
            if peer.channel is not None:
                self._lost(peer, reason)

        try:
            channel = await connect(addresses, new_channel, me.tls)
        except MemoryError:
            no_memory.end()
        except (OSError, WireError) as error:
            self._lost(peer, f"cannot reach engine {peer.engine_id}: {error}")
            return
        if channel.closed.done():
            self._lost(peer, channel.closed.result())
            return
        peer.channel = channel
        for message in peer.unsent:
            channel.send(message)
        peer.unsent.clear()

    def _send(self, peer: _Peer, message: Pull | PullChunk | Pulled) -> None:
        if self._held is not None:
            self._held.append(functools.partial(self._send, peer, message))
        elif peer.channel is None:
            peer.unsent.append(message)
        else:
            peer.channel.send(message)

    def _received(self, peer: _Peer, message: Message) -> None:
        if self._held is not None:
            self._held.append(functools.partial(self._received, peer, message))
            return
        if isinstance(message, Sent):
            reader = peer.readers.get(message.attempt_id)
            if reader is not None:
                reader.sent(message.seconds, message.chunk)
            return
        if not isinstance(message, PullGrant):
            raise WireError(f"engine {peer.engine_id} answered a Pull with {type(message).__name__}")
        timer = peer.timers.pop(message.attempt_id, None)
        if timer is None:
            return  # the read has timed out or ended
        timer.cancel()
        reader = peer.readers[message.attempt_id]
        if message.ok:
            reader.granted(message.paced)
        else:
            self._forget(peer, message.attempt_id)
            reader.read_failed(f"engine {peer.engine_id} does not hold the KV any more")

    def _timed_out(self, peer: _Peer, lease: str) -> None:
        reader = peer.readers[lease]
        self._forget(peer, lease)
        # If the grant still comes, no reader would end it.
        self._send(peer, Pulled(lease))
        reader.read_failed(f"engine {peer.engine_id} did not answer within {self._timeout_s:g} s")

    def _lost(self, peer: _Peer, reason: str) -> None:
        if self._peers.get(peer.engine_id) is peer:
            del self._peers[peer.engine_id]
        readers = list(peer.readers.values())
        for lease in list(peer.readers):
            self._forget(peer, lease)
        if peer.unsent:
            log.info("%s: %d messages to it are lost; its leases end by themselves", reason, len(peer.unsent))
        for reader in readers:
            reader.read_failed(reason)

    def _forget(self, peer: _Peer, lease: str) -> None:
        peer.readers.pop(lease, None)
        timer = peer.timers.pop(lease, None)
        if timer is not None:
            timer.cancel()
