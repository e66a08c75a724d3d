"""Figures of the documents against the results files that they come from, and where these come from."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import check as check_module
from benchmarks import figures, provenance, runner
from benchmarks.check import check
from benchmarks.checkout import ROOT, Origin
from benchmarks.document import RESULTS, document, section
from benchmarks.experiments import registry
from benchmarks.predictors.page import markdown

FILE = "experiments/deepflow_heatmap.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with one experiment's results and the document of it."""
    (tmp_path / "benchmarks/results/experiments").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    shutil.copy(RESULTS / FILE, tmp_path / "benchmarks/results" / FILE)
    (tmp_path / "README.md").write_text("# Sluice\n")
    redocument(tmp_path)
    return tmp_path


def redocument(root: Path) -> None:
    (root / "docs/results.md").write_text(document(root / "benchmarks/results"))


def change(root: Path, how: Callable[[dict[str, object]], None]) -> None:
    """Changes the results file, and makes the document of it again."""
    file = root / "benchmarks/results" / FILE
    whole = json.loads(file.read_text())
    how(whole)
    file.write_text(json.dumps(whole))
    redocument(root)


def test_a_marked_figure_must_be_the_rows(root: Path) -> None:
    row = section(root / "benchmarks/results", FILE).rows[0]
    assert row.ours is not None and row.paper is not None
    name = f"{FILE} | {row.name}"
    right = f"| cells | {row.ours:.1f} % <!-- ours: {name} --> | > {row.paper:g} % <!-- paper: {name} --> |\n"
    (root / "docs/design.md").write_text(right)
    assert (check(root).problems, check(root).cited) == ([], 2)
    (root / "README.md").write_text(f"{row.ours + 1:.1f} <!-- ours: {name} -->")
    [problem] = check(root).problems
    assert problem.startswith("README.md:1: ") and f"stands for {row.ours:.6g}" in problem
    (root / "README.md").write_text(
        f"1 <!-- ours: {FILE} | no such row --> 2 <!-- ours: experiments/none.json | x -->"
    )
    assert [" has no figure" in p or "not a results file" in p for p in check(root).problems] == [True, True]
    (root / "README.md").write_text(f"about ten <!-- ours: {name} -->")
    assert "no number before it" in check(root).problems[0]


def test_a_row_that_the_measures_do_not_give_is_found(root: Path) -> None:
    file = root / "benchmarks/results" / FILE
    whole = json.loads(file.read_text())
    whole["rows"][0]["ours"] += 0.5
    file.write_text(json.dumps(whole))
    problems = check(root).problems
    assert any("from its measures" in p for p in problems) and any("docs/results.md" in p for p in problems)
    whole["rows"][0]["name"] = "another"
    file.write_text(json.dumps(whole))
    assert any("other names" in p for p in check(root).problems)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("A token took 12 ms.", ["12 ms"]),
        ("It is 2.4x as fast, 8 % less and 1,064 in all.", ["2.4x", "8 %", "1,064"]),
        ("18 of 20 aims met", ["18 of 20"]),
        ("some 1.5 to 2.3 ms", ["2.3 ms"]),
        ("| -18.0 +- 2.0 % |", ["2.0 %"]),
        # code, links, versions, counts and sections are no figures
        ("`30 s`, [30 s](a#30 s) Python 3.11.7, 2 cores, section 3.4, port 8000", ["30 s"]),
        ("after 4 s <!-- given: 4 s -->", []),
        ("after 4 s, in 5 ms <!-- given: 4 s -->", ["5 ms"]),
        ("after 4 s and 10 s <!-- given: 10 s, 4 s -->", []),
        (f"it took 12 ms <!-- ours: {FILE} | x --> and 13 ms", ["13 ms"]),
        (f"it took 12 <!-- ours: {FILE} | x --> ms", []),
    ],
)
def test_a_figure_that_neither_cites_a_file_nor_is_given_is_found(line: str, found: list[str]) -> None:
    made = "```\n99 ms\n```\n<!-- generated: x -->\n98 ms\n<!-- end -->"
    assert list(figures.unmarked(f"first line\n{line}\n{made}")) == [(2, figure) for figure in found]


