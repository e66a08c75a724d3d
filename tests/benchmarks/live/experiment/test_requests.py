"""The requests of a load: reproducible, at the rate that was asked for, with exact lengths and shared beginnings."""

import json

import pytest

from benchmarks.live.experiment.plan import Load, PlanError
from benchmarks.live.experiment.requests import FIRST_TOKEN, LAST_TOKEN, body_of, planned, tokens_of


def made(**keys) -> Load:
    phases = [{"name": "a", "for_s": 50, "rate_per_s": 20}, {"name": "b", "for_s": 10, "rate_per_s": 0}]
    return Load.model_validate({"phases": phases, **keys})


def test_equal_seeds_give_equal_requests_and_repeats_differ() -> None:
    assert planned(made(seed=4)) == planned(made(seed=4))
    assert planned(made(seed=4), 1) == planned(made(seed=5), 0)
    assert planned(made(seed=4)) != planned(made(seed=5))


def test_even_arrivals_are_even_and_a_phase_without_rate_is_silent() -> None:
    found = planned(made(cv=0))
    # 50 s at 20 a second
    assert [one.at_s for one in found] == [i / 20 for i in range(1000)]
    assert {one.phase for one in found} == {"a"}


def test_poisson_arrivals_have_their_rate() -> None:
    # 1,000 are expected, with a deviation of about 32
    assert 870 < len(planned(made())) < 1130


def test_classes_come_by_their_shares_with_their_lengths() -> None:
    classes = {
        "interactive": {
            "share": 3,
            "prompt_tokens": {"mean": 100, "cv": 0.5, "cap": 200},
            "output_tokens": 7,
        },
        "batch": {"share": 1, "prompt_tokens": 50, "tpot_slo_ms": 20},
    }
    found = planned(made(classes=classes, cv=0))
    interactive = [one for one in found if one.request_class == "interactive"]
    assert 690 < len(interactive) < 810
    assert {one.output_tokens for one in interactive} == {7}
    assert max(one.prompt_tokens for one in interactive) <= 200
    assert 85 < sum(one.prompt_tokens for one in interactive) / len(interactive) < 110
    batch = [one for one in found if one.request_class == "batch"]
    assert {(one.prompt_tokens, one.tpot_slo_s) for one in batch} == {(50, 0.02)}


def test_prompts_have_their_length_and_share_what_they_are_to_share() -> None:
    classes = {"standard": {"prompt_tokens": 100, "shared_tokens": 60, "prefixes": 3}}
    found = planned(made(classes=classes, cv=0))[:60]
    prompts = [tokens_of(one, 1, n) for n, one in enumerate(found)]
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:60]) for prompt in prompts}) == 3
    assert len({tuple(prompt[60:]) for prompt in prompts}) == 60
    assert all(FIRST_TOKEN <= token < LAST_TOKEN for prompt in prompts for token in prompt)


def test_the_body_asks_for_exactly_what_is_planned() -> None:
    classes = {"batch": {"prompt_tokens": 5, "output_tokens": 9, "ttft_slo_ms": 250}}
    body = json.loads(body_of(planned(made(classes=classes))[0], "m", 1, 0))
    assert (len(body["prompt"]), body["max_tokens"], body["priority"], body["slo"]) == (
        5,
        9,
        "batch",
        {"ttft_ms": 250},
    )
    assert body["ignore_eos"] and body["stream"]


def test_a_trace_brings_times_lengths_and_shared_blocks() -> None:
    trace = {
        "name": "mooncake-conversation-excerpt",
        "for_s": 20,
        "rate_per_s": 10,
        "max_prompt_tokens": 4000,
    }
    load = Load.model_validate({"trace": trace, "classes": {"interactive": {"ttft_slo_ms": 100}}})
    found = planned(load)
    assert 100 < len(found) < 300
    assert all(one.at_s < 20 and one.prompt_tokens <= 4000 and one.ttft_slo_s == 0.1 for one in found)
    with_block = [one for one in found if len(one.blocks) >= 1]
    first = [tokens_of(one, 1, n)[:512] for n, one in enumerate(with_block)]
    by_block = {one.blocks[0]: tokens for one, tokens in zip(with_block, first, strict=True)}
    assert all(by_block[one.blocks[0]] == tokens for one, tokens in zip(with_block, first, strict=True))
    assert len(by_block) < len(with_block)


@pytest.mark.parametrize(
    ("trace", "problem"),
    [
        ({"name": "no-such", "for_s": 5, "rate_per_s": 1}, "no workload is called"),
        ({"file": "/no/such.jsonl", "for_s": 5, "rate_per_s": 1}, "no such trace file"),
    ],
)
def test_a_trace_that_is_not_there_is_refused(trace, problem) -> None:
    with pytest.raises(PlanError, match=problem):
        planned(Load.model_validate({"trace": trace}))
