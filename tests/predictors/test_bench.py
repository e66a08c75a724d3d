"""`make bench-predictors` without traces says so and succeeds; with a damaged one it names the place."""

from benchmarks.predictors.__main__ import main
from benchmarks.predictors.cost import workload


def test_no_traces_is_a_clear_skip(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    assert main(["--out", str(tmp_path / "out")]) == 0
    assert "skipped: give --traces" in capsys.readouterr().out
    assert main(["--traces", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "skipped: none of" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_damaged_trace_is_named(tmp_path, capsys):
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text("{")
    assert main(["--traces", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "mooncake_conversation_trace.jsonl:1" in capsys.readouterr().err


def test_the_cost_workload_repeats():
    assert workload(50, 1) == workload(50, 1) != workload(50, 2)
