"""The compiled `advance` runs one round of the composition over tables, step by step. `composition` has the
formulas, and `balance.stages` describes the two stages.

Two things differ from BalanceRoute's kernel. The value of a set depends on more than its sum, so all 2^W subsets of
a window are valued at once. And the overflows sum_h gamma^h max(0, w - m(h)) of all candidates are one product of a
matrix and a vector, rounded as the BLAS rounds. So `advance` stops where it needs a product, its caller (`round`)
multiplies, and the next call continues. It also stops for prefix hits, which are looked up only for entries that
are weighed and not for a whole pool. If nothing overflows no product is needed, so a round in an empty cluster
needs few calls.

An entry's weight and credit are fixed when it is first weighed (`touch`). They reflect the transfers that are on
their way at that moment.
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
    Row,
    Totals,
    WorkerRow,
    activate,
    book,
    fits,
    has_room,
    measure,
    next_worker,
    note,
    project,
    slots_of,
)
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

DONE, AGAIN, HITS, PRODUCT = range(4)
"""The answers of a step, which say what it needs: nothing more, the next step, an entry's prefix hits, or a
product.
"""

NOTHING, ONE, SET = range(3)
"""The choices that may wait for their overflow: none, one entry on all workers, or the subsets of a window on one
worker.
"""

TIERS = 4
NO_TIER = TIERS
"""The column of `flows` for transfers without a tier."""

GIGABYTE = 1e9


class PricedWorker(WorkerRow):
    """A worker with the values from which a set's cost there is computed. The last three change with each
    admission.
    """

    slowdown: float  # N s D / sum_h gamma^h
    extra: int  # what it may get beyond `free`
    batch: int  # beta_d while others queue
    # decode steps in which a full batch frees a slot; 0 if not known
    slot_steps: float
    queued: int  # sequences that run or wait there
    queue_s: float
    step_s: float


class CostedEntry(EntryRow):
    """A pool entry with the values from which its cost, credit and rent are computed."""

    prompt: int  # tokens, at least 1
    priority: int
    sender: int
    flow_class: int  # row of `classes` and `flows`
    dearest: int  # row of `dearest`
    kv_bytes: float
    arrived_s: float
    slo_s: float  # TTFT objective; 0 if none
    hold: float  # hold_r
    age_s: float  # age_r
    looked: int  # 1 if its row of `hits` is filled
    known: int  # 1 if the next two are fixed
    weight: float  # weight_r
    credit: float  # credit_r


class PathRow:
    """The path from a sender to a worker."""

    known: int
    own: int  # 1 if the pair has its own estimate
    tier: int
    sent: int  # tier on which transfers count
    uplinks: int
    residual: float  # bytes/s
    latency_s: float
    near_s: float  # near_g


class FlowClass:
    """The class of transfers with which entries of one priority share the network."""

    lowest: int  # largest priority that counts
    begun: int  # 1 if this round's transfers count


class Dearest:
    """An upper bound on the costs of all entries with one sender, priority and kind."""

    known: int
    least_s: float
    per_byte_s: float


class Rules:
    """The parameters of a round. A field with the name of a parameter of `Composition` has its value."""

    window: int
    abundance: float
    reserve_tokens: int
    wait_s: float
    max_weight: float
    cost_weight: float
    credit_s_per_token: float
    step_base_s: float
    step_per_seq_s: float
    max_inflight: float
    by_tokens: int  # 1 if the credit is by tokens
    now_s: float
    queue_rent_s: float
    counted: int  # 1 if own transfers count
    senders: int
    pressing: int  # 1 if entries are FIRST_OF_CLASS


class State(Totals):
    """The progress of a round."""

    cursor: int  # next entry to try as overdue
    priority: int  # number of priorities begun
    start: int  # its begin in `by_size`, `by_turn`
    end: int
    left: int  # its entries that are not gone
    waits: int  # NOTHING, ONE or SET
    reason: int
    entry: int  # entry of ONE or of HITS
    row: int  # worker of SET
    found: int  # entries in `window`
    rows: int  # rows of `over` for the product


class PricedAdmission(AdmissionRow):
    """An admission with the sums over its set that the decision shows."""

    worth_s: float
    age_s: float
    cost_s: float
    queue_s: float
    rent_s: float
    holds: float


Workers = Annotated[Table, rows_of(PricedWorker)]
Entries = Annotated[Table, rows_of(CostedEntry)]
Paths = Annotated[Table, rows_of(PathRow)]
Classes = Annotated[Table, rows_of(FlowClass)]
DearestRows = Annotated[Table, rows_of(Dearest)]
RulesRow = Annotated[Table, rows_of(Rules)]
StateRow = Annotated[Table, rows_of(State)]
Admissions = Annotated[Table, rows_of(PricedAdmission)]


class Tables(NamedTuple):
    """The tables of a round. G is the number of workers kept, H + 1 of steps, N of entries, and M of subsets or
    workers that are weighed at once.
    """

    workers: Workers  # G
    load: FloatRows  # G, H + 1: L_g(h)
    envelope: FloatRows  # barriers, H + 1: M(h)
    entries: Entries  # N, in the order of service
    allowed: TruthRows  # kinds of entries, G
    hits: IntegerRows  # N, G: tokens
    in_use: IntegerRows  # N, G: tokens that need no KV room
    by_size: Integers  # N: by priority, then size descending
    by_turn: Integers  # N: by priority, then turn
    ends: Integers  # where each priority ends in these
    paths: Paths  # senders * G
    classes: Classes
    flows: IntegerRows  # classes, TIERS + 1: transfers
    dearest: DearestRows
    rules: RulesRow  # 1
    state: StateRow  # 1
    window: Integers  # W: entries
    sums: IntegerRows  # 3, M + 1: tokens, slots, KV of subsets
    worths: Floats  # M + 1
    over: FloatRows  # M, H + 1: max(0, w - m(h))
    overflow: Floats  # M: `over` times gamma^h
    done: Admissions  # N
    done_over: FloatRows  # N, H + 1: `over` of admissions
    chosen: Integers  # N: admitted, set after set


# ---------------------------------------------------------------------------------------------------------- costs


@part
def transfer_s(path: Row, rules: Row, flows: IntegerRows, flow_class: int, n_bytes: float) -> float:
    """Returns the seconds to move `n_bytes` over a path that is shared with the transfers on their way, or 0 if the
    path is not known.
    """
    if path.known == 0:
        return 0.0
    shared_by = 0.0
    if rules.counted:
        total = 0
        for tier in range(path.tier, TIERS):
            total += flows[flow_class, tier]
        shared_by = min(rules.max_inflight, total / rules.senders)
    sharing = 1 + shared_by / path.uplinks
    if path.own:
        return float(n_bytes * sharing / path.residual + path.latency_s)
    return float(n_bytes * (sharing / path.residual) + path.latency_s)


@part
def cost_s(entry: Row, worker: Row, path: Row, rules: Row, flows: IntegerRows, hit_tokens: int) -> float:
    """Returns cost(r, g), the seconds of transfer, queue and first step."""
    n_bytes = entry.kv_bytes * (1.0 - min(1.0, hit_tokens / entry.prompt))
    return float(transfer_s(path, rules, flows, entry.flow_class, n_bytes) + worker.queue_s + worker.step_s)


@part
def rent_s(entry: Row, path: Row, rules: Row) -> float:
    """Returns rent(r, g), the request-seconds that others lose while the entry holds its slots."""
    return float(entry.hold * (rules.queue_rent_s + path.near_s))


@part
def worth_s(entry: Row, worker: Row, path: Row, rules: Row, flows: IntegerRows, hit_tokens: int) -> float:
    """Returns credit_r + age_r - weight_r * cost(r, g) - rent(r, g), an entry's value on a worker without the
    overflow.
    """
    worth = entry.credit - entry.weight * cost_s(entry, worker, path, rules, flows, hit_tokens)
    return float(worth + entry.age_s - rent_s(entry, path, rules))


@part
def dearest_s(t: Tables, entry: Row) -> float:
    """Returns an upper bound on the entry's cost over all allowed workers, ignoring later admissions of this round."""
    found, rules, n = t.dearest[entry.dearest], t.rules[0], len(t.workers)
    if found.known == 0:
        fixed_s = first_s = slowest_s = -np.inf
        for row in range(n):
            if t.allowed[entry.kind, row]:
                path = t.paths[entry.sender * n + row]
                least_s = transfer_s(path, rules, t.flows, entry.flow_class, 0.0)
                gigabyte_s = transfer_s(path, rules, t.flows, entry.flow_class, GIGABYTE)
                fixed_s = max(fixed_s, least_s)
                slowest_s = max(slowest_s, gigabyte_s - least_s)
                first_s = max(first_s, t.workers[row].queue_s + t.workers[row].step_s)
        found.least_s, found.per_byte_s, found.known = fixed_s + first_s, slowest_s / GIGABYTE, 1
    return float(found.least_s + entry.kv_bytes * found.per_byte_s)


