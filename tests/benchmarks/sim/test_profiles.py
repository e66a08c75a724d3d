"""Profiles: every shipped file loads and says where it comes from; broken ones are refused by file and key."""

from pathlib import Path

import pytest

from benchmarks.sim.profiles import ProfileError, dump, load, names
from policies.engine_model.timing import CPU_SMOLLM2

GOOD = {
    "prefill_base_s": 0.0,
    "prefill_per_token_s": 0.1,
    "decode_base_s": 0.1,
    "decode_per_seq_s": 0.0,
    "decode_per_kv_token_s": 0.0,
    "kv_bytes_per_token": 8,
    "transfer_bandwidth_bytes_per_s": 1.0,
    "transfer_latency_s": 0.0,
}


def test_every_shipped_profile_has_a_source() -> None:
    assert len(names()) >= 6
    for name in names():
        assert len(load(name).source) > 40, name


def test_the_cpu_profile_is_the_live_sim_engines() -> None:
    assert load("cpu_smollm2") == CPU_SMOLLM2


def test_netkv_gives_the_papers_tbt() -> None:
    """Table II, round robin: 12.74, 13.01, 13.13 ms at 100, 200, 250 %, within 0.02 ms."""
    profile = load("netkv_llama3_70b_tp4_h100")
    for others, tbt_ms in [(2.26, 12.74), (4.53, 13.01), (5.66, 13.13)]:
        step_s = profile.decode_base_s + profile.decode_per_seq_s * (others + 1)
        assert step_s * 1e3 == pytest.approx(tbt_ms, abs=0.02)
    assert profile.step_s(10_200, 0, 0) == pytest.approx(0.952, abs=0.001)
    assert profile.step_s(1_024, 0, 0) == pytest.approx(0.255, abs=0.001)


def test_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    dump(path, CPU_SMOLLM2, {"prefill_base_s": "a guess"}, {"residual_ms": 1.5})
    assert load(path) == CPU_SMOLLM2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must be a mapping"),
        ("a: [", "not YAML"),
        ("values: {}", "must say where the values come from"),
        ("source: x\nvalues: {}\nnotes: y", "unknown key 'notes'"),
        ("source: x\nvalues: {decode_base_s: 1}", "values lack"),
        ("source: x\nvalues: {%s}\nassumptions: {speed: guess}", "'speed', which is no value"),
        ("source: x\nvalues: {%s, decode_base_s: fast}", "decode_base_s is 'fast'"),
        ("source: x\nvalues: {%s, decode_base_s: -1}", "decode_base_s is -1"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    kept = [f"{k}: {v}" for k, v in GOOD.items() if f"{k}:" not in text]
    path.write_text(text % ", ".join(kept) if "%s" in text else text)
    with pytest.raises(ProfileError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ProfileError, match="cpu_smollm2"):
        load("gpu_of_my_dreams")
