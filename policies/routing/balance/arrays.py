"""What the compiled stages work on: a group's workers, pool entries and rules as the arrays of `stages_kernel`."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.routing.balance.kernel import ENTRY, WORKER, Rules
from policies.routing.balance.loads import Aim
from policies.routing.balance.stages import Feasible, StageLimits, price_of_age
from policies.routing.base import Reason
from policies.state.views import Request, Worker

Integers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]
Table = npt.NDArray[np.void]

REASONS = (Reason.FILL, Reason.BEST_SUBSET, Reason.LEAST_HARM, Reason.OVERDUE)  # by the kernel's numbers

_request_facts = attrgetter("prompt_tokens", "slots", "terms.priority")
_worker_facts = attrgetter("kv_tokens", "slots_used", "slots", "kv_capacity_tokens", "foreign_kv_tokens")


def table(fields: Any, rows: int) -> Table:
    """Rows of records, all 0."""
    return np.zeros(rows, fields)


class Fleet(NamedTuple):
    """Workers as WORKER rows, their departures (step, sequences, KV tokens) one after the other, and the barriers."""

    workers: Table
    departures: Integers
    barriers: int
    free: list[int]
    sizes: list[int]  # G, of each worker's barrier


def fleet_of(workers: Sequence[Worker], truths: Truths, aim: Aim, draws: Sequence[float]) -> Fleet:
    """All workers of a group. `truths`: where entries of a kind may go."""
    facts = integers(_worker_facts, workers)
    tokens, used, slots, capacity, foreign = facts.T
    barrier, sizes = barriers_of(workers)
    made = table(WORKER, len(workers))
    made["tokens"], made["running"], made["slots"] = tokens, used, slots
    made["barrier"], made["beta"] = barrier, sizes if aim.beta is None else aim.beta
    made["draw"], made["open"] = draws, truths.any(axis=0)
    made["free"] = np.maximum(0, slots - used)
    made["room"] = np.where(used > 0, np.maximum(0, capacity - tokens - foreign), capacity)
    departures = np.empty((0, 3), np.int64)
    if aim.horizon:
        each = [worker.departures for worker in workers]
        made["departures"] = [len(some) for some in each]
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(each))
        departures = np.fromiter(flat, np.int64).reshape(-1, 3)
    return Fleet(made, departures, max(barrier) + 1, made["free"].tolist(), sizes)


def barriers_of(workers: Sequence[Worker]) -> tuple[list[int], list[int]]:
    """Each worker's barrier as a number, and how many workers it has."""
    names = [worker.barrier for worker in workers]
    sizes = Counter(names)
    index = {name: i for i, name in enumerate(sizes)}
    return [index[name] for name in names], [sizes[name] for name in names]


def integers(facts: Callable[[Any], tuple[int, ...]], things: Sequence[Any]) -> Integers:
    """A row of whole numbers of each."""
    flat = np.fromiter(itertools.chain.from_iterable(map(facts, things)), np.int64)
    return flat.reshape(len(things), -1)


class Pool(NamedTuple):
    """The entries as ENTRY rows, and what else the kernel is told of them."""

    requests: list[Request]
    entries: Table
    order: Integers
    ends: Integers
    rules: Rules


def pool_of(
    feasible: Feasible, kind: Integers, group: int, aim: Aim, limits: StageLimits, now_s: float
) -> Pool:
    """`kind` of each entry; `group`: how many workers it has."""
    requests, n = [entry.request for entry, _ in feasible], len(feasible)
    facts = integers(_request_facts, requests)
    entered_s = np.fromiter([entry.entered_s for entry, _ in feasible], np.float64, n)
    tokens = np.maximum(facts[:, 0], 1)
    per_s = price_of_age(limits, int(tokens.sum()) / n, aim.gain)
    entries = table(ENTRY, n)
    entries["tokens"], entries["sequences"], entries["kind"] = tokens, facts[:, 1], kind
    entries["late"] = entered_s < now_s - limits.max_wait_s
    if per_s:
        entries["age"] = per_s * (now_s - entered_s)
    rules = Rules(
        gain=aim.gain,
        slack=aim.slack_tokens,
        reserve=limits.reserve_tokens,
        enough=limits.abundance * group,
        window=limits.window,
        aged=bool(limits.ageing),
        most_age=per_s * (now_s - float(entered_s.min())),
    )
    return Pool(requests, entries, *by_priority_and_size(facts[:, 2], tokens), rules)


def kinds_of(feasible: Feasible, workers: Sequence[Worker]) -> tuple[Integers, Truths]:
    """Each entry's kind, and per kind and worker whether it may go there. Lists that are one object are one kind."""
    row_of = {worker.id: row for row, worker in enumerate(workers)}
    lists = {id(allowed): allowed for _, allowed in feasible}
    truths = np.zeros((len(lists), len(workers)), np.bool_)
    for number, allowed in enumerate(lists.values()):
        truths[number, [row_of[worker.id] for worker in allowed]] = True
    if len(lists) == 1:
        return np.zeros(len(feasible), np.int64), truths
    numbers = {key: number for number, key in enumerate(lists)}
    return np.array([numbers[id(allowed)] for _, allowed in feasible]), truths


def by_priority_and_size(priority: Integers, tokens: Integers) -> tuple[Integers, Integers]:
    """Entries by priority, then size descending, equal ones as they come; and where each priority ends."""
    if (priority == priority[0]).all():
        return np.argsort(-tokens, kind="stable"), np.array([len(tokens)])
    order = np.lexsort((-tokens, priority))
    changes = np.flatnonzero(np.diff(priority[order])) + 1
    return order, np.append(changes, len(tokens))
