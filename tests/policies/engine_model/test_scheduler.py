"""Tests of the step model against results by hand: the sequences of each step, their blocks, preemption."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine_model.blocks import BlockError, BlockPool, block_hashes
from policies.engine_model.scheduler import EngineModel, Sequence, SequenceStage, StepResult
from policies.engine_model.timing import TimingProfile

T = TimingProfile(
    source="test",
    prefill_base_s=1.0,
    prefill_per_token_s=0.1,
    decode_base_s=2.0,
    decode_per_seq_s=0.5,
    decode_per_kv_token_s=0.01,
    kv_bytes_per_token=1,
    transfer_bandwidth_bytes_per_s=1.0,
    transfer_latency_s=0.0,
)


def model(
    blocks: int = 100, size: int = 4, slots: int = 8, budget: int = 100, chunked: bool = True
) -> EngineModel:
    return EngineModel(T, BlockPool(blocks, size), slots, budget, chunked)


def step(m: EngineModel) -> tuple[float | None, StepResult]:
    seconds = m.begin_step()
    return seconds, m.end_step() if seconds is not None else StepResult()


def test_one_colocated_request_step_by_step() -> None:
    m = model()
    seq = Sequence(prompt_tokens=6, output_tokens=3)
    m.add(seq)
    # the prefill of 6 tokens takes 1 + 0.6 s and gives the first token
    seconds, result = step(m)
    assert seconds == pytest.approx(1.6)
    assert (result.decoded, result.finished) == ([seq], [])
    assert (m.generated(seq), m.kv_tokens, m.pool.used) == (1, 7, 2)
    seconds, result = step(m)  # decode: 2 + 0.5 + 7 * 0.01
    assert seconds == pytest.approx(2.57)
    assert result.decoded == [seq]
    assert (m.generated(seq), m.kv_tokens) == (2, 8)
    seconds, result = step(m)  # 2 + 0.5 + 8 * 0.01
    assert seconds == pytest.approx(2.58)
    assert result.finished == [seq]
    assert seq.stage is SequenceStage.DONE
    assert (m.kv_tokens, m.pool.used, m.n_active) == (0, 0, 0)
    assert step(m)[0] is None


def test_blocks_grow_one_step_before_they_are_written() -> None:
    m = model(size=4)
    seq = Sequence(prompt_tokens=4, output_tokens=9)
    m.add(seq)
    used = []
    for _ in range(9):
        step(m)
        used.append(m.pool.used)
    # After token g the next step writes KV position 4 + g. A 2nd block is needed from g = 1 on, a 3rd from g = 5 on.
    # The sequence is done at g = 9.
    assert used == [2, 2, 2, 2, 3, 3, 3, 3, 0]


def test_prefill_budget_and_chunks() -> None:
    m = model(budget=10)
    a, b = Sequence(7, 0, prefill_only=True), Sequence(8, 0, prefill_only=True)
    m.add(a)
    m.add(b)
    seconds, result = step(m)  # 7 of a and 3 of b
    assert seconds == pytest.approx(1 + 1.0)
    assert result.prefilled == [a]
    assert result.decoded == []
    seconds, result = step(m)  # the other 5 of b
    assert seconds == pytest.approx(1 + 0.5)
    assert result.prefilled == [b]
    assert m.prefill_tokens_total == 15
    # both hold their KV until the lease ends
    assert m.pool.used == 4
    assert a.stage is SequenceStage.LEASED


def test_without_chunks_a_long_prompt_runs_alone() -> None:
    m = model(budget=10, chunked=False)
    short, long = Sequence(4, 0, prefill_only=True), Sequence(25, 0, prefill_only=True)
    m.add(short)
    m.add(long)
    assert step(m)[1].prefilled == [short]
    seconds, result = step(m)
    assert seconds == pytest.approx(1 + 2.5)
    assert result.prefilled == [long]


def test_colocated_prefill_delays_decode() -> None:
    m = model()
    a = Sequence(4, 10)
    m.add(a)
    step(m)
    m.add(Sequence(10, 10))
    # prefill 1 + 1.0, decode of a 2 + 0.5 + 5 * 0.01
    seconds, _ = step(m)
    assert seconds == pytest.approx(4.55)


def test_slots_limit_and_priority_order() -> None:
    m = model(slots=1)
    first, low, high = Sequence(4, 2), Sequence(4, 1, priority=5), Sequence(4, 1, priority=-1)
    m.add(first)
    step(m)
    m.add(low)
    m.add(high)
    assert m.n_waiting == 2
    step(m)  # first finishes
    assert step(m)[1].finished == [high]
    assert step(m)[1].finished == [low]


def test_nothing_overtakes_a_sequence_that_does_not_fit() -> None:
    m = model(blocks=4, size=4)
    big, small = Sequence(12, 1), Sequence(4, 1)
    running = Sequence(8, 4)
    for seq in (running, big, small):
        m.add(seq)
    step(m)
    assert running.stage is SequenceStage.DECODING
    assert big.stage is small.stage is SequenceStage.QUEUED


def test_prefix_hit_saves_prefill_but_never_the_last_token() -> None:
    m = model(size=4)
    tokens = list(range(8))
    hashes = block_hashes(tokens, 4)
    a = Sequence(8, 1, hashes)
    m.add(a)
    assert step(m)[0] == pytest.approx(1.8)
    b = Sequence(8, 1, hashes)
    m.add(b)
    # block 0 is a hit; block 1 holds the last token and is computed
    assert step(m)[0] == pytest.approx(1.4)
    assert b.cached_tokens == 4


def test_remote_sequence_loads_then_decodes() -> None:
    m = model(size=4)
    hashes = block_hashes(list(range(8)), 4)
    seq = Sequence(8, 2, hashes, remote=True)
    m.add(seq)
    # there is nothing to compute until the KV has arrived
    assert m.begin_step() is None
    assert m.take_admitted() == [seq]
    assert m.take_admitted() == []
    assert seq.stage is SequenceStage.TRANSFERRING
    assert (m.pool.used, m.n_active) == (2, 1)
    m.loaded(seq)
    seconds, result = step(m)  # 2 + 0.5 + 8 * 0.01, no prefill
    assert seconds == pytest.approx(2.58)
    assert result.decoded == [seq]
    assert m.prefill_tokens_total == 0
    assert step(m)[1].finished == [seq]
    assert m.pool.hits(hashes) == 2  # the loaded KV is now cached here


def test_a_remote_sequence_is_loaded_ahead_of_a_slot() -> None:
    """One slot. b is loaded first and runs. a has its KV by then, and runs in the step after b's last; c is loaded."""
    m = EngineModel(T, BlockPool(100, 4), slots=1, ahead=1)
    a, b, c = (Sequence(4, 2, remote=True) for _ in range(3))
    for seq in (a, b, c):
        m.add(seq)
    assert m.begin_step() is None
    assert (m.take_admitted(), m.n_waiting, m.n_active) == ([a, b], 1, 2)
    m.loaded(b)
    m.loaded(a)
    # in the order in which they were loaded
    assert step(m)[1].decoded == [b]
    assert (m.awaits_slot(a), m.awaits_slot(b)) == (True, False)
    assert step(m)[1].finished == [b]
    assert step(m)[1].decoded == [a]
    assert (m.take_admitted(), m.n_waiting) == ([c], 0)
    m.remove(a)
    m.loaded(c)
    assert step(m)[1].decoded == [c]


