"""BalanceRoute's two stages over arrays, compiled: `stages.Round` step by step, with the same admissions bit for bit.

Read `stages` for what is done and why, `loads` for the scores. Here are the same steps without objects: a tick of 64
workers admits some 40 times in a row, each a few hundred additions, for which numpy's calls and Python took 1.5 ms.
Different in form only: the next worker is the least key of all rows instead of a heap's top; no shortcuts where all
entries are alike; subsets are summed one by one, so windows are `subset.FEW` entries at most.

One file, because the cache of compiled code watches the file of `place` only. Loops and plain arrays instead of numpy's
functions, because those take long to compile. Importing this module costs some 8 s of CPU where nothing is cached and
1.7 s where it is, half of that numba itself, and 140 MB, most of them LLVM's: who serves requests loads it at its start
(`registry.prepare`), others when they need it.
"""

from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.routing.compiled import (
    FloatRows,
    Floats,
    IntegerRows,
    Integers,
    TruthRows,
    compiled,
    part,
    rows_of,
)

FILL, BEST_SUBSET, LEAST_HARM, OVERDUE = range(4)

WORKER = np.dtype(
    [
        ("tokens", np.int64),  # KV tokens now
        ("running", np.int64),  # sequences now
        ("departures", np.int64),  # how many of `place`'s are its own
        ("slots", np.int64),
        ("barrier", np.int64),  # 0, 1, ...
        ("open", np.int64),  # 1: entries may go there
        ("beta", np.float64),
        ("draw", np.float64),  # orders equal keys
        ("free", np.int64),  # slots; this and the next three change with each admission
        ("room", np.int64),  # KV tokens
        ("touched", np.int64),  # 1: has admitted in this round
        ("margin", np.float64),  # min_h m_g(h); filled in, as the next
        ("first_margin", np.float64),  # the same as the round began
    ]
)
ENTRY = np.dtype(
    [
        ("tokens", np.int64),  # s_r
        ("sequences", np.int64),
        ("kind", np.int64),  # row of `allowed`
        ("late", np.int64),  # 1: overdue
        ("age", np.float64),  # what its age adds to a score
    ]
)
ADMISSION = np.dtype(
    [
        ("row", np.int64),
        ("reason", np.int64),
        ("free", np.int64),  # the worker's slots before it, as `margin`
        ("tokens", np.int64),  # w
        ("size", np.int64),  # |S| in entries
        ("score", np.float64),
        ("margin", np.float64),
    ]
)
Workers = Annotated[npt.NDArray[np.void], rows_of(WORKER)]
Entries = Annotated[npt.NDArray[np.void], rows_of(ENTRY)]
Done = Annotated[npt.NDArray[np.void], rows_of(ADMISSION)]


class Rules(NamedTuple):
    """`gain` alpha * sum_h gamma^h; `enough` free slots of the group for stage 1; `most_age`: the oldest entry's."""

    gain: float
    slack: float
    reserve: int
    enough: float
    window: int
    aged: bool
    most_age: float


# ---------------------------------------------------------------------------------------------------------- loads


@part
def project(workers: Workers, departures: IntegerRows, load: FloatRows, gone: IntegerRows) -> None:
    """L_g(h): what runs now, grown by h tokens a sequence, less what is gone by step h."""
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
def measure(workers: Workers, load: FloatRows, envelope: FloatRows) -> None:
    """M(h) of each barrier, and the margins of all workers below it."""
    for barrier in range(len(envelope)):
        for h in range(envelope.shape[1]):
            envelope[barrier, h] = -np.inf
    for row in range(len(workers)):
        barrier = workers[row].barrier
        for h in range(load.shape[1]):
            envelope[barrier, h] = max(envelope[barrier, h], load[row, h])
    for row in range(len(workers)):
        workers[row].margin = workers[row].first_margin = least_margin(workers, load, envelope, row)


@part
def least_margin(workers: Workers, load: FloatRows, envelope: FloatRows, row: int) -> float:
    """min_h m_g(h)."""
    barrier, least = workers[row].barrier, np.inf
    for h in range(load.shape[1]):
        least = min(least, envelope[barrier, h] - load[row, h])
    return least


@part
def add(workers: Workers, load: FloatRows, envelope: FloatRows, row: int, tokens: int, slots: int) -> None:
    """Books w on a load, which grows by a token a sequence a step; an envelope that it exceeds rises with it."""
    barrier = workers[row].barrier
    for h in range(load.shape[1]):
        load[row, h] += tokens + slots * h
    workers[row].margin = least_margin(workers, load, envelope, row)
    if workers[row].margin >= 0.0:
        return
    for h in range(load.shape[1]):
        envelope[barrier, h] = max(envelope[barrier, h], load[row, h])
    for other in range(len(workers)):
        if workers[other].open and workers[other].barrier == barrier:
            workers[other].margin = least_margin(workers, load, envelope, other)


