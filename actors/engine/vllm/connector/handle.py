"""The fields of a KV handle on which a reader rests, and their check.

A handle is vLLM's `kv_transfer_params` from another process, with ours. vLLM's core and workers use its fields as they
are: a field that is missing or of another type would end the core, or leave its request waiting without end.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from actors.engine.vllm.connector import BATCH, LEASE

_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Index = Annotated[int, msgspec.Meta(ge=0)]
_SumsAt = tuple[_Index, _Index, _Index, _Count]


class _Lease(msgspec.Struct, frozen=True):
    slot: _Index
    generation: _Index
    tables: list[tuple[_Index, _Index, _Index]]
    node: str = ""
    sums: list[tuple[_Index, _Index, _SumsAt]] = []


class _Handle(msgspec.Struct, frozen=True):
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[list[list[_Index]], msgspec.Meta(min_length=1)]
    tp_size: _Count
    dcp_size: _Count = 1
    pp_size: _Count = 1
    remote_num_tokens: _Index | None = None
    remote_blocks_expiry_time: float | None = None
    batch: str = msgspec.field(default="", name=BATCH)
    lease: _Lease | None = msgspec.field(default=None, name=LEASE)


def fault(params: Mapping[str, Any]) -> str:
    """Returns what is wrong with a handle, or an empty string if KV can be read by it."""
    try:
        msgspec.convert(params, _Handle)
    except msgspec.ValidationError as e:
        return str(e)
    return ""
