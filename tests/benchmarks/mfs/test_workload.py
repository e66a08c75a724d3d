"""The requests of a run: the same for each policy, as many of each class in each run, at the rate that is asked for."""

from itertools import pairwise

import pytest

from benchmarks.mfs.__main__ import FIRST_LONE, LONE, lone_prompt
from benchmarks.mfs.workload import BLOCK_TOKENS, KINDS, Kind, Workload, arrivals, rate


def test_a_seed_gives_the_same_requests_at_every_rate_only_closer_together() -> None:
    slow, fast = (arrivals(Workload(), per_s, 2, seed=3) for per_s in (1.0, 2.0))
    assert [(a.kind, a.prompt, a.decode) for a in slow] == [(a.kind, a.prompt, a.decode) for a in fast]
    assert [a.at_s for a in slow] == pytest.approx([2 * a.at_s for a in fast])
    assert slow != arrivals(Workload(), 1.0, 2, seed=4)


@pytest.mark.parametrize("seed", range(4))
def test_each_run_has_the_same_mix_and_meets_the_rate(seed: int) -> None:
    workload = Workload(requests=2_000)
    made = arrivals(workload, 10.0, 2, seed)
    # 77 % of 2,000
    assert sum(a.kind == "tight" for a in made) == 1_540
    # 2,000 exponential gaps of mean 0.1 s: 200 s, with a standard deviation of 4.5 s
    assert made[-1].at_s == pytest.approx(200.0, abs=20.0)
    assert {a.decode for a in made} == {0, 1}
    assert all(b.at_s > a.at_s for a, b in pairwise(made))


def test_the_rate_fills_the_share_of_the_link_that_is_asked_for() -> None:
    workload = Workload(tight_share=0.5)
    # 2,000 bytes a request on average; 80 % of 50 kB/s are 40 kB/s
    assert rate(workload, 0.8, 50e3, {"tight": 1e3, "loose": 3e3}) == pytest.approx(20.0)


def test_prompts_differ_from_the_first_token_on_and_are_the_same_each_time() -> None:
    workload = Workload()
    prompts = [workload.prompt(kind, number) for kind in KINDS for number in range(12)]
    assert {len(prompt) for prompt in prompts} == {257, 1_985}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 24
    assert prompts[3] == workload.prompt("tight", 3)


def test_fresh_prompts_never_come_twice() -> None:
    workload = Workload(fresh=True)
    made = [*arrivals(workload, 1.0, 2, 1, first_fresh=8), *arrivals(workload, 1.0, 2, 2, first_fresh=248)]
    assert sorted(a.prompt for a in made) == list(range(8, 488))
    # everything else is as without
    pool = arrivals(Workload(), 1.0, 2, 1)
    assert [(a.at_s, a.kind, a.decode) for a in made[:240]] == [(a.at_s, a.kind, a.decode) for a in pool]


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_cached_prompt_one_token_is_computed(kind: Kind) -> None:
    """vLLM reuses whole blocks, and never the last token."""
    workload = Workload()
    reused = (workload.tokens(kind) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert workload.tokens(kind) - reused == 1
    # 7/8 of 257 and of 1,985 are 224.9 and 1,736.9; blocks of 32 make 224 and 1,728
    assert workload.prefix_tokens(kind) == {"tight": 224, "loose": 1_728}[kind]


def test_cold_requests_are_spread_over_the_other_prefill_engines_and_nothing_else_changes() -> None:
    plain = arrivals(Workload(requests=1_000), 1.0, 1, 1)
    assert {a.prefill for a in plain} == {0}
    made = arrivals(Workload(requests=1_000, cold_share=0.5), 1.0, 1, 1, others=3)
    counts = [sum(a.prefill == n for a in made) for n in range(4)]
    # half of 1,000, with a standard deviation of 16, and a third of the others each
    assert 420 < counts[0] < 580
    assert all(120 < count < 220 for count in counts[1:])
    assert [a.kind for a in made] == [a.kind for a in plain]


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        arrivals(Workload(), 0.0, 2, 1)


def test_a_request_that_is_sent_alone_has_a_prompt_that_is_cached_or_one_that_is_filled_before() -> None:
    workload = Workload(tight_prompts=8, loose_prompts=4)
    assert [lone_prompt(workload, "tight", n) for n in range(LONE)] == list(range(8))
    assert [lone_prompt(workload, "loose", n) for n in range(LONE)] == [0, 1, 2, 3, 0, 1, 2, 3]
    fresh = [lone_prompt(Workload(fresh=True), "loose", n) for n in range(LONE)]
    assert fresh == list(range(FIRST_LONE, FIRST_LONE + LONE))
