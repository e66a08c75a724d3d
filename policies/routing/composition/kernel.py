"""The composition's two stages over arrays, compiled: `request_seconds` step by step, the same admissions bit for bit.

Read `composition` for the formulas, `stages` and `request_seconds` for what is done and why, `entry_costs` for costs.
Here are the same steps without objects, as `stages_kernel` has them for BR-0 and BR-H. The difference: the overflow
sum_h gamma^h max(0, w - m(h)) of all that is weighed at once is one product of a matrix and a vector, whose rounding is
the BLAS's. So `advance` stops where one is needed, its caller multiplies (`quick_seconds`), and the next call goes on.
It also stops for prefix hits, which are looked up for entries that are weighed and not for a whole pool. What has no
overflow needs no product: an empty cluster's tick is one call.

What is worked out when it is first asked for in `entry_costs` is here too (`touch`): it holds what was on its way then.

One file, because the cache of compiled code watches the file of `advance` only. Importing this module costs some 16 s
of CPU where nothing is cached; see `stages_kernel` for what else, and who loads it when.
"""

from typing import Annotated, Any, NamedTuple

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
DONE, AGAIN, HITS, PRODUCT = range(4)  # what a step asks for: nothing more, the next one, hits, a product
NOTHING, ONE, SET = range(3)  # what waits for its overflow
TIERS = 4
NO_TIER = TIERS  # a column that no tier's flows include
GIGABYTE = 1e9

WORKER = np.dtype(
    [
        ("slots", np.int64),
        ("barrier", np.int64),  # 0, 1, ...
        ("open", np.int64),  # 1: entries may go there
        ("draw", np.float64),  # orders equal keys
        ("slowdown", np.float64),  # N s D / sum_h gamma^h, s per token-step
        ("free", np.int64),  # slots; this and all below change with each admission
        ("room", np.int64),  # KV tokens
        ("touched", np.int64),  # 1: has admitted in this round
        ("active", np.int64),  # 1: something of this priority may still fit it
        ("margin", np.float64),  # min_h m_g(h)
        ("sequences", np.int64),  # that run or wait there
        ("queue_s", np.float64),
        ("step_s", np.float64),
    ]
)
ENTRY = np.dtype(
    [
        ("tokens", np.int64),  # s_r
        ("prompt", np.int64),
        ("sequences", np.int64),
        ("priority", np.int64),
        ("kind", np.int64),  # row of `allowed`
        ("sender", np.int64),
        ("fleet", np.int64),
        ("dearest", np.int64),
        ("overdue", np.int64),  # 1: goes first
        ("kv_bytes", np.float64),
        ("arrived_s", np.float64),
        ("slo_s", np.float64),  # 0 or less: none
        ("hold", np.float64),
        ("age_s", np.float64),
        ("looked", np.int64),  # 1: its row of `hits` is filled
        ("gone", np.int64),  # 1: admitted, or fits nowhere any more
        ("known", np.int64),  # 1: the next two are
        ("weight", np.float64),
        ("credit", np.float64),
    ]
)
PATH = np.dtype(  # from a sender to a worker
    [
        ("known", np.int64),
        ("own", np.int64),  # 1: of the pair's estimate
        ("tier", np.int64),
        ("sent", np.int64),  # the tier that a transfer counts on
        ("uplinks", np.int64),
        ("residual", np.float64),  # bytes/s
        ("latency_s", np.float64),
        ("near_s", np.float64),  # near_g
    ]
)
FLEET = np.dtype(
    [("lowest", np.int64), ("born", np.int64)]
)  # class; 1: this round's transfers count from now on
DEAREST = np.dtype([("known", np.int64), ("least_s", np.float64), ("per_byte_s", np.float64)])
RULES = np.dtype(
    [
        ("window", np.int64),
        ("abundance", np.float64),
        ("reserve", np.int64),
        ("now_s", np.float64),
        ("wait_s", np.float64),
        ("max_weight", np.float64),
        ("cost_weight", np.float64),
        ("by_tokens", np.int64),  # 1: credit by tokens
        ("credit_s_per_token", np.float64),
        ("queue_rent_s", np.float64),
        ("step_base_s", np.float64),
        ("step_per_seq_s", np.float64),
        ("counted", np.int64),  # 1: the oracle's congestion excludes our transfers
        ("most_flows", np.float64),
        ("senders", np.int64),
    ]
)
STATE = np.dtype(
    [
        ("free", np.int64),  # slots of the whole group
        ("cursor", np.int64),  # overdue entries before it are done
        ("priority", np.int64),  # classes begun
        ("start", np.int64),  # of the class in `by_size` and `by_turn`
        ("end", np.int64),
        ("left", np.int64),  # its entries that are not gone
        ("waits", np.int64),  # NOTHING, ONE or SET
        ("reason", np.int64),
        ("entry", np.int64),  # the ONE, or whose hits are asked for
        ("row", np.int64),  # whose SET
        ("found", np.int64),  # entries in `window`
        ("rows", np.int64),  # of `over` that are to be multiplied
        ("made", np.int64),  # admissions
        ("chosen", np.int64),  # entries in them
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
        ("worth_s", np.float64),
        ("age_s", np.float64),
        ("cost_s", np.float64),
        ("rent_s", np.float64),
        ("holds", np.float64),
    ]
)


