"""Percentiles and summaries, by hand."""

import pytest

from benchmarks.live.stats import differences, line_through, per, percentile, summarise


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([5.0], 0.95, 5.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),
        # place 0.95 * 4 = 3.8: 4 + 0.8 * (5 - 4)
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.95, 4.8),
        ([1.0, 9.0], 0.0, 1.0),
        ([1.0, 9.0], 1.0, 9.0),
    ],
)
def test_percentile(values: list[float], q: float, expected: float) -> None:
    assert percentile(values, q) == pytest.approx(expected)


def test_percentile_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        percentile([1.0], 50)


def test_summary_scales() -> None:
    # 1, 2, 3, 10 ms: mean 4, p50 2.5, p95 at place 2.85: 3 + 0.85 * 7 = 8.95, p99 at 2.97: 3 + 0.97 * 7 = 9.79
    summary = summarise([0.001, 0.002, 0.003, 0.010], 1e3)
    assert summary is not None
    assert (summary.n, summary.worst) == (4, 10.0)
    found = [summary.mean, summary.p50, summary.p95, summary.p99]
    assert found == pytest.approx([4.0, 2.5, 8.95, 9.79])
    assert summarise([]) is None


def test_differences_and_shares() -> None:
    spent = differences({"a": 3.0, "new": 1.0}, {"a": 1.0, "gone": 5.0})
    assert spent == {"a": 2.0, "new": 1.0}
    assert per(spent, 4, 1e3) == {"a": 500.0, "new": 250.0}
    with pytest.raises(ValueError, match="nothing was served"):
        per(spent, 0)


def test_a_line_has_the_interval_of_student() -> None:
    """Values 0, 2, 1 at 0, 1, 2: slope 0.5; residuals -0.5, 1, -0.5, so the deviation is sqrt(1.5 / 1), its error
    sqrt(1.5 / 2), and one degree of freedom has 12.706.
    """
    found = line_through([(0.0, 0.0), (1.0, 2.0), (2.0, 1.0)])
    assert found is not None
    assert (found.slope, found.at_zero) == (pytest.approx(0.5), pytest.approx(0.5))
    assert found.half_width == pytest.approx(12.7062 * 0.75**0.5, rel=1e-4)
    assert line_through([(0.0, 0.0), (1.0, 2.0)]) is None
