"""Engine <-> router: what an engine's prefix cache holds, as numbered changes with replay and snapshot."""

from typing import Literal

import msgspec

from actors.wire.messages.base import Wire


class KvChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What entered or left a prefix cache (`policies.engine_model.blocks.Change`); see `actors.wire.kv` for the bytes.

    `parent` is the hash before the first stored block, None at the prompt's start.
    """

    kind: Literal["stored", "removed", "cleared"]
    hashes: bytes = b""
    parent: int | None = None


class KvEvents(Wire, frozen=True):
    """Engine -> router: batch `seq` of the changes of one rank's prefix cache, numbered from 0 in each `epoch` (one
    life of the engine). Sent within a report period, from the first KvReplay of a connection on until KvStop.
    """

    engine_id: str
    epoch: str
    seq: int
    changes: list[KvChange]
    rank: int = 0


class KvReplay(Wire, frozen=True):
    """Router -> engine: batches `first`..`last` of `epoch` again (`last` None: up to now), and all that follow.
    Answered by KvEvents, or by KvState where the engine does not have them any more, the epoch is another one, or
    `first` is None.
    """

    epoch: str
    first: int | None
    last: int | None = None
    rank: int = 0


class KvStop(Wire, frozen=True):
    """Router -> engine: no policy looks at prefix hits any more, send no more KvEvents of `rank`."""

    rank: int = 0


class KvState(Wire, frozen=True):
    """Engine -> router: part `part` of `parts` of all that a rank's prefix cache holds before batch `next_seq`, as
    chains (KvChange of kind "stored", a chain after those that it hangs on).
    """

    engine_id: str
    epoch: str
    next_seq: int
    part: int
    parts: int
    chains: list[KvChange]
    rank: int = 0