Row = Any  # a record: parts that run often take records and few arrays, each of which costs them to be handed over
Rows = npt.NDArray[np.void]


class Tables(NamedTuple):
    """A round's state. G: workers kept, H + 1: steps, N: entries, M: subsets or workers weighed at once."""

    workers: Annotated[npt.NDArray[np.void], rows_of(WORKER)]  # G
    load: FloatRows  # G, H + 1
    envelope: FloatRows  # barriers, H + 1
    entries: Annotated[npt.NDArray[np.void], rows_of(ENTRY)]  # N, in the order in which they should be served
    allowed: TruthRows  # kinds, G
    hits: IntegerRows  # N, G: tokens
    by_size: Integers  # N: entries by priority, then size descending
    by_turn: Integers  # N: by priority, then whose turn is first
    ends: Integers  # where each priority ends in these
    paths: Annotated[npt.NDArray[np.void], rows_of(PATH)]  # senders * G
    fleets: Annotated[npt.NDArray[np.void], rows_of(FLEET)]
    flows: IntegerRows  # fleets, TIERS + 1: transfers on the way
    dearest: Annotated[npt.NDArray[np.void], rows_of(DEAREST)]
    rules: Annotated[npt.NDArray[np.void], rows_of(RULES)]  # 1
    state: Annotated[npt.NDArray[np.void], rows_of(STATE)]  # 1
    window: Integers  # W: entries
    sums: IntegerRows  # 2, M + 1: tokens and slots of each subset of the window
    worths: Floats  # M + 1
    margins: Floats  # H + 1: m_g(h) of the worker whose SET it is
    over: FloatRows  # M, H + 1: max(0, w - m(h)) of each that is weighed
    overflow: Floats  # M: what the caller makes of `over`
    done: Annotated[npt.NDArray[np.void], rows_of(ADMISSION)]  # N
    done_over: FloatRows  # N, H + 1: max(0, w - m(h)) of each admission
    chosen: Integers  # N: their entries, one after the other


# ---------------------------------------------------------------------------------------------------------- costs


@part
def transfer_s(path: Row, rules: Row, flows: IntegerRows, fleet: int, n_bytes: float) -> float:
    """Seconds for so many bytes, the transfers on the way counted."""
    if path.known == 0:
        return 0.0
    shared_by = 0.0
    if rules.counted:
        total = 0
        for tier in range(path.tier, TIERS):
            total += flows[fleet, tier]
        shared_by = min(rules.most_flows, total / rules.senders)
    sharing = 1 + shared_by / path.uplinks
    if path.own:
        return float(n_bytes * sharing / path.residual + path.latency_s)
    return float(n_bytes * (sharing / path.residual) + path.latency_s)