@part
def slack_weight(arrived_s: float, slo_s: float, now_s: float, most: float) -> float:
    """Returns the weight of a request's slack: its TTFT objective divided by the time left of it, at least 1 and at
    most `most`. Without an objective it is 1.
    """
    if slo_s <= 0:
        return 1.0
    slack_s = arrived_s + slo_s - now_s
    return most if slack_s * most <= slo_s else max(1.0, slo_s / slack_s)


@part
def touch(t: Tables, entry: Row) -> None:
    """Fixes an entry's weight and credit when it is first weighed. From then on transfers of this round count in
    its flow class.
    """
    rules = t.rules[0]
    t.classes[entry.flow_class].begun = 1
    slack = slack_weight(entry.arrived_s, entry.slo_s, rules.now_s, rules.max_weight)
    entry.weight = rules.cost_weight * slack
    if rules.by_tokens:
        entry.credit = rules.credit_s_per_token * entry.tokens
    else:
        entry.credit = slack * rules.wait_s + entry.weight * dearest_s(t, entry)
    entry.known = 1


@part
def queue_up(worker: Row, rules: Row, slots: int) -> None:
    """Adds `slots` sequences to a worker and sets T_queue and T_decode for one more (netkv's terms)."""
    worker.queued += slots
    waiting = worker.queued - worker.slots
    steps = float(max(0, waiting))
    if worker.slot_steps > 0.0:
        steps = max(0, waiting + 1) * worker.slot_steps
    running = worker.batch if steps > 0.0 else worker.queued
    worker.queue_s = steps * (rules.step_base_s + rules.step_per_seq_s * running)
    worker.step_s = rules.step_base_s + rules.step_per_seq_s * (running + 1)


