"""The base of all messages: their encoding, the words that several of them use, and the handshake."""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 3

Role = Literal["prefill", "decode", "colocated"]
EngineState = Literal["starting", "ready", "draining", "down"]


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of what messages are made of: immutable and encoded as an array."""


class Wire(Part, tag=True, frozen=True):
    """Base of all messages: a part that is tagged by its class name."""


class Hello(Wire, frozen=True):
    """First message of every connection, both ways; `actors.wire.channel` says what the handshake proves. The peer
    answers the nonce with a proof where a secret is configured.
    """

    version: int
    kind: Literal["ingress", "router", "engine"]
    id: str
    nonce: bytes = b""


class Prove(Wire, frozen=True):
    """Answer to the peer's Hello where a secret is configured: HMAC-SHA256 by that secret of both nonces, the sender's
    kind and id, and the peer's id.
    """

    mac: bytes
