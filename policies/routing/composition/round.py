"""`compose` runs one round of the composition: it turns objects into tables, runs the stages (`kernel`), and turns
tables into decisions.

The network term counts the transfers of all P senders:

    n[tau] = transfers of all senders on tier tau or farther / P        -> Worker.transfers of the P prefill workers

NetKV counts only the sender's own. All senders share the links that limit a path, which are the uplinks of racks
and pods, and farther transfers use the nearer tiers' links too. A fat tree has as many links per level as NICs
below it and spreads flows over them, so that a flow meets the mean number of flows per NIC, not the number of its
own sender. ASSUMPTION: senders are alike.
"""

import random
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.network.oracle import Oracle
from policies.routing.balance.loads import FIRST_OF_CLASS
from policies.routing.balance.round import (
    WorkerTable,
    assignments,
    by_priority_and_size,
    entry_table,
    kinds_of,
    overdue_of,
    stage_terms,
    worker_table,
)
from policies.routing.balance.stages import discounts
from policies.routing.base import Assignment, Feasible
from policies.routing.compiled import Table, table
from policies.routing.composition.kernel import (
    DONE,
    HITS,
    NO_TIER,
    TIERS,
    CostedEntry,
    Dearest,
    FlowClass,
    PathRow,
    PricedAdmission,
    PricedWorker,
    Rules,
    State,
    Tables,
    advance,
    begin,
)
from policies.routing.composition.parameters import Parameters
from policies.routing.composition.slot_rent import holds, near_rents_s, queue_rent_s
from policies.routing.netkv.netkv import batch_behind_queue, sequences_on
from policies.state.views import Health, Role, Snapshot, TypicalEntry, Worker, WorkerId

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

EVERY_CLASS = np.iinfo(np.int64).max
NOTHING_TYPICAL = TypicalEntry(0.0)

OWN_RULES = (
    "window",
    "abundance",
    "reserve_tokens",
    "wait_s",
    "max_weight",
    "cost_weight",
    "credit_s_per_token",
    "step_base_s",
    "step_per_seq_s",
    "max_inflight",
)
"""The parameters of the policy that the kernel's rules have under the same name."""

_entry_facts = attrgetter("request", "prefill_worker", "entered_s", "kv_bytes")


class Group(NamedTuple):
    """The group that a round serves. `workers` are all its decode workers, ordered by id."""

    policy: Parameters
    feasible: Feasible
    snapshot: Snapshot
    workers: Sequence[Worker]
    discount: Floats  # gamma^h, h = 0..H
    typical: TypicalEntry
    queued: int  # Q
    queue_rent_s: float


class Start(NamedTuple):
    """A round before its first step. The tables contain only the workers in the rows `kept`. `tight` says that some
    worker has too little free KV for all entries.
    """

    tables: Tables
    kept: list[int]
    workers: WorkerTable
    tight: bool


def compose(
    policy: Parameters,
    feasible: Feasible,
    snapshot: Snapshot,
    workers: Sequence[Worker],
    rng: random.Random,
) -> tuple[Assignment, ...]:
    """Returns the assignments of one group in one round."""
    draws = [rng.random() for _ in workers]
    group = group_of(policy, feasible, snapshot, workers)
    start = start_of(group, draws)
    tables, state = start.tables, start.tables.state[0]
    while (asked := advance(*tables)) != DONE:
        if asked == HITS:
            _look_up_hits(start, group)
        else:
            n = state["rows"]
            np.matmul(tables.over[:n], group.discount, out=tables.overflow[:n])
    return _decisions(start, group)


def group_of(policy: Parameters, feasible: Feasible, snapshot: Snapshot, workers: Sequence[Worker]) -> Group:
    """Returns the group of a round, with the values on which all its prices depend."""
    typical = snapshot.typical or NOTHING_TYPICAL
    queued = max(0, len(snapshot.pool) - sum([worker.free_slots for worker in workers]))
    rent_s = queue_rent_s(typical, workers, queued, _slowest_step_s(policy, workers), policy.rent_weight)
    discount = discounts(policy.horizon, policy.gamma)
    return Group(policy, feasible, snapshot, workers, discount, typical, queued, rent_s)


