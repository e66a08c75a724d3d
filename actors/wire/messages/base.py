"""The base of all messages: their encoding, the types that several of them use, and the handshake."""

from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = 17

MAX_COUNT = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""A number of things, of which a float holds each exactly. A message with another number ends its connection."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""The id of a token, which vLLM keeps in 32 bits."""

Tier = Annotated[int, msgspec.Meta(ge=0, le=3)]
"""A tier of the network: 0 on one node, 1 in one rack, 2 in one pod, 3 beyond."""

Role = Literal["prefill", "decode", "colocated"]
EngineState = Literal["starting", "ready", "stalled", "quarantined", "draining", "down"]
"""The state of an engine. An engine is "stalled" while it has work and ends no step. The router alone calls one
"quarantined", in its Fleet, because of failures or slowness; an engine does not know of it."""

Duty = Literal["active", "warm"]
"""The duty of an engine. A "warm" engine is ready and connected to all ingresses, and the router gives it no requests;
work that it has got before ends where it is."""


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of the structs that messages are made of. They are immutable and encoded as arrays."""


class Wire(Part, tag=True, frozen=True):
    """Base of all messages; a message is a part that is tagged with its class name."""


class Hello(Wire, frozen=True):
    """First message of every connection, in both directions. If a secret is configured, the peer answers `nonce` with a
    Prove. `generation` is that of the sender if it is a router or an autoscaler: each router of an application has a
    higher one than the router before it, and each autoscaler than the autoscaler before it.
    """

    version: int
    kind: Literal["ingress", "router", "engine", "worker", "agent", "coordinator", "autoscaler", "observer"]
    id: str
    nonce: bytes = b""
    generation: int = 0


class Ping(Wire, frozen=True):
    """Sent every second on every open connection, in both directions; a peer that is silent for too long is lost.
    `generation` is the highest generation of a router that the sender knows, so that every process hears of a new
    router and leaves an old one.
    """

    generation: int = 0


class SetLogs(Wire, frozen=True):
    """Router -> ingress, engine, autoscaler and observer: write lines of `logger` and of those below it ("": all) from
    `level` on, and access lines or none; what is None stays as it is. It holds until the process ends.
    """

    level: str | None = None
    logger: str = ""
    access: bool | None = None


class Prove(Wire, frozen=True):
    """Answer to the peer's Hello if a secret is configured. `mac` is the HMAC-SHA256, keyed with the secret, of both
    nonces, the sender's kind and id, and the peer's id.
    """

    mac: bytes
