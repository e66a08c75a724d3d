"""`sluice train` and `python -m predictors.fit` end to end on a small trace."""

import argparse
import json
import subprocess
import sys

import pytest

from predictors.cli import command, main, parse_windows, register
from predictors.protocol import WindowRange
from predictors.store import load, read_pointer

from .conftest import two_kinds


@pytest.fixture
def trace(tmp_path):
    rows = [
        {
            "timestamp": o.arrival.arrival_s * 1e3,
            "input_length": o.arrival.prompt_tokens,
            "output_length": o.output_tokens,
            "hash_ids": [0, 1 if o.arrival.template_key == "short" else 2, i][
                : -(-o.arrival.prompt_tokens // 512)
            ],
        }
        for i, o in enumerate(two_kinds(800, seed=2))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return path


def test_a_trace_becomes_a_model_and_a_report(trace, tmp_path, capsys):
    arguments = [
        "--source",
        str(trace),
        "--models",
        str(tmp_path / "models"),
        "--report",
        str(tmp_path / "report"),
        "--windows",
        "1:48",
        "--threads",
        "1",
        "--promote",
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "| lightgbm |" in said
    assert "the features carry signal" in said
    version = read_pointer(tmp_path / "models").current
    _, metadata = load(tmp_path / "models" / f"{version}.sluicemodel")
    assert metadata.windows == (1, 48)
    assert metadata.source == "trace.jsonl"
    assert metadata.metrics["lightgbm"]["brier"] < metadata.metrics["survival"]["brier"]
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert set(report["lightgbm"]["by_window"]) == {"1", "8", "24", "48"}
    assert (tmp_path / "report" / "report.png").stat().st_size > 1_000
    assert str(tmp_path) not in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("source", "windows", "message"),
    [
        ("none.jsonl", "1:96", "no such trace file"),
        ("t.jsonl", "1-96", "--windows"),
        ("t.jsonl", "9:3", "1 <= low"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path, capsys, source, windows, message):
    arguments = ["--source", str(tmp_path / source), "--models", str(tmp_path), "--windows", windows]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_it_registers_as_a_subcommand():
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    args = parser.parse_args(["train", "--source", "x", "--models", "y"])
    assert args.run == command.run
    assert args.windows == "1:96"
    assert parse_windows("2:24") == WindowRange(2, 24)


def test_the_decision_path_imports_nothing_heavy():
    """A router that predicts by survival imports no lightgbm, scikit-learn, matplotlib; nor Ray, torch,
    asyncio.
    """
    program = (
        "import sys; import predictors.book, predictors.memorise, predictors.oracle, predictors.live, predictors.cli\n"
        "print([m for m in ('lightgbm', 'sklearn', 'matplotlib', 'ray', 'torch', 'vllm', 'asyncio', 'pandas') "
        "if m in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
