"""Figures of trials and their comparison, on requests whose times are given by hand."""

import pytest

from benchmarks.live.experiment.client import Sent
from benchmarks.live.experiment.figures import (
    BLOCKS,
    FIGURES,
    Column,
    Trialled,
    compare,
    figures,
    series,
    summary_of,
)
from benchmarks.live.experiment.plan import Trial

LOAD_S = 24.0


def sent(number: int, at_s: float, ttft_s: float = 0.1, tpot_s: float = 0.01, **keys) -> Sent:
    """A request of 11 tokens: its last token comes ten times `tpot_s` after its first."""
    one = Sent(
        number,
        "a",
        "interactive",
        10,
        11,
        at_s,
        0.2,
        None,
        "x",
        at_s,
        at_s + ttft_s,
        at_s + ttft_s + 10 * tpot_s,
    )
    one.status, one.problem = 200, None
    for key, value in keys.items():
        setattr(one, key, value)
    return one


def trialled(requests: list[Sent], engines: int = 3, repeat: int = 0, arm: str = "") -> Trialled:
    """A trial in which `engines` serve, and two more are held."""
    samples = [
        {"at_s": float(t), "engines_active": engines, "engines_held": engines + 2, "trial": 0, "queued": t}
        for t in range(25)
    ]
    return Trialled(Trial(arm, repeat), 0.0, LOAD_S, requests, samples)


def test_the_figures_of_a_trial() -> None:
    requests = [sent(i, float(i)) for i in range(20)]
    # two miss their objective, one of them by failing
    requests[3] = sent(3, 3.0, ttft_s=0.5)
    requests[4] = sent(4, 4.0, problem="status 503", first_s=None, last_s=None)
    found = figures([trialled(requests)])
    assert found["attainment"] == pytest.approx(18 / 20)
    assert found["goodput_per_s"] == pytest.approx(18 / LOAD_S)
    assert found["failed_share"] == pytest.approx(1 / 20)
    assert found["tokens_per_s"] == pytest.approx(19 * 11 / LOAD_S)
    # 18 of 0.1 s and one of 0.5 s
    assert found["ttft_mean_s"] == pytest.approx((18 * 0.1 + 0.5) / 19)
    assert found["ttft_p50_s"] == pytest.approx(0.1)
    assert found["tpot_mean_s"] == pytest.approx(0.01)
    assert found["e2e_p50_s"] == pytest.approx(0.2)
    # three engines serve for 24 s, and five are held
    assert found["serving_hours"] == pytest.approx(3 * 24 / 3600)
    assert found["engine_hours"] == pytest.approx(5 * 24 / 3600)


def test_a_run_of_before_engines_were_counted_has_no_engine_time_and_no_zero() -> None:
    made = trialled([sent(0, 1.0)])
    for sample in made.samples:
        del sample["engines_held"]
    found = figures([made])
    assert found["engine_hours"] is None and found["serving_hours"] == pytest.approx(3 * 24 / 3600)


def test_without_objectives_there_is_no_attainment_and_goodput_counts_answers() -> None:
    found = figures([trialled([sent(i, float(i), ttft_slo_s=None) for i in range(6)])])
    assert found["attainment"] is None
    assert found["goodput_per_s"] == pytest.approx(6 / LOAD_S)


def test_a_trial_without_requests_has_no_times() -> None:
    found = figures([trialled([])])
    assert (found["ttft_p95_s"], found["attainment"], found["failed_share"]) == (None, None, None)
    assert found["goodput_per_s"] == 0.0


def test_repeats_are_compared_in_pairs() -> None:
    # TTFT 0.1, 0.2, 0.3 s against 0.02 s more each: the paired difference has no spread, whatever the repeats have
    base = [trialled([sent(0, 1.0, ttft_s=0.1 * (r + 1))], repeat=r) for r in range(3)]
    more = [trialled([sent(0, 1.0, ttft_s=0.1 * (r + 1) + 0.02)], repeat=r) for r in (2, 0, 1)]
    [line] = [
        line for line in compare([Column("a", base), Column("b", more)]) if line.figure.name == "ttft_mean_s"
    ]
    assert line.values == pytest.approx((200.0, 220.0))
    difference = line.differences[1]
    assert difference is not None and difference.basis == "repeats"
    assert difference.difference == pytest.approx(20.0)
    assert difference.interval == pytest.approx((20.0, 20.0))