def _look_up_hits(start: Start, group: Group) -> None:
    """Fills in the prefix hits of the entry that the kernel wants, and of the entries next in turn, as many as may
    be weighed before the free slots are used up.
    """
    tables, snapshot = start.tables, group.snapshot
    state = tables.state[0]
    at = int(np.flatnonzero(tables.by_turn == state["entry"])[0])
    column = {group.workers[row].id: i for i, row in enumerate(start.kept)}
    for entry in tables.by_turn[at : at + state["free"] + len(tables.window)].tolist():
        request = group.feasible[entry][0].request
        for worker, tokens in snapshot.hits.tokens(request).items():
            if worker in column:
                tables.hits[entry, column[worker]] = tokens
        if start.tight:
            for worker, tokens in snapshot.hits.tokens_in_use(request).items():
                if worker in column:
                    tables.in_use[entry, column[worker]] = tokens
        tables.entries["looked"][entry] = 1


def _decisions(start: Start, group: Group) -> tuple[Assignment, ...]:
    """Returns the assignments of a finished round, whose decisions show the terms that add up to each score."""
    tables = start.tables
    done = tables.done[: tables.state[0]["admissions"]]
    # Each row is a product of its own, because the BLAS would round the rows of one large product differently.
    overflow = np.matmul(tables.done_over[: len(done), None, :], group.discount)[:, 0]
    slowdown_s = (tables.workers["slowdown"][done["row"]] * overflow).tolist()
    terms = stage_terms(done, start.workers.sizes)
    names = ("worth_s", "age_s", "cost_s", "queue_s", "rent_s", "holds")
    columns = [done[name].tolist() for name in names]
    for shows, slowed_s, worth_s, age_s, cost_s, queue_s, rent_s, held in zip(
        terms, slowdown_s, *columns, strict=True
    ):
        shows["free_slots"] = max(0.0, shows["free_slots"])
        shows["credit_less_cost_s"] = worth_s + rent_s - age_s
        shows["age_s"] = age_s
        shows["cost_s"] = cost_s
        shows["queue_s"] = queue_s
        shows["rent_s"] = rent_s
        shows["usual_holds"] = held
        shows["queue_rent_s"] = group.queue_rent_s
        shows["near_rent_s"] = rent_s / held - group.queue_rent_s if held else 0.0
        shows["slowdown_s"] = slowed_s
    chosen = tables.chosen[: tables.state[0]["chosen"]].tolist()
    requests = [group.feasible[entry][0].request for entry in chosen]
    return assignments([group.workers[row] for row in start.kept], start.workers, done, terms, requests)


# --------------------------------------------------------------------------------------------------------- tables


def start_of(group: Group, draws: Sequence[float]) -> Start:
    """Returns the tables of a round before its first step."""
    policy, snapshot, n, steps = group.policy, group.snapshot, len(group.feasible), len(group.discount)
    kind, allowed = _merged(*kinds_of(group.feasible, group.workers))
    workers = worker_table(PricedWorker, group.workers, allowed, draws, policy.horizon)
    free = sum(workers.free)
    _fill_prices(workers, group)
    entries, entered_s, senders, priorities = _entries(group, kind, len(allowed))
    by_size, ends = by_priority_and_size(entries["priority"], entries["tokens"])
    turn = entries["hold"] * group.queue_rent_s - entries["age_s"]
    keys = entered_s[by_size], turn[by_size], entries["priority"][by_size]
    classes, flows = _flow_classes(snapshot, priorities if policy.strict_priorities else [EVERY_CLASS])
    rules = _rules(group)
    rules["pressing"] = (entries["overdue"] == FIRST_OF_CLASS).any()
    load, envelope = np.empty((len(group.workers), steps)), np.empty((workers.barriers, steps))
    begin(workers.rows, workers.departures, load, envelope, rules)
    kept = _kept(workers.rows["open"])
    workers = workers._replace(
        rows=workers.rows[kept],
        free=[workers.free[row] for row in kept],
        sizes=[workers.sizes[row] for row in kept],
    )
    subsets = 1 << policy.window
    weighed = max(len(kept), subsets - 1)
    tables = Tables(
        workers=workers.rows,
        load=load[kept],
        envelope=envelope,
        entries=entries,
        allowed=np.ascontiguousarray(allowed[:, kept]),
        hits=np.zeros((n, len(kept)), np.int64),
        in_use=np.zeros((n, len(kept)), np.int64),
        by_size=by_size,
        by_turn=by_size[np.lexsort(keys)],  # stable
        ends=ends,
        paths=_paths(group, senders, kept),
        classes=classes,
        flows=flows,
        dearest=table(Dearest, len(senders) * len(priorities) * len(allowed)),
        rules=rules,
        state=table(State, 1),
        window=np.empty(policy.window, np.int64),
        sums=np.zeros((3, subsets), np.int64),
        worths=np.zeros(subsets),
        over=np.empty((weighed, steps)),
        overflow=np.empty(weighed),
        done=table(PricedAdmission, n),
        done_over=np.empty((n, steps)),
        chosen=np.empty(n, np.int64),
    )
    tables.state["free"] = free
    need = int(entries["tokens"].sum() + policy.reserve_tokens * entries["sequences"].sum())
    tight = bool((tables.workers["room"] < need).any())
    return Start(tables, kept, workers, tight)


