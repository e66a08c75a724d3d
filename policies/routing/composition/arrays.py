"""What the composition's compiled stages begin with: a group's workers, pool entries, paths and prices as the tables of
`seconds_kernel`. What each number is: `composition`; the same one at a time: `request_seconds`, `entry_costs`.
"""

import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.network.oracle import Oracle
from policies.routing.balance.arrays import barriers_of, by_priority_and_size, integers, kinds_of, table
from policies.routing.balance.loads import projected_loads
from policies.routing.balance.stages import Feasible, StageLimits
from policies.routing.composition.entry_costs import Prices
from policies.routing.composition.kernel import (
    ADMISSION,
    DEAREST,
    ENTRY,
    FLEET,
    NO_TIER,
    PATH,
    RULES,
    STATE,
    TIERS,
    WORKER,
    Tables,
)
from policies.routing.composition.request_seconds import LEASE_SHARE, delayed, slowest_step_s
from policies.routing.composition.slot_rent import FOREVER_S, SlotRent
from policies.routing.netkv.fleet_flows import FleetFlows
from policies.routing.netkv.netkv import queue_and_step_seconds, sequences_on
from policies.state.views import Request, Snapshot, Worker, WorkerId

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]
Table = npt.NDArray[np.void]

EVERY_CLASS = np.iinfo(np.int64).max

_request_facts = attrgetter("prompt_tokens", "slots", "terms.priority", "arrived_s")
_entry_facts = attrgetter("request", "prefill_worker", "entered_s", "lease_until_s", "kv_bytes")
_worker_facts = attrgetter("kv_tokens", "slots_used", "slots", "kv_capacity_tokens", "foreign_kv_tokens")


class Group(NamedTuple):
    """What a round is about. `workers`: all of the group, by id; `draws`: one each; `discount`: gamma^h, h = 0..H."""

    feasible: Feasible
    snapshot: Snapshot
    workers: Sequence[Worker]
    draws: Sequence[float]
    discount: Floats
    prices: Prices
    limits: StageLimits


class Start(NamedTuple):
    """A round's tables as it begins, and what its decisions show besides. `kept`: the workers that the tables have."""

    tables: Tables
    kept: list[int]
    sizes: list[int]  # G, of each kept worker's barrier
    queue_rent_s: float


def start_of(group: Group) -> Start:
    """The tables of a round that has not begun."""
    workers, snapshot, prices = group.workers, group.snapshot, group.prices
    kind, allowed = _merged(*kinds_of(group.feasible, workers))
    is_open: Truths = np.logical_or.reduce(allowed, axis=0)
    kept = _kept(is_open)
    free = sum([worker.free_slots for worker in workers])
    queued = max(0, len(snapshot.pool) - free)
    step_s = slowest_step_s(workers, prices)
    rent = SlotRent(snapshot, workers, queued, step_s, prices.rent_weight, prices.near_scarcity)
    rows, load, envelope, sizes = _workers(group, queued, is_open, kept)
    entries, entered_s, senders, classes = _entries(group, kind, len(allowed), rent)
    by_size, ends = by_priority_and_size(entries["priority"], entries["tokens"])
    turn = entries["hold"] * rent.queue_s - entries["age_s"]
    keys = entered_s[by_size], turn[by_size], entries["priority"][by_size]
    fleets, flows, fleet_size = _fleets(snapshot, classes, prices)
    n, steps, subsets = len(entries), len(group.discount), 1 << group.limits.window
    weighed = max(len(kept), subsets - 1)
    tables = Tables(
        workers=rows,
        load=load,
        envelope=envelope,
        entries=entries,
        allowed=np.ascontiguousarray(allowed[:, kept]),
        hits=np.zeros((n, len(kept)), np.int64),
        by_size=by_size,
        by_turn=by_size[np.lexsort(keys)],  # stable
        ends=ends,
        paths=_paths(snapshot, senders, workers, kept, rent),
        fleets=fleets,
        flows=flows,
        dearest=table(DEAREST, len(senders) * len(classes) * len(allowed)),
        rules=_rules(group, rent.queue_s, fleet_size),
        state=table(STATE, 1),
        window=np.empty(group.limits.window, np.int64),
        sums=np.zeros((2, subsets), np.int64),
        worths=np.zeros(subsets),
        margins=np.empty(steps),
        over=np.empty((weighed, steps)),
        overflow=np.empty(weighed),
        done=table(ADMISSION, n),
        done_over=np.empty((n, steps)),
        chosen=np.empty(n, np.int64),
    )
    tables.state["free"] = free
    return Start(tables, kept, sizes, rent.queue_s)


