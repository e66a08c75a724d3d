"""Figures of README and docs against the results files that they come from."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import document
from benchmarks.checkout import ROOT

FILE = "experiments/deepflow_heatmap.json"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A checkout with one experiment's results and the document of it."""
    (tmp_path / "benchmarks/results/experiments").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    shutil.copy(document.RESULTS / FILE, tmp_path / "benchmarks/results" / FILE)
    (tmp_path / "README.md").write_text("# Sluice\n")
    (tmp_path / "docs/results.md").write_text(document.document(tmp_path / "benchmarks/results"))
    return tmp_path


def test_every_figure_of_readme_and_docs_is_that_of_its_results_file():
    assert document.problems(ROOT) == []


def test_a_marked_figure_must_be_the_rows(root):
    row = document.section(root / "benchmarks/results", FILE).rows[0]
    assert row.ours is not None and row.paper is not None
    name = f"{FILE} | {row.name}"
    right = f"| cells | {row.ours:.1f} % <!-- ours: {name} --> | > {row.paper:g} % <!-- paper: {name} --> |\n"
    (root / "docs/design.md").write_text(right)
    assert document.problems(root) == []
    (root / "README.md").write_text(f"{row.ours + 1:.1f} <!-- ours: {name} -->")
    [problem] = document.problems(root)
    assert problem.startswith("README.md: ") and f"stands for {row.ours:.6g}" in problem
    (root / "README.md").write_text(
        f"1 <!-- ours: {FILE} | no such row --> 2 <!-- ours: experiments/none.json | x -->"
    )
    assert [" has no figure" in p or "not a results file" in p for p in document.problems(root)] == [
        True,
        True,
    ]
    (root / "README.md").write_text(f"about ten <!-- ours: {name} -->")
    assert "no number before it" in document.problems(root)[0]


def test_a_row_that_the_measures_do_not_give_is_found(root):
    file = root / "benchmarks/results" / FILE
    whole = json.loads(file.read_text())
    whole["rows"][0]["ours"] += 0.5
    file.write_text(json.dumps(whole))
    problems = document.problems(root)
    assert any("from its measures" in p for p in problems) and any("docs/results.md" in p for p in problems)
    whole["rows"][0]["name"] = "another"
    file.write_text(json.dumps(whole))
    assert any("other names" in p for p in document.problems(root))


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [
        ("11.6", 11.6049, True),
        ("11.6", 11.66, False),
        ("16,356", 16_355.7, True),
        ("18.6", -18.61, True),  # "18.6 % shorter"
        ("-18.6", 18.61, False),
        ("\u221218.6", -18.61, True),
        ("7,700", 7_712.0, False),  # to be shown as it is
        ("0", 0.0, True),
    ],
)
def test_a_number_is_compared_as_it_is_shown(text, value, right):
    assert document.shows(text, value) is right