def _kept(is_open: Integers) -> list[int]:
    """Returns the rows of the workers with which a round computes: the open ones if they are less than half,
    otherwise all.
    """
    rows: list[int] = np.flatnonzero(is_open).tolist()
    return rows if 2 * len(rows) < len(is_open) else list(range(len(is_open)))


def _merged(kind: Integers, truths: Truths) -> tuple[Integers, Truths]:
    """Returns the entries' kinds and the table of allowed workers after merging the kinds that allow the same
    workers.
    """
    numbers: dict[bytes, int] = {}
    merged = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in truths])
    if len(numbers) == len(truths):
        return kind, truths
    return merged[kind], np.array([np.frombuffer(row, np.bool_) for row in numbers])


def _rules(group: Group) -> Table:
    """Returns the kernel's rules as a table of one row."""
    policy, oracle = group.policy, group.snapshot.oracle
    rules = table(Rules, 1)
    for name in OWN_RULES:
        rules[name] = getattr(policy, name)
    rules["by_tokens"] = policy.credit == "tokens"
    rules["now_s"], rules["queue_rent_s"] = group.snapshot.now_s, group.queue_rent_s
    rules["counted"] = oracle is not None and oracle.own_flows_excluded
    everyone = group.snapshot.workers.values()
    senders = [w for w in everyone if w.role is Role.PREFILL and w.health is not Health.WARM]
    rules["senders"] = max(1, len(senders))
    return rules


def _slowest_step_s(policy: Parameters, workers: Sequence[Worker]) -> float:
    """Returns the length in seconds of the slowest decode step of the workers, at their present loads."""
    base_s, per_seq_s, per_token_s = policy.step_base_s, policy.step_per_seq_s, policy.seconds_per_kv_token
    return max([base_s + per_seq_s * w.slots_used + per_token_s * w.kv_tokens for w in workers])


def _fill_prices(workers: WorkerTable, group: Group) -> None:
    """Fills in each worker's slowdown, for which N is taken before the round's admissions, the sequences on it, and
    how many more than its free slots it may get.
    """
    policy, rows = group.policy, workers.rows
    used, barrier = rows["running"], rows["barrier"]
    occupied = min(1.0, int(used.sum()) / int(rows["slots"].sum()))
    each = policy.stream_weight + (1.0 - policy.stream_weight) * float(occupied**policy.scarcity)
    together = np.array([worker.barrier != "" for worker in group.workers])
    batch = np.where(together, np.bincount(barrier, used)[barrier], used)
    members = np.where(together, workers.sizes, 1)
    delayed = each * np.maximum(1, batch) + group.queued * members / len(rows)
    held = policy.hold_steps / float(group.discount.sum())
    rows["slowdown"] = delayed * policy.seconds_per_kv_token * held
    rows["queued"] = [sequences_on(worker) for worker in group.workers]
    output_tokens = group.typical.output_tokens or group.snapshot.usual_output_tokens or 0.0
    rows["slot_steps"] = output_tokens / rows["slots"]
    rows["batch"] = [batch_behind_queue(worker) for worker in group.workers]
    more = rows["slots"] + group.snapshot.overcommit_slots - used
    rows["extra"] = np.maximum(0, more) - rows["free"]


