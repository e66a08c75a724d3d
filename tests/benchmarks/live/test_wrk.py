"""The wrk client: its summary line, and one real run where wrk is installed."""

import pytest

from benchmarks.live import measure, targets, wrk
from benchmarks.live.servers import running

OUTPUT = """Running 1s test @ http://127.0.0.1:1/v1/chat/completions
  1 threads and 8 connections

WRK {"requests": 400, "duration_us": 2000000, "bytes": 1000, "p50_us": 1500.0, "p95_us": 2500.0, "p99_us": 9000.0, \
"connect": 0, "read": 2, "write": 0, "status": 3, "timeout": 0}
"""


def test_summary() -> None:
    result = wrk.parse(OUTPUT, cpu_s=0.5)
    assert (result.requests, result.served, result.wall_s, result.cpu_s) == (400, 397, 2.0, 0.5)
    assert (result.p50_s, result.p95_s, result.p99_s) == (0.0015, 0.0025, 0.009)
    assert result.failures == {"read": 2, "status": 3}


def test_no_summary_is_an_error() -> None:
    with pytest.raises(wrk.WrkError, match="no summary"):
        wrk.parse("unable to connect\n", 0.0)


def test_it_may_be_missing() -> None:
    assert wrk.find("no-such-wrk-here") is None


@pytest.mark.live
@pytest.mark.skipif(wrk.find(None) is None, reason="wrk is not installed (Debian: apt install wrk)")
def test_a_real_run() -> None:
    executable = wrk.find(None)
    assert executable is not None
    plan = measure.Plan(concurrency=8, requests=8, tokens=4, max_s=1.0)
    with running(targets.bare(), lambda _text: None) as server:
        case = measure.with_wrk(server, "bare", plan, 0, executable)
    assert case.requests > 0
    assert not case.failures
    assert case.client_cpu_ms_per_request > 0
