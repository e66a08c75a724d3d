"""`make bench-predictors` without traces says so and succeeds; with a damaged one it names the place."""

import json

import pytest

from benchmarks.live import kept
from benchmarks.predictors import __main__ as bench
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


def test_a_run_goes_on_after_its_finished_traces(tmp_path, monkeypatch, capsys):
    for file in ("mooncake_conversation_trace.jsonl", "azure2023_AzureLLMInferenceTrace_code.csv"):
        (tmp_path / file).write_text(file)
    judged = []

    def judge(name, path, config, args):
        if len(judged) == 1:
            judged.append("interrupted")
            raise KeyboardInterrupt
        judged.append(name)
        (args.out / f"{name}.png").write_bytes(b"")
        return {"file": path.name}

    monkeypatch.setattr(bench, "_judge", judge)
    monkeypatch.setattr(bench.cost, "measure", lambda *anything: {})
    monkeypatch.setattr(bench, "markdown", lambda whole: "")
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    arguments = ["--traces", str(tmp_path), "--out", str(tmp_path / "out")]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert main(arguments) == 0
    assert judged == ["mooncake-conversation", "interrupted", "azure2023-code"]
    whole = json.loads((tmp_path / "out/results.json").read_text())
    assert whole["traces"]["mooncake-conversation"] == {"file": "mooncake_conversation_trace.jsonl"}
    assert whole["command"] == "python -m benchmarks.predictors"
    # the origin names the traces with their contents; with another content nothing would be taken up
    assert [trace.split()[0] for trace in whole["origin"]["traces"]] == [
        "mooncake_conversation_trace.jsonl",
        "azure2023_AzureLLMInferenceTrace_code.csv",
    ]
    digests = whole["origin"]["traces"]
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text("other")
    assert main(arguments) == 0
    assert json.loads((tmp_path / "out/results.json").read_text())["origin"]["traces"][0] != digests[0]


def test_the_cost_workload_repeats():
    assert workload(50, 1) == workload(50, 1) != workload(50, 2)
