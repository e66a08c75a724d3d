"""Changes of a workload, worked by hand."""

import math

import pytest

from benchmarks.workloads import transform
from benchmarks.workloads.record import WorkloadError, WorkloadRequest
from benchmarks.workloads.transform import LengthFilter


def at(*times_s: float, prompt: int = 100, output: int = 10) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"r{i}", t, prompt, output) for i, t in enumerate(times_s)]


def times(requests) -> list[float]:
    return [r.at_s for r in requests]


def test_compression_divides_times_and_a_rate_finds_its_factor():
    assert times(transform.compress(at(0, 4, 10), 2.0)) == [0, 2, 5]
    # three requests over 8 s are 0.25 a second between the first and the last
    assert times(transform.at_rate(at(2, 5, 10), 1.0)) == [0.5, 1.25, 2.5]


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_impossible_compressions_are_refused(factor):
    with pytest.raises(WorkloadError, match="give a number above 0"):
        transform.compress(at(0), factor)


@pytest.mark.parametrize("requests", [[], at(1), at(1, 1)])
def test_a_rate_needs_a_span(requests):
    with pytest.raises(WorkloadError, match="at least two requests"):
        transform.at_rate(requests, 1.0)


def test_ticks_are_spread_in_file_order_up_to_the_next_tick():
    original = at(0, 0, 0, 0, 3, 3, 4, 9)
    spread = list(transform.spread_ticks(original, 3.0, seed=5))
    assert [r.request_id for r in spread] == [r.request_id for r in original]
    assert times(spread) == sorted(times(spread))
    limits = [(0, 3)] * 4 + [(3, 4)] * 2 + [(4, 7), (9, 12)]
    assert all(low <= t < high for t, (low, high) in zip(times(spread), limits, strict=True))
    assert len(set(times(spread))) == 8
    assert spread == list(transform.spread_ticks(original, 3.0, seed=5))
    assert spread != list(transform.spread_ticks(original, 3.0, seed=6))


def test_spread_times_are_uniform_over_the_tick():
    offsets = times(transform.spread_ticks(at(*[0.0] * 20_000), 3.0, seed=1))
    # mean 1.5 with a standard error of 3 / sqrt(12 * 20,000)
    assert sum(offsets) / 20_000 == pytest.approx(1.5, abs=5 * 3 / math.sqrt(12 * 20_000))


def test_a_window_counts_from_its_start_and_ends_the_reading():
    def endless():
        yield from at(*range(10))
        pytest.fail("read on behind the window")

    assert times(transform.window(endless(), 2.0, 5.0)) == [0, 1, 2]
    with pytest.raises(WorkloadError, match="0 <= start < end"):
        list(transform.window(at(0), 3.0, 3.0))


def test_length_bounds_hold_both_ends():
    mixed = [WorkloadRequest(str(p), 0, p, o) for p, o in ((10, 5), (20, 5), (30, 5), (20, 50))]
    kept = transform.select(
        mixed, LengthFilter(min_prompt_tokens=20, max_prompt_tokens=30, max_output_tokens=5)
    )
    assert [r.request_id for r in kept] == ["20", "30"]


def test_the_held_out_part_is_the_last_fifth():
    train, held_out = transform.split_by_time(at(*range(10)))
    assert (times(train), times(held_out)) == ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9])
    assert times(transform.rebase(held_out)) == [0, 1]
    with pytest.raises(WorkloadError):
        transform.split_by_time(at(0), 1.0)


def test_overridden_prompts_forget_what_they_shared():
    shared = [WorkloadRequest("r", 0, 1_024, 5, (1, 2), 512, prompt_key="k")]
    [made] = transform.with_prompt_tokens(shared, 64)
    assert (made.prompt_tokens, made.block_hashes, made.prompt_key) == (64, (), "")


def test_a_class_and_its_slos_are_given_to_all():
    made = list(transform.with_class(at(0, 1), "rag", ttft_slo_s=5.0, priority=2))
    assert {(r.request_class, r.ttft_slo_s, r.tpot_slo_s, r.priority) for r in made} == {
        ("rag", 5.0, None, 2)
    }


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (at(1, 0), "not in order"),
        (at(-1), "not in order"),
        (at(math.nan), "not in order"),
        (at(0, output=0), "at least 1"),
        (at(0, prompt=-3), "at least 1"),
        ([WorkloadRequest("r9", 0, 1_000, 5, (1, 2), 512)], r"request r9: 2 blocks"),
    ],
)
def test_what_cannot_be_run_is_refused(requests, message):
    with pytest.raises(WorkloadError, match=message):
        list(transform.checked(requests))


def test_equal_times_are_fine():
    assert times(transform.checked(at(0, 0, 1))) == [0, 0, 1]
