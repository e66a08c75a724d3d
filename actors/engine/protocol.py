"""The contract of an engine, which `server.EngineServer` drives and every kind of engine obeys.

Rules that every engine keeps (each is a test in tests/actors/engine):

- `prefill` and `decode` return at once; results arrive through the `Sink` given at `start`, on the event loop.
- Each prefill ends in exactly one of PrefillDone / Failed / (nothing, after cancel). Each decode sends `Reading` once
  when it begins to read KV, `Admitted` once, then Tokens whose last piece per choice carries `finish`, or one Failed;
  after cancel nothing more is sent.
- `cancel` works in every stage (queued, computing, leased, transferring, decoding) and frees slot and blocks;
  cancelling a leased prefill releases its KV. A running transfer first runs to its end: blocks are never reused
  while they are read.
- `release` frees a leased prefill. A lease that is neither pulled nor released ends by itself after `lease_s`.
- `renew` makes a lease longer, and is answered once by `Sink.renewed`: with the seconds that are left of it, or with 0
  if it has ended. How long a lease may last in all is the server's decision.
- The engine that decodes frees the prefill engine's copy after the pull (also if its request is cancelled before).
- `status()` is cheap and synchronous, since it is called several times a second.
- An engine of several data-parallel ranks (`info().dp_ranks`) runs a request on its `dp_rank`, or on a rank of its
  choice if that is None. It counts each rank in `status().ranks`.
- `set_role` changes the role that the engine announces; any engine can do the work of any role, and work under way is
  not touched.
- An engine that can stall or lose its core while its process lives says so in `state` (`server.SelfWatching`). The
  server then fails its open work; the engine need not.
"""

from dataclasses import dataclass
from typing import Protocol

from actors.wire.messages import (
    Admitted,
    Decode,
    EngineInfo,
    Failed,
    KVRenewed,
    Out,
    Prefill,
    PrefillDone,
    Reading,
    Role,
    Status,
)
from policies.engine_model.blocks import Change


class Sink(Protocol):
    """The receiver of an engine's results. Calls are synchronous, on the engine's event loop, and never raise."""

    def prefill_done(self, msg: PrefillDone) -> None: ...
    def reading(self, msg: Reading) -> None: ...
    def admitted(self, msg: Admitted) -> None: ...
    def tokens(self, items: list[Out]) -> None:
        """Takes all output of one engine step, for any number of requests."""

    def renewed(self, msg: KVRenewed) -> None: ...
    def failed(self, msg: Failed) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Monotonic totals since the start, for Prometheus. A total that the engine does not count is None.

    `collectives` and `collective_s` are the number and the times of the collectives between the nodes of the engine's
    instance, and `reuse_wait_s` is the time for which layer groups waited for a lent prefix: only sim engines count
    them. `weights_lent_bytes` are those of weights that other engines read here when they started. The last six are
    sums over the steps whose duration is known, `step_s` together: those that computed prompts, with their prompt
    tokens, and those that decoded, with their sequences and the KV tokens of these. An engine's speed is fitted to them
    (`policies.scaling.timing_fit`).
    """

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
    stalls: int | None = None
    transfers_overdue: int | None = None
    handshakes_refused: int | None = None
    handshake_restarts: int | None = None
    kv_feed_errors: int | None = None
    transfer_mismatches: int | None = None
    transfers_unscheduled: int | None = None
    collectives: int | None = None
    collective_s: float | None = None
    reuse_wait_s: float | None = None
    weights_lent_bytes: int | None = None
    step_s: float | None = None
    prefill_steps: int | None = None
    prefill_step_tokens: int | None = None
    decode_steps: int | None = None
    decode_step_seqs: int | None = None
    decode_step_kv_tokens: int | None = None


class Engine(Protocol):
    """One engine of one role in one process tree. The constructor only keeps the config; `start` does the work."""

    async def start(self, sink: Sink) -> None:
        """Loads the model and warms up. Raises an error with a message for the operator if the engine cannot start."""

    def info(self) -> EngineInfo:
        """Returns the static facts, after `start`. The server fills in `addresses`, `node` and `replica`."""

    def prefill(self, msg: Prefill) -> None: ...
    def decode(self, msg: Decode) -> None: ...
    def cancel(self, attempt_id: str) -> None: ...
    def release(self, attempt_id: str) -> None: ...
    def renew(self, attempt_id: str, lease_s: float) -> None:
        """Makes the lease of a finished prefill last for `lease_s` from now on, unless it lasts longer already."""

    def lease_rank(self, attempt_id: str) -> int:
        """Returns the data-parallel rank that holds the KV of a finished prefill (0 where there is one rank, and for an
        unknown lease).
        """

    def set_role(self, role: Role) -> None:
        """Serves `role` from now on, and `info` names it; its server knows whether that is for good."""

    def status(self) -> Status: ...
    def metrics(self) -> EngineMetrics: ...
    def kv_events(self, rank: int = 0) -> list[Change]:
        """Returns the changes of the prefix cache since the last call, in order. The first call returns all that is
        cached.

        The list is empty for an engine whose `info().features` lacks "kv_events". Called several times a second.
        """

    async def check_health(self) -> None:
        """Raises an error if the engine is dead; Serve then replaces the replica."""

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new work, and waits until running work and leases have ended. Returns whether all did within
        `timeout_s`.
        """

    async def stop(self) -> None:
        """Ends the engine and all its child processes. Idempotent."""
