"""The live overload benchmark: its load, its figures and its aims, on answers made by hand."""

import json
from typing import Any

import pytest

from benchmarks.live.openloop import Answer, Planned
from benchmarks.overload.__main__ import CAPACITY_PER_S, Sent, figures, requests, rows


def sent(at_s: float, name: str = "interactive", tokens: int = 10) -> Sent:
    return Sent(Planned(at_s, b""), name, tokens)


def answered(at_s: float, ttft_s: float) -> Answer:
    return Answer(
        at_s,
        sent_s=at_s,
        first_s=at_s + ttft_s,
        last_s=at_s + ttft_s + 1,
        ended_s=at_s + ttft_s + 1,
        problem=None,
    )


def refused(at_s: float, after_s: float) -> Answer:
    problem = 'status 429: {"error":{"message":"..","code":"ttft_objective"}}'
    return Answer(at_s, sent_s=at_s, ended_s=at_s + after_s, problem=problem)


def test_the_load_has_its_rate_and_its_classes() -> None:
    made = requests(2.0, 300.0, 1)
    assert len(made) == pytest.approx(2.0 * CAPACITY_PER_S * 300.0, rel=0.05)
    shares = [sum(one.request_class == name for one in made) / len(made) for name in ("interactive", "batch")]
    assert shares == pytest.approx([0.5, 0.1], abs=0.02)
    first = made[0]
    body = json.loads(first.planned.body)
    assert (body["max_tokens"], body["priority"]) == (first.output_tokens, first.request_class)
    assert sum(one.output_tokens for one in made) / len(made) == pytest.approx(60.0, rel=0.05)


def test_only_the_second_third_counts_and_only_what_was_in_time() -> None:
    # of 9 s: 3 to 6 s. In time, too late, of a class with more time, refused; and two outside
    plan = [sent(1.0), sent(3.0), sent(4.0), sent(5.0, "batch", 40), sent(5.5), sent(6.0)]
    answers = [answered(1.0, 0.1), answered(3.0, 1.5), answered(4.0, 2.5), answered(5.0, 20.0)]
    answers += [refused(5.5, 0.004), answered(6.0, 0.1)]
    found = figures(plan, answers, 9.0)
    assert found["requests"] == 4 and found["offered_tokens_per_s"] == 70 / 3.0
    assert found["goodput_tokens_per_s"] == 50 / 3.0 and found["goodput_per_s"] == 2 / 3.0
    assert found["problems"] == {"status 429 ttft_objective": 1}
    assert found["refusal_p50_s"] == pytest.approx(0.004)
    assert found["ttft_p99_s/interactive"] == pytest.approx(2.49) and found["ttft_p99_s/standard"] is None


def run(policy: str, load: float, goodput: float, **more: Any) -> dict[str, Any]:
    found = {"ttft_p99_s/interactive": 1.9, "ttft_p99_s/standard": None, "refusal_p50_s": 0.01}
    return {
        "policy": policy,
        "load": load,
        "goodput_tokens_per_s": goodput,
        "offered_tokens_per_s": 500.0,
    } | found | more  # fmt: skip


def test_the_aims_are_of_the_peak_or_of_what_was_offered() -> None:
    runs = [run("by_wait", 1.25, 480.0), run("by_wait", 5.0, 440.0, offered_tokens_per_s=2500.0)]
    runs += [run("open", 1.25, 250.0), run("open", 5.0, 0.0)]
    runs[1] |= {"ttft_p99_s/interactive": 2.1, "refusal_p50_s": 0.06}
    met = {row["name"]: row["met"] for row in rows(runs)}
    assert met == {
        "load 1.25: goodput of by_wait, share of its peak": True,
        "load 1.25: goodput of open, share of by_wait's": False,  # 0.52
        "load 1.25: p99 TTFT, interactive, s": True,
        "load 1.25: half of the refusals, s": True,
        "load 5: goodput of by_wait, share of its peak": False,  # 440 of 480
        "load 5: p99 TTFT, interactive, s": False,
        "load 5: half of the refusals, s": False,
    }