# --------------------------------------------------------------------------------------------------------- scores


@part
def find_kinks(
    workers: Workers,
    load: FloatRows,
    envelope: FloatRows,
    discount: Floats,
    slack: float,
    row: int,
    kinks: FloatRows,
    order: IntegerRows,
) -> None:
    """`loads._Kinks` of a worker: into kinks[0] its m_g(h) less the slack ascending, into [1] and [2] the sums of
    gamma^h and of gamma^h m_g(h) so far.
    """
    barrier, steps = workers[row].barrier, load.shape[1]
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
def sort(margins: Floats, order: IntegerRows) -> None:
    """Into order[0] the steps by margin ascending, equal ones as they come (merge sort)."""
    n, width = len(margins), 1
    for h in range(n):
        order[0, h] = h
    while width < n:
        for start in range(0, n, 2 * width):
            middle, end = min(start + width, n), min(start + 2 * width, n)
            left, right = start, middle
            for k in range(start, end):
                first = right == end or (
                    left < middle and margins[order[0, left]] <= margins[order[0, right]]
                )
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
    """How many of the numbers are below the limit."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < limit:
            low = middle + 1
        else:
            high = middle
    return low


@part
def peak_of(kinks: FloatRows, gain: float, beta: float) -> float:
    """The w at which the score is largest."""
    k = below(kinks[1], gain / beta) if beta != 0.0 else len(kinks[1])
    return kinks[0, k] if k < len(kinks[1]) else np.inf


@part
def score_of(kinks: FloatRows, gain: float, beta: float, w: int) -> float:
    """F_H of a sum w."""
    k = below(kinks[0], float(w)) - 1
    overflow = kinks[1, k] * w - kinks[2, k] if k >= 0 else 0.0
    return gain * w - beta * overflow


# ------------------------------------------------------------------------------------------------------- selection


@part
def better(workers: Workers, row: int, other: int) -> bool:
    """Whether a row has the larger margin, or the first draw of two equal ones."""
    a, b = workers[row].margin, workers[other].margin
    return bool(a > b or (a == b and workers[row].draw < workers[other].draw))


@part
def next_row(workers: Workers, active: Integers) -> int:
    """The active row of most free slots, then margin; their number: none that is active has a slot."""
    best = len(workers)
    for row in range(len(workers)):
        if active[row] and workers[row].free > 0:
            if best < len(workers):
                more = workers[row].free - workers[best].free
                if more < 0 or (more == 0 and not better(workers, row, best)):
                    continue
            best = row
    return best


@part
def slots_of(workers: Workers, entries: Entries, row: int, entry: int) -> int:
    """The slots that it takes there."""
    sequences = entries[entry].sequences
    return int(sequences if sequences == 1 else min(sequences, workers[row].slots))


@part
def has_room(workers: Workers, entries: Entries, reserve: int, row: int, entry: int) -> bool:
    """KV room."""
    return bool(entries[entry].tokens + reserve * slots_of(workers, entries, row, entry) <= workers[row].room)


@part
def fits(workers: Workers, entries: Entries, allowed: TruthRows, reserve: int, row: int, entry: int) -> bool:
    """May go there, slots and KV room; until something was admitted there the dispatcher's word counts for the room."""
    if not allowed[entries[entry].kind, row]:
        return False
    if slots_of(workers, entries, row, entry) > workers[row].free:
        return False
    return workers[row].touched == 0 or has_room(workers, entries, reserve, row, entry)


@part
def first_at_most(entries: Entries, left: Integers, limit: float) -> int:
    """The position in `left`, which is sorted by size descending, of the first entry not above the limit."""
    low, high = 0, len(left)
    while low < high:
        middle = (low + high) // 2
        if entries[left[middle]].tokens > limit:
            low = middle + 1
        else:
            high = middle
    return low


@part
def first_with_room(workers: Workers, entries: Entries, reserve: int, row: int, left: Integers) -> int:
    """The first entry that is not too large for what an admission has left of the worker's room."""
    if workers[row].touched == 0:
        return 0
    return first_at_most(entries, left, float(workers[row].room - reserve))


