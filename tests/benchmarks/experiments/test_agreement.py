"""Live against simulated: quantiles and errors by hand, and the batch that an answer really had."""

import pytest

from benchmarks.experiments.agreement import Stream, Times, compare, decode_load, table, values


def times(*ttft_s: float) -> list[Times]:
    return [Times(t, 0.02, t + 1.0) for t in ttft_s]


def test_errors_of_quantiles_are_simulated_over_live() -> None:
    live, simulated = times(0.1, 0.2, 0.3), [times(0.11, 0.22, 0.33), times(0.11, 0.24, 0.33)]
    by_name = {(line.measure, line.quantile): line for line in compare(live, simulated)}
    p50 = by_name["ttft", 0.5]
    assert p50.live_ms == pytest.approx(200.0)
    assert p50.simulated_ms == pytest.approx(230.0)  # both runs together: (220 + 240) / 2
    assert (p50.low_ms, p50.high_ms) == pytest.approx((220.0, 240.0))
    assert p50.error_percent == pytest.approx(15.0)
    assert by_name["ttft", 0.95].live_ms == pytest.approx(290.0)  # 200 + 0.9 * 100
    assert by_name["tpot", 0.5].error_percent == pytest.approx(0.0)
    assert [line.met("sim") for line in by_name.values() if line.measure == "jct"] == [None, None]


def test_what_is_too_far_off_is_marked_whichever_way() -> None:
    for simulated, met in ((0.116, False), (0.114, True), (0.086, True), (0.084, False)):
        lines = compare(times(0.1), [times(simulated)])
        assert [line.met("vllm") for line in lines if line.measure == "ttft"] == [met, met]
        assert ("above 15 %" in table(lines, "vllm")) is not met


def test_a_request_of_one_token_has_no_tpot() -> None:
    assert values([Times(0.1, None, 0.1), Times(0.1, 0.02, 0.3)], "tpot").tolist() == [0.02]


@pytest.mark.parametrize(("live", "simulated"), [([], [times(1.0)]), (times(1.0), []), (times(1.0), [[]])])
def test_nothing_is_not_compared(live: list[Times], simulated: list[list[Times]]) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(live, simulated)


def test_the_batch_of_an_answer_is_its_mean_over_its_own_decode_phase() -> None:
    # A: 0..10 s, 11 tokens, so a token a second; B joins for its second half with a prompt of 50: 5..15 s.
    a, b = Stream(0.0, 10.0, 100, 11), Stream(5.0, 15.0, 50, 11)
    alone = decode_load([a])
    assert alone == [(1.0, 100 + 1 + 5.0, 1.0)]  # at half time it has 1 + 5 tokens
    of_a, of_b = decode_load([a, b])
    assert of_a == pytest.approx((1.5, 106.0 + 0.5 * (50 + 1 + 2.5), 1.0))
    assert of_b == pytest.approx((1.5, 50 + 6.0 + 0.5 * (100 + 1 + 7.5), 1.0))


def test_answers_without_a_decode_phase_tell_nothing() -> None:
    assert decode_load([Stream(1.0, 1.0, 10, 1)]) == []
    assert decode_load([Stream(1.0, 1.0, 10, 1), Stream(0.0, 2.0, 10, 3)]) == [(1.0, 12.0, 1.0)]
