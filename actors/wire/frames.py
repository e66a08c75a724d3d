"""Frames and proofs: what both forms of a connection share, `actors.wire.channel` on an event loop and
`actors.flow.client` in a thread.

A frame is a 4-byte big-endian length and a msgpack array of tagged messages.
"""

import hmac
import struct
from typing import Literal

import msgspec

from actors.wire.messages import Message

HEADER = struct.Struct(">I")
PeerKind = Literal["ingress", "router", "engine", "worker", "agent", "coordinator", "autoscaler", "observer"]
"""Kinds of processes on the wire. A worker reads KV by the permits of an agent; an agent talks to workers, to other
nodes' agents, to a coordinator and to the router. An observer (the dashboard) watches, and serves no request."""

ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(list[Message])
GARBAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of `DECODER` for bytes that are no frame: texts that are no UTF-8, and arrays in arrays without end, have
errors of Python's own."""


def proof(secret: bytes, peer_nonce: bytes, own_nonce: bytes, kind: str, name: str, peer_id: str) -> bytes:
    """Returns the MAC by which the process `name` of this kind proves to `peer_id` that it knows the secret. The MAC
    covers both nonces and both names, so that it is worthless in any other connection.
    """
    parts = (peer_nonce, own_nonce, kind.encode(), name.encode(), peer_id.encode())
    return hmac.new(secret, b"".join(HEADER.pack(len(part)) + part for part in parts), "sha256").digest()
