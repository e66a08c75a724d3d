"""Translation of the engines' and ingresses' messages into the policies' terms, in which a worker is one data-parallel
rank of an engine.

An engine with one rank is one worker of the same name. Rank r of an engine with several ranks is the worker `engine#r`.
Slots and KV blocks are divided evenly among the ranks, as the engines divide them. For ranks that step together the
engine's name is the name of their barrier group.
"""

import dataclasses
from collections.abc import Callable

from actors.wire.kv import unpack_hashes
from actors.wire.messages import Adopt, Closed, Duty, EngineInfo, EngineState, Fleet, Standby, Status, Submit
from policies.dispatch.actions import PrefixFetch
from policies.request.events import Lend
from policies.request.terms import LEAST_WEIGHT, MOST_WEIGHT
from policies.state import events as ev
from policies.state import standby
from policies.state.reducer import role_of
from policies.state.views import Health, Request, WorkerId

MAX_RANKS = 1024
"""Most data-parallel ranks of an engine, each of which is a worker of the router. ASSUMPTION: deployments have some
hundreds. The time that an announcement takes the router grows with the square of the ranks."""


def check(info: EngineInfo) -> None:
    """Raises ValueError for impossible facts: a rank without a slot or a KV block, blocks or a context without tokens,
    a lease of negative length, or `#` in the name.
    """
    if info.dp_ranks > MAX_RANKS:
        raise ValueError(f"engine {info.id} announces {info.dp_ranks} ranks; at most {MAX_RANKS}")
    if not 1 <= info.dp_ranks <= info.slots:
        raise ValueError(f"engine {info.id} announces {info.dp_ranks} ranks with {info.slots} slots in all")
    if info.block_size_tokens < 1 or info.kv_blocks < info.dp_ranks:
        raise ValueError(f"engine {info.id}: {info.kv_blocks} KV blocks of {info.block_size_tokens} tokens")
    if info.max_model_len < 1:
        raise ValueError(f"engine {info.id} announces a context of {info.max_model_len} tokens")
    if not (info.lease_s >= 0 and info.max_lease_s >= 0):
        raise ValueError(
            f"engine {info.id} announces leases of {info.lease_s} s, at most {info.max_lease_s} s"
        )
    if "#" in info.id:
        raise ValueError(f"engine {info.id}: '#' separates the name of an engine from its rank")


def check_fleet(fleet: Fleet) -> None:
    """Raises ValueError for a fleet that no router has: an engine with impossible facts (`check`), blocks to hash
    without tokens, or an impossible standby.
    """
    for info in fleet.engines:
        check(info)
    if fleet.block_tokens is not None and fleet.block_tokens < 1:
        raise ValueError(f"prompts cannot be hashed in blocks of {fleet.block_tokens} tokens")
    if fleet.standby is not None:
        check_standby(fleet.standby)


def check_standby(told: Standby) -> None:
    """Raises ValueError for an impossible standby: a wake of negative length, or a context without tokens."""
    if not told.wake_limit_s >= 0:
        raise ValueError(f"a wake may take {told.wake_limit_s} s")
    if told.abilities is not None and told.abilities.context_tokens < 1:
        raise ValueError(f"a sleeping fleet has a context of {told.abilities.context_tokens} tokens")


def workers_of(info: EngineInfo) -> tuple[WorkerId, ...]:
    """Returns the workers of an engine, in the order of their ranks."""
    if info.dp_ranks == 1:
        return (info.id,)
    return tuple(f"{info.id}#{rank}" for rank in range(info.dp_ranks))


def worker_of(engine_id: str | None, rank: int | None) -> WorkerId | None:
    """Returns the worker that a message names by engine and rank (None: the engine has one rank); None without an
    engine.
    """
    return engine_id if engine_id is None or rank is None else f"{engine_id}#{rank}"


def place_of(worker: WorkerId) -> tuple[str, int | None]:
    """Returns a worker's engine and its rank there, which is None if the engine has only one rank."""
    engine_id, _, rank = worker.rpartition("#")
    return (engine_id, int(rank)) if engine_id else (worker, None)


def lend_of(prefix: PrefixFetch | None, engine_id: str) -> Lend | None:
    """Returns the order to lend a prefix to the prefill on `engine_id`; None if none is to be fetched. The ranks of one
    engine lend each other nothing, because their answers could not be told apart.
    """
    if prefix is None or not prefix.fetch:
        return None
    lender, rank = place_of(prefix.lender)
    if lender == engine_id:
        return None
    return Lend(lender, prefix.tokens, prefix.patience_s, rank)