# ------------------------------------------------------------------------------- one entry, weighed on all workers


@part
def takes(entry: Row, worker: Row, allowed: bool, reserve: int) -> bool:
    """Returns whether an entry is allowed on a worker and finds KV room there, and slots or places in its queue."""
    if not allowed or slots_of(entry, worker) > worker.free + worker.extra:
        return False
    return worker.touched == 0 or has_room(entry, worker, reserve)


@part
def prepare_one(t: Tables, at: int, reason: int) -> int:
    """Prepares an entry to be weighed on all workers. Returns HITS if its hits are missing, PRODUCT if it overflows
    somewhere, else AGAIN.
    """
    state, entry, above = t.state[0], t.entries[at], False
    state.entry = at
    if entry.looked == 0:
        return HITS
    if entry.known == 0:
        touch(t, entry)
    state.waits, state.reason = ONE, reason
    for row in range(len(t.workers)):
        above = above or entry.tokens > t.workers[row].margin
        t.overflow[row] = 0.0
    if not above:
        return AGAIN
    state.rows = len(t.workers)
    for row in range(len(t.workers)):
        fill_over(t.load, t.envelope, t.workers[row].barrier, row, entry.tokens, t.over, row)
    return PRODUCT


@part
def fill_over(
    load: FloatRows, envelope: FloatRows, barrier: int, row: int, tokens: int, over: FloatRows, at: int
) -> None:
    """Writes max(0, tokens - m_g(h)) of a worker into the row `at` of `over`."""
    for h in range(load.shape[1]):
        over[at, h] = max(0.0, tokens - (envelope[barrier, h] - load[row, h]))