def test_all_documents_are_looked_through_but_for_those_that_are_made_from_code(root: Path) -> None:
    for name in ("README.md", "docs/sdk.md", "docs/metrics.md", "benchmarks/chaos/README.md"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("It took 12 ms.")
    problems = check(root).problems
    assert [problem.partition(":")[0] for problem in problems] == [
        "README.md",
        "docs/sdk.md",
        "benchmarks/chaos/README.md",
    ]
    assert all("'12 ms' cites no results file" in problem for problem in problems)


def test_the_predictors_page_is_made_from_its_results(root: Path) -> None:
    folder = root / "benchmarks/results/predictors"
    shutil.copytree(RESULTS / "predictors", folder)
    redocument(root)
    assert check(root).problems == []
    page = folder / "README.md"
    assert page.read_text() == markdown(json.loads((folder / "results.json").read_text()))
    page.write_text(page.read_text().replace("0.1516", "0.1515"))
    assert ["predictors/README.md is not what" in problem for problem in check(root).problems] == [True]


def test_finished_runs_that_lie_beside_the_results_are_no_results(root: Path) -> None:
    (root / "benchmarks/results/experiments/runs/deepflow_heatmap").mkdir(parents=True)
    (root / "benchmarks/results/experiments/runs/deepflow_heatmap/a.json").write_text("{}")
    assert (check(root).problems, check(root).files) == ([], 1)


def test_a_results_file_that_no_document_can_show_is_found(root: Path) -> None:
    (root / "benchmarks/results/other.json").write_text("{}")
    assert check(root).problems == [
        "other.json has no reader (benchmarks/document.py), so no document can show it"
    ]


# ------------------------------------------------------------------------------------------------------------- origins

HERE = {"code": "aa", "commit": "abc", "clean": True, "machine": "m"}


def made_by(*origins: dict[str, object], command: str = "") -> Callable[[dict[str, object]], None]:
    def how(whole: dict[str, object]) -> None:
        variants = whole["variants"]
        assert isinstance(variants, dict)
        whole |= {"format": 3, "origins": list(origins), "command": command or whole["command"]}
        for variant in variants.values():
            variant["origin"] = [min(i, len(origins) - 1) for i in range(3)]

    return how


@pytest.mark.parametrize(
    ("origins", "command", "said"),
    [
        ([HERE], "", []),
        ([HERE, {**HERE, "machine": "another"}], "", []),
        ([HERE, {**HERE, "code": "bb"}], "", ["runs of 2 states of the code"]),
        ([{**HERE, "clean": False}], "", ["code that was in no commit"]),
        ([HERE], "python -m benchmarks run x --keep-stale", ["written with --keep-stale"]),
        (
            [HERE, {**HERE, "code": "bb", "clean": False}],
            "run x --keep-stale",
            ["--keep-stale", "2 states", "in no commit"],
        ),
        ([], "", ["does not say which code made its runs"]),
    ],
)
def test_committed_runs_are_of_one_state_of_the_code_which_is_in_a_commit(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    origins: list[dict[str, object]],
    command: str,
    said: list[str],
) -> None:
    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    change(root, made_by(*origins, command=command))
    problems = check(root).problems
    assert [text in problem for text, problem in zip(said, problems, strict=True)] == [True] * len(said)


def test_a_file_of_before_runs_kept_their_origin_is_noted_and_leaves_the_list_when_it_has_one(
    root: Path,
) -> None:
    assert FILE in provenance.UNTRACED
    checked = check(root)
    assert checked.problems == [] and checked.notes == [f"written before runs kept their origin: {FILE}"]
    change(root, made_by(HERE))
    assert ["take it off UNTRACED" in problem for problem in check(root).problems] == [True]


def test_runs_of_other_code_than_the_present_one_are_noted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    change(root, made_by(HERE))
    assert check(root).notes == [
        f"runs of other code than the present one: {FILE}",
        "commits that are not in this checkout: abc",
    ]
    present = runner.code_of(registry.load("deepflow_heatmap"))
    change(root, made_by({**HERE, "code": present}))
    checked = check(root)
    assert (checked.problems, checked.notes) == ([], ["commits that are not in this checkout: abc"])
    assert f"code {present}" in (root / "docs/results.md").read_text()


def test_runs_that_name_a_commit_with_other_code_are_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def at(commit: str, where: Path) -> Iterator[Path | None]:
        yield ROOT if commit == "abc" else None

    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    monkeypatch.setattr(check_module, "code_at", at)
    present = runner.code_of(registry.load("deepflow_heatmap"))
    change(root, made_by({**HERE, "code": present}))
    assert (check(root).problems, check(root).notes) == ([], [])
    change(root, made_by(HERE))
    assert check(root).problems == [f"{FILE} names commit abc, whose code is another one"]


@pytest.mark.parametrize(
    ("whole", "origins"),
    [
        ({"origin": HERE}, [Origin("aa", "abc", True, "m")]),
        ({"machine": {"cpu": "c", "cores": 2, "python": "3.11", "commit": "abc"}}, []),
        (
            {
                "machine": {
                    "cpu": "c",
                    "cores": 2,
                    "python": "3.11",
                    "commit": "abc",
                    "code": "aa",
                    "clean": True,
                }
            },
            [Origin("aa", "abc", True, "c, 2 cores; Python 3.11")],
        ),
        (
            {
                "runs": [
                    {
                        "code": code,
                        "commit": "abc",
                        "clean": True,
                        "machine": {"cpu": "c", "cores": 2, "python": "3"},
                    }
                    for code in ("aa", "bb", "aa")
                ]
            },
            [Origin(code, "abc", True, "c, 2 cores; Python 3") for code in ("aa", "bb")],
        ),
        ({"runs": [{"code": "aa", "commit": "abc", "machine": {}}]}, []),
        ({"machine": "x86_64, 2 cores"}, []),
    ],
)
def test_the_origin_of_other_results_files(whole: dict[str, object], origins: list[Origin]) -> None:
    assert provenance.of_other(whole) == origins


def test_the_command_prints_what_it_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make lint` runs it on this checkout."""
    monkeypatch.setattr(check_module, "check", lambda: check(root))
    assert program.main(["check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"written before runs kept their origin: {FILE}",
        "1 results files, 4 rows of experiments computed again, 0 figures cited in 1 documents: no problem",
    ]
    (root / "README.md").write_text("It took 12 ms.")
    assert program.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert "README.md:1: '12 ms' cites no results file" in printed and printed.endswith(": 1 problems\n")


# ------------------------------------------------------------------------------------------------------------- numbers


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
def test_a_number_is_compared_as_it_is_shown(text: str, value: float, right: bool) -> None:
    assert figures.shows(text, value) is right