@part
def best_single(
    workers: Workers,
    entries: Entries,
    allowed: TruthRows,
    rules: Rules,
    row: int,
    left: Integers,
    kinks: FloatRows,
) -> tuple[int, float]:
    """Position and score of the entry of best score, the nearest to the peak from below or above; len(left): none fits.
    With ageing by score plus age, each side searched as far as age could make up for the score.
    """
    gain, beta = rules.gain, workers[row].beta
    first = first_with_room(workers, entries, rules.reserve, row, left)
    start = first_at_most(entries, left, peak_of(kinks, gain, beta))
    best, best_score, best_worth = len(left), 0.0, 0.0
    for step in (1, -1):
        at = max(start, first) if step == 1 else start - 1
        while first <= at < len(left):
            if fits(workers, entries, allowed, rules.reserve, row, left[at]):
                score = score_of(kinks, gain, beta, entries[left[at]].tokens)
                if best < len(left) and score + rules.most_age <= best_worth:
                    break
                worth = score + entries[left[at]].age
                if best == len(left) or worth > best_worth:
                    best, best_score, best_worth = at, score, worth
                if not rules.aged:
                    break
            at += step
    return best, best_score


@part
def find_window(
    workers: Workers,
    entries: Entries,
    allowed: TruthRows,
    rules: Rules,
    row: int,
    left: Integers,
    window: Integers,
) -> int:
    """Positions of the first W entries that fit the worker on their own, less those without KV room; how many."""
    found = seen = 0
    for at in range(first_with_room(workers, entries, rules.reserve, row, left), len(left)):
        if seen == rules.window:
            break
        if fits(workers, entries, allowed, rules.reserve, row, left[at]):
            seen += 1
            if has_room(workers, entries, rules.reserve, row, left[at]):
                window[found] = at
                found += 1
    return found


@part
def best_set(
    workers: Workers,
    entries: Entries,
    rules: Rules,
    row: int,
    left: Integers,
    window: Integers,
    kinks: FloatRows,
    sums: IntegerRows,
) -> tuple[int, float]:
    """The subset of the window of best score as a bitmask, and its score; 0: none fits. Of all sums the largest not
    above the peak or the smallest above it; of equal sums that of fewest sequences, then the items that stand first.
    """
    gain, beta, total = rules.gain, workers[row].beta, 0
    for at in window:
        total += entries[left[at]].tokens
    peak = max(0, int(min(peak_of(kinks, gain, beta), float(total))))
    low = high = 0
    for bit in range(len(window)):
        entry, added = left[window[bit]], 1 << bit
        for mask in range(added, 2 * added):
            w = sums[0, mask - added] + entries[entry].tokens
            count = sums[1, mask - added] + slots_of(workers, entries, row, entry)
            sums[0, mask], sums[1, mask] = w, count
            if count > workers[row].free or w + rules.reserve * count > workers[row].room:
                continue
            if w <= peak:
                if low == 0 or w > sums[0, low] or (w == sums[0, low] and count < sums[1, low]):
                    low = mask
            elif high == 0 or w < sums[0, high] or (w == sums[0, high] and count < sums[1, high]):
                high = mask
    if low == 0 and high == 0:
        return 0, 0.0
    low_score = score_of(kinks, gain, beta, sums[0, low]) if low else -np.inf
    high_score = score_of(kinks, gain, beta, sums[0, high]) if high else -np.inf
    return (high, high_score) if high_score > low_score else (low, low_score)


@part
def admit(
    workers: Workers,
    load: FloatRows,
    envelope: FloatRows,
    entries: Entries,
    reserve: int,
    row: int,
    left: Integers,
    positions: Integers,
    reason: int,
    score: float,
    done: Done,
    chosen: Integers,
    made: Integers,
) -> None:
    """Notes that the entries at ascending `positions` go to the worker, takes its slots and room, and closes up `left`,
    of which the last len(positions) are no longer valid.
    """
    worker, admission = workers[row], done[made[0]]
    tokens = slots = 0
    for position in positions:
        tokens += entries[left[position]].tokens
        slots += slots_of(workers, entries, row, left[position])
        chosen[made[1]] = left[position]
        made[1] += 1
    admission.row, admission.reason, admission.score = row, reason, score
    admission.free, admission.margin = worker.free, worker.margin
    admission.tokens, admission.size = tokens, len(positions)
    made[0] += 1
    worker.free -= slots
    worker.room -= tokens + reserve * slots
    worker.touched = 1
    made[2] -= slots
    for k in range(len(positions) - 1, -1, -1):
        for i in range(positions[k], len(left) - 1):
            left[i] = left[i + 1]
    add(workers, load, envelope, row, tokens, slots)


# ---------------------------------------------------------------------------------------------------------- stages


