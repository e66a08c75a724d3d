"""A sim engine of several data-parallel ranks. Each rank is a sim engine of its own; all share one server and one
identity.

Ranks share nothing but the process, and the step clock if there is a barrier. KV that one rank computed for another is
pulled as from any other engine, over the engine's own listener.
"""

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from actors.engine.protocol import Engine, EngineMetrics, Sink
from actors.engine.sim.clock import StepClock
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import (
    Decode,
    EngineInfo,
    EngineState,
    Failed,
    KVRenewed,
    Message,
    Prefill,
    Pull,
    PullChunk,
    Pulled,
    Role,
    Status,
)
from policies.engine_model.blocks import Change

T = TypeVar("T", int, float)


def sim_engine(config: SimEngineConfig) -> Engine:
    """Returns the engine for a configuration with one rank or several."""
    return SimEngine(config) if config.dp_ranks == 1 else SimRanks(config)


class SimRanks:
    """Implements `actors.engine.protocol.Engine`, and `server.PeerEngine` for other engines' KV reads."""

    def __init__(self, config: SimEngineConfig) -> None:
        clock = StepClock() if config.barrier else None
        self.config = config
        self.ranks = [
            SimEngine(
                dataclasses.replace(
                    config, engine_id=f"{config.engine_id}#{rank}", dp_ranks=1, barrier=False
                ),
                clock,
                rank,
            )
            for rank in range(config.dp_ranks)
        ]

    # ------------------------------------------------------------------------------------------------ life

    async def start(self, sink: Sink) -> None:
        """Starts all ranks. The engine is ready at once, because there is nothing to load."""
        self._sink = sink
        for rank in self.ranks:
            await rank.start(sink)

    def attach(self, me: Identity, addresses: tuple[str, ...]) -> None:
        """Takes the engine's name on the wire and its addresses. Each rank gets a name of its own towards other
        engines. The server calls this when it listens.
        """
        for number, rank in enumerate(self.ranks):
            rank.attach(dataclasses.replace(me, id=f"{me.id}#{number}"), addresses)

    def info(self) -> EngineInfo:
        """Returns the static facts, with the slots and blocks of all ranks together."""
        info, n = self.ranks[0].info(), len(self.ranks)
        return msgspec.structs.replace(
            info,
            id=self.config.engine_id,
            slots=n * info.slots,
            kv_blocks=n * info.kv_blocks,
            dp_ranks=n,
            barrier=self.config.barrier,
        )

    def set_role(self, role: Role) -> None:
        """Has all ranks serve `role` from now on."""
        for rank in self.ranks:
            rank.set_role(role)

    @property
    def state(self) -> EngineState:
        """The state of the rank that is worst off, because in a real engine the others could not go on without it."""
        return max((rank.state for rank in self.ranks), key=("ready", "stalled", "down").index)

    @property
    def silent_s(self) -> float:
        """Seconds for which the rank that has stood still for longest has done so."""
        return max(rank.silent_s for rank in self.ranks)

    async def check_health(self) -> None:
        """Raises RuntimeError if a rank has failed, because in a real engine the others could not go on without it."""
        for rank in self.ranks:
            await rank.check_health()

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new work and waits until all work and all leases have ended. Returns whether all did within
        `timeout_s`.
        """
        return all(await asyncio.gather(*(rank.drain(timeout_s) for rank in self.ranks)))

    async def stop(self) -> None:
        """Ends everything at once; running tasks get no answer."""
        for rank in self.ranks:
            await rank.stop()

    # ------------------------------------------------------------------------------------------------ requests

    def prefill(self, msg: Prefill) -> None:
        """Queues the prompt on its rank; a rank that does not exist fails the task."""
        rank = self._rank(msg.dp_rank)
        if rank is None:
            self._sink.failed(self._no_rank(msg, "prefill"))
        else:
            rank.prefill(msg)

    def decode(self, msg: Decode) -> None:
        """Queues the decode on its rank; a rank that does not exist fails the task."""
        rank = self._rank(msg.dp_rank)
        if rank is None:
            self._sink.failed(self._no_rank(msg, "decode"))
        else:
            rank.decode(msg)

    def cancel(self, attempt_id: str) -> None:
        """Ends `attempt_id` on all ranks, since its prefill may be on another rank than its decode."""
        for rank in self.ranks:
            rank.cancel(attempt_id)

    def release(self, attempt_id: str) -> None:
        """Ends the leases of `attempt_id`, if there are any."""
        for rank in self.ranks:
            rank.release(attempt_id)

    def renew(self, attempt_id: str, lease_s: float) -> None:
        """Renews the lease of `attempt_id` on the rank that holds it; the answer is that of all ranks together."""
        left_s = max(rank.renew_lease(attempt_id, lease_s) for rank in self.ranks)
        self._sink.renewed(KVRenewed(attempt_id, left_s))

    def lease_rank(self, attempt_id: str) -> int:
        """Returns the rank that holds the KV of a finished prefill; 0 if none does."""
        return next((number for number, rank in enumerate(self.ranks) if rank.holds_lease(attempt_id)), 0)

    def _rank(self, number: int | None) -> SimEngine | None:
        """Returns rank `number`, or None if it does not exist. With `number` None it returns the rank with the fewest
        requests.
        """
        if number is None:
            loads = [rank.status() for rank in self.ranks]
            number = min(range(len(loads)), key=lambda n: loads[n].running + loads[n].waiting)
        return self.ranks[number] if 0 <= number < len(self.ranks) else None

    def _no_rank(self, msg: Prefill | Decode, stage: Any) -> Failed:
        message = f"engine {self.config.engine_id} has no rank {msg.dp_rank}, but 0 to {len(self.ranks) - 1}"
        return Failed(msg.attempt_id, stage, "internal", message, False)

    # ------------------------------------------------------------------------------------------------ counts

    def status(self) -> Status:
        """Returns the present counts of all ranks together, and of each rank."""
        ranks = [rank.status() for rank in self.ranks]
        return msgspec.structs.replace(
            ranks[0],
            engine_id=self.config.engine_id,
            running=sum(s.running for s in ranks),
            waiting=sum(s.waiting for s in ranks),
            kv_blocks_used=sum(s.kv_blocks_used for s in ranks),
            leases=sum(s.leases for s in ranks),
            kv_usage=sum(s.kv_usage for s in ranks) / len(ranks),
            tokens_in_flight=_sum(s.tokens_in_flight for s in ranks),
            token_budget=_mean(s.token_budget for s in ranks),
            ranks=ranks,
        )

    def metrics(self) -> EngineMetrics:
        """Returns the totals of all ranks together since the start."""
        ranks = [dataclasses.asdict(rank.metrics()) for rank in self.ranks]
        totals: dict[str, Any] = {name: _sum(rank[name] for rank in ranks) for name in ranks[0]}
        return EngineMetrics(**totals)

    def kv_events(self, rank: int = 0) -> list[Change]:
        """Returns the changes of the prefix cache of `rank` since the last call."""
        return self.ranks[rank].kv_events()

    # ------------------------------------------------------------------------------------------------ other engines

    def peer_message(self, channel: Channel, message: Message) -> None:
        """Passes a message about a lease to its rank, with which the lease's key begins. Raises WireError for any other
        message.
        """
        number = (
            message.attempt_id.partition(".")[0] if isinstance(message, (Pull, PullChunk, Pulled)) else ""
        )
        if not number.isdecimal() or int(number) >= len(self.ranks):
            raise WireError(f"engine {self.config.engine_id} has no lease for {type(message).__name__}")
        self.ranks[int(number)].peer_message(channel, message)

    def peer_closed(self, channel: Channel) -> None:
        """Ends the reads of an engine whose connection is lost."""
        for rank in self.ranks:
            rank.peer_closed(channel)


def _sum(terms: Iterable[T | None]) -> T | None:
    """Returns the sum, or None if a term is None."""
    known = list(terms)
    numbers = [term for term in known if term is not None]
    return sum(numbers) if len(numbers) == len(known) else None


def _mean(terms: Iterable[float | None]) -> float | None:
    known = list(terms)
    total = _sum(known)
    return None if total is None else total / len(known)