@part
def cost_s(facts: Row, worker: Row, path: Row, rules: Row, flows: IntegerRows, hit_tokens: int) -> float:
    """cost(r, g)."""
    n_bytes = facts.kv_bytes * (1.0 - min(1.0, hit_tokens / facts.prompt))
    return float(transfer_s(path, rules, flows, facts.fleet, n_bytes) + worker.queue_s + worker.step_s)


@part
def rent_s(facts: Row, path: Row, rules: Row) -> float:
    """rent(r, g)."""
    return float(facts.hold * (rules.queue_rent_s + path.near_s))


@part
def worth_s(facts: Row, worker: Row, path: Row, rules: Row, flows: IntegerRows, hit_tokens: int) -> float:
    """credit_r + age_r - weight_r * cost(r, g) - rent(r, g)."""
    worth = facts.credit - facts.weight * cost_s(facts, worker, path, rules, flows, hit_tokens)
    return float(worth + facts.age_s - rent_s(facts, path, rules))


@part
def dearest_s(t: Tables, entry: int) -> float:
    """No less than its cost on any worker that it may go to, but for what this round admits there."""
    facts, found, rules, n = t.entries[entry], t.dearest[t.entries[entry].dearest], t.rules[0], len(t.workers)
    if found.known == 0:
        fixed_s = first_s = slowest_s = -np.inf
        for row in range(n):
            if t.workers[row].open and t.allowed[facts.kind, row]:
                path = t.paths[facts.sender * n + row]
                least_s = transfer_s(path, rules, t.flows, facts.fleet, 0.0)
                gigabyte_s = transfer_s(path, rules, t.flows, facts.fleet, GIGABYTE)
                fixed_s = max(fixed_s, least_s)
                slowest_s = max(slowest_s, gigabyte_s - least_s)
                first_s = max(first_s, t.workers[row].queue_s + t.workers[row].step_s)
        found.least_s, found.per_byte_s, found.known = fixed_s + first_s, slowest_s / GIGABYTE, 1
    return float(found.least_s + facts.kv_bytes * found.per_byte_s)


@part
def touch(t: Tables, entry: int) -> None:
    """The first time that an entry is weighed: its fleet counts from now on, its weight and credit are fixed."""
    facts, rules = t.entries[entry], t.rules[0]
    t.fleets[facts.fleet].born = 1
    slack = 1.0
    if facts.slo_s > 0:
        slack_s = facts.arrived_s + facts.slo_s - rules.now_s
        late = slack_s * rules.max_weight <= facts.slo_s
        slack = rules.max_weight if late else max(1.0, facts.slo_s / slack_s)
    facts.weight = rules.cost_weight * slack
    if rules.by_tokens:
        facts.credit = rules.credit_s_per_token * facts.tokens
    else:
        facts.credit = slack * rules.wait_s + facts.weight * dearest_s(t, entry)
    facts.known = 1


# ------------------------------------------------------------------------------------------------------- selection


@part
def slots_of(facts: Row, worker: Row) -> int:
    """The slots that it takes there."""
    return int(min(facts.sequences, worker.slots))


@part
def fits(facts: Row, worker: Row, allowed: bool, reserve: int) -> bool:
    """May go there, slots and KV room; until something was admitted there the dispatcher's word counts for the room."""
    if not (allowed and worker.open):
        return False
    slots = slots_of(facts, worker)
    if slots > worker.free:
        return False
    return bool(worker.touched == 0 or facts.tokens + reserve * slots <= worker.room)


@part
def fits_somewhere(workers: Rows, entries: Rows, allowed: TruthRows, reserve: int, entry: int) -> bool:
    """On any worker."""
    facts, found = entries[entry], False
    for row in range(len(workers)):
        found = found or fits(facts, workers[row], allowed[facts.kind, row], reserve)
    return found


@part
def next_row(workers: Rows) -> int:
    """The active row of most free slots, then margin, then by draw; their number: none that is active has a slot."""
    best = len(workers)
    for row in range(len(workers)):
        a = workers[row]
        if a.active == 0 or a.free <= 0:
            continue
        if best < len(workers):
            b = workers[best]
            if a.free < b.free or (a.free == b.free and a.margin < b.margin):
                continue
            if a.free == b.free and a.margin == b.margin and a.draw >= b.draw:
                continue
        best = row
    return best