def standby_of(told: Standby) -> standby.Standby:
    """Returns the phase of the fleet that a message tells."""
    roles = tuple(role_of(role) for role in told.roles)
    return standby.Standby(standby.Phase(told.phase), roles, told.wake_limit_s, told.reason)


_HEALTH: dict[EngineState, Health] = {
    "ready": Health.READY,
    "stalled": Health.STALLED,
    "down": Health.DOWN,
    # the router's own word: it says nothing about what the engine can do
    "quarantined": Health.READY,
}


def health_of(state: EngineState, duty: Duty) -> Health:
    """Returns the health of an engine's workers by its state and its duty; an engine that is starting takes no work
    yet.
    """
    health = _HEALTH.get(state, Health.DRAINING)
    return Health.WARM if health is Health.READY and duty == "warm" else health


def ups(info: EngineInfo, health: Health, now_s: float) -> list[ev.EngineUp]:
    """Returns the events that tell the reducer of an engine's workers, one for each."""
    n, barrier = info.dp_ranks, info.id if info.barrier else ""
    kv_tokens = info.kv_blocks // n * info.block_size_tokens
    return [
        ev.EngineUp(
            now_s, worker, role_of(info.role), info.group, info.node, info.slots // n, kv_tokens, health, barrier
        )
        for worker in workers_of(info)
    ]  # fmt: skip


def reports(info: EngineInfo, status: Status, now_s: float) -> list[ev.EngineStatus]:
    """Returns an engine's counts as events, one for each worker. Raises ValueError if the counts of a rank are
    missing.
    """
    workers = workers_of(info)
    each = status.ranks if info.dp_ranks > 1 else [status]
    if len(each) != len(workers):
        raise ValueError(f"engine {info.id} has {len(workers)} ranks, but reports {len(each)}")
    health = health_of(status.state, info.duty)
    return [
        ev.EngineStatus(
            now_s, worker, one.running, one.waiting, one.kv_blocks_used * info.block_size_tokens, health, one.swapped,
            one.token_budget, one.compute, one.memory_bandwidth,
        )
        for worker, one in zip(workers, each, strict=True)
    ]  # fmt: skip


def failure_of(
    message: Closed, now_s: float, workers: Callable[[tuple[str, ...]], tuple[WorkerId, ...]]
) -> ev.AttemptFailed | None:
    """Returns the failure that ended an attempt; None for an attempt that no engine has failed. `workers` returns the
    workers of engines.
    """
    if message.engine_id is None:
        return None
    blamed = workers((message.engine_id,))
    return ev.AttemptFailed(now_s, message.attempt_id, blamed, message.task, message.code)


def adopted_of(
    message: Adopt, now_s: float, workers: Callable[[tuple[str, ...]], tuple[WorkerId, ...]]
) -> ev.Adopted:
    """Returns the event of an attempt that a router adopts at `now_s`, which arrived when it reached its ingress.
    `workers` returns the workers of engines. Raises ValueError if the bytes of a block hash are incomplete.
    """
    submit, renewed_ago_s = message.submit, message.renewed_ago_s
    request = request_of(submit, now_s, workers(submit.avoid))
    return ev.Adopted(
        now_s,
        dataclasses.replace(request, arrived_s=now_s - submit.age_s),
        message.stage,
        worker_of(message.engine_id, message.dp_rank),
        worker_of(message.decode_engine_id, message.decode_dp_rank),
        message.tokens,
        now_s + message.lease_s,
        message.kv_bytes,
        entered_s=now_s - message.pooled_ago_s,
        renewed_s=None if renewed_ago_s is None else now_s - renewed_ago_s,
        lease_s=message.granted_s,
    )


def request_of(message: Submit, now_s: float, avoid: tuple[WorkerId, ...]) -> Request:
    """Returns the request that an ingress submits at `now_s`. Raises ValueError if the bytes of a block hash are
    incomplete, or for a weight that no tenant has.
    """
    if not LEAST_WEIGHT <= message.terms.weight <= MOST_WEIGHT:
        raise ValueError(
            f"a weight of {message.terms.weight}: it must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        )
    return Request(
        attempt_id=message.attempt_id,
        arrived_s=now_s,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        slots=message.slots,
        terms=message.terms,
        deadline_s=message.terms.deadline_s(now_s - message.age_s),
        avoid=avoid,
        block_hashes=unpack_hashes(message.block_hashes),
        block_tokens=message.block_tokens,
        waits_since_s=now_s - message.waits_s,
        again=message.again or message.resumed_tokens > 0,
    )
