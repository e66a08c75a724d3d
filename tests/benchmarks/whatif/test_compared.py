"""The sentence of `sluice simulate` on a base of which nothing was measured."""

import json
from pathlib import Path

from benchmarks.whatif.compared import committed


def result(folder: Path, kind: str, simulated_s: float) -> None:
    """Writes a comparison whose TTFT was 100 ms live."""
    case = {
        "policies": ["a", "b"],
        "live": [[0.1, 0.02, 1.0]],
        "simulated": [[[simulated_s, 0.02, 1.0]]],
    }
    file = folder / "experiments" / "validate_live" / f"{kind}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"setup": {"kind": kind}, "cases": [case]}))


def test_the_largest_judged_error_of_each_kind_of_engine_is_named(tmp_path: Path) -> None:
    result(tmp_path, "sim", 0.112)
    result(tmp_path, "vllm", 0.08)
    said = committed(tmp_path)
    assert "on sim engines +12.0 % (a/b: TTFT p50; experiments/validate_live/sim.json)" in said
    assert "on vLLM on CPU -20.0 % (a/b: TTFT p50; experiments/validate_live/vllm.json)" in said


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    assert committed(tmp_path).endswith("no comparison of the simulator is at hand")