def _rules(group: Group, queue_rent_s: float, fleet_size: int) -> Table:
    """The RULES record."""
    prices, limits, oracle = group.prices, group.limits, group.snapshot.oracle
    facts = (
        limits.window,
        limits.abundance,
        limits.reserve_tokens,
        group.snapshot.now_s,
        prices.wait_s,
        prices.max_weight,
        prices.cost_weight,
        prices.credit_s_per_token is not None,
        prices.credit_s_per_token or 0.0,
        queue_rent_s,
        prices.step_base_s,
        prices.step_per_seq_s,
        oracle is not None and oracle.own_flows_excluded,
        prices.max_inflight,
        fleet_size,
    )
    return np.array([facts], RULES)


def _merged(kind: Integers, truths: Truths) -> tuple[Integers, Truths]:
    """The same with one kind for equal lists."""
    numbers: dict[bytes, int] = {}
    merged = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in truths])
    if len(numbers) == len(truths):
        return kind, truths
    return merged[kind], np.array([np.frombuffer(row, np.bool_) for row in numbers])


def _kept(is_open: Truths) -> list[int]:
    """The rows that a round computes with, as `HorizonLoads.only` keeps them."""
    rows: list[int] = np.flatnonzero(is_open).tolist()
    return rows if 2 * len(rows) < len(is_open) else list(range(len(is_open)))


def _workers(
    group: Group, queued: int, is_open: Truths, kept: list[int]
) -> tuple[Table, Floats, Floats, list[int]]:
    """WORKER rows and projected loads of those kept, the envelopes of all, and G of each kept one's barrier."""
    workers, prices = group.workers, group.prices
    load = projected_loads(workers, len(group.discount) - 1)
    numbers, sizes = barriers_of(workers)
    barrier = np.array(numbers)
    members = [barrier == i for i in range(max(numbers) + 1)] if max(numbers) else [...]
    envelope = np.array([load[some].max(axis=0) for some in members])
    tokens, used, slots, capacity, foreign = integers(_worker_facts, workers).T
    rows = table(WORKER, len(workers))
    rows["slots"], rows["barrier"], rows["open"], rows["draw"] = slots, barrier, is_open, group.draws
    held = prices.hold_steps / float(group.discount.sum())
    rows["slowdown"] = np.array(delayed(workers, queued, prices)) * prices.seconds_per_kv_token * held
    rows["free"] = np.maximum(0, slots - used)
    rows["room"] = np.where(used > 0, np.maximum(0, capacity - tokens - foreign), capacity)
    rows, load, some = rows[kept], load[kept], [workers[row] for row in kept]
    rows["margin"] = np.minimum.reduce(envelope[barrier[kept]] - load, axis=1)
    rows["sequences"] = [sequences_on(worker) for worker in some]
    queue_and_step = [
        queue_and_step_seconds(on_it, worker.slots, prices.step_base_s, prices.step_per_seq_s)
        for on_it, worker in zip(rows["sequences"].tolist(), some, strict=True)
    ]
    rows["queue_s"], rows["step_s"] = np.array(queue_and_step).T
    return rows, load, envelope, [sizes[row] for row in kept]


def _entries(
    group: Group, kind: Integers, kinds: int, rent: SlotRent
) -> tuple[Table, Floats, list[WorkerId], list[int]]:
    """ENTRY rows, when they entered, the senders by their numbers, and the priorities."""
    now_s, prices = group.snapshot.now_s, group.prices
    requests, sender, *times = zip(*[_entry_facts(entry) for entry, _ in group.feasible], strict=True)
    entered_s, lease_until_s, kv_bytes = np.array(times, np.float64)
    flat = np.fromiter(itertools.chain.from_iterable(map(_request_facts, requests)), np.float64)
    prompt, sequences, priority, arrived_s = flat.reshape(len(requests), -1).T
    senders = {name: number for number, name in enumerate(dict.fromkeys(sender))}
    classes, number = _classes(priority)
    rows = table(ENTRY, len(requests))
    rows["sender"] = [senders[name] for name in sender]
    rows["tokens"], rows["prompt"] = np.where(prompt == 0, 1, prompt), np.maximum(1, prompt)
    rows["sequences"], rows["priority"], rows["kind"] = sequences, priority, kind
    rows["fleet"] = number if prices.strict_priorities else 0
    rows["dearest"] = (rows["sender"] * len(classes) + number) * kinds + kind
    most_s = np.minimum(group.limits.max_wait_s, (lease_until_s - entered_s) * LEASE_SHARE)
    rows["overdue"] = entered_s < now_s - most_s
    rows["kv_bytes"], rows["arrived_s"] = kv_bytes, arrived_s
    rows["slo_s"] = [request.terms.ttft_slo_s or 0.0 for request in requests]
    rows["hold"] = _holds(requests, sequences, rent)
    rows["age_s"] = prices.ageing * np.maximum(0.0, now_s - entered_s)
    return rows, entered_s, list(senders), classes


