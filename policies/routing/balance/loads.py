"""The compiled functions here compute loads, envelopes and margins of the decode workers during one round
(BalanceRoute 3, 4).

    L_g(h)  load of worker g projected h steps ahead, KV tokens        M(h) = max_g L_g(h)       m_g(h) = M(h) - L_g(h)

L_g(0) -> Worker.kv_tokens (running and dispatched, BalanceRoute's virtual load). G and M are over the workers of
one barrier; workers without a barrier form one group. Sequences gone by step h -> Worker.departures; the other
sequences grow by one token a step. A request admitted in this round is assumed to stay, so it has s_r + h tokens at
step h.

The penalty sum_h gamma^h max(0, w - m_g(h)) is a piecewise linear function of w. `find_kinks` computes its pieces
once per popped worker, so that a score costs one bisection and not H + 1 terms. All functions are parts of the
kernels of `balance` and `composition`, whose workers and entries extend the records here.

Loops over plain arrays are used instead of numpy's functions, because those take long to compile.
"""

from typing import Any

import numpy as np

from policies.routing.compiled import FloatRows, Floats, IntegerRows, Table, part

FILL, BEST_SUBSET, LEAST_HARM, OVERDUE = range(4)
"""The numbers of the reasons why a set was admitted; `round.REASONS` has their names."""

BEFORE_ALL, FIRST_OF_CLASS = 1, 2
"""The two ways in which an entry may be overdue: it is placed before all others, or before those of its priority."""


class WorkerRow:
    """A decode worker. The fields from `free` on change with each admission."""

    tokens: int  # KV tokens before the round
    running: int  # sequences before the round
    departures: int  # number of its `departures` rows
    slots: int
    barrier: int  # number of its barrier, from 0
    open: int  # 1 if some entry may go there
    draw: float  # decides among equal keys
    free: int  # free slots
    room: int  # free KV tokens
    touched: int  # 1 after an admission in this round
    active: int  # 1 while tried for this priority
    margin: float  # min_h m_g(h)
    first_margin: float  # `margin` as the round began


class EntryRow:
    """A pool entry."""

    tokens: int  # s_r, its prompt
    sequences: int
    kind: int  # row of `allowed`
    overdue: int  # BEFORE_ALL, FIRST_OF_CLASS or 0
    gone: int  # 1 if admitted or no longer placeable


class AdmissionRow:
    """An admission: a set S of entries that one worker took."""

    row: int  # the worker
    reason: int
    free: int  # the worker's free slots before it
    tokens: int  # w, the sum of s_r over S
    size: int  # |S| in entries
    score: float
    margin: float  # the worker's margin before it


class Totals:
    """The counts of a round."""

    free: int  # free slots of the whole group
    admissions: int
    chosen: int  # admitted entries


Row = Any  # one record of a table


# ---------------------------------------------------------------------------------------------------- projections


@part
def project(workers: Table, departures: IntegerRows, load: FloatRows, gone: IntegerRows) -> None:
    """Fills in L_g(h): the sequences that have not left by step h, each grown by h tokens. `departures` are rows of
    (step, sequences, KV tokens), one worker after the other; `gone` (2, H + 1) is working space.
    """
    first, steps = 0, load.shape[1]
    for row in range(len(workers)):
        for h in range(steps):
            gone[0, h] = gone[1, h] = 0
        for i in range(first, first + workers[row].departures):
            h = departures[i, 0]
            if h < steps:
                gone[0, h] += departures[i, 1]
                gone[1, h] += departures[i, 2]
        first += workers[row].departures
        running, tokens = workers[row].running, workers[row].tokens
        for h in range(steps):
            running -= gone[0, h]
            tokens -= gone[1, h]
            load[row, h] = tokens + running * h


@part
def measure(workers: Table, load: FloatRows, envelope: FloatRows) -> None:
    """Fills in M(h) of each barrier and the least margin of each worker."""
    envelope[:, :] = -np.inf
    for row in range(len(workers)):
        raise_envelope(load, envelope, workers[row].barrier, row)
    for row in range(len(workers)):
        workers[row].margin = least_margin(load, envelope, workers[row].barrier, row)
        workers[row].first_margin = workers[row].margin


@part
def raise_envelope(load: FloatRows, envelope: FloatRows, barrier: int, row: int) -> None:
    """Raises M(h) of a barrier to one worker's load where that is larger."""
    for h in range(load.shape[1]):
        envelope[barrier, h] = max(envelope[barrier, h], load[row, h])


@part
def least_margin(load: FloatRows, envelope: FloatRows, barrier: int, row: int) -> float:
    """Returns min_h m_g(h), the tokens that a worker can take without exceeding the envelope."""
    least = np.inf
    for h in range(load.shape[1]):
        least = min(least, envelope[barrier, h] - load[row, h])
    return least


# ------------------------------------------------------------------------------------------------------ penalties


