"""The contract of an engine: what `server.EngineServer` drives and both implementations obey.

Rules that every engine keeps (each is a test in tests/actors/engine):

- `prefill` and `decode` return at once; results arrive through the `Sink` given at `start`, on the event loop.
- Each prefill ends in exactly one of PrefillDone / Failed / (nothing, after cancel). Each decode sends `Admitted`
  once, then Tokens whose last piece per choice carries `finish`, or one Failed; after cancel nothing more is sent.
- `cancel` works in every stage (queued, computing, leased, transferring, decoding) and frees slot and blocks;
  cancelling a leased prefill releases its KV. A transfer under way is let end first: blocks are never reused under a
  running read.
- `release` frees a leased prefill. A lease that nobody pulls or releases ends by itself after `lease_s`.
- The engine that decodes frees the prefill engine's copy after the pull (also when its request is cancelled before).
- `status()` is cheap and synchronous: called several times a second.
- An engine of several data-parallel ranks (`info().dp_ranks`) runs a request on its `dp_rank`, or chooses one where
  that is None, and counts each rank in `status().ranks`.
"""

from dataclasses import dataclass
from typing import Protocol

from actors.wire.messages import Admitted, Decode, EngineInfo, Failed, Out, Prefill, PrefillDone, Status
from policies.engine_model.blocks import Change


class Sink(Protocol):
    """Where an engine puts results. Calls are synchronous, on the engine's event loop, and never raise."""

    def prefill_done(self, msg: PrefillDone) -> None: ...
    def admitted(self, msg: Admitted) -> None: ...
    def tokens(self, items: list[Out]) -> None:
        """All output of one engine step, for any number of requests."""

    def failed(self, msg: Failed) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Monotonic totals since start, for Prometheus; a term the engine does not count is None."""

    prefill_tokens: int
    decode_tokens: int
    transfers: int
    transfer_bytes: int
    transfer_s: float
    transfer_descriptors: int
    transfer_failures: int
    leases_expired: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_free: int
    preemptions: int | None = None


class Engine(Protocol):
    """One engine of one role in one process tree. Constructors only keep the config; `start` does the work."""

    async def start(self, sink: Sink) -> None:
        """Load and warm up. Raises with a message for the operator when it cannot."""

    def info(self) -> EngineInfo:
        """Static facts; `addresses`, `node`, `replica` are filled in by the server. Valid after `start`."""

    def prefill(self, msg: Prefill) -> None: ...
    def decode(self, msg: Decode) -> None: ...
    def cancel(self, attempt_id: str) -> None: ...
    def release(self, attempt_id: str) -> None: ...
    def status(self) -> Status: ...
    def metrics(self) -> EngineMetrics: ...
    def kv_events(self, rank: int = 0) -> list[Change]:
        """Changes of the prefix cache since the last call, in order; the first call returns all that is cached.

        Empty for an engine whose `info().features` lacks "kv_events". Called several times a second.
        """

    async def check_health(self) -> None:
        """Raises when the engine is dead; Serve then replaces the replica."""

    async def drain(self, timeout_s: float) -> bool:
        """Take no new work, wait until running work and leases have ended; True if all did within `timeout_s`."""

    async def stop(self) -> None:
        """End the engine and all its child processes. Idempotent."""