def _classes(priority: Floats) -> tuple[list[int], Integers]:
    """The priorities that there are, and each entry's place among them."""
    if (priority == priority[0]).all():
        return [int(priority[0])], np.zeros(len(priority), np.int64)
    classes, number = np.unique(priority, return_inverse=True)
    return classes.astype(np.int64).tolist(), number


def _holds(requests: Sequence[Request], slots: Floats, rent: SlotRent) -> Floats:
    """hold_r of each."""
    usual = rent.typical.output_tokens
    if not usual:
        return slots
    forecast = [request.predicted_tokens for request in requests]
    known = np.array([tokens is not None for tokens in forecast])
    tokens = np.array([tokens or 0.0 for tokens in forecast], np.float64)
    return np.where(known, slots * tokens / usual, slots)


def _fleets(snapshot: Snapshot, classes: Sequence[int], prices: Prices) -> tuple[Table, Integers, int]:
    """With strict priorities one of each class, else one; their transfers by tier; the number of senders."""
    lowest = list(classes) if prices.strict_priorities else [None]
    fleets, flows = table(FLEET, len(lowest)), np.zeros((len(lowest), TIERS + 1), np.int64)
    fleets["lowest"] = [EVERY_CLASS if priority is None else priority for priority in lowest]
    senders = 1
    for i, priority in enumerate(lowest):
        fleet = FleetFlows(snapshot, priority)
        senders = fleet.senders
        for tier, number in fleet.by_tier.items():
            flows[i, tier] = number
    return fleets, flows, senders


def _paths(
    snapshot: Snapshot,
    senders: Sequence[WorkerId],
    workers: Sequence[Worker],
    kept: Sequence[int],
    rent: SlotRent,
) -> Table:
    """PATH rows of the workers kept, sender after sender. Rents need the paths to all workers."""
    usual_bytes, oracle = rent.typical.kv_bytes, snapshot.oracle
    asked = list(range(len(workers))) if usual_bytes else kept
    paths: Table = np.zeros((len(senders), len(asked)), PATH)
    paths["uplinks"], paths["residual"] = 1, 1.0
    if oracle is not None:
        receivers, tiers = [workers[row] for row in asked], _tier_facts(oracle, snapshot.now_s)
        for row, sender in zip(paths, senders, strict=True):
            _fill_paths(row, snapshot, oracle, tiers, sender, receivers, workers)
        if usual_bytes:
            with np.errstate(over="ignore"):  # a path of no bandwidth: FOREVER_S below
                share_s, own_s = (
                    usual_bytes * (1.0 / paths["residual"]),
                    usual_bytes * 1.0 / paths["residual"],
                )
            seconds = np.where(paths["own"], own_s, share_s) + paths["latency_s"]
            near_s = rent.near_of(np.minimum(seconds, FOREVER_S))
            paths["near_s"] = np.where(paths["known"], near_s, 0.0)
            paths = paths[:, kept]
    return paths.ravel()


def _tier_facts(oracle: Oracle, now_s: float) -> Floats:
    """Uplinks, residual bytes/s and latency in s of each tier, and of none."""
    facts = np.ones((TIERS + 1, 3))
    facts[NO_TIER, 2] = 0.0
    for tier in oracle.bandwidth_bytes_per_s:
        path = oracle.tier_path(tier, now_s)
        facts[tier] = oracle.uplinks.get(tier, 1), path.residual_bytes_per_s, path.latency_s
    return facts


def _fill_paths(
    row: Table,
    snapshot: Snapshot,
    oracle: Oracle,
    tier_facts: Floats,
    sender: WorkerId,
    receivers: Sequence[Worker],
    workers: Sequence[Worker],
) -> None:
    """One sender's: by tier, or by the pair's own estimate where there is a fresh one. Where one of all `workers` has
    neither, none is known.
    """
    source = snapshot.workers.get(sender)
    node = source.node if source is not None else ""
    own = oracle.pair_paths(sender, node, workers, snapshot.now_s)
    if not (oracle.bandwidth_bytes_per_s or all(worker.id in own for worker in workers)):
        return
    tiers = [NO_TIER if tier is None else tier for tier in oracle.tiers(sender, node, receivers)]
    row["known"], row["tier"], row["sent"] = 1, tiers, tiers if source is not None else NO_TIER
    row["uplinks"], row["residual"], row["latency_s"] = tier_facts[tiers].T
    for at in [at for at, worker in enumerate(receivers) if worker.id in own] if own else ():
        path = own[receivers[at].id]
        row["own"][at], row["tier"][at] = 1, path.tier
        row["uplinks"][at] = oracle.uplinks.get(path.tier, 1)
        row["residual"][at], row["latency_s"][at] = path.residual_bytes_per_s, path.latency_s
