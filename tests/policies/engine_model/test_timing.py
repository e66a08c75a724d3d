"""Tests of the timing formula against results by hand, and of the impossible profiles that are refused."""

import dataclasses
import math

import pytest

from policies.engine_model.timing import PROFILES, TICK_1MS, TimingProfile

P = TimingProfile(
    source="test",
    prefill_base_s=0.010,
    prefill_per_token_s=0.0001,
    decode_base_s=0.020,
    decode_per_seq_s=0.001,
    decode_per_kv_token_s=0.000001,
    kv_bytes_per_token=1000,
    transfer_bandwidth_bytes_per_s=1e6,
    transfer_latency_s=0.002,
)


@pytest.mark.parametrize(
    ("prefill_tokens", "seqs", "kv_tokens", "seconds"),
    [
        (0, 0, 0, 0.0),
        (100, 0, 0, 0.020),  # 0.010 + 100 * 0.0001
        (0, 4, 2000, 0.026),  # 0.020 + 4 * 0.001 + 2000 * 1e-6
        (100, 4, 2000, 0.046),  # both
    ],
)
def test_step(prefill_tokens: int, seqs: int, kv_tokens: int, seconds: float) -> None:
    assert P.step_s(prefill_tokens, seqs, kv_tokens) == pytest.approx(seconds)


def test_transfer() -> None:
    assert P.kv_bytes(500) == 500_000
    assert P.transfer_s(500_000) == pytest.approx(0.502)  # 0.002 + 500 kB at 1 MB/s
    assert P.transfer_s(0) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill_base_s", -1.0),
        ("decode_per_seq_s", math.nan),
        ("transfer_latency_s", math.inf),
        ("transfer_bandwidth_bytes_per_s", 0.0),
        ("decode_base_s", 0.0),
        ("prefill_base_s", 0.0),
    ],
)
def test_impossible_profiles(field: str, value: float) -> None:
    # this profile's per-token terms are 0, so with a base of 0 a step would take no time
    base = TICK_1MS
    with pytest.raises(ValueError, match="TimingProfile"):
        dataclasses.replace(base, **{field: value})  # type: ignore[arg-type]


def test_profiles_name_their_source() -> None:
    assert all(profile.source for profile in PROFILES.values())
