"""A sim engine of several data-parallel ranks: each rank is a sim engine of its own behind one server and one identity.

Ranks share nothing but the process, and the step clock where there is a barrier. KV that one rank prefilled for another
is pulled as from any other engine, over the engine's own listener.
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
from actors.wire.messages import Decode, EngineInfo, Failed, Message, Prefill, Pull, Pulled, Status
from policies.engine_model.blocks import Change

T = TypeVar("T", int, float)


def sim_engine(config: SimEngineConfig) -> Engine:
    """The engine of a configuration, of one rank or several."""
    return SimEngine(config) if config.dp_ranks == 1 else SimRanks(config)


class SimRanks:
    """Implements `actors.engine.protocol.Engine`, and what its server needs of an engine that others pull from."""

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
        """Ready at once: there is nothing to load."""
        self._sink = sink
        for rank in self.ranks:
            await rank.start(sink)

    def attach(self, me: Identity, addresses: tuple[str, ...]) -> None:
        """Called by the server when it listens. Each rank has a name of its own towards the others."""
        for number, rank in enumerate(self.ranks):
            rank.attach(dataclasses.replace(me, id=f"{me.id}#{number}"), addresses)

    def info(self) -> EngineInfo:
        """Static facts; slots and blocks of all ranks together."""
        info, n = self.ranks[0].info(), len(self.ranks)
        return msgspec.structs.replace(
            info,
            id=self.config.engine_id,
            slots=n * info.slots,
            kv_blocks=n * info.kv_blocks,
            dp_ranks=n,
            barrier=self.config.barrier,
        )

    async def check_health(self) -> None:
        """Raises RuntimeError when a rank has failed: the others cannot go on without it in a real engine."""
        for rank in self.ranks:
            await rank.check_health()

    async def drain(self, timeout_s: float) -> bool:
        """New work is refused from now on; waits until all work and all leases have ended."""
        return all(await asyncio.gather(*(rank.drain(timeout_s) for rank in self.ranks)))

    async def stop(self) -> None:
        """Ends everything at once, without answers."""
        for rank in self.ranks:
            await rank.stop()

    # ------------------------------------------------------------------------------------------------ requests

    def prefill(self, msg: Prefill) -> None:
        """Queues the prompt on its rank."""
        rank = self._rank(msg.dp_rank)
        if rank is None:
            self._sink.failed(self._no_rank(msg, "prefill"))
        else:
            rank.prefill(msg)

    def decode(self, msg: Decode) -> None:
        """Queues the decode on its rank."""
        rank = self._rank(msg.dp_rank)
        if rank is None:
            self._sink.failed(self._no_rank(msg, "decode"))
        else:
            rank.decode(msg)

    def cancel(self, attempt_id: str) -> None:
        """Ends `attempt_id` on whatever rank; its prefill may be on another one than its decode."""
        for rank in self.ranks:
            rank.cancel(attempt_id)

    def release(self, attempt_id: str) -> None:
        """Ends the lease of `attempt_id`, if there is one."""
        for rank in self.ranks:
            rank.release(attempt_id)

    def _rank(self, number: int | None) -> SimEngine | None:
        """The rank asked for, the one with the least requests where none was; None if there is no such rank."""
        if number is None:
            loads = [rank.status() for rank in self.ranks]
            number = min(range(len(loads)), key=lambda n: loads[n].running + loads[n].waiting)
        return self.ranks[number] if 0 <= number < len(self.ranks) else None

    def _no_rank(self, msg: Prefill | Decode, stage: Any) -> Failed:
        message = f"engine {self.config.engine_id} has no rank {msg.dp_rank}, but 0 to {len(self.ranks) - 1}"
        return Failed(msg.attempt_id, stage, "internal", message, False)

    # ------------------------------------------------------------------------------------------------ counts

    def status(self) -> Status:
        """All ranks together, and each."""
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
        """Totals of all ranks since start."""
        ranks = [dataclasses.asdict(rank.metrics()) for rank in self.ranks]
        totals: dict[str, Any] = {name: _sum(rank[name] for rank in ranks) for name in ranks[0]}
        return EngineMetrics(**totals)

    def kv_events(self, rank: int = 0) -> list[Change]:
        """Changes of one rank's prefix cache since the last call."""
        return self.ranks[rank].kv_events()

    # ------------------------------------------------------------------------------------------------ other engines

    def peer_message(self, channel: Channel, message: Message) -> None:
        """A message about a lease, whose key begins with its rank. Raises WireError when it is none."""
        number = message.attempt_id.partition(".")[0] if isinstance(message, (Pull, Pulled)) else ""
        if not number.isdecimal() or int(number) >= len(self.ranks):
            raise WireError(f"engine {self.config.engine_id} has no lease for {type(message).__name__}")
        self.ranks[int(number)].peer_message(channel, message)

    def peer_closed(self, channel: Channel) -> None:
        """An engine's connection is gone, and its reads with it."""
        for rank in self.ranks:
            rank.peer_closed(channel)


def _sum(terms: Iterable[T | None]) -> T | None:
    """None if a term is not known."""
    known = list(terms)
    return None if any(term is None for term in known) else sum(known)  # type: ignore[arg-type,return-value]


def _mean(terms: Iterable[float | None]) -> float | None:
    known = list(terms)
    total = _sum(known)
    return None if total is None else total / len(known)
