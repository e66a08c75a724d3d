"""The rows of the comparison with vllm-router: their names, their loads, and the aims that were set beforehand."""

import pytest

from benchmarks.live.measure import prompts
from benchmarks.peers.rows import (
    CASES,
    CLIENTS,
    FAST_STEP_S,
    HOT_CPU,
    HOT_CPU_TOKEN,
    PROMPTS,
    PYTHON,
    RATE,
    TTFT_P50,
    TTFT_P99,
    WRK,
    Aim,
    Case,
    _cases,
    chosen,
    own_aim,
    ratio_aim,
)
from benchmarks.peers.sides import BARE, LEAN, ROUTER, SLOTS


def test_every_row_has_a_name_of_its_own() -> None:
    assert len(CASES) == len(list(_cases()))
    assert "wrk, c = 8, 16 tokens" in CASES
    assert "wrk, c = 32, 1 token" in CASES
    assert "python, c = 8, 500 tokens, steps of 0.1 ms" in CASES
    assert "wrk, c = 32, 16 tokens, prompts of 5,000 words" in CASES


def test_both_clients_measure_all_numbers_of_clients_and_no_row_has_more_than_a_sim_engine_takes() -> None:
    for client in (WRK, PYTHON):
        plain = [c.clients for c in CASES.values() if c.name == f"{client}, c = {c.clients}, 16 tokens"]
        assert tuple(plain) == CLIENTS
    assert max(case.clients for case in CASES.values()) <= SLOTS


def test_prompts_have_the_words_that_a_row_names() -> None:
    for words in PROMPTS:
        plan = Case(WRK, 8, words=words).plan(quick=False)
        found = prompts(0, 3, plan.prompt_words)
        assert [len(text.split()) for text in found] == [words] * 3
        assert len(set(found)) == 3


def test_the_short_form_has_fewer_and_shorter_rows_of_the_same_kinds() -> None:
    whole, quick = chosen(False, (WRK, PYTHON)), chosen(True, (WRK, PYTHON))
    assert set(quick) < set(whole)
    assert {case.step_s for case in quick} == {case.step_s for case in whole}
    assert {case.tokens for case in quick} == {case.tokens for case in whole}
    assert all(case.plan(quick=True).max_s == 1.0 for case in quick)
    assert {case.client for case in chosen(False, (PYTHON,))} == {PYTHON}
    assert {case.clients for case in chosen(False, (WRK, PYTHON), (8, 512))} == {8, 512}


@pytest.mark.parametrize(
    ("case", "measure", "aim"),
    [
        # issue 16: 1.05 at 8 and 32 clients, 1.5 at 128 and 512, and 1.5 at all of them with answers of one token
        (Case(WRK, 1), RATE, None),
        (Case(WRK, 8), RATE, Aim(least=1.05)),
        (Case(PYTHON, 32), RATE, Aim(least=1.05)),
        (Case(WRK, 128), RATE, Aim(least=1.5)),
        (Case(WRK, 512), RATE, Aim(least=1.5)),
        (Case(WRK, 8, tokens=1), RATE, Aim(least=1.5)),
        (Case(WRK, 32, step_s=FAST_STEP_S), RATE, Aim(least=1.05)),
        (Case(PYTHON, 8, tokens=500), RATE, None),
        (Case(WRK, 32, words=5000), RATE, None),
        # not above its TTFT at any
        (Case(PYTHON, 1), TTFT_P50, Aim(most=1.0)),
        (Case(PYTHON, 8, words=5000), TTFT_P99, Aim(most=1.0)),
        (Case(PYTHON, 8), HOT_CPU, None),
    ],
)
def test_aims_of_ratios_are_against_the_router_on_uvicorn_sources(
    case: Case, measure: str, aim: Aim | None
) -> None:
    assert ratio_aim(case, measure, ROUTER) == aim
    assert ratio_aim(case, measure, LEAN) is None
    assert ratio_aim(case, measure, BARE) is None


def test_aims_of_cpu_time_are_those_of_a_request_at_128_clients_and_of_a_token_of_a_long_answer() -> None:
    aimed = {(c.name, m): own_aim(c, m) for c in CASES.values() for m in (HOT_CPU, HOT_CPU_TOKEN)}
    assert {key: aim for key, aim in aimed.items() if aim} == {
        ("wrk, c = 128, 16 tokens", HOT_CPU): Aim(most=0.2),
        ("python, c = 128, 16 tokens", HOT_CPU): Aim(most=0.2),
        ("python, c = 8, 500 tokens", HOT_CPU_TOKEN): Aim(most=0.02),
        ("python, c = 32, 500 tokens", HOT_CPU_TOKEN): Aim(most=0.02),
        ("python, c = 128, 500 tokens", HOT_CPU_TOKEN): Aim(most=0.02),
        ("python, c = 8, 500 tokens, steps of 0.1 ms", HOT_CPU_TOKEN): Aim(most=0.02),
    }
    assert [Aim(least=1.05).text, Aim(most=0.02).text] == ["at least 1.05", "at most 0.02"]