def test_without_ahead_nothing_is_loaded_before_it_has_a_slot() -> None:
    m = EngineModel(T, BlockPool(100, 4), slots=1)
    a, b = (Sequence(4, 2, remote=True) for _ in range(2))
    m.add(a)
    m.add(b)
    assert m.begin_step() is None
    assert (m.take_admitted(), m.n_waiting) == ([a], 1)


def test_a_prompt_that_is_computed_here_is_not_admitted_ahead() -> None:
    m = EngineModel(T, BlockPool(100, 4), slots=1, ahead=3)
    a, b = Sequence(4, 3), Sequence(4, 3)
    m.add(a)
    m.add(b)
    assert step(m)[1].decoded == [a]
    assert step(m)[1].decoded == [a] and m.n_waiting == 1


@pytest.mark.parametrize(("remote_output", "computed"), [(0, 3), (2, 1), (3, 1)])
def test_of_a_resumed_remote_sequence_only_the_kv_that_did_not_come_is_computed(
    remote_output: int, computed: int
) -> None:
    """Of 8 prompt tokens and 3 of output. The last token is always computed: it gives the next one."""
    m = model(size=4)
    seq = Sequence(8, 5, remote=True, remote_output=remote_output)
    seq.generated = 3
    m.add(seq)
    assert m.begin_step() is None
    m.loaded(seq)
    seconds, result = step(m)
    assert seconds == pytest.approx(1.0 + 0.1 * computed)
    assert result.decoded == result.started == [seq]
    assert m.prefill_tokens_total == computed
    assert m.generated(seq) == 4
    assert step(m)[1].finished == [seq]


