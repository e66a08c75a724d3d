"""Inputs of the decisions that are timed, drawn from a seed.

As in BalanceRoute, the cluster is near saturation: beta_max = 96, and only 1/8 of the workers (at least 8, where there
are that many) have free slots, 8 to 12 each. KV loads, prompts and forecasts are drawn at random. Such a tick admits
some 80 requests at G = 64; a round that follows a single event admits one or two.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from policies.network.oracle import NodePlace, Oracle
from policies.request.terms import Terms
from policies.state.views import (
    Departure,
    Health,
    KnownHits,
    PoolEntry,
    Request,
    Role,
    Snapshot,
    Transfers,
    Worker,
)

BETA_MAX = 96
GIB = float(1 << 30)
KV_BYTES_PER_TOKEN = 80_000
"""KV bytes per token of Llama-3-70B on one of four shards (NetKV III-B)."""

BANDWIDTH = {0: 450 * GIB, 1: 12.5 * GIB, 2: 6.25 * GIB, 3: 3.125 * GIB}  # NetKV VI-A, bytes/s
LATENCY_S = {0: 1e-6, 1: 3e-6, 2: 8e-6, 3: 15e-6}


@dataclass(frozen=True, slots=True)
class RoundInput:
    """The input of one decision: a snapshot, and the workers on which each entry fits.

    All entries share one list of workers, as in the dispatcher.
    """

    snapshot: Snapshot
    feasible: list[tuple[PoolEntry, Sequence[Worker]]]


def round_input(workers: int, pool: int, rng: random.Random, busy: bool = True) -> RoundInput:
    """Returns the input of one tick, with `workers` decode workers and `pool` waiting prefills of 8 senders."""
    nodes = {f"n{i}": NodePlace(rack=f"r{i // 4}", pod=f"p{i // 16}") for i in range(workers + 8)}
    oracle = Oracle(
        BANDWIDTH, LATENCY_S, places=nodes, congestion=dict.fromkeys(range(4), 0.2), congestion_at_s=0.0
    )
    decode = [_decode_worker(i, rng, free=not busy or i < max(8, workers // 8)) for i in range(workers)]
    senders = [_sender(i, workers, rng) for i in range(8)]
    entries = tuple(_entry(i, rng) for i in range(pool))
    hits = {
        e.request.attempt_id: {decode[i % workers].id: e.request.prompt_tokens // 2}
        for i, e in enumerate(entries)
    }
    by_id = {worker.id: worker for worker in [*decode, *senders]}
    snapshot = Snapshot(1.0, by_id, entries, {}, oracle, KnownHits(hits))
    with_room = [worker for worker in decode if worker.free_slots]
    return RoundInput(snapshot, [(entry, with_room) for entry in entries])


def _decode_worker(i: int, rng: random.Random, free: bool) -> Worker:
    used = BETA_MAX - rng.randint(8, 12) if free else BETA_MAX
    departures = tuple(
        Departure(step, 1, rng.randint(200, 6000)) for step in sorted(rng.sample(range(1, 97), 6))
    )
    kv_tokens = sum(rng.randint(100, 4000) for _ in range(used))
    return Worker(
        f"d{i:03d}",
        Role.DECODE,
        "g",
        f"n{i}",
        Health.READY,
        BETA_MAX,
        1_000_000,
        slots_used=used,
        kv_tokens=kv_tokens,
        status_at_s=1.0,
        departures=departures,
    )


def _sender(i: int, workers: int, rng: random.Random) -> Worker:
    transfers = tuple(Transfers(f"d{d:03d}", 0, 1) for d in sorted(rng.sample(range(workers), 4)))
    return Worker(
        f"p{i}",
        Role.PREFILL,
        "g",
        f"n{workers + i}",
        Health.READY,
        32,
        1_000_000,
        sending=4,
        transfers=transfers,
    )


def _entry(i: int, rng: random.Random) -> PoolEntry:
    tokens = rng.randint(50, 8000)
    request = Request(f"r{i:04d}", 0.5, tokens, 1024, terms=Terms(ttft_slo_s=rng.choice([None, 2.0, 10.0])))
    return PoolEntry(request, f"p{i % 8}", "g", 0.5, 30.5, tokens * KV_BYTES_PER_TOKEN, 0)
