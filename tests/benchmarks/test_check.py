"""Figures of the documents against the results files that they come from, and where these come from."""

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import check as check_module
from benchmarks import figures, provenance, runner
from benchmarks.aims.page import page
from benchmarks.check import check
from benchmarks.checkout import ROOT, Origin, code_digest, depends_on
from benchmarks.document import OTHERS, RESULTS, document, expected, section
from benchmarks.experiments import registry
from benchmarks.experiments.base import Row, aimed
from benchmarks.live.machine import LIVE_CODE
from benchmarks.predictors.page import markdown

FILE = "experiments/deepflow_heatmap.json"
PLOT = "experiments/deepflow_heatmap/deepflow_heatmap.png"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout, with history, in which only one experiment has results, and the document of it.

    Its runs are of before runs kept their origin, and the file may be such a one.
    """
    (tmp_path / "benchmarks/results/experiments/deepflow_heatmap").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    whole = json.loads((RESULTS / FILE).read_text())
    del whole["origins"]
    whole.pop("verified", None)
    (tmp_path / "benchmarks/results" / FILE).write_text(json.dumps(whole | {"format": 2}))
    shutil.copy(RESULTS / PLOT, tmp_path / "benchmarks/results" / PLOT)
    monkeypatch.setattr(provenance, "UNTRACED", provenance.UNTRACED | {FILE})
    monkeypatch.setattr(check_module, "expected", lambda: [FILE])
    monkeypatch.setattr(check_module, "no_history", lambda root: None)
    monkeypatch.setattr(provenance, "MISSING", frozenset())
    (tmp_path / "README.md").write_text("# Sluice\n")
    redocument(tmp_path)
    return tmp_path


def redocument(root: Path) -> None:
    (root / "docs/results.md").write_text(document(root / "benchmarks/results"))
    (root / "docs/not_reproduced.md").write_text(page(root / "benchmarks/results"))


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
    (root / "docs/design.md").write_text(f"{-row.ours:.1f} % below <!-- -ours: {name} -->")
    assert (check(root).problems, check(root).cited) == ([], 1)
    (root / "docs/design.md").write_text(f"{row.ours:.1f} % below <!-- -ours: {name} -->")
    assert len(check(root).problems) == 1
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


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row("a", -11.8, -11.0, "%", 1.0, "within 3 points", True, least=-14.8, most=-8.8), ""),
        (
            Row("a", -11.8, -11.0, "%", 3.0, "within 3 points", True, least=-14.8, most=-8.8),
            "open by its interval",
        ),
        (Row("a", -11.8, -11.0, "%", 3.0, "within 3 points", None, least=-14.8, most=-8.8), ""),
        (
            Row("a", -11.8, -2.0, "%", 3.0, "within 3 points", None, least=-14.8, most=-8.8),
            "missed by its interval",
        ),
        (Row("a", None, 1.0, "%", 0.1, "least of all", True), "no bounds"),
        (Row("a", None, 1.0, "%", 0.1, "least of all", True, beside="open"), "open by its interval"),
        (Row("a", None, 1.0, "%", None, "least of all", True), ""),
        (Row("a", None, 1.0, "%", 0.1), ""),
    ],
)
def test_a_row_that_is_judged_otherwise_than_by_its_interval_is_found(row: Row, said: str) -> None:
    found = list(check_module._judged_otherwise("x.json", [row]))
    assert len(found) == bool(said) and said in "".join(found)


@pytest.mark.parametrize(("kind", "ttft", "tpot"), [("sim", 10.0, 3.0), ("vllm", 15.0, 15.0)])
def test_the_simulators_errors_have_the_aims_of_the_kind_of_engines(
    kind: str, ttft: float, tpot: float
) -> None:
    found = section(RESULTS, f"experiments/validate_live/{kind}.json").rows
    errors = [row for row in found if row.name.endswith("simulated against live")]
    assert errors
    for row in errors:
        within = ttft if ": TTFT" in row.name else tpot if ": TPOT" in row.name else None
        assert row.aim == ("" if within is None else f"within {within:g} %")
        assert row.ours is not None and row.met is (None if within is None else abs(row.ours) <= within)


def test_an_aim_is_judged_by_the_interval_and_by_the_figures_beside_it() -> None:
    row = Row("a", None, 1.0, "%", 0.5)
    assert aimed(row, "at most 2", most=2.0).met is True
    assert aimed(row, "at most 1.2", most=1.2).met is None
    assert aimed(row, "at most 2, and more", most=2.0, also=[None, True]).met is None
    assert aimed(row, "at most 1.2, and more", most=1.2, also=[False]).met is False
    assert aimed(Row("a", None, 1.0), "at most 1.2", most=1.2).met is True
    assert aimed(Row("a", None, None), "at most 1.2", most=1.2).met is None


def test_a_row_that_the_measures_do_not_give_is_found(root: Path) -> None:
    file = root / "benchmarks/results" / FILE
    whole = json.loads(file.read_text())
    whole["rows"][0]["ours"] += 0.5
    file.write_text(json.dumps(whole))
    problems = check(root).problems
    assert any("from its measures" in p for p in problems) and any("docs/results.md" in p for p in problems)
    assert any("ours is" in p for p in problems)
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


def test_the_page_of_what_could_not_be_reproduced_is_made_from_the_results(root: Path) -> None:
    path = root / "docs/not_reproduced.md"
    path.write_text(path.read_text().replace("without an experiment", "forgotten"))
    assert check(root).problems == [
        "docs/not_reproduced.md is not what the results say: python -m benchmarks document"
    ]


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


def spoil(value: object, keys: tuple[str, ...]) -> object:
    """Returns the results with every number below one of the keys, means and ratios, changed."""
    if isinstance(value, dict):
        return {key: spoil(doubled(inner) if key in keys else inner, keys) for key, inner in value.items()}
    return [spoil(inner, keys) for inner in value] if isinstance(value, list) else value


def doubled(value: object) -> object:
    if isinstance(value, dict):
        return {key: doubled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [doubled(inner) for inner in value]
    return value * 2 + 1 if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("composition/composition.json", ("rows",)),
        ("dtype/dtype.json", ("ratios",)),
        ("predictors/results.json", ("lightgbm_against_survival",)),
        ("overhead/overhead-sim.json", ("requests_per_s", "tokens_per_s")),
        ("experiments/validate_live/sim.json", ("error_percent", "met")),
    ],
)
def test_the_rows_of_a_live_measurement_are_of_what_was_measured_not_of_means_beside_it(
    file: str, keys: tuple[str, ...]
) -> None:
    whole = json.loads((RESULTS / file).read_text())
    rows = list(OTHERS[file].read(whole))
    assert rows and list(OTHERS[file].read(spoil(whole, keys))) == rows


def test_the_predictors_page_is_made_from_its_results(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "_compare_with_commits", lambda *anything: None)
    folder = root / "benchmarks/results/predictors"
    shutil.copytree(RESULTS / "predictors", folder)
    redocument(root)
    assert check(root).problems == []
    page = folder / "README.md"
    assert page.read_text() == markdown(json.loads((folder / "results.json").read_text()))
    [figure, *_] = re.findall(r"0\.\d+[1-9]", page.read_text())
    page.write_text(page.read_text().replace(figure, figure[:-1] + "0"))
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

TRACES = ["azure2023_AzureLLMInferenceTrace_code.csv.xz sha256:1", "azure2024_digitised.tar sha256:2"]
HERE = {"code": "v2:aa", "commit": "abc", "clean": True, "machine": "m", "traces": TRACES}


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
        ([HERE, {**HERE, "code": "v2:bb"}], "", ["runs of 2 states of the code"]),
        ([{**HERE, "clean": False}], "", ["code that was in no commit"]),
        ([HERE], "python -m benchmarks run x --keep-stale", ["written with --keep-stale"]),
        (
            [HERE, {**HERE, "code": "v2:bb", "clean": False}],
            "run x --keep-stale",
            ["--keep-stale", "2 states", "in no commit"],
        ),
        ([{**HERE, "code": "aa"}], "", ["in the present way (v2)"]),
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
    monkeypatch.setattr(check_module, "_compare_with_commits", lambda *anything: None)
    change(root, made_by(*origins, command=command))
    problems = check(root).problems
    assert [text in problem for text, problem in zip(said, problems, strict=True)] == [True] * len(said)


def test_a_file_of_before_runs_kept_their_origin_is_noted_and_leaves_the_list_when_it_has_one(
    root: Path,
) -> None:
    checked = check(root)
    assert checked.problems == [] and checked.notes == [f"written before runs kept their origin: {FILE}"]
    assert "| unknown |" in (root / "docs/results.md").read_text()
    change(root, made_by(HERE))
    assert "take it off UNTRACED" in check(root).problems[0]


def test_runs_of_other_code_than_the_present_one_are_noted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    monkeypatch.setattr(check_module, "_compare_with_commits", lambda *anything: None)
    change(root, made_by(HERE))
    assert check(root).notes == [f"runs of other code than the present one: {FILE}"]
    assert "| abc | v2:aa | changed |" in (root / "docs/results.md").read_text()
    present = runner.code_of(registry.load("deepflow_heatmap"))
    change(root, made_by({**HERE, "code": present}))
    checked = check(root)
    assert (checked.problems, checked.notes) == ([], [])
    assert f"| abc | {present} | same |" in (root / "docs/results.md").read_text()


def test_a_commit_that_nobody_else_has_is_found_and_without_history_it_is_said_that_nothing_was(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    change(root, made_by(HERE))
    [problem] = check(root).problems
    assert problem.startswith(f"{FILE}: the commit abc is not in the history")
    monkeypatch.setattr(check_module, "no_history", lambda root: "this is a shallow clone")
    checked = check(root)
    assert checked.problems == [] and checked.notes[-1].startswith("NOTHING IS KNOWN OF THE CODE")


def test_a_commit_that_is_known_as_lost_is_said_beside_the_figures(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    monkeypatch.setattr(provenance, "LOST", frozenset({FILE}))
    change(root, made_by(HERE))
    checked = check(root)
    assert checked.problems == []
    assert f"of a commit that is in no history any more, to be measured again: {FILE}" in checked.notes
    assert "| abc | v2:aa | changed, its commit is lost |" in (root / "docs/results.md").read_text()

    @contextmanager
    def at(commit: str, where: Path) -> Iterator[Path | None]:
        yield ROOT

    monkeypatch.setattr(check_module, "code_at", at)
    assert any("take it off LOST" in problem for problem in check(root).problems)


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
    ("changes", "note", "problem"),
    [
        ({}, "a sample of which was equal when later code computed it again: " + FILE, ""),
        ({"different": 2}, f"{FILE} is to be run again: 2 of 9 differ (of 90) with def", ""),
        ({"commit": "elsewhere"}, "", "verified with the commit elsewhere, whose code is not found here"),
        ({"code": "v2:cc"}, "", "verified with the commit def, whose code is not found here"),
        ({"clean": False}, "", "verified with code that was in no commit"),
    ],
)
def test_the_outcome_of_runs_that_were_computed_again_is_shown_and_their_code_is_looked_up(
    root: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], note: str, problem: str
) -> None:
    @contextmanager
    def at(commit: str, where: Path) -> Iterator[Path | None]:
        yield ROOT if commit == "def" else None

    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    monkeypatch.setattr(check_module, "_compare_with_commits", lambda *anything: None)
    monkeypatch.setattr(check_module, "code_at", at)
    origin = {**HERE, "commit": "def", "code": runner.code_of(registry.load("deepflow_heatmap"))}
    origin |= {name: value for name, value in changes.items() if name in origin}
    noted = {"origin": origin, "runs": 9, "different": changes.get("different", 0), "of": 90, "date": "d"}

    def verify(whole: dict[str, object]) -> None:
        made_by(HERE)(whole)
        whole["verified"] = noted

    change(root, verify)
    checked = check(root)
    assert [problem in one for one in checked.problems] == ([True] if problem else [])
    assert any(note in one for one in checked.notes)
    outcome = "2 of 9 differ" if "different" in changes else "all 9 equal"
    assert f"| changed; {outcome} (of 90) with {origin['commit']} |" in (root / "docs/results.md").read_text()


def test_runs_without_a_published_trace_that_their_code_names_are_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def at(commit: str, where: Path) -> Iterator[Path | None]:
        yield ROOT

    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    monkeypatch.setattr(check_module, "code_at", at)
    present = runner.code_of(registry.load("deepflow_heatmap"))
    change(root, made_by({**HERE, "code": present, "traces": TRACES[1:]}))
    [problem] = check(root).problems
    assert problem.startswith(f"{FILE} was made without azure2023_AzureLLMInferenceTrace_code.csv: ")


def other_file(root: Path, name: str, whole: dict[str, object]) -> None:
    (root / "benchmarks/results" / name).parent.mkdir(exist_ok=True)
    (root / "benchmarks/results" / name).write_text(json.dumps(whole))
    redocument(root)


SWITCHING = "switching/switching-sim.json"


@pytest.mark.parametrize(
    ("facts", "command", "said"),
    [
        ({}, "python -m benchmarks.live.switching", []),
        ({"code_of": None}, "python -m benchmarks.live.switching", ["of which files its digest is"]),
        ({"code_of": []}, "python -m benchmarks.live.switching", ["of which files its digest is"]),
        (
            {"code_of": ["benchmarks/seeds.py"], "code": code_digest(["benchmarks/seeds.py"])},
            "python -m benchmarks.live.switching",
            ["its digest leaves out benchmarks/__init__.py, "],
        ),
        (
            {"code_of": ["benchmarks"], "code": code_digest(["benchmarks"])},
            "python -m benchmarks.live.switching",
            ["its digest leaves out actors, app, policies"],
        ),
        (
            {"code": "v2:bb"},
            "python -m benchmarks.live.switching",
            ["names commit abc, whose code is another one"],
        ),
        ({}, "", ["which command made it"]),
        ({}, "python -m benchmarks.live.balance", ["is to be made by"]),
        ({}, "python -m benchmarks.live.switching --quick", ["is to be made by"]),
    ],
)
def test_another_results_file_says_which_files_its_digest_is_of_and_which_command_ran(
    root: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], command: str, said: list[str]
) -> None:
    @contextmanager
    def at(commit: str, where: Path) -> Iterator[Path | None]:
        yield ROOT

    monkeypatch.setattr(provenance, "UNTRACED", frozenset({FILE}))
    monkeypatch.setattr(check_module, "code_at", at)
    machine = {"cpu": "c", "cores": 2, "python": "3", "commit": "abc", "clean": True}
    code_of = depends_on("benchmarks.live.switching", LIVE_CODE)
    machine |= {"code_of": code_of, "code": code_digest(code_of)} | facts
    whole = {"machine": machine, "command": command, "rows": [], "served": 1, "lost": {}}
    other_file(root, SWITCHING, whole)
    problems = check(root).problems
    assert [text in problem for text, problem in zip(said, problems, strict=True)] == [True] * len(said)
    # the document shows the command that ran
    assert f"`{command or OTHERS[SWITCHING].command}`" in (root / "docs/results.md").read_text()


def test_a_live_result_of_an_overloaded_machine_is_noted_and_its_figures_are_marked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "_compare_with_commits", lambda *anything: None)
    monkeypatch.setattr(provenance, "UNTRACED", frozenset({FILE}))
    machine = {"cpu": "c", "cores": 2, "python": "3", "commit": "abc", "clean": True, "code": "v2:aa"}
    machine |= {"code_of": ["benchmarks"], "load_1min_before": 2.0}
    whole = {"machine": machine, "command": "python -m benchmarks.live.switching", "rows": [], "served": 1}
    other_file(root, SWITCHING, whole | {"lost": {}})
    assert check(root).problems == [] and not any("overloaded" in note for note in check(root).notes)
    assert "| figure | ours |" in (root / "docs/results.md").read_text()
    other_file(root, SWITCHING, whole | {"lost": {}, "machine": machine | {"load_1min_before": 28.84}})
    checked = check(root)
    assert checked.problems == []
    assert f"{SWITCHING} is of an overloaded machine: load 28.8 on 2 cores before the run" in checked.notes
    assert "| figure | ours, load 28.8 on 2 cores before the run |" in (root / "docs/results.md").read_text()


def test_the_document_says_what_was_fitted_on_the_figures_beside_it(root: Path) -> None:
    netkv = "experiments/netkv/netkv_load.json"
    (root / "benchmarks/results/experiments/netkv").mkdir()
    shutil.copy(RESULTS / netkv, root / "benchmarks/results" / netkv)
    one, other = (section(root / "benchmarks/results", file).fitted for file in (netkv, FILE))
    assert one.startswith("the times of a prefill, the rate at 100 %") and not other
    assert document(root / "benchmarks/results").count(one) == 1
    known = {start: [n for n in registry.EXPERIMENTS if n.startswith(start)] for start in registry.FITTED}
    assert all(known.values())


def test_a_results_file_that_should_be_there_is_missed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        check_module, "expected", lambda: [FILE, SWITCHING, "experiments/netkv/netkv_load.json"]
    )
    assert check(root).problems == [
        f"{SWITCHING} is not there: python -m benchmarks.live.switching",
        "experiments/netkv/netkv_load.json is not there: python -m benchmarks run netkv_load",
    ]
    monkeypatch.setattr(
        provenance, "MISSING", frozenset({SWITCHING, "experiments/netkv/netkv_load.json", FILE})
    )
    # The page of what was not reproduced names experiments that have no result yet.
    redocument(root)
    checked = check(root)
    assert ["take it off MISSING" in problem for problem in checked.problems] == [True]
    assert (
        "not measured yet: experiments/netkv/netkv_load.json, switching/switching-sim.json" in checked.notes
    )


def test_all_experiments_and_live_measurements_have_a_results_file() -> None:
    files = expected()
    assert len(set(files)) == len(files) == len(registry.EXPERIMENTS) + len(OTHERS)
    assert set(files) >= provenance.UNTRACED | provenance.MISSING | provenance.LOST
    assert not provenance.UNTRACED & provenance.MISSING and not provenance.LOST & provenance.MISSING


@pytest.mark.parametrize(
    ("whole", "origins"),
    [
        ({"origin": HERE}, [Origin("v2:aa", "abc", True, "m", tuple(TRACES))]),
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


def change_row(name: str, value: object) -> Callable[[dict[str, object]], None]:
    def how(whole: dict[str, object]) -> None:
        rows = whole["rows"]
        assert isinstance(rows, list)
        rows[0][name] = value

    return how


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (change_row("note", "twice the paper's"), 'note is "twice the paper\'s" in the file'),
        (change_row("unit", "s"), "unit is 's' in the file"),
        (change_row("aim", "any"), "aim is 'any' in the file"),
        (change_row("met", False), "met is False in the file"),
        (lambda whole: whole.update(summary="Ours is better"), "its summary is not the experiment's"),
        (lambda whole: whole.update(quick=True), "of the reduced size"),
        (lambda whole: whole.update(seeds=[0, 1, 7]), "not all from 0 on"),
    ],
)
def test_a_change_of_words_or_size_is_found_even_if_the_document_is_made_again(
    root: Path, how: Callable[[dict[str, object]], None], said: str
) -> None:
    change(root, how)
    assert any(said in problem for problem in check(root).problems)


def test_a_variant_that_the_same_code_does_not_have_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shorter(whole: dict[str, object]) -> None:
        variants = whole["variants"]
        assert isinstance(variants, dict)
        variants["1/s"]["config"]["length_s"] = 6.0

    monkeypatch.setattr(provenance, "UNTRACED", frozenset())
    monkeypatch.setattr(check_module, "_compare_with_commits", lambda *anything: None)
    present = runner.code_of(registry.load("deepflow_heatmap"))
    change(root, made_by({**HERE, "code": present}))
    change(root, shorter)
    assert ["the variant '1/s' is not the one" in problem for problem in check(root).problems] == [True]
    # other code may have had other variants
    change(root, made_by(HERE))
    assert check(root).problems == []


def test_results_lie_in_the_place_of_their_experiment_only(root: Path) -> None:
    folder = root / "benchmarks/results/experiments"
    shutil.copytree(folder / "deepflow_heatmap", folder / "old/deepflow_heatmap")
    shutil.copy(folder / "deepflow_heatmap.json", folder / "old/deepflow_heatmap.json")
    problems = check(root).problems
    assert any("whose place is experiments/deepflow_heatmap.json" in problem for problem in problems)


def test_a_plot_that_is_missing_or_no_picture_is_found(root: Path) -> None:
    plot = root / "benchmarks/results" / PLOT
    whole = plot.read_bytes()
    for data in (b"", whole[:-20], b"x" * 100, whole[:33] + whole[-12:]):
        plot.write_bytes(data)
        assert check(root).problems == [f"{PLOT} is no whole PNG file"]
    plot.unlink()
    assert f"{PLOT} is missing" in check(root).problems


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("<!-- generated: fields -->\nIt took 12 ms.", 1),
        ("a\n```\nIt took 12 ms.", 2),
        ("<!-- generated: a -->\n<!-- generated: b -->\n<!-- end -->", 1),
        ("```\n99 ms\n```\n<!-- generated: x -->\n98 ms\n<!-- end -->", None),
    ],
)
def test_a_block_that_does_not_end_hides_nothing(root: Path, text: str, line: int | None) -> None:
    (root / "docs/api.md").write_text(text)
    said = f"docs/api.md:{line}: what begins here has no end, so nothing after it would be looked at"
    assert check(root).problems == ([] if line is None else [said])
    # in other documents no script writes blocks
    (root / "docs/api.md").unlink()
    (root / "docs/design.md").write_text("<!-- generated: x -->\nIt took 12 ms.\n<!-- end -->")
    assert ["no script writes any" in problem for problem in check(root).problems] == [True]


GIVEN = Path(__file__).parent / "given.txt"


def test_the_figures_that_nobody_measured_are_those_of_the_list() -> None:
    """Whoever adds one to a document adds it to the list, and whoever reviews the list asks whether it is measured."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for folder in ("benchmarks", "deploy", "examples", "predictors"):
        documents += (ROOT / folder).rglob("README.md")
    found = {
        f"{path.relative_to(ROOT)}: {figure}"
        for path in documents
        for figure in figures.given(path.read_text())
    }
    listed = GIVEN.read_text().splitlines()
    assert listed == sorted(found)


