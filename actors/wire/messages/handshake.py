"""The first messages of every connection, both ways; `actors.wire.channel` says what is proved by them."""

from typing import Literal

from actors.wire.messages.base import Wire


class Hello(Wire, frozen=True):
    """First message of every connection, both ways. `proof` is an HMAC over the peer's nonce where a secret is set."""

    version: int
    kind: Literal["ingress", "router", "engine"]
    id: str
    nonce: bytes = b""


class Prove(Wire, frozen=True):
    """Answer to the peer's Hello: HMAC-SHA256(secret, both nonces, own kind and id, peer's id). Sent only where a
    secret is configured.
    """

    mac: bytes
