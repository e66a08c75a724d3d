"""`balance` runs one round of BR-0 or BR-H: it turns objects into arrays, runs the stages (`kernel`), and turns
arrays into decisions. The composition uses the same tables of workers and entries and the same form of decisions.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.routing.balance.kernel import AgedEntry, Rules, ScoredWorker, place
from policies.routing.balance.loads import (
    BEFORE_ALL,
    FIRST_OF_CLASS,
    AdmissionRow,
    EntryRow,
    Totals,
    WorkerRow,
)
from policies.routing.balance.stages import Aim, StageLimits, discounts
from policies.routing.base import RANKED, Assignment, Decision, Feasible, Ranked, Reason
from policies.routing.compiled import Table, table
from policies.state.views import Request, Snapshot, Worker

Integers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

REASONS = (Reason.FILL, Reason.BEST_SUBSET, Reason.LEAST_HARM, Reason.OVERDUE)
"""The reasons in the order of the kernel's numbers for them (`loads.FILL` and the others)."""


def balance(
    feasible: Feasible,
    snapshot: Snapshot,
    workers: Sequence[Worker],
    aim: Aim,
    limits: StageLimits,
    rng: random.Random,
) -> tuple[Assignment, ...]:
    """Returns the assignments of one group in one round. `workers` are all its decode workers, ordered by id."""
    draws, discount = [rng.random() for _ in workers], discounts(aim.horizon, aim.gamma)
    kind, allowed = kinds_of(feasible, workers)
    group = worker_table(ScoredWorker, workers, allowed, draws, aim.horizon)
    group.rows["beta"] = group.sizes if aim.beta is None else aim.beta
    requests = [entry.request for entry, _ in feasible]
    prompts = np.array([request.prompt_tokens for request in requests])
    sequences = np.array([request.slots for request in requests])
    priority = np.array([request.terms.priority for request in requests])
    entries = entry_table(AgedEntry, prompts, sequences, kind)
    entries["priority"] = priority
    rules = _rules_and_ages(feasible, entries, len(workers), aim, limits, snapshot)
    n = len(entries)
    done, chosen, totals = table(AdmissionRow, n), np.empty(n, np.int64), table(Totals, 1)
    totals["free"] = sum(group.free)
    by_size, ends = by_priority_and_size(priority, entries["tokens"])
    by_age = by_size
    if rules.aged:
        by_age, _ = by_priority_and_size(priority, entries["tokens"] + entries["age"] / rules.gain)
    place(
        group.rows, group.barriers, group.departures, discount, entries, allowed, rules, by_size, by_age, ends, done,
        chosen, totals,
    )  # fmt: skip
    done = done[: totals["admissions"][0]]
    admitted = [requests[i] for i in chosen[: totals["chosen"][0]].tolist()]
    return assignments(workers, group, done, stage_terms(done, group.sizes), admitted)


def _rules_and_ages(
    feasible: Feasible, entries: Table, workers: int, aim: Aim, limits: StageLimits, snapshot: Snapshot
) -> Rules:
    """Returns the kernel's rules, and fills in which entries are overdue and what their ages add to a score."""
    n, per_s, now_s = len(entries), 0.0, snapshot.now_s
    entered_s = np.fromiter([entry.entered_s for entry, _ in feasible], np.float64, n)
    entries["overdue"] = overdue_of(feasible, snapshot, entered_s, limits.max_wait_s)
    if limits.ageing_s is not None:
        per_s = int(entries["tokens"].sum()) / n * aim.gain / limits.ageing_s
        entries["age"] = per_s * np.maximum(0.0, now_s - entered_s)
    return Rules(
        gain=aim.gain,
        slack=aim.slack_tokens,
        reserve=limits.reserve_tokens,
        enough=limits.abundance * workers,
        window=limits.window,
        pool_wide=limits.pool_wide,
        aged=per_s > 0.0,
        most_age=per_s * max(0.0, now_s - float(entered_s.min())),
        pressing=bool((entries["overdue"] == FIRST_OF_CLASS).any()),
    )


def overdue_of(
    feasible: Feasible, snapshot: Snapshot, entered_s: npt.NDArray[np.float64], max_wait_s: float | None
) -> Integers:
    """Returns how each entry is overdue: BEFORE_ALL if its KV would be lost otherwise, FIRST_OF_CLASS if it is about to
    miss its TTFT objective or has waited for longer than `max_wait_s`, else 0.
    """
    n, now_s = len(feasible), snapshot.now_s
    first = np.zeros(n, np.bool_)
    if snapshot.overdue_by_slo:
        first = np.fromiter([entry.is_pressing(now_s) for entry, _ in feasible], np.bool_, n)
    if max_wait_s is not None:
        first |= entered_s < now_s - max_wait_s
    rescued = np.fromiter([entry.is_overdue(now_s) for entry, _ in feasible], np.bool_, n)
    return np.where(rescued, BEFORE_ALL, np.where(first, FIRST_OF_CLASS, 0))


# --------------------------------------------------------------------------------------------------------- tables


class WorkerTable(NamedTuple):
    """The workers of a group as records."""

    rows: Table  # WorkerRow or a class derived from it
    departures: Integers  # (step, sequences, KV tokens) rows
    barriers: int
    free: list[int]  # slots as the round begins
    sizes: list[int]  # G of each worker's barrier


