"""Aims that are written before a run, and their digest in the results."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import __main__ as program
from benchmarks import check as check_module
from benchmarks import provenance, results_io
from benchmarks.aims import stated
from benchmarks.check import Checked
from benchmarks.checkout import ROOT, Origin
from benchmarks.document import RESULTS, stated_when
from benchmarks.experiments import registry
from benchmarks.experiments.base import ExperimentError, Row
from benchmarks.results_io import load
from tests.benchmarks import toy_experiment

AIMS = {"rho *": "closed form"}


def write(root: Path, name: str, text: str) -> Path:
    path = root / stated.FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


def test_the_digest_is_of_patterns_and_aims_not_of_the_layout(tmp_path: Path) -> None:
    assert (
        stated.digest("x", tmp_path) == ""
        and list(stated.differences("x", [Row("a", None, 1.0)], root=tmp_path)) == []
    )
    one = stated.digest("x", write(tmp_path, "x", '{"a": "1", "b*": "2"}'))
    assert stated.digest("x", write(tmp_path, "x", '{\n "b*": "2",\n "a": "1"\n}\n')) == one
    assert stated.digest("x", write(tmp_path, "x", '{"a": "1", "b*": "3"}')) != one


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"a": 1}', '{"a": ""}'])
def test_a_file_that_states_no_aims_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ExperimentError, match=r"x\.json"):
        stated.digest("x", write(tmp_path, "x", text))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([Row("a 1", None, 1.0, aim=">= 1"), Row("b", None, 1.0, aim="2"), Row("c", None, 1.0)], []),
        ([Row("a 1", None, 1.0, aim=">= 1"), Row("b", None, 1.0, aim="3")], ["'b' has the aim '3', "]),
        ([Row("a 1", None, 1.0, aim=">= 1"), Row("b", None, 1.0)], ["'b' has no aim, "]),
        ([Row("a 1", None, 1.0, aim=">= 1")], ["states '2' for 'b', which no row matches"]),
        (
            [Row("a 1", None, 1.0, aim=">= 1"), Row("b", None, 1.0, aim="2"), Row("c", None, 1.0, aim="4")],
            ["states none for it"],
        ),
    ],
)
def test_rows_are_compared_with_the_stated_aims(tmp_path: Path, rows: list[Row], said: list[str]) -> None:
    root = write(tmp_path, "x", json.dumps({"a *": ">= 1", "b": "2"}))
    found = list(stated.differences("x", rows, root=root))
    assert [text in difference for text, difference in zip(said, found, strict=True)] == [True] * len(said)


def test_rows_of_a_reduced_size_may_lack_some(tmp_path: Path) -> None:
    root = write(tmp_path, "x", json.dumps({"a *": ">= 1", "b": "2"}))
    assert list(stated.differences("x", [Row("a 1", None, 1.0, aim=">= 1")], True, root)) == []


@pytest.mark.parametrize("path", sorted((ROOT / stated.FOLDER).glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_aims_are_those_of_the_committed_rows(path: Path) -> None:
    assert path.stem in registry.EXPERIMENTS
    if f"experiments/{registry.place(path.stem)}" in provenance.MISSING:
        pytest.skip("not measured yet, so there are no rows")
    assert (
        list(stated.differences(path.stem, load(RESULTS / "experiments" / registry.place(path.stem)).rows))
        == []
    )


# --------------------------------------------------------------------------------------------------------- in a run


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The toy, in a checkout whose aims a test can write."""
    monkeypatch.setitem(registry.EXPERIMENTS, "toy", "tests.benchmarks.toy_experiment")
    monkeypatch.setattr(stated.digest, "__defaults__", (tmp_path,))
    monkeypatch.setattr(stated.differences, "__defaults__", (False, tmp_path))
    return toy_experiment


def ran(folder: Path) -> results_io.Stored:
    assert program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(folder)]) == 0
    return load(folder / "toy.json")


def test_a_run_puts_the_digest_of_its_aims_into_the_results(
    toy: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(tmp_path / "a").aims == "" and "aims" not in json.loads((tmp_path / "a/toy.json").read_text())
    write(tmp_path, "toy", json.dumps(AIMS))
    stored = ran(tmp_path / "b")
    assert stored.aims == stated.digest("toy") and len(stored.aims) == 16
    assert "has the aim" not in capsys.readouterr().err
    # it stays when rows are made again
    assert program.main(["remake", "--results", str(tmp_path / "b")]) == 0
    assert load(tmp_path / "b/toy.json").aims == stored.aims


def test_a_run_says_which_rows_have_other_aims(
    toy: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "toy", json.dumps({"rho *": "within 1 %"}))
    ran(tmp_path / "a")
    assert "'rho 0.2' has the aim 'closed form', and " in capsys.readouterr().err


def test_the_document_says_whether_aims_were_stated_before_the_runs() -> None:
    stored = load(RESULTS / "experiments/netkv/netkv_whole.json")
    assert stated_when(replace(stored, aims="ab")) == "aims stated before the runs (ab)"
    assert stated_when(replace(stored, aims="")) == "aims in no file before the runs"
    assert stated_when(replace(stored, rows=())) == ""


def test_a_broken_file_of_aims_ends_the_command_before_the_first_run(
    toy: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "toy", "{")
    assert program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path / "a")]) == 2
    assert "is no JSON" in capsys.readouterr().err and not (tmp_path / "a").exists()


# ---------------------------------------------------------------------------------------------------- in the check


def test_rows_with_other_aims_than_were_stated_are_found_and_a_later_change_is_noted(
    toy: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, "toy", json.dumps(AIMS))
    stored, checked = ran(tmp_path / "a"), Checked()
    assert list(check_module._other_aims("toy.json", stored, checked)) == [] and checked.notes == []
    row = replace(stored.rows[0], aim="within 1 %")
    [problem] = check_module._other_aims("toy.json", replace(stored, rows=(row, *stored.rows[1:])), checked)
    assert problem.startswith("toy.json: 'rho 0.2' has the aim 'within 1 %', and ")
    write(tmp_path, "toy", json.dumps({"rho *": "within 1 %"}))
    assert list(check_module._other_aims("toy.json", stored, checked)) == []
    assert checked.notes == [
        "toy.json: its aims were changed after its runs (benchmarks/aims/stated/toy.json)"
    ]
    assert list(check_module._other_aims("toy.json", replace(stored, aims=""), Checked())) == []


def test_aims_that_the_commit_of_the_runs_does_not_state_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, file = "netkv_whole", "experiments/netkv/netkv_whole.json"
    then = tmp_path / "then"
    write(then, name, (ROOT / stated.FOLDER / f"{name}.json").read_text())

    @contextmanager
    def at(commit: str, root: Path) -> Iterator[Path | None]:
        yield then

    monkeypatch.setattr(check_module, "code_at", at)
    monkeypatch.setattr(check_module, "_without_traces", lambda *anything: [])
    stored = replace(load(RESULTS / file), aims=stated.digest(name))
    origins = [Origin("v2:aa", "abc", True, "m")]

    def problems() -> list[str]:
        checked = Checked()
        check_module._compare_with_commits(
            ROOT, RESULTS, {file: (origins, lambda root: "v2:aa")}, {file: stored}, checked
        )
        return checked.problems

    assert problems() == []
    write(then, name, json.dumps({"rag, *": "within 9 points"}))
    assert problems() == [f"{file}: its aims are not those that commit abc states, with whose code it ran"]
    shutil.rmtree(then / stated.FOLDER)
    assert len(problems()) == 1
