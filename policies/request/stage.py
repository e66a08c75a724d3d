"""The stages of a request: the one vocabulary of router, ingress, simulator, metrics and documents."""

from enum import StrEnum


class Stage(StrEnum):
    """Where a request is on its way.

    A colocated request is PREFILLING until its engine has admitted it, then DECODING. DONE has no way out.
    """

    QUEUED = "queued"
    """It waits for the router to choose a prefill worker."""
    PREFILLING = "prefilling"
    """Its prompt is computed, or waits for its turn, on the chosen worker."""
    POOLED = "pooled"
    """Its KV waits under a lease for a decode worker."""
    TRANSFERRING = "transferring"
    """The chosen decode worker takes a slot and pulls the KV."""
    DECODING = "decoding"
    """Tokens are generated."""
    DONE = "done"
    """It has ended, however it ended, and holds nothing."""