@part
def find_window(t: Tables, row: int) -> int:
    """The first W entries in turn that fit the worker; how many."""
    found, entries, by_turn, window = 0, t.entries, t.by_turn, t.window
    worker, allowed, reserve = t.workers[row], t.allowed, t.rules[0].reserve
    for at in range(t.state[0].start, t.state[0].end):
        entry = by_turn[at]
        facts = entries[entry]
        if facts.gone == 0 and fits(facts, worker, allowed[facts.kind, row], reserve):
            window[found] = entry
            found += 1
            if found == len(window):
                break
    return found


@part
def prepare_one(t: Tables, entry: int, reason: int) -> int:
    """Gets an entry ready to be weighed on all workers."""
    state, tokens, above = t.state[0], t.entries[entry].tokens, False
    state.entry = entry
    if t.entries[entry].looked == 0:
        return HITS
    if t.entries[entry].known == 0:
        touch(t, entry)
    state.waits, state.reason = ONE, reason
    for row in range(len(t.workers)):
        above = above or tokens > t.workers[row].margin
        t.overflow[row] = 0.0
    if not above:
        return AGAIN
    state.rows = len(t.workers)
    for row in range(len(t.workers)):
        fill_over(t.envelope, t.load, t.workers[row].barrier, row, tokens, t.over, row)
    return PRODUCT


@part
def fill_over(
    envelope: FloatRows, load: FloatRows, barrier: int, row: int, tokens: int, over: FloatRows, at: int
) -> None:
    """max(0, w - m_g(h)), into a row."""
    for h in range(load.shape[1]):
        over[at, h] = max(0.0, tokens - (envelope[barrier, h] - load[row, h]))


@part
def prepare_set(t: Tables, row: int, found: int) -> int:
    """Gets all subsets of the window ready to be weighed on a worker; a bit of a mask is an entry of the window."""
    state, sums, worths = t.state[0], t.sums, t.worths  # a field of `t` is not to be fetched in a long loop
    margins, over, overflow, worker, rules = t.margins, t.over, t.overflow, t.workers[row], t.rules[0]
    for entry in t.window[:found]:
        if t.entries[entry].looked == 0:
            state.entry = entry
            return HITS
    state.waits, state.row, state.found, state.rows = SET, row, found, (1 << found) - 1
    for bit in range(found):
        entry, added = t.window[bit], 1 << bit
        facts = t.entries[entry]
        if facts.known == 0:
            touch(t, entry)
        path = t.paths[facts.sender * len(t.workers) + row]
        worth = worth_s(facts, worker, path, rules, t.flows, t.hits[entry, row])
        tokens, slots = facts.tokens, slots_of(facts, worker)
        for mask in range(added, 2 * added):
            sums[0, mask] = sums[0, mask - added] + tokens
            sums[1, mask] = sums[1, mask - added] + slots
            worths[mask] = worths[mask - added] + worth
    if sums[0, state.rows] <= worker.margin:
        for at in range(state.rows):
            overflow[at] = 0.0
        return AGAIN
    for h in range(len(margins)):
        margins[h] = t.envelope[worker.barrier, h] - t.load[row, h]
    for at in range(state.rows):
        for h in range(len(margins)):
            over[at, h] = max(0.0, sums[0, at + 1] - margins[h])
    return PRODUCT


# --------------------------------------------------------------------------------------------------------- booking


@part
def settle_one(t: Tables) -> None:
    """The entry goes to the worker of most value."""
    entry, workers, paths, rules, flows = t.state[0].entry, t.workers, t.paths, t.rules[0], t.flows
    facts, hits, allowed, overflow = t.entries[entry], t.hits, t.allowed, t.overflow
    best, most, first = len(workers), 0.0, facts.sender * len(workers)
    for row in range(len(workers)):
        worker = workers[row]
        if fits(facts, worker, allowed[facts.kind, row], rules.reserve):
            cost = cost_s(facts, worker, paths[first + row], rules, flows, hits[entry, row])
            worth = (
                facts.credit + facts.age_s - facts.weight * cost - rent_s(facts, paths[first + row], rules)
            )
            value = worth - worker.slowdown * overflow[row]
            drawn = best < len(workers) and worker.draw < workers[best].draw
            if best == len(workers) or value > most or (value == most and drawn):
                best, most = row, value
    t.window[0] = entry
    admit(t, best, 1, t.state[0].reason, most)


