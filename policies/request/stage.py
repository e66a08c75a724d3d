"""The names of a request's stages, tasks and outcomes; router, ingress, simulator, metrics and documents share them."""

from enum import StrEnum
from typing import Literal

Task = Literal["prefill", "decode"]
"""The part of an attempt that an engine does; a failure names it."""

Outcome = Literal["finished", "cancelled", "failed", "rejected", "expired"]
"""How an attempt ended."""

LoanEnd = Literal["used", "recomputed", "failed", "dropped"]
"""How the loan of a prefix ended: the prompt was computed with the prefix; it was lent, and the prompt was computed
without it; the lender refused, went or took too long; the attempt ended before the prompt was computed.
"""


class Stage(StrEnum):
    """The stage of a request, which alone says what the request holds.

    A colocated request is PREFILLING until its engine has admitted it, then DECODING. A request never leaves DONE.
    """

    QUEUED = "queued"
    """The request waits until a prefill worker is chosen, and holds nothing."""
    LENDING = "lending"
    """Another engine lends the prompt's prefix, which it computes and caches, to the chosen prefill worker: it is to
    hold the prefix under a lease.
    """
    PREFILLING = "prefilling"
    """The prompt waits for its turn on the chosen worker or is computed there."""
    POOLED = "pooled"
    """The prompt's KV waits under a lease on the prefill worker for a decode worker."""
    TRANSFERRING = "transferring"
    """The chosen decode worker takes a slot and pulls the KV; the lease still holds."""
    DECODING = "decoding"
    """Tokens are generated on the decode worker."""
    DONE = "done"
    """The request has ended, however it ended, and holds nothing."""