def _entries(group: Group, kind: Integers, kinds: int) -> tuple[Table, Floats, list[WorkerId], list[int]]:
    """Returns the entries as records, the times at which they entered, the senders in the order of their numbers,
    and the priorities that occur.
    """
    now_s, policy = group.snapshot.now_s, group.policy
    requests, sender, *times = zip(*[_entry_facts(entry) for entry, _ in group.feasible], strict=True)
    entered_s, kv_bytes = np.array(times, np.float64)
    prompt = np.array([request.prompt_tokens for request in requests], np.float64)
    sequences = np.array([request.slots for request in requests], np.float64)
    priority = np.array([request.terms.priority for request in requests], np.float64)
    arrived_s = np.array([request.ttft_from_s for request in requests])
    senders = {name: number for number, name in enumerate(dict.fromkeys(sender))}
    priorities, number = _numbered(priority)
    rows = entry_table(CostedEntry, prompt, sequences, kind)
    rows["sender"] = [senders[name] for name in sender]
    rows["prompt"], rows["priority"] = np.maximum(1, prompt), priority
    rows["flow_class"] = number if policy.strict_priorities else 0
    rows["dearest"] = (rows["sender"] * len(priorities) + number) * kinds + kind
    rows["overdue"] = overdue_of(group.feasible, group.snapshot, entered_s, policy.max_wait_s)
    rows["kv_bytes"], rows["arrived_s"] = kv_bytes, arrived_s
    rows["slo_s"] = [request.terms.ttft_slo_s or 0.0 for request in requests]
    rows["hold"] = holds(requests, sequences, group.typical)
    if policy.ageing_s is not None:
        rows["age_s"] = np.maximum(0.0, now_s - entered_s) / policy.ageing_s
    return rows, entered_s, list(senders), priorities


def _numbered(priority: Floats) -> tuple[list[int], Integers]:
    """Returns the priorities that occur, ascending, and the index of each entry's priority among them."""
    if (priority == priority[0]).all():
        return [int(priority[0])], np.zeros(len(priority), np.int64)
    occurring, number = np.unique(priority, return_inverse=True)
    return occurring.astype(np.int64).tolist(), number


# -------------------------------------------------------------------------------------------------------- network


def _flow_classes(snapshot: Snapshot, lowest: Sequence[int]) -> tuple[Table, Integers]:
    """Returns a flow class for each priority in `lowest`, and per class and tier the transfers on their way whose
    priority is at most that one.
    """
    classes, flows = table(FlowClass, len(lowest)), np.zeros((len(lowest), TIERS + 1), np.int64)
    classes["lowest"] = lowest
    oracle, workers = snapshot.oracle, snapshot.workers
    if oracle is None:
        return classes, flows
    counts: dict[tuple[int, int], int] = {}  # by priority and tier
    for sender in workers.values():
        if sender.role is Role.PREFILL:
            for to, priority, number in sender.transfers:
                receiver = workers.get(to)
                tier = None if receiver is None else oracle.tier(sender.id, sender.node, to, receiver.node)
                if tier is not None:
                    counts[priority, tier] = counts.get((priority, tier), 0) + number
    for (priority, tier), number in counts.items():
        flows[classes["lowest"] >= priority, tier] += number
    return classes, flows


def _paths(group: Group, senders: Sequence[WorkerId], kept: Sequence[int]) -> Table:
    """Returns the paths to the workers `kept`, sender after sender. Rents are computed first, because they need the
    paths to all workers.
    """
    snapshot, oracle, typical_bytes = group.snapshot, group.snapshot.oracle, group.typical.kv_bytes
    asked = list(range(len(group.workers))) if typical_bytes else kept
    paths = table(PathRow, len(senders) * len(asked)).reshape(len(senders), len(asked))
    paths["uplinks"], paths["residual"] = 1, 1.0
    if oracle is not None:
        receivers, tiers = [group.workers[row] for row in asked], _tier_facts(oracle, snapshot.now_s)
        for row, sender in zip(paths, senders, strict=True):
            _fill_paths(row, snapshot, oracle, tiers, sender, receivers, group.workers)
        if typical_bytes:
            # A path without bandwidth overflows here; `slot_rent.FOREVER_S` bounds it.
            with np.errstate(over="ignore"):
                by_tier_s = typical_bytes * (1.0 / paths["residual"])
                own_s = typical_bytes * 1.0 / paths["residual"]
            seconds = np.where(paths["own"], own_s, by_tier_s) + paths["latency_s"]
            near_s = near_rents_s(seconds, group.workers, group.policy.near_scarcity)
            paths["near_s"] = np.where(paths["known"], near_s, 0.0)
            paths = paths[:, kept]
    return paths.ravel()


def _tier_facts(oracle: Oracle, now_s: float) -> Floats:
    """Returns uplinks, residual bytes/s and latency in s of each tier, (TIERS + 1, 3). The last row is for a path
    without a tier.
    """
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
    """Fills in one sender's paths, from the pair's own estimate if there is a fresh one and otherwise from the
    tier. If one of `workers` has neither, no path is known.
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
