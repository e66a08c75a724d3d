"""Reading the Prometheus text format."""

from __future__ import annotations

import math

import pytest

from sluice import InvalidResponseError
from sluice._metrics import parse_metrics

TEXT = r"""
# HELP sluice_requests_total Requests by code and class.
# TYPE sluice_requests_total counter
sluice_requests_total{code="200",class="batch"} 3
sluice_requests_total{code="200",class="standard",} 4.5 1700000000000
sluice_requests_total{code="429",class="batch"} 1
sluice_up 1
sluice_odd{text="a}b\"c\\d\ne, f=\"g\""} 2
sluice_ttft_seconds_bucket{le="+Inf"} +Inf # {trace_id="x"} 0.5
sluice_nan NaN
"""


def test_samples() -> None:
    metrics = parse_metrics(TEXT)
    assert metrics.text == TEXT
    assert len(metrics.samples) == 7
    assert metrics.total("sluice_requests_total") == 8.5
    assert metrics.total("sluice_requests_total", code="200") == 7.5
    assert metrics.total("sluice_requests_total", **{"class": "batch", "code": "429"}) == 1
    assert metrics.total("sluice_up") == 1
    assert metrics.select("sluice_odd")[0].labels == {"text": 'a}b"c\\d\ne, f="g"'}
    assert metrics.total("sluice_ttft_seconds_bucket", le="+Inf") == math.inf
    assert math.isnan(metrics.total("sluice_nan"))


@pytest.mark.parametrize("labels", [{"code": "500"}, {"colour": "red"}])
def test_a_missing_metric_is_not_zero(labels: dict[str, str]) -> None:
    with pytest.raises(KeyError, match="sluice_requests_total"):
        parse_metrics(TEXT).total("sluice_requests_total", **labels)


@pytest.mark.parametrize("line", ["<html>", "name", "name x", 'name{a="b} 1', "1name 2"])
def test_what_is_no_sample_is_named_with_its_line(line: str) -> None:
    with pytest.raises(InvalidResponseError, match="line 2"):
        parse_metrics(f"# comment\n{line}\n")
