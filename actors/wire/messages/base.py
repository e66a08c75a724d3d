"""What all messages share: how they are encoded, and the words that several of them use."""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 2

Role = Literal["prefill", "decode", "colocated"]
EngineState = Literal["starting", "ready", "draining", "down"]


class Wire(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of all messages: immutable, array encoded, tagged by class name."""
