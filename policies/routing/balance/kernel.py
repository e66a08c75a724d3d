"""The compiled `place` runs one round of BR-0 or BR-H over arrays. `stages` describes the rules and their reasons.

The best subset of a window is found as follows. The score depends on a set S only through w = sum of s_r, and it is
concave in w, being a line minus convex terms. Let `peak` maximise it over all real w. Among the sums that fit the
worker the best one is then either the largest that is not above the peak or the smallest above it. This holds for
BR-0 and for BR-H (the paper probes in this way for BR-0 only and enumerates subsets for BR-H). All 2^W sums are
formed, each from one that is smaller by an entry.

With ages a set is worth its score plus the age bonus of its oldest entry. The window is then sorted by age, so that the
oldest entry of a set is the highest bit of its mask, and the sets of each highest bit are probed on their own: they
differ in their scores only.
"""

from typing import Annotated, NamedTuple

import numpy as np

from policies.routing.balance.loads import (
    BEFORE_ALL,
    BEST_SUBSET,
    FILL,
    FIRST_OF_CLASS,
    LEAST_HARM,
    OVERDUE,
    AdmissionRow,
    EntryRow,
    Totals,
    WorkerRow,
    activate,
    book,
    find_kinks,
    fits,
    larger_margin,
    measure,
    next_worker,
    note,
    overflow,
    project,
    slots_of,
)
from policies.routing.balance.loads import below as number_below
from policies.routing.compiled import (
    FloatRows,
    Floats,
    IntegerRows,
    Integers,
    Table,
    TruthRows,
    compiled,
    part,
    rows_of,
)


class ScoredWorker(WorkerRow):
    """A worker with its own weight beta of an overflow."""

    beta: float


class AgedEntry(EntryRow):
    """A pool entry with the score that its wait adds."""

    age: float  # what its age adds to a score
    priority: int


class Rules(NamedTuple):
    """The parameters of a round."""

    gain: float  # alpha * sum_h gamma^h
    slack: float  # tokens taken off every margin
    reserve: int  # KV tokens kept free per sequence
    enough: float  # free slots from which stage 1 runs
    window: int  # W
    pool_wide: bool  # whether singles are of all the pool
    aged: bool  # whether entries have an `age`
    most_age: float  # the `age` of the oldest entry
    pressing: bool  # whether entries are FIRST_OF_CLASS


class Round(NamedTuple):
    """The tables of a round, and working space that its steps reuse. The projection has H + 1 steps."""

    workers: Annotated[Table, rows_of(ScoredWorker)]
    load: FloatRows  # workers, H + 1: L_g(h)
    envelope: FloatRows  # barriers, H + 1: M(h)
    discount: Floats  # H + 1: gamma^h
    entries: Annotated[Table, rows_of(AgedEntry)]  # in the order of service
    allowed: TruthRows  # kinds of entries, workers
    rules: Rules
    kinks: FloatRows  # 4, H + 1: penalty of one worker
    order: IntegerRows  # 2, H + 1: working space
    window: Integers  # W: positions in a sorted list
    sums: IntegerRows  # 2, 2^W: tokens and slots of subsets
    done: Annotated[Table, rows_of(AdmissionRow)]
    chosen: Integers  # admitted entries, set by set
    totals: Annotated[Table, rows_of(Totals)]  # one record


# --------------------------------------------------------------------------------------------------------- scores


@part
def look_at(t: Round, row: int) -> None:
    """Fills `kinks` with the penalty of a worker."""
    barrier = t.workers[row].barrier
    find_kinks(t.load, t.envelope, barrier, row, t.discount, t.rules.slack, t.kinks, t.order)


@part
def peak_of(kinks: FloatRows, gain: float, beta: float) -> float:
    """Returns the w at which the score is largest, which is the first margin where beta times the penalty's slope
    reaches the gain.
    """
    k = number_below(kinks[1], gain / beta) if beta != 0.0 else len(kinks[1])
    return kinks[0, k] if k < len(kinks[1]) else np.inf


@part
def score_of(kinks: FloatRows, gain: float, beta: float, w: int) -> float:
    """Returns F_H of a set with the sum w."""
    return gain * w - beta * overflow(kinks, float(w))