def test_loaded_during_a_step_joins_the_next_one() -> None:
    m = model()
    a = Sequence(4, 5)
    b = Sequence(4, 5, remote=True)
    m.add(a)
    m.add(b)
    m.begin_step()
    m.take_admitted()
    m.loaded(b)
    assert m.end_step().decoded == [a]
    assert step(m)[1].decoded == [a, b]
    assert (m.generated(a), m.generated(b)) == (2, 1)


def test_preemption_recomputes_and_loses_nothing() -> None:
    # There are 5 blocks of 4 tokens. Each sequence takes one block at once and one more at 1, 5 and 9 generated tokens.
    # At 5 the fifth and a sixth block are needed.
    m = model(blocks=5, size=4)
    a, b = Sequence(4, 12), Sequence(4, 12)
    m.add(a)
    m.add(b)
    for _ in range(4):
        step(m)
    assert m.pool.used == 4
    _, result = step(m)
    assert result.preempted == [b]  # the later one
    assert b.stage is SequenceStage.QUEUED
    assert b.generated == 5
    assert m.preemptions_total == 1
    tokens = {a: 5, b: 5}
    finished = []
    for _ in range(30):
        seconds, result = step(m)
        if seconds is None:
            break
        for seq in result.decoded:
            tokens[seq] += 1
        finished += result.finished
    assert finished == [a, b]
    assert tokens == {a: 12, b: 12}
    assert (m.pool.used, m.kv_tokens, m.n_active, m.n_waiting) == (0, 0, 0, 0)


def test_too_large_for_the_pool_is_refused() -> None:
    m = model(blocks=2, size=4)
    with pytest.raises(BlockError, match="2"):
        m.add(Sequence(8, 2))
    # the last token's own KV is never written
    m.add(Sequence(8, 1))


def test_removed_in_every_stage() -> None:
    m = model(slots=3)
    waiting, chunk, loading, joining, running = (Sequence(4, 9) for _ in range(5))
    loading.remote = joining.remote = True
    m.add(running)
    step(m)
    m.add(joining)
    m.begin_step()
    m.take_admitted()
    m.end_step()
    m.loaded(joining)
    m.add(loading)
    m.begin_step()
    m.take_admitted()
    m.add(waiting)
    for seq in (waiting, loading, joining, running, running):
        m.remove(seq)
        assert seq.stage is SequenceStage.DONE
    assert m.end_step().decoded == []
    m.add(chunk)
    m.begin_step()
    m.remove(chunk)
    assert m.end_step().decoded == []
    assert (m.pool.used, m.kv_tokens, m.n_active, m.n_waiting) == (0, 0, 0, 0)
    assert m.begin_step() is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(8, 40), st.integers(1, 6))
def test_every_sequence_gets_all_its_tokens_whatever_happens(seed: int, blocks: int, slots: int) -> None:
    """Under random arrivals, loads, cancellations and preemptions, counts are exact and everything is given back."""
    rng = random.Random(seed)
    m = model(blocks=blocks, size=4, slots=slots, budget=rng.choice([5, 50]), chunked=rng.random() < 0.5)
    got: dict[Sequence, int] = {}
    loading: list[Sequence] = []
    finished: set[Sequence] = set()
    cancelled: set[Sequence] = set()
    for turn in range(3000):
        if turn < 40 and rng.random() < 0.6:
            prompt = rng.randint(1, 14)
            hashes = block_hashes([rng.randint(0, 1)] * prompt, 4)
            seq = Sequence(prompt, rng.randint(1, 14), hashes, rng.randint(0, 2), remote=rng.random() < 0.4)
            got[seq] = 0
            m.add(seq)
        seconds = m.begin_step()
        loading += [seq for seq in m.take_admitted() if seq.stage is SequenceStage.TRANSFERRING]
        while loading and (seconds is None or rng.random() < 0.5):
            m.loaded(loading.pop(rng.randrange(len(loading))))
            if seconds is None:
                break
        alive = [
            seq
            for seq in got
            if seq not in finished | cancelled and seq.stage is not SequenceStage.TRANSFERRING
        ]
        if alive and rng.random() < 0.05:
            victim = rng.choice(alive)
            m.remove(victim)
            cancelled.add(victim)
        if seconds is None:
            if turn >= 40 and not loading and not m.n_active and not m.n_waiting:
                break
            continue
        result = m.end_step()
        for seq in result.decoded:
            got[seq] += 1
        finished |= set(result.finished)
        assert m.n_active <= slots
        assert m.kv_tokens == sum(seq.prompt_tokens + m.generated(seq) for seq in m.running)
    assert finished | cancelled == set(got)
    assert all(got[seq] == seq.output_tokens for seq in finished - cancelled)
    assert (m.pool.used, m.pool.free, m.kv_tokens) == (0, blocks, 0)