def test_single_trials_are_compared_by_time_blocks() -> None:
    # 48 requests, four in each of the 12 blocks; the second trial's TTFT is 50 ms longer in every one
    base = trialled([sent(i, i * LOAD_S / 48, ttft_s=0.1 + 0.001 * (i % 4)) for i in range(48)])
    slow = trialled([sent(i, i * LOAD_S / 48, ttft_s=0.15 + 0.001 * (i % 4)) for i in range(48)], engines=4)
    lines = {line.figure.name: line for line in compare([Column("a", [base]), Column("b", [slow])])}
    for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p95_s"):
        found = lines[name].differences[1]
        assert found is not None and found.basis == "time blocks" and found.interval is not None
        assert found.difference == pytest.approx(50.0)
        assert found.interval == pytest.approx((50.0, 50.0), abs=3.1)
    assert lines["attainment"].values == pytest.approx((100.0, 100.0))
    hours = lines["engine_hours"].differences[1]
    assert hours is not None and hours.difference == pytest.approx(24 / 3600)
    assert hours.interval == pytest.approx((24 / 3600, 24 / 3600))


def test_equal_trials_differ_by_nothing_and_noise_is_no_difference() -> None:
    base = trialled([sent(i, i / 2, ttft_s=0.1 + 0.05 * (i % 7)) for i in range(48)])
    shuffled = trialled([sent(i, i / 2, ttft_s=0.1 + 0.05 * ((i * 3 + 1) % 7)) for i in range(48)])
    lines = {line.figure.name: line for line in compare([Column("a", [base]), Column("b", [base])])}
    same = lines["ttft_mean_s"].differences[1]
    assert same is not None and same.difference == 0.0 and same.interval == (0.0, 0.0)
    other = {line.figure.name: line for line in compare([Column("a", [base]), Column("b", [shuffled])])}
    noise = other["ttft_mean_s"].differences[1]
    assert noise is not None and noise.interval is not None
    assert noise.interval[0] < 0 < noise.interval[1]


def test_three_columns_are_all_compared_with_the_first() -> None:
    columns = [
        Column(name, [trialled([sent(0, 1.0, ttft_s=t)])]) for name, t in (("a", 0.1), ("b", 0.2), ("c", 0.4))
    ]
    line = next(line for line in compare(columns) if line.figure.name == "ttft_mean_s")
    assert [None if d is None else round(d.difference) for d in line.differences] == [None, 100, 300]
    # one block of twelve has a request: most resamples have none, so that nothing is said of an interval
    told = line.as_json()
    assert (told["difference"], len(told["differences"])) == (pytest.approx(100.0), 3)


def test_series_are_by_second_and_by_class() -> None:
    requests = [
        sent(0, 0.5),
        sent(1, 2.0, ttft_s=0.4),
        sent(2, 3.0, problem="cut", first_s=None, last_s=None),
    ]
    found = series(trialled(requests))
    assert found["t"][:4] == [0.0, 1.0, 2.0, 3.0]
    # the first ended at 0.7 s, the second at 2.5 s, and the third never: it counts when it was sent
    assert found["requests_per_s"][:5] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert found["errors_per_s"][3] == 1.0
    assert found["tokens_per_s"][1] == 11.0
    assert found["ttft_p50_s/interactive"][1] == pytest.approx(0.1)
    assert found["attainment/interactive"][3] == pytest.approx(1 / 3)
    assert found["queued"][2] == 2
    assert {len(values) for values in found.values()} == {25}


def test_a_summary_says_why_requests_failed() -> None:
    requests = [sent(i, 1.0, problem="status 429: full") for i in range(3)] + [sent(3, 1.0, sent_s=1.25)]
    found = summary_of([trialled(requests)])
    assert (found["requests"], found["failed"], found["problems"]) == (4, 3, {"status 429: full": 3})
    assert found["client_late_p95_s"] > 0.1


def test_names_of_figures_are_distinct() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    assert BLOCKS > 1