# ------------------------------------------------------------------------------------------------------ selection


@part
def first_at_most(entries: Table, left: Integers, limit: float) -> int:
    """Returns the first position in `left`, which is sorted by size descending, of an entry that is not larger than
    the limit.
    """
    low, high = 0, len(left)
    while low < high:
        middle = (low + high) // 2
        if entries[left[middle]].tokens > limit:
            low = middle + 1
        else:
            high = middle
    return low


@part
def first_with_room(t: Round, row: int, left: Integers) -> int:
    """Returns the first position in `left` of an entry that is not too large for the KV room that this round's
    admissions have left.
    """
    worker = t.workers[row]
    return first_at_most(t.entries, left, float(worker.room - t.rules.reserve)) if worker.touched else 0


@part
def position_of(entries: Table, left: Integers, wanted: int) -> int:
    """Returns the position of an entry in `left`, where entries of equal size are in the order of their numbers."""
    low, high, tokens = 0, len(left), entries[wanted].tokens
    while low < high:
        middle = (low + high) // 2
        larger = entries[left[middle]].tokens
        if larger > tokens or (larger == tokens and left[middle] < wanted):
            low = middle + 1
        else:
            high = middle
    return low


@part
def best_single(t: Round, row: int, left: Integers) -> tuple[int, float, float]:
    """Returns position, score, and score plus age of the entry of the whole pool for which the last is best among those
    that fit. The position is len(left) if none fits.

    Scores fall on both sides of the peak. Without ages only the nearest entry on each side can be the best. With
    ages a side is searched until even the oldest entry's age could not make up for the lower score.
    """
    entries, allowed, rules, kinks = t.entries, t.allowed, t.rules, t.kinks
    worker, gain, beta, reserve = t.workers[row], rules.gain, t.workers[row].beta, rules.reserve
    first = first_with_room(t, row, left)
    start = first_at_most(entries, left, peak_of(kinks, gain, beta))
    best, best_score, best_worth = len(left), 0.0, 0.0
    for step in (1, -1):
        at = max(start, first) if step == 1 else start - 1
        while first <= at < len(left):
            entry = entries[left[at]]
            if fits(entry, worker, allowed[entry.kind, row], reserve):
                score = score_of(kinks, gain, beta, entry.tokens)
                if best < len(left) and score + rules.most_age <= best_worth:
                    break
                worth = score + entry.age
                if best == len(left) or worth > best_worth:
                    best, best_score, best_worth = at, score, worth
                if not rules.aged:
                    break
            at += step
    return best, best_score, best_worth


@part
def best_of_window(t: Round, row: int, left: Integers, window: Integers) -> tuple[int, float]:
    """Returns position and score of the entry of the window with the best score plus age, of equal ones the largest.
    The window must not be empty.
    """
    kinks, gain, beta = t.kinks, t.rules.gain, t.workers[row].beta
    best, best_score, best_worth = len(left), 0.0, 0.0
    for at in window:
        entry = t.entries[left[at]]
        score = score_of(kinks, gain, beta, entry.tokens)
        worth = score + entry.age
        if best == len(left) or worth > best_worth or (worth == best_worth and at < best):
            best, best_score, best_worth = at, score, worth
    return best, best_score


@part
def find_window(t: Round, row: int, left: Integers, heads: Integers) -> int:
    """Fills `window` with the positions of the first W entries that fit the worker on their own, and returns their
    number. The first are the largest, or with ages the first of `heads`, which are then sorted by age ascending.

    An entry that is larger than the KV room but was allowed because the worker is empty may be among them, although no
    set can contain it.
    """
    entries, allowed, window, worker = t.entries, t.allowed, t.window, t.workers[row]
    most, reserve, found = t.rules.window, t.rules.reserve, 0
    if not t.rules.aged:
        for at in range(first_with_room(t, row, left), len(left)):
            if found == most:
                break
            entry = entries[left[at]]
            if fits(entry, worker, allowed[entry.kind, row], reserve):
                window[found] = at
                found += 1
        return found
    for number in heads:
        if found == most:
            break
        entry = entries[number]
        if entry.gone == 0 and fits(entry, worker, allowed[entry.kind, row], reserve):
            place = found
            while place > 0 and entries[left[window[place - 1]]].age > entry.age:
                window[place] = window[place - 1]
                place -= 1
            window[place] = position_of(entries, left, number)
            found += 1
    return found