@part
def find_kinks(
    load: FloatRows,
    envelope: FloatRows,
    barrier: int,
    row: int,
    discount: Floats,
    slack: float,
    kinks: FloatRows,
    order: IntegerRows,
) -> None:
    """Computes the pieces of one worker's penalty. kinks[0] gets its m_g(h) minus the slack, ascending. kinks[1]
    gets the slope of the penalty above each of them (the sum of gamma^h up to there), and kinks[2] the sum of
    gamma^h (m_g(h) - slack) up to there. kinks[3] and `order` are working space.
    """
    steps = load.shape[1]
    for h in range(steps):
        kinks[3, h] = envelope[barrier, h] - load[row, h] - slack
    sort(kinks[3], order)
    slope = offset = 0.0
    for k in range(steps):
        h = order[0, k]
        slope += discount[h]
        offset += discount[h] * kinks[3, h]
        kinks[0, k], kinks[1, k], kinks[2, k] = kinks[3, h], slope, offset


@part
def sort(values: Floats, order: IntegerRows) -> None:
    """Writes the indices of the values, ascending, into order[0]; equal values keep their order (merge sort)."""
    n, width = len(values), 1
    for h in range(n):
        order[0, h] = h
    while width < n:
        for start in range(0, n, 2 * width):
            middle, end = min(start + width, n), min(start + 2 * width, n)
            left, right = start, middle
            for k in range(start, end):
                first = right == end or (left < middle and values[order[0, left]] <= values[order[0, right]])
                if first:
                    order[1, k] = order[0, left]
                    left += 1
                else:
                    order[1, k] = order[0, right]
                    right += 1
        for k in range(n):
            order[0, k] = order[1, k]
        width *= 2


@part
def below(ascending: Floats, limit: float) -> int:
    """Returns the number of values below the limit."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < limit:
            low = middle + 1
        else:
            high = middle
    return low


@part
def overflow(kinks: FloatRows, w: float) -> float:
    """Returns the penalty sum_h gamma^h max(0, w - m_g(h)) of the worker that `kinks` describe, with the slack
    taken off each m_g(h).
    """
    k = below(kinks[0], w) - 1
    return kinks[1, k] * w - kinks[2, k] if k >= 0 else 0.0


# ---------------------------------------------------------------------------------------------- fitting, choosing


@part
def slots_of(entry: Row, worker: Row) -> int:
    """Returns the slots that an entry takes on a worker: one per sequence, but no more than the worker has."""
    return int(entry.sequences if entry.sequences == 1 else min(entry.sequences, worker.slots))


@part
def has_room(entry: Row, worker: Row, reserve: int) -> bool:
    """Returns whether the worker's KV room holds the prompt and `reserve` tokens for each slot that the entry
    takes.
    """
    return bool(entry.tokens + reserve * slots_of(entry, worker) <= worker.room)


@part
def fits(entry: Row, worker: Row, allowed: bool, reserve: int) -> bool:
    """Returns whether an entry is allowed on a worker and finds slots and KV room there. The dispatcher has checked
    the room, so it is checked again only if this round has admitted something there.
    """
    if not allowed or slots_of(entry, worker) > worker.free:
        return False
    return worker.touched == 0 or has_room(entry, worker, reserve)


@part
def larger_margin(worker: Row, other: Row) -> bool:
    """Returns whether a worker has a larger margin than another, or an equal margin and the smaller draw."""
    if worker.margin == other.margin:
        return bool(worker.draw < other.draw)
    return bool(worker.margin > other.margin)


@part
def next_worker(workers: Table) -> int:
    """Returns the row of the active worker with the most free slots, then the largest margin. It returns
    len(workers) if no active worker has a free slot.
    """
    best = len(workers)
    for row in range(len(workers)):
        worker = workers[row]
        if worker.active == 0 or worker.free <= 0:
            continue
        if best < len(workers):
            more = worker.free - workers[best].free
            if more < 0 or (more == 0 and not larger_margin(worker, workers[best])):
                continue
        best = row
    return best


@part
def activate(workers: Table) -> None:
    """Makes all open workers active again, for the next priority."""
    for row in range(len(workers)):
        workers[row].active = workers[row].open


# -------------------------------------------------------------------------------------------------------- booking


@part
def note(admission: Row, worker: Row, row: int, reason: int, score: float, tokens: int, size: int) -> None:
    """Records an admission, with the worker's free slots and margin before it is booked."""
    admission.row, admission.reason, admission.score = row, reason, score
    admission.free, admission.margin = worker.free, worker.margin
    admission.tokens, admission.size = tokens, size


@part
def book(
    workers: Table, load: FloatRows, envelope: FloatRows, row: int, tokens: int, slots: int, reserve: int
) -> None:
    """Books an admission: takes slots and KV room from a worker and adds `tokens` to its load, which then grows by
    `slots` tokens a step. If the load exceeds the envelope, the envelope is raised to it and the margins of its
    barrier are updated.
    """
    worker = workers[row]
    worker.free -= slots
    worker.room -= tokens + reserve * slots
    worker.touched = 1
    for h in range(load.shape[1]):
        load[row, h] += tokens + slots * h
    worker.margin = least_margin(load, envelope, worker.barrier, row)
    if worker.margin >= 0.0:
        return
    raise_envelope(load, envelope, worker.barrier, row)
    for other in range(len(workers)):
        if workers[other].open and workers[other].barrier == worker.barrier:
            workers[other].margin = least_margin(load, envelope, worker.barrier, other)