def worker_table(
    kind: type[WorkerRow], workers: Sequence[Worker], allowed: Truths, draws: Sequence[float], horizon: int
) -> WorkerTable:
    """Returns the table of a group's workers with the fields that BR-0, BR-H and the composition share. `allowed`
    (kinds, workers) says where entries of each kind may go.
    """
    tokens = np.array([worker.kv_tokens for worker in workers])
    used = np.array([worker.slots_used for worker in workers])
    slots = np.array([worker.slots for worker in workers])
    # what the workers' own requests may take, in which each shared block counts as often as in `tokens`
    capacity = np.array([w.kv_capacity_tokens - w.foreign_kv_tokens + w.shared_kv_tokens for w in workers])
    total = np.array([worker.kv_capacity_tokens for worker in workers])
    names = [worker.barrier for worker in workers]
    members = Counter(names)
    number = {name: i for i, name in enumerate(members)}
    rows = table(kind, len(workers))
    rows["tokens"], rows["running"], rows["slots"] = tokens, used, slots
    rows["barrier"] = [number[name] for name in names]
    rows["draw"], rows["open"] = draws, allowed.any(axis=0)
    rows["free"] = np.maximum(0, slots - used)
    rows["room"] = np.where(used > 0, np.maximum(0, capacity - tokens), total)
    departures = np.empty((0, 3), np.int64)
    if horizon:
        each = [worker.departures for worker in workers]
        rows["departures"] = [len(some) for some in each]
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(each))
        departures = np.fromiter(flat, np.int64).reshape(-1, 3)
    return WorkerTable(
        rows, departures, len(members), rows["free"].tolist(), [members[name] for name in names]
    )


def entry_table(
    kind: type[EntryRow], prompts: npt.NDArray[Any], sequences: npt.NDArray[Any], kinds: Integers
) -> Table:
    """Returns the table of pool entries with the fields that BR-0, BR-H and the composition share. An empty prompt
    counts as one token.
    """
    rows = table(kind, len(prompts))
    rows["tokens"], rows["sequences"], rows["kind"] = np.maximum(prompts, 1), sequences, kinds
    return rows


def kinds_of(feasible: Feasible, workers: Sequence[Worker]) -> tuple[Integers, Truths]:
    """Returns each entry's kind (entries,), and whether entries of a kind may go to a worker (kinds, workers).
    Entries are of one kind if they have the same list object of workers, which the dispatcher shares between them.
    """
    row_of = {worker.id: row for row, worker in enumerate(workers)}
    lists = {id(allowed): allowed for _, allowed in feasible}
    truths = np.zeros((len(lists), len(workers)), np.bool_)
    for number, allowed in enumerate(lists.values()):
        truths[number, [row_of[worker.id] for worker in allowed]] = True
    if len(lists) == 1:
        return np.zeros(len(feasible), np.int64), truths
    numbers = {key: number for number, key in enumerate(lists)}
    return np.array([numbers[id(allowed)] for _, allowed in feasible]), truths


def by_priority_and_size(priority: Integers, tokens: npt.NDArray[Any]) -> tuple[Integers, Integers]:
    """Returns the entries ordered by priority and then by size descending, and the end of each priority in that
    order. Equal entries keep their order.
    """
    if (priority == priority[0]).all():
        return np.argsort(-tokens, kind="stable"), np.array([len(tokens)])
    order = np.lexsort((-tokens, priority))
    changes = np.flatnonzero(np.diff(priority[order])) + 1
    return order, np.append(changes, len(tokens))


# ------------------------------------------------------------------------------------------------------ decisions


def stage_terms(done: Table, group_sizes: Sequence[int]) -> list[dict[str, float]]:
    """Returns the terms that the decision of each admission shows: the score and the sum of the set, and the
    worker's margin and free slots before it.
    """
    columns = [done[name].tolist() for name in ("row", "free", "tokens", "size", "score", "margin")]
    return [
        {
            "score": score,
            "w_tokens": float(tokens),
            "margin_tokens": margin,
            "workers": float(group_sizes[row]),
            "free_slots": float(free),
            "set_size": float(size),
        }
        for row, free, tokens, size, score, margin in zip(*columns, strict=True)
    ]


def assignments(
    workers: Sequence[Worker],
    group: WorkerTable,
    done: Table,
    terms: Sequence[dict[str, float]],
    requests: Sequence[Request],
) -> tuple[Assignment, ...]:
    """Returns the assignments of a round; all entries of a set share one decision. `terms` has one item for each
    admission of `done`. `requests` are the admitted ones, set after set.

    A ranking names the chosen worker first. After it come the best workers by stage 2's order as the round began,
    among those to which some entry could go.
    """
    facts, margins = group.rows, group.rows["first_margin"]
    order = np.lexsort((facts["draw"], -margins, -np.array(group.free), facts["open"] == 0))
    shown = [
        (row, _candidate(workers[row], float(group.free[row]), float(margins[row])))
        for row in order[: min(RANKED, int(facts["open"].sum()))].tolist()
    ]
    others: dict[int, tuple[Ranked, ...]] = {}
    assigned: list[Assignment] = []
    columns = [done[name].tolist() for name in ("row", "reason", "size")]
    for shows, row, reason, size in zip(terms, *columns, strict=True):
        if row not in others:
            others[row] = tuple([ranked for other, ranked in shown if other != row])
        name = workers[row].id
        decision = Decision(name, (Ranked(name, -shows["score"], shows), *others[row]), REASONS[reason])
        for request in requests[len(assigned) : len(assigned) + size]:
            assigned.append(Assignment(request.attempt_id, decision))
    return tuple(assigned)


def _candidate(worker: Worker, free_slots: float, margin_tokens: float) -> Ranked:
    """Returns the item of a ranking for a worker that was not chosen."""
    load_tokens = float(worker.kv_tokens)
    terms = {"free_slots": free_slots, "margin_tokens": margin_tokens, "load_tokens": load_tokens}
    return Ranked(worker.id, -free_slots, terms)