@part
def settle_one(t: Tables) -> None:
    """Admits the entry to the worker on which its value is largest, and among equal ones to that of the smallest
    draw. Workers without a free slot are weighed too, at the cost of their queue, because the entry could take a free
    slot elsewhere.
    """
    state, workers, rules, flows, overflow = t.state[0], t.workers, t.rules[0], t.flows, t.overflow
    entry, allowed, hits, paths = t.entries[t.state[0].entry], t.allowed, t.hits, t.paths
    best, most, first = len(workers), 0.0, entry.sender * len(workers)
    for row in range(len(workers)):
        worker = workers[row]
        if takes(entry, worker, allowed[entry.kind, row], rules.reserve_tokens):
            path = paths[first + row]
            cost = cost_s(entry, worker, path, rules, flows, hits[state.entry, row])
            worth = entry.credit + entry.age_s - entry.weight * cost - rent_s(entry, path, rules)
            value = worth - worker.slowdown * overflow[row]
            drawn = best < len(workers) and worker.draw < workers[best].draw
            if best == len(workers) or value > most or (value == most and drawn):
                best, most = row, value
    t.window[0] = state.entry
    admit(t, best, 1, state.reason, most)


# --------------------------------------------------------------------------- subsets of a window, weighed on one worker


@part
def find_window(t: Tables, row: int) -> int:
    """Fills `window` with the first W entries in turn that fit the worker, and returns their number."""
    found, entries, by_turn, window = 0, t.entries, t.by_turn, t.window
    worker, allowed, reserve = t.workers[row], t.allowed, t.rules[0].reserve_tokens
    for at in range(t.state[0].start, t.state[0].end):
        entry = entries[by_turn[at]]
        if entry.gone == 0 and fits(entry, worker, allowed[entry.kind, row], reserve):
            window[found] = by_turn[at]
            found += 1
            if found == len(window):
                break
    return found


@part
def prepare_set(t: Tables, row: int, found: int) -> int:
    """Prepares all subsets of the window to be weighed on a worker. Bit i of a mask is the window's i-th entry.
    Returns HITS if an entry's hits are missing, PRODUCT if the whole window overflows, else AGAIN.
    """
    # Fields that long loops need are fetched once, because each access to a field of `t` costs time.
    state, sums, worths, over, overflow = t.state[0], t.sums, t.worths, t.over, t.overflow
    worker, rules = t.workers[row], t.rules[0]
    for at in t.window[:found]:
        if t.entries[at].looked == 0:
            state.entry = at
            return HITS
    state.waits, state.row, state.found, state.rows = SET, row, found, (1 << found) - 1
    for bit in range(found):
        at, added = t.window[bit], 1 << bit
        entry = t.entries[at]
        if entry.known == 0:
            touch(t, entry)
        path = t.paths[entry.sender * len(t.workers) + row]
        worth = worth_s(entry, worker, path, rules, t.flows, t.hits[at, row])
        tokens, slots = entry.tokens, slots_of(entry, worker)
        need = tokens - t.in_use[at, row] + rules.reserve_tokens * slots
        for mask in range(added, 2 * added):
            sums[0, mask] = sums[0, mask - added] + tokens
            sums[1, mask] = sums[1, mask - added] + slots
            sums[2, mask] = sums[2, mask - added] + need
            worths[mask] = worths[mask - added] + worth
    if sums[0, state.rows] <= worker.margin:
        overflow[: state.rows] = 0.0
        return AGAIN
    margins = np.empty(t.load.shape[1])
    for h in range(len(margins)):
        margins[h] = t.envelope[worker.barrier, h] - t.load[row, h]
    for at in range(state.rows):
        for h in range(len(margins)):
            over[at, h] = max(0.0, sums[0, at + 1] - margins[h])
    return PRODUCT


