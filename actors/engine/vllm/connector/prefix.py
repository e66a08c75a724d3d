"""A prefill that begins with a prefix which another engine lends.

A lender keeps a cached prefix by a prefill of the prefix and one token more, whose KV stays under a lease as after any
prefill. The handle goes to a prefill engine that lacks the prefix: it reads the lender's blocks, then computes the rest
of its prompt. In vLLM this is the second turn of `bidirectional_kv_xfer`, in which a prefill engine reads what a decode
engine has kept. vLLM's switch is not set, because it would also pin the blocks of every finished decode for
`decoder_kv_blocks_ttl` (480 s); it is on only while a borrower's blocks are allocated (`scheduler`).

A read that fails, for any reason, leaves a prefill that computes its whole prompt. So does an engine whose KV is moved
through host memory (`kv_buffer_device: cpu` on a GPU), for which vLLM reads nothing for a prefill.
"""

from collections.abc import Mapping
from typing import Any

from actors.engine.vllm.connector import LEASE

_PROCESSED = "_remote_blocks_processed"
"""vLLM's own mark, in `kv_transfer_params`, of a request whose read has been ordered."""

_LENT = ("remote_block_ids", "remote_num_tokens", LEASE)


def borrowing(handle: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `kv_transfer_params` of a prefill that reads the prefix which `handle` names. Its own KV is kept for
    a decode engine, as after any prefill.
    """
    return {**handle, "do_remote_decode": True, "do_remote_prefill": False}


def borrows(params: Mapping[str, Any] | None) -> bool:
    """Returns whether the request is a prefill to which a prefix is lent."""
    return bool(params and params.get("do_remote_decode") and params.get("remote_block_ids"))


def unread(params: Mapping[str, Any] | None) -> bool:
    """Returns whether the request is a prefill that has not ordered the read of its lent prefix yet."""
    return params is not None and borrows(params) and not params.get(_PROCESSED)


def decline(params: dict[str, Any]) -> None:
    """Makes a prefill compute its whole prompt, and leaves the handle, from which its lender learns that."""
    params[_PROCESSED] = True


def forget(params: dict[str, Any]) -> None:
    """Makes a prefill compute its whole prompt."""
    for key in _LENT:
        params.pop(key, None)
