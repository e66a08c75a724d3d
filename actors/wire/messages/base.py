"""The base of all messages: their encoding, the types that several of them use, and the handshake."""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 3

Role = Literal["prefill", "decode", "colocated"]
EngineState = Literal["starting", "ready", "draining", "down"]


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of the structs that messages are made of. They are immutable and encoded as arrays."""


class Wire(Part, tag=True, frozen=True):
    """Base of all messages; a message is a part that is tagged with its class name."""


class Hello(Wire, frozen=True):
    """First message of every connection, in both directions. If a secret is configured, the peer answers `nonce` with a
    Prove.
    """

    version: int
    kind: Literal["ingress", "router", "engine"]
    id: str
    nonce: bytes = b""


class Prove(Wire, frozen=True):
    """Answer to the peer's Hello if a secret is configured. `mac` is the HMAC-SHA256, keyed with the secret, of both
    nonces, the sender's kind and id, and the peer's id.
    """

    mac: bytes