def test_readmitted_in_time_for_its_old_step_grows_once() -> None:
    """A preempted sequence that is admitted again at once is due at the same step as before."""
    m = model(blocks=6, size=4)
    other = m.pool.allocate((), 2)
    assert other is not None
    b, c = Sequence(3, 12, priority=1), Sequence(1, 12)
    m.add(b)
    m.add(c)
    step(m)
    a = Sequence(4, 12)
    m.add(a)
    assert step(m)[1].preempted == [b]  # b took the last block, which a needed
    m.remove(c)
    m.pool.release(other)
    results = [step(m)[1] for _ in range(4)]
    assert not any(result.preempted for result in results)
    assert (m.generated(a), m.generated(b)) == (5, 6)
    assert m.pool.used == 3 + 3
    m.remove(a)
    m.remove(b)
    assert m.pool.used == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 60), st.integers(0, 40), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 6),
    st.integers(25, 60),
)
def test_many_steps_at_once_equal_one_by_one(
    requests: list[tuple[int, int, int, bool]], slots: int, blocks: int
) -> None:
    """Many steps at once give the same times, tokens, blocks and preemptions as single steps, if arrivals come at step
    boundaries.
    """

    def run(most: int) -> list[tuple[object, ...]]:
        m = model(blocks=blocks, size=4, slots=slots)
        todo = sorted(enumerate(requests), key=lambda item: item[1][2])
        names: dict[Sequence, int] = {}
        now_s, log = 0.0, []
        while True:
            while todo and todo[0][1][2] <= m.steps:
                name, (prompt, output, _, remote) = todo.pop(0)
                seq = Sequence(prompt, output, remote=remote)
                names[seq] = name
                m.add(seq)
            plan = m.begin_steps(min(most, todo[0][1][2] - m.steps) if todo else most)
            loading = [seq for seq in m.take_admitted() if seq.stage is SequenceStage.TRANSFERRING]
            for seq in loading:
                m.loaded(seq)
            if plan is None:
                if loading:
                    continue
                if not todo:
                    return log
                name, (prompt, output, _, remote) = todo[0]
                todo[0] = (name, (prompt, output, m.steps, remote))
                continue
            count = 1 if loading else plan.n  # loaded sequences join at the next
            result = m.end_steps(count)
            now_s += count * plan.first_s + plan.growth_s * count * (count - 1) / 2
            for what in (result.started, result.finished, result.preempted):
                if what:
                    log.append((round(now_s, 6), m.steps, [names[s] for s in what], m.kv_tokens, m.pool.used))

    assert run(1) == run(1000)


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_sums_over_steps_are_those_of_its_timing(at_once: int) -> None:
    m = model()
    for _ in range(2):
        m.add(Sequence(prompt_tokens=6, output_tokens=4))
    spent_s = 0.0
    while (steps := m.begin_steps(at_once)) is not None:
        spent_s += sum(steps.first_s + i * steps.growth_s for i in range(steps.n))
        m.end_steps(steps.n)
    totals = m.step_totals
    # one step computes both prompts of 6 tokens and their first tokens; three decode 2 sequences of 7, 8 and 9 tokens
    assert (totals.prefill_steps, totals.prefill_tokens) == (1, 12)
    assert (totals.decode_steps, totals.decode_seqs, totals.decode_kv_tokens) == (3, 6, 2 * (7 + 8 + 9))
    assert totals.busy_s == pytest.approx(spent_s)
    assert totals.busy_s == pytest.approx(1.0 + 12 * 0.1 + 3 * 2.0 + 6 * 0.5 + 48 * 0.01)
