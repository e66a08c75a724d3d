"""The fields of a KV handle on which a reader rests, and their check.

A handle is vLLM's `kv_transfer_params` from another process, with ours. vLLM's core and workers use its fields as they
are: a field that is missing or of another type would end the core, or leave its request waiting without end.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from actors.engine.vllm.connector import BATCH, LEASE, PROMPT
from policies.engine_model.text import prompt_hash

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
    prompt: tuple[_Index, _Index] | None = msgspec.field(default=None, name=PROMPT)


def fault(params: Mapping[str, Any]) -> str:
    """Returns what is wrong with a handle, or an empty string if KV can be read by it."""
    try:
        msgspec.convert(params, _Handle)
    except msgspec.ValidationError as e:
        return str(e)
    return ""


def name_of(tokens: Sequence[int]) -> list[int]:
    """Returns what a handle says of the tokens whose KV it names: their number and hash."""
    return [len(tokens), prompt_hash(tokens)]


def is_of(params: Mapping[str, Any], tokens: Sequence[int], least: int = 0) -> bool:
    """Returns whether a handle names the KV of the first of these tokens, and of `least` of them at least. A handle
    that names no tokens is believed. Raises OverflowError for a number that is no token.
    """
    told = params.get(PROMPT)
    if told is None:
        return True
    n_tokens, _ = told
    return least <= n_tokens <= len(tokens) and list(told) == name_of(tokens[:n_tokens])