OF_DOCSTRINGS = Path(__file__).parent / "given_in_docstrings.txt"


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_docstrings_of_benchmarks_have_figures_of_papers_and_settings_only() -> None:
    """A docstring can cite no results file, so it may not say what was measured; docs/results.md does."""
    found = {
        f"{path.relative_to(ROOT / 'benchmarks').with_suffix('')}: {figure}"
        for path in (ROOT / "benchmarks").rglob("*.py")
        for text in docstrings(path)
        for _, figure in figures.unmarked(text)
    }
    assert OF_DOCSTRINGS.read_text().splitlines() == sorted(found)


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
        ("18.6", -18.61, False),
        ("-18.6", 18.61, False),
        ("+11.2", 11.23, True),
        # one digit of two or more says little
        ("1", 0.85, False),
        ("0.9", 0.85, False),
        ("0.0", 0.03, False),
        ("0.85", 0.85, True),
        ("0.5", 0.5, True),
        ("42", 42.0, True),
        ("100", 99.7, True),
        ("\u221218.6", -18.61, True),
        ("7,700", 7_712.0, False),  # to be shown as it is
        ("0", 0.0, True),
    ],
)
def test_a_number_is_compared_as_it_is_shown(text: str, value: float, right: bool) -> None:
    assert figures.shows(text, value) is right
