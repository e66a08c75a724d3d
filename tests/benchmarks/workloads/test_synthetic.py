"""Generated workloads: margins, sessions, recurrence, and what a seed fixes."""

from collections import defaultdict
from dataclasses import replace
from itertools import islice, pairwise, takewhile

import numpy as np
import pytest

from benchmarks.workloads import standins
from benchmarks.workloads.arrivals import Diurnal, Poisson
from benchmarks.workloads.lengths import Fixed, Lognormal
from benchmarks.workloads.prefixes import ideal_hit_share
from benchmarks.workloads.record import WorkloadError
from benchmarks.workloads.synthetic import Clients, Corpus, Recurrence, Sessions, Synthetic

PLAIN = Synthetic("plain", Poisson(5.0), Lognormal(600.0, 1.0), Lognormal(200.0, 0.8), block_tokens=64)
MAKERS = [
    standins.heavy_tail,
    standins.heavy_tail_recurring,
    standins.heavy_tail_long_context,
    standins.qwen_a,
    standins.qwen_b,
    standins.chat,
    standins.rag,
]


def take(model: Synthetic, count: int = 4_000, seed: int = 1):
    return list(islice(model.stream(seed), count))


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_fixes_everything_and_time_goes_forward(make):
    made = take(make(), 400)
    assert made == take(make(), 400)
    assert made != take(make(), 400, seed=2)
    at = [r.at_s for r in made]
    assert at == sorted(at) and at[0] >= 0
    assert all(len(r.block_hashes) == r.prompt_tokens // r.block_tokens for r in made)
    assert all(r.output_tokens >= 1 for r in made)
    assert len({r.request_id for r in made}) == 400
    assert all(r.request_id.startswith("synthetic-") for r in made)


def test_another_rate_leaves_the_lengths():
    slow, fast = take(PLAIN, 300), take(replace(PLAIN, arrivals=Poisson(50.0)), 300)
    assert [(r.prompt_tokens, r.output_tokens) for r in slow] == [
        (r.prompt_tokens, r.output_tokens) for r in fast
    ]
    assert slow[-1].at_s == pytest.approx(10 * fast[-1].at_s)


def test_clients_keep_the_margin_and_tell_something():
    made = take(replace(PLAIN, clients=Clients(10, spread=0.1)), 8_000)
    outputs = np.array([r.output_tokens for r in made])
    assert np.median(outputs) == pytest.approx(200, rel=0.05)
    assert np.quantile(outputs, 0.95) == pytest.approx(200 * np.exp(1.645 * 0.8), rel=0.08)
    by_client = defaultdict(list)
    for r in made:
        by_client[r.client].append(np.log(r.output_tokens))
    assert len(by_client) == 10
    within = sum(np.var(v) * len(v) for v in by_client.values()) / len(made)
    assert within < 0.6 * np.var(np.log(outputs))


def test_recurring_prompts_are_equal_and_have_alike_outputs():
    made = take(replace(PLAIN, recurrence=Recurrence(0.5, 20)))
    again = [r for r in made if r.prompt_key]
    assert len(again) / len(made) == pytest.approx(0.5, abs=0.04)
    outputs = np.array([r.output_tokens for r in made])
    assert np.median(outputs) == pytest.approx(200, rel=0.06)
    by_key = defaultdict(list)
    for r in again:
        by_key[r.prompt_key].append(r)
    assert len(by_key) == 20
    assert all(len({(r.prompt_tokens, r.block_hashes) for r in group}) == 1 for group in by_key.values())
    within = np.mean([np.std(np.log([r.output_tokens for r in group])) for group in by_key.values()])
    assert within < 0.4 * np.std(np.log(outputs))


def test_what_is_learnt_of_a_prompt_on_one_seed_holds_on_another():
    model = replace(PLAIN, clients=Clients(10, spread=0.05), recurrence=Recurrence(0.5, 20))
    for group in ("prompt_key", "client"):
        means = []
        for seed in (1, 2):
            by_group = defaultdict(list)
            for r in take(model, 2_000, seed):
                if group == "prompt_key" or not r.prompt_key:
                    by_group[getattr(r, group)].append(np.log(r.output_tokens))
            means.append({name: np.mean(v) for name, v in by_group.items() if name and len(v) > 10})
        both = sorted(set(means[0]) & set(means[1]))
        assert len(both) >= 5
        assert np.corrcoef([means[0][b] for b in both], [means[1][b] for b in both])[0, 1] > 0.9


def test_turns_of_a_session_extend_its_prompt():
    model = replace(PLAIN, sessions=Sessions(0.6, gap_median_s=20.0))
    made = take(model)
    sessions = defaultdict(list)
    for r in made:
        sessions[r.session].append(r)
    later = 0
    for turns in sessions.values():
        for earlier, follow_up in pairwise(turns):
            later += 1
            assert follow_up.prompt_tokens >= earlier.prompt_tokens
            assert follow_up.block_hashes[: len(earlier.block_hashes)] == earlier.block_hashes
    # 60 % are later turns; those whose earlier turn lies before time 0 are not seen as such
    assert 0.5 < later / len(made) < 0.63
    assert len(made) / made[-1].at_s == pytest.approx(5.0, rel=0.12)
    prompts = [r.prompt_tokens for r in made]
    assert np.median(prompts) == pytest.approx(600, rel=0.1)


def test_sessions_are_in_their_steady_state_from_the_start():
    """Without a lead the first seconds would hold session starts only: 40 % of the rate."""
    model = replace(PLAIN, arrivals=Poisson(1.0), sessions=Sessions(0.6, gap_median_s=100.0, gap_sigma=0.5))
    counts = [len(list(takewhile(lambda r: r.at_s < 40.0, model.stream(seed)))) for seed in range(40)]
    # 40 requests expected in 40 s; sessions make the counts a little more spread than Poisson
    assert np.mean(counts) == pytest.approx(40, abs=5 * np.std(counts) / np.sqrt(40))


def test_a_lead_keeps_the_time_of_day():
    day = Diurnal((10.0, 0.1), 500.0)
    made = take(replace(PLAIN, arrivals=day, sessions=Sessions(0.1, gap_median_s=1.0)), 2_000)
    assert sum(r.at_s % 1_000 < 500 for r in made) / len(made) > 0.95


def test_a_corpus_shares_documents_in_the_order_of_their_popularity():
    model = replace(PLAIN, prompt=Fixed(50), corpus=Corpus(20, 2, 128, system_tokens=64))
    made = take(model, 1_000)
    assert len({r.block_hashes[0] for r in made}) == 1  # the system text
    assert ideal_hit_share(made) > 0.5
    assert {r.prompt_tokens for r in made} <= {64 + 128 + 50, 64 + 256 + 50}


@pytest.mark.parametrize(
    ("make", "mean", "median", "hit"),
    [(standins.qwen_a, 2_331, 1_046, 0.579), (standins.qwen_b, 915, 574, 0.542)],
)
def test_stand_ins_have_the_published_margins(make, mean, median, hit):
    made = take(make(), 8_000, seed=3)
    prompts = np.array([r.prompt_tokens for r in made])
    assert prompts.mean() == pytest.approx(mean, rel=0.06)
    assert np.median(prompts) == pytest.approx(median, rel=0.1)  # turns of a session are alike
    assert ideal_hit_share(made) == pytest.approx(hit, abs=0.05)
    assert len(made) / made[-1].at_s == pytest.approx(make().arrivals.rate_per_s, rel=0.06)


def test_the_long_context_has_the_spread_that_table_1_implies():
    made = take(standins.heavy_tail_long_context(recurring=False), 6_000)
    prompts = np.array([r.prompt_tokens for r in made], dtype=float)
    assert prompts.mean() == pytest.approx(42_500, rel=0.03)
    assert prompts.std() == pytest.approx(25_000, rel=0.1)
    longer = list(standins.with_long_context(take(PLAIN, 500), seed=2))
    assert [r.output_tokens for r in longer] == [r.output_tokens for r in take(PLAIN, 500)]
    assert np.mean([r.prompt_tokens for r in longer]) > 30_000


def test_impossible_models_are_refused():
    for change in (
        {"sessions": Sessions(1.0, 10.0)},
        {"recurrence": Recurrence(1.5, 3)},
        {"sessions": Sessions(0.2, 10.0), "recurrence": Recurrence(0.5, 3)},
    ):
        with pytest.raises(WorkloadError):
            replace(PLAIN, **change)