@part
def place_overdue(
    workers: Workers,
    load: FloatRows,
    envelope: FloatRows,
    discount: Floats,
    entries: Entries,
    allowed: TruthRows,
    rules: Rules,
    kinks: FloatRows,
    sorting: IntegerRows,
    left: Integers,
    done: Done,
    chosen: Integers,
    made: Integers,
) -> None:
    """Entries that have waited too long, in order, each to the worker of largest margin of those that it fits."""
    for entry in range(len(entries)):
        if entries[entry].late == 0:
            continue
        best = len(workers)
        for row in range(len(workers)):
            if not (workers[row].open and fits(workers, entries, allowed, rules.reserve, row, entry)):
                continue
            if best == len(workers) or better(workers, row, best):
                best = row
        if best < len(workers):
            find_kinks(workers, load, envelope, discount, rules.slack, best, kinks, sorting)
            score = score_of(kinks, rules.gain, workers[best].beta, entries[entry].tokens)
            left[0] = entry
            only = np.zeros(1, np.int64)
            admit(
                workers,
                load,
                envelope,
                entries,
                rules.reserve,
                best,
                left[:1],
                only,
                OVERDUE,
                score,
                done,
                chosen,
                made,
            )


@part
def choose(
    workers: Workers,
    entries: Entries,
    allowed: TruthRows,
    rules: Rules,
    row: int,
    left: Integers,
    kinks: FloatRows,
    sums: IntegerRows,
    window: Integers,
    free: int,
) -> tuple[int, int, float]:
    """What the worker takes: positions in `window`, how many (0: nothing fits it), reason and score. `free`: slots of
    the whole group.
    """
    at, score = best_single(workers, entries, allowed, rules, row, left, kinks)
    if at == len(left):
        return 0, LEAST_HARM, 0.0
    stage_1 = free >= rules.enough
    if not stage_1 and workers[row].free > 1:
        found = find_window(workers, entries, allowed, rules, row, left, window)
        mask, set_score = best_set(workers, entries, rules, row, left, window[:found], kinks, sums)
        if mask != 0 and set_score > max(0.0, score):
            number = 0
            for bit in range(found):
                if mask >> bit & 1:
                    window[number] = window[bit]
                    number += 1
            return number, BEST_SUBSET, set_score
    window[0] = at
    return 1, FILL if stage_1 else BEST_SUBSET if score > 0.0 else LEAST_HARM, score


@compiled
def place(
    workers: Workers,
    departures: IntegerRows,
    barriers: int,
    discount: Floats,
    entries: Entries,
    allowed: TruthRows,
    order: Integers,
    ends: Integers,
    rules: Rules,
    done: Done,
    chosen: Integers,
    made: Integers,
) -> None:
    """One round. `departures`: (step, sequences, KV tokens), one worker after the other; `discount` gamma^h, h = 0..H;
    `entries` in the order in which they should be served, `allowed` per kind of entry and row; `order`: entries by
    priority, then size descending, equal ones as they stand, and `ends`, where each priority ends in it.

    Changes `workers`, fills `done`, and `chosen` with their entries one after the other (room for all in both); `made`
    counts admissions, chosen entries, and free slots of the whole group, which it is given.
    """
    load, envelope = np.empty((len(workers), len(discount))), np.empty((barriers, len(discount)))
    kinks, sorting = np.empty((4, len(discount))), np.empty((2, len(discount)), np.int64)
    left, window = np.empty(len(entries), np.int64), np.empty(rules.window, np.int64)
    sums, active = np.zeros((2, 1 << rules.window), np.int64), np.zeros(len(workers), np.int64)
    placed = np.zeros(len(entries), np.int64)
    project(workers, departures, load, sorting)
    measure(workers, load, envelope)
    place_overdue(
        workers, load, envelope, discount, entries, allowed, rules, kinks, sorting, left, done, chosen, made
    )
    for i in range(made[1]):
        placed[chosen[i]] = 1
    start = 0
    for end in ends:
        n = 0
        for i in range(start, end):
            if placed[order[i]] == 0:
                left[n] = order[i]
                n += 1
        start = end
        for row in range(len(workers)):
            active[row] = workers[row].open
        while n > 0:
            row = next_row(workers, active)
            if row == len(workers):
                break
            find_kinks(workers, load, envelope, discount, rules.slack, row, kinks, sorting)
            number, reason, score = choose(
                workers, entries, allowed, rules, row, left[:n], kinks, sums, window, made[2]
            )
            if number == 0:  # nothing of this priority fits it any more
                active[row] = 0
                continue
            positions = window[:number]
            admit(
                workers,
                load,
                envelope,
                entries,
                rules.reserve,
                row,
                left[:n],
                positions,
                reason,
                score,
                done,
                chosen,
                made,
            )
            n -= number