@part
def settle_set(t: Tables) -> None:
    """Admits to the worker the subset of largest value. If no value is above 0 it admits the single entry of
    largest value.
    """
    row, found, best, most = t.state[0].row, t.state[0].found, 0, -np.inf
    worker, window = t.workers[row], t.window
    sums, worths, overflow = t.sums, t.worths, t.overflow
    for mask in range(1, 1 << found):
        if sums[1, mask] > worker.free or sums[2, mask] > worker.room:
            continue
        value = worths[mask] - worker.slowdown * overflow[mask - 1]
        if value > most:
            best, most = mask, value
    reason = BEST_SUBSET
    if not most > 0.0:
        reason, best = LEAST_HARM, 0
        for bit in range(found):
            value = worths[1 << bit] - worker.slowdown * overflow[(1 << bit) - 1]
            if best == 0 or value > most:
                best, most = 1 << bit, value
    size = 0
    for bit in range(found):
        if best >> bit & 1:
            window[size] = window[bit]
            size += 1
    admit(t, row, size, reason, most)


# -------------------------------------------------------------------------------------------------------- booking


@part
def admit(t: Tables, row: int, size: int, reason: int, score: float) -> None:
    """Admits the first `size` entries of the window to a worker: records the admission and books it."""
    state, worker, rules = t.state[0], t.workers[row], t.rules[0]
    admission, tokens, slots, in_use = t.done[state.admissions], 0, 0, 0
    for at in t.window[:size]:
        entry, hit_tokens = t.entries[at], t.hits[at, row]
        path = t.paths[entry.sender * len(t.workers) + row]
        tokens += entry.tokens
        slots += slots_of(entry, worker)
        in_use += t.in_use[at, row]
        admission.worth_s += worth_s(entry, worker, path, rules, t.flows, hit_tokens)
        admission.age_s += entry.age_s
        admission.cost_s += cost_s(entry, worker, path, rules, t.flows, hit_tokens)
        admission.queue_s += worker.queue_s
        admission.rent_s += rent_s(entry, path, rules)
        admission.holds += entry.hold
    note(admission, worker, row, reason, score, tokens, size)
    fill_over(t.load, t.envelope, worker.barrier, row, tokens, t.done_over, state.admissions)
    for at in t.window[:size]:
        entry = t.entries[at]
        entry.gone = 1
        t.chosen[state.chosen] = at
        state.chosen += 1
        send(t.classes, t.flows, entry, t.paths[entry.sender * len(t.workers) + row].sent)
    state.admissions += 1
    state.free -= min(slots, max(0, worker.free))
    state.left -= size
    queue_up(worker, rules, slots)
    book(t.workers, t.load, t.envelope, row, tokens, slots, rules.reserve_tokens)
    worker.room += in_use


@part
def send(classes: Table, flows: IntegerRows, entry: Row, tier: int) -> None:
    """Counts the transfer of an admitted entry in each flow class that has begun and that includes its priority."""
    for i in range(len(classes)):
        if classes[i].begun and entry.priority <= classes[i].lowest:
            flows[i, tier] += 1


# --------------------------------------------------------------------------------------------------------- stages


@part
def fits_somewhere(workers: Table, entry: Row, allowed: TruthRows, reserve: int) -> bool:
    """Returns whether an entry fits on any worker."""
    found, row = False, 0
    while row < len(workers) and not found:
        found = fits(entry, workers[row], allowed[entry.kind, row], reserve)
        row += 1
    return found


@part
def has_turn(t: Tables, entry: Row) -> bool:
    """Returns whether an entry goes first now by being overdue: before all classes, or as one of the present class."""
    state = t.state[0]
    if state.priority == 0:
        return bool(entry.overdue == BEFORE_ALL)
    of_class = t.entries[t.by_size[state.start]].priority
    return bool(entry.overdue == FIRST_OF_CLASS and entry.priority == of_class)


@part
def prepare_overdue(t: Tables) -> int:
    """Prepares the next overdue entry whose turn it is and that fits on any worker. Returns DONE if there is none,
    otherwise the answer of `prepare_one`.
    """
    state, entries, reserve = t.state[0], t.entries, t.rules[0].reserve_tokens
    while state.cursor < len(entries):
        entry = entries[state.cursor]
        if entry.gone == 0 and has_turn(t, entry) and fits_somewhere(t.workers, entry, t.allowed, reserve):
            return prepare_one(t, state.cursor, OVERDUE)
        state.cursor += 1
        if state.cursor == len(entries) and state.priority == 0:
            state.left = 0  # no class has begun
    return DONE