@part
def settle_set(t: Tables) -> None:
    """The worker takes the subset of most value, or the single one that does least harm."""
    row, found, best, most = t.state[0].row, t.state[0].found, 0, -np.inf
    worker, reserve, window = t.workers[row], t.rules[0].reserve, t.window
    sums, worths, overflow = t.sums, t.worths, t.overflow
    for mask in range(1, 1 << found):
        if sums[1, mask] > worker.free or sums[0, mask] + reserve * sums[1, mask] > worker.room:
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


@part
def admit(t: Tables, row: int, size: int, reason: int, score: float) -> None:
    """Notes that the first entries of the window go to the worker, and books them."""
    state, worker, rules = t.state[0], t.workers[row], t.rules[0]
    admission, tokens, slots = t.done[state.made], 0, 0
    for entry in t.window[:size]:
        facts, hit_tokens = t.entries[entry], t.hits[entry, row]
        path = t.paths[facts.sender * len(t.workers) + row]
        tokens += facts.tokens
        slots += slots_of(facts, worker)
        admission.worth_s += worth_s(facts, worker, path, rules, t.flows, hit_tokens)
        admission.age_s += facts.age_s
        admission.cost_s += cost_s(facts, worker, path, rules, t.flows, hit_tokens)
        admission.rent_s += rent_s(facts, path, rules)
        admission.holds += facts.hold
    admission.row, admission.reason, admission.score = row, reason, score
    admission.free, admission.margin = worker.free, worker.margin
    admission.tokens, admission.size = tokens, size
    fill_over(t.envelope, t.load, worker.barrier, row, tokens, t.done_over, state.made)
    for entry in t.window[:size]:
        facts = t.entries[entry]
        facts.gone = 1
        t.chosen[state.chosen] = entry
        state.chosen += 1
        send(t.fleets, t.flows, facts, t.paths[facts.sender * len(t.workers) + row].sent)
    state.made += 1
    state.free -= slots
    state.left -= size
    worker.free -= slots
    worker.room -= tokens + rules.reserve * slots
    worker.touched = 1
    queue_up(worker, rules, slots)
    add_load(t.workers, t.load, t.envelope, row, tokens, slots)


@part
def send(fleets: Rows, flows: IntegerRows, facts: Row, tier: int) -> None:
    """One more transfer on the way."""
    for i in range(len(fleets)):
        if fleets[i].born and facts.priority <= fleets[i].lowest:
            flows[i, tier] += 1


@part
def queue_up(worker: Row, rules: Row, slots: int) -> None:
    """T_queue and T_decode after so many more sequences."""
    worker.sequences += slots
    running = min(worker.sequences, worker.slots)
    waiting = max(0, worker.sequences - worker.slots)
    worker.queue_s = waiting * (rules.step_base_s + rules.step_per_seq_s * running)
    worker.step_s = rules.step_base_s + rules.step_per_seq_s * (running + 1)


@part
def least_margin(load: FloatRows, envelope: FloatRows, barrier: int, row: int) -> float:
    """min_h m_g(h)."""
    least = np.inf
    for h in range(load.shape[1]):
        least = min(least, envelope[barrier, h] - load[row, h])
    return least


@part
def add_load(workers: Rows, load: FloatRows, envelope: FloatRows, row: int, tokens: int, slots: int) -> None:
    """Books w on a load, which grows by a token a sequence a step; an envelope that it exceeds rises with it."""
    barrier = workers[row].barrier
    for h in range(load.shape[1]):
        load[row, h] += tokens + slots * h
    workers[row].margin = least_margin(load, envelope, barrier, row)
    if workers[row].margin >= 0.0:
        return
    for h in range(load.shape[1]):
        envelope[barrier, h] = max(envelope[barrier, h], load[row, h])
    for other in range(len(workers)):
        if workers[other].barrier == barrier:
            workers[other].margin = least_margin(load, envelope, barrier, other)


