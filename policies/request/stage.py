"""The words for a request's way through the system: router, ingress, simulator, metrics and documents share them."""

from enum import StrEnum
from typing import Literal

Task = Literal["prefill", "decode"]
"""The part of an attempt that an engine does; a failure names it."""

Outcome = Literal["finished", "cancelled", "failed", "rejected", "expired"]
"""How an attempt ended."""


class Stage(StrEnum):
    """Where a request is on its way. What it holds follows from its stage alone.

    A colocated request is PREFILLING until its engine has admitted it, then DECODING. DONE has no way out.
    """

    QUEUED = "queued"
    """The request waits for a prefill worker to be chosen and holds nothing."""
    PREFILLING = "prefilling"
    """The prompt is computed, or waits for its turn, on the chosen worker."""
    POOLED = "pooled"
    """The prompt's KV waits under a lease on the prefill worker for a decode worker."""
    TRANSFERRING = "transferring"
    """The chosen decode worker takes a slot and pulls the KV; the lease still holds."""
    DECODING = "decoding"
    """Tokens are generated on the decode worker."""
    DONE = "done"
    """The request has ended, however it ended, and holds nothing."""