@part
def next_class(t: Tables) -> int:
    """Begins the next priority and returns AGAIN, or DONE if there is none."""
    state = t.state[0]
    if state.priority == len(t.ends):
        return DONE
    state.start, state.end = state.end, t.ends[state.priority]
    state.priority += 1
    if t.rules[0].pressing:
        state.cursor = 0
    for at in range(state.start, state.end):
        state.left += 1 - t.entries[t.by_size[at]].gone
    activate(t.workers)
    return AGAIN


@part
def prepare_largest(t: Tables) -> int:
    """Runs a step of stage 1: prepares the largest entry that fits on any worker. Larger entries stay in the pool."""
    state, reserve = t.state[0], t.rules[0].reserve_tokens
    for at in range(state.start, state.end):
        entry = t.entries[t.by_size[at]]
        if entry.gone:
            continue
        if fits_somewhere(t.workers, entry, t.allowed, reserve):
            return prepare_one(t, t.by_size[at], FILL)
        entry.gone = 1
        state.left -= 1
    return AGAIN


@part
def prepare(t: Tables) -> int:
    """Prepares the next choice: first the entries that are overdue before all others, then for each priority those that
    go first in it, and the two stages. Returns the answer of the step.
    """
    state, asked = t.state[0], prepare_overdue(t)
    if asked != DONE:
        return asked
    if state.left == 0:
        return next_class(t)
    row = next_worker(t.workers)
    if row == len(t.workers):
        state.left = 0
        return AGAIN
    if state.free >= t.rules[0].abundance * state.left:
        return prepare_largest(t)
    found = find_window(t, row)
    if found == 0:
        t.workers[row].active = 0
        return AGAIN
    return prepare_set(t, row, found)


@compiled
def begin(
    workers: Workers, departures: IntegerRows, load: FloatRows, envelope: FloatRows, rules: RulesRow
) -> None:
    """Fills in projected loads, envelopes, margins and queues of all workers. `departures` are rows of (step,
    sequences, KV tokens), one worker after the other.
    """
    project(workers, departures, load, np.empty((2, load.shape[1]), np.int64))
    measure(workers, load, envelope)
    for row in range(len(workers)):
        queue_up(workers[row], rules[0], 0)


@compiled
def advance(
    workers: Workers,
    load: FloatRows,
    envelope: FloatRows,
    entries: Entries,
    allowed: TruthRows,
    hits: IntegerRows,
    in_use: IntegerRows,
    by_size: Integers,
    by_turn: Integers,
    ends: Integers,
    paths: Paths,
    classes: Classes,
    flows: IntegerRows,
    dearest: DearestRows,
    rules: RulesRow,
    state: StateRow,
    window: Integers,
    sums: IntegerRows,
    worths: Floats,
    over: FloatRows,
    overflow: Floats,
    done: Admissions,
    done_over: FloatRows,
    chosen: Integers,
) -> int:
    """Continues a round until it needs something from its caller, which the caller must provide before the next
    call. The answer is HITS (of at least `state.entry`), PRODUCT (the first `state.rows` rows of `over` times
    gamma^h, written to `overflow`), or DONE.

    The fields of a `Tables` are parameters one by one, because passing a tuple of arrays costs four times as much.
    """
    t = Tables(
        workers,
        load,
        envelope,
        entries,
        allowed,
        hits,
        in_use,
        by_size,
        by_turn,
        ends,
        paths,
        classes,
        flows,
        dearest,
        rules,
        state,
        window,
        sums,
        worths,
        over,
        overflow,
        done,
        done_over,
        chosen,
    )
    asked = AGAIN
    while asked == AGAIN:
        waits = t.state[0].waits
        t.state[0].waits = NOTHING
        if waits == ONE:
            settle_one(t)
        elif waits == SET:
            settle_set(t)
        asked = prepare(t)
    return asked