# ---------------------------------------------------------------------------------------------------------- stages


@part
def next_class(t: Tables) -> int:
    """Begins the next priority."""
    state = t.state[0]
    if state.priority == len(t.ends):
        return DONE
    state.start, state.end = state.end, t.ends[state.priority]
    state.priority += 1
    for at in range(state.start, state.end):
        state.left += 1 - t.entries[t.by_size[at]].gone
    for row in range(len(t.workers)):
        t.workers[row].active = t.workers[row].open
    return AGAIN


@part
def prepare_largest(t: Tables) -> int:
    """Stage 1: the largest that fits anywhere; what does not stays in the pool."""
    state = t.state[0]
    for at in range(state.start, state.end):
        entry = t.by_size[at]
        if t.entries[entry].gone:
            continue
        if fits_somewhere(t.workers, t.entries, t.allowed, t.rules[0].reserve, entry):
            return prepare_one(t, entry, FILL)
        t.entries[entry].gone = 1
        state.left -= 1
    return AGAIN


@part
def prepare(t: Tables) -> int:
    """What is to be weighed next: overdue entries, then the stages for each priority."""
    state, entries, reserve = t.state[0], t.entries, t.rules[0].reserve
    while state.cursor < len(entries):
        facts = entries[state.cursor]
        if (
            facts.overdue
            and facts.gone == 0
            and fits_somewhere(t.workers, entries, t.allowed, reserve, state.cursor)
        ):
            return prepare_one(t, state.cursor, OVERDUE)
        state.cursor += 1
        if state.cursor == len(entries):
            state.left = 0  # of a class that is yet to begin
    if state.left == 0:
        return next_class(t)
    row = next_row(t.workers)
    if row == len(t.workers):
        state.left = 0
        return AGAIN
    if state.free >= t.rules[0].abundance * state.left:
        return prepare_largest(t)
    found = find_window(t, row)
    if found == 0:  # nothing of this priority fits it any more
        t.workers[row].active = 0
        return AGAIN
    return prepare_set(t, row, found)


@compiled
def advance(
    workers: Annotated[npt.NDArray[np.void], rows_of(WORKER)],
    load: FloatRows,
    envelope: FloatRows,
    entries: Annotated[npt.NDArray[np.void], rows_of(ENTRY)],
    allowed: TruthRows,
    hits: IntegerRows,
    by_size: Integers,
    by_turn: Integers,
    ends: Integers,
    paths: Annotated[npt.NDArray[np.void], rows_of(PATH)],
    fleets: Annotated[npt.NDArray[np.void], rows_of(FLEET)],
    flows: IntegerRows,
    dearest: Annotated[npt.NDArray[np.void], rows_of(DEAREST)],
    rules: Annotated[npt.NDArray[np.void], rows_of(RULES)],
    state: Annotated[npt.NDArray[np.void], rows_of(STATE)],
    window: Integers,
    sums: IntegerRows,
    worths: Floats,
    margins: Floats,
    over: FloatRows,
    overflow: Floats,
    done: Annotated[npt.NDArray[np.void], rows_of(ADMISSION)],
    done_over: FloatRows,
    chosen: Integers,
) -> int:
    """Goes on with a round, given what it last asked for, until it asks again: HITS (those of `state.entry`, at least),
    PRODUCT (the first `state.rows` rows of `over` by gamma^h, into `overflow`), or DONE. Takes a `Tables`, field by
    field: a tuple of arrays costs ten times as much to hand over.
    """
    t = Tables(
        workers,
        load,
        envelope,
        entries,
        allowed,
        hits,
        by_size,
        by_turn,
        ends,
        paths,
        fleets,
        flows,
        dearest,
        rules,
        state,
        window,
        sums,
        worths,
        margins,
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