@part
def best_set(t: Round, row: int, left: Integers, window: Integers) -> tuple[int, float, float]:
    """Returns the subset of best score plus age as a bitmask of `window`, its score, and score plus age. The bitmask is
    0 if no subset fits. Among equal sums the subset with the fewest slots is taken, then the smallest bitmask.
    """
    entries, kinks, sums, worker, reserve = t.entries, t.kinks, t.sums, t.workers[row], t.rules.reserve
    gain, beta, aged, total = t.rules.gain, worker.beta, t.rules.aged, 0
    for at in window:
        total += entries[left[at]].tokens
    peak = max(0, int(min(peak_of(kinks, gain, beta), float(total))))
    low = high = best = 0
    best_score = best_worth = -np.inf
    for bit in range(len(window)):
        entry, added = entries[left[window[bit]]], 1 << bit
        for mask in range(added, 2 * added):
            w = sums[0, mask - added] + entry.tokens
            count = sums[1, mask - added] + slots_of(entry, worker)
            sums[0, mask], sums[1, mask] = w, count
            if count > worker.free or w + reserve * count > worker.room:
                continue
            if w <= peak:
                if low == 0 or w > sums[0, low] or (w == sums[0, low] and count < sums[1, low]):
                    low = mask
            elif high == 0 or w < sums[0, high] or (w == sums[0, high] and count < sums[1, high]):
                high = mask
        if aged or bit == len(window) - 1:
            for mask in (low, high):
                if mask == 0:
                    continue
                score = score_of(kinks, gain, beta, sums[0, mask])
                if score + entry.age > best_worth:
                    best, best_score, best_worth = mask, score, score + entry.age
            low = high = 0
    return best, best_score, best_worth


@part
def choose(t: Round, row: int, left: Integers, heads: Integers) -> tuple[int, int, float]:
    """Chooses the entries that the worker takes and writes their positions to the start of `window`. Returns their
    number (0 if nothing fits the worker), the reason and the score.
    """
    worker, window, pool_wide = t.workers[row], t.window, t.rules.pool_wide
    abundant = t.totals[0].free >= t.rules.enough
    at, score, worth = len(left), 0.0, 0.0
    if abundant or pool_wide:
        at, score, worth = best_single(t, row, left)
        if at == len(left):
            return 0, LEAST_HARM, 0.0
    if abundant:
        window[0] = at
        return 1, FILL, score
    if worker.free > 1 or not pool_wide:
        found = find_window(t, row, left, heads)
        if found == 0:
            return 0, LEAST_HARM, 0.0
        if worker.free > 1:
            mask, set_score, set_worth = best_set(t, row, left, window[:found])
            if mask != 0 and set_worth > 0.0 and (not pool_wide or set_worth > worth):
                return keep(window, mask, found), BEST_SUBSET, set_score
        if not pool_wide:
            at, score = best_of_window(t, row, left, window[:found])
    window[0] = at
    return 1, BEST_SUBSET if score > 0.0 else LEAST_HARM, score


@part
def keep(window: Integers, mask: int, found: int) -> int:
    """Moves the members of a bitmask to the start of the window, in ascending order, and returns their number."""
    number = 0
    for bit in range(found):
        if mask >> bit & 1:
            position, place = window[bit], number
            while place > 0 and window[place - 1] > position:
                window[place] = window[place - 1]
                place -= 1
            window[place] = position
            number += 1
    return number


# --------------------------------------------------------------------------------------------------------- stages


@part
def admit(t: Round, row: int, left: Integers, positions: Integers, reason: int, score: float) -> None:
    """Admits the entries at `positions` of `left` to a worker: records the admission and books it."""
    worker, totals, tokens, slots = t.workers[row], t.totals[0], 0, 0
    for position in positions:
        entry = t.entries[left[position]]
        tokens += entry.tokens
        slots += slots_of(entry, worker)
        entry.gone = 1
        t.chosen[totals.chosen] = left[position]
        totals.chosen += 1
    note(t.done[totals.admissions], worker, row, reason, score, tokens, len(positions))
    totals.admissions += 1
    totals.free -= slots
    book(t.workers, t.load, t.envelope, row, tokens, slots, t.rules.reserve)


