"""Sim engine <-> sim engine: a decode engine reads the KV that a prefill engine holds."""

from actors.wire.messages.base import Wire


class Pull(Wire, frozen=True):
    """Sim decode engine -> sim prefill engine: I start to read `n_bytes` of the KV of `attempt_id`; keep it until
    Pulled.
    """

    attempt_id: str
    n_bytes: int = 0


class PullGrant(Wire, frozen=True):
    """Answer to Pull: `ok` False where the KV is gone (lease expired, released, engine restarted). `paced`: a Sent
    follows when the bytes have arrived; else the reader knows itself how long they take.
    """

    attempt_id: str
    ok: bool
    kv_bytes: int = 0
    paced: bool = False


class Sent(Wire, frozen=True):
    """Sim prefill engine -> sim decode engine: the bytes of a paced Pull have arrived, after `seconds`."""

    attempt_id: str
    seconds: float


class Pulled(Wire, frozen=True):
    """The read has ended; the prefill engine frees its copy."""

    attempt_id: str
