"""Durations as OpenAI writes them, headers and errors of limits, and labels of metrics."""

import pytest

from app.ingress.tenants.answers import duration, headers_of, limited
from app.ingress.tenants.labels import TenantLabels
from app.ingress.tenants.ledger import Meter, Meters, Refusal


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (59.2, "1m0s"), (60.0, "1m0s"), (360.0, "6m0s"),
        (3723.0, "1h2m3s"), (7200.0, "2h0m0s"),
    ],
)  # fmt: skip
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_only_limits_that_there_are_have_headers() -> None:
    assert headers_of(Meters(None, None)) == []
    assert headers_of(Meters(None, Meter(100, 40, 36.0))) == [
        (b"x-ratelimit-limit-tokens", b"100"),
        (b"x-ratelimit-remaining-tokens", b"40"),
        (b"x-ratelimit-reset-tokens", b"36s"),
    ]


def test_a_limit_names_itself_its_use_and_the_time() -> None:
    error = limited(Refusal("tokens", 100, 60, 50, 6.2), Meters(None, Meter(100, 40, 36.0)))
    assert "Limit 100, Used 60, Requested 50" in error.message
    assert "try again in 7s" in error.message
    assert (b"retry-after", b"7") in error.headers()
    assert (b"x-ratelimit-remaining-tokens", b"40") in error.headers()
    assert b'"type":"tokens"' in error.body()


def test_labels_are_those_of_the_first_tenants_and_stay() -> None:
    labels = TenantLabels(2)
    labels.learn(["a", "b", "c"])
    assert [labels.of(name) for name in ("a", "b", "c", "admin")] == ["a", "b", "other", "admin"]
    # `a` is gone from the file; its series is still there, so nobody takes its place
    labels.learn(["b", "c", "d"])
    assert [labels.of(name) for name in ("a", "b", "c", "d")] == ["a", "b", "other", "other"]
    assert TenantLabels(0).of("a") == "other"