@part
def close_up(left: Integers, positions: Integers) -> None:
    """Removes the elements at ascending positions and closes the gaps. The last len(positions) elements are then
    invalid.
    """
    for k in range(len(positions) - 1, -1, -1):
        for i in range(positions[k], len(left) - 1):
            left[i] = left[i + 1]


@part
def place_overdue(t: Round, left: Integers, how: int, priority: int) -> None:
    """Places each entry that is overdue in the sense of `how` (FIRST_OF_CLASS: those of one priority), in the order of
    service, on the worker of largest margin among those that it fits. `left` is working space.
    """
    workers, entries = t.workers, t.entries
    for at in range(len(entries)):
        entry, best = entries[at], len(workers)
        if entry.overdue != how or (how == FIRST_OF_CLASS and entry.priority != priority):
            continue
        for row in range(len(workers)):
            if fits(entry, workers[row], t.allowed[entry.kind, row], t.rules.reserve) and (
                best == len(workers) or larger_margin(workers[row], workers[best])
            ):
                best = row
        if best < len(workers):
            look_at(t, best)
            score = score_of(t.kinks, t.rules.gain, workers[best].beta, entry.tokens)
            left[0], t.window[0] = at, 0
            admit(t, best, left, t.window[:1], OVERDUE, score)


@part
def place_class(t: Round, left: Integers, heads: Integers) -> None:
    """Runs the two stages for entries of one priority, sorted by size descending. `heads` are the same entries by size
    plus age.
    """
    n = len(left)
    activate(t.workers)
    while n > 0:
        row = next_worker(t.workers)
        if row == len(t.workers):
            break
        look_at(t, row)
        number, reason, score = choose(t, row, left[:n], heads)
        if number == 0:
            t.workers[row].active = 0
            continue
        admit(t, row, left, t.window[:number], reason, score)
        close_up(left[:n], t.window[:number])
        n -= number


@compiled
def place(
    workers: Annotated[Table, rows_of(ScoredWorker)],
    barriers: int,
    departures: IntegerRows,
    discount: Floats,
    entries: Annotated[Table, rows_of(AgedEntry)],
    allowed: TruthRows,
    rules: Rules,
    by_size: Integers,
    by_age: Integers,
    ends: Integers,
    done: Annotated[Table, rows_of(AdmissionRow)],
    chosen: Integers,
    totals: Annotated[Table, rows_of(Totals)],
) -> None:
    """Runs one round. It fills `done` and `chosen` and counts them in `totals`.

    `departures` are rows of (step, sequences, KV tokens), one worker after the other. `by_size` has the entries by
    priority and then by size descending, equal ones in the order of service; `by_age` has them by priority and then by
    size plus age. `ends` says where each priority ends in both. The other parameters are fields of `Round`, which is
    made here because a call from Python pays for every field that it hands over.
    """
    steps = len(discount)
    t = Round(
        workers,
        np.empty((len(workers), steps)),
        np.empty((barriers, steps)),
        discount,
        entries,
        allowed,
        rules,
        np.empty((4, steps)),
        np.empty((2, steps), np.int64),
        np.empty(rules.window, np.int64),
        np.zeros((2, 1 << rules.window), np.int64),
        done,
        chosen,
        totals,
    )
    left, start = np.empty(len(entries), np.int64), 0
    project(workers, departures, t.load, t.order)
    measure(workers, t.load, t.envelope)
    place_overdue(t, left, BEFORE_ALL, 0)
    for end in ends:
        if rules.pressing:
            place_overdue(t, left, FIRST_OF_CLASS, entries[by_size[start]].priority)
        n = 0
        for entry in by_size[start:end]:
            if entries[entry].gone == 0:
                left[n] = entry
                n += 1
        place_class(t, left[:n], by_age[start:end])
        start = end
