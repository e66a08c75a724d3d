"""Running, resuming, storing and reporting an experiment."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks import __main__ as program
from benchmarks import report, results_io, runner
from benchmarks.checkout import Origin, code_digest
from benchmarks.experiments import registry
from benchmarks.experiments.base import ExperimentError, Results, Row, Variant
from benchmarks.results_io import Run, RunCache, Stored, checked_metrics, config_key
from benchmarks.runner import Options
from benchmarks.sim.built import note
from policies.routing.netkv.netkv import NetKV
from policies.routing.registry import decode_policy
from tests.benchmarks import toy_experiment

TOY = "tests.benchmarks.toy_experiment"


@pytest.fixture
def toy(monkeypatch) -> ModuleType:
    monkeypatch.setitem(registry.EXPERIMENTS, "toy", TOY)
    return toy_experiment


def options(folder: Path, **changes) -> Options:
    return Options(**{"quick": True, "jobs": 1, "out": folder, **changes})


def logged(monkeypatch, toy, folder: Path, **extra) -> Path:
    """The toy writes down each run that really happens; `extra` goes into every config."""
    log = folder / "log"
    log.touch()
    changed = [Variant(v.name, {**v.config, "log": str(log), **extra}) for v in toy.variants(True)]
    monkeypatch.setattr(toy, "variants", lambda quick: changed)
    return log


def test_every_variant_runs_with_every_seed(toy, tmp_path, monkeypatch):
    results = runner.run("toy", toy, options(tmp_path))
    assert results.seeds == (0, 1)
    assert results.runs["rho 0.5"][1] == toy.run_one(results.variants["rho 0.5"], 1)
    assert runner.run("toy", toy, options(tmp_path, seeds=3)).seeds == (0, 1, 2)
    assert runner.run("toy", toy, options(tmp_path, quick=False)).seeds == (0, 1, 2, 3)
    monkeypatch.setattr(toy, "SEEDS_FROM", 10, raising=False)
    assert runner.run("toy", toy, options(tmp_path, seeds=2)).seeds == (10, 11)


def test_processes_give_the_same_as_one_and_outlive_a_failing_run(toy, tmp_path, monkeypatch):
    logged(monkeypatch, toy, tmp_path, fails_on=1)
    with pytest.raises(runner.RunsFailedError, match="2 of 4 runs failed"):
        runner.run("toy", toy, options(tmp_path, jobs=2))
    kept = runner.run("toy", toy, options(tmp_path, seeds=1))
    for name, config in kept.variants.items():
        assert kept.runs[name][0] == toy.run_one(config, 0)


def test_finished_runs_are_not_run_again(toy, tmp_path, monkeypatch):
    log = logged(monkeypatch, toy, tmp_path)
    first = runner.run("toy", toy, options(tmp_path))
    assert len(log.read_text().splitlines()) == 4
    again = runner.run("toy", toy, options(tmp_path, seeds=3))
    assert log.read_text().splitlines()[4:] == ["0.2 2", "0.5 2"]
    assert again.runs["rho 0.2"][0] == first.runs["rho 0.2"][0]


def test_other_code_or_another_config_is_run_again(toy, tmp_path, monkeypatch):
    log = logged(monkeypatch, toy, tmp_path)
    runner.run("toy", toy, options(tmp_path))
    before = runner.run("toy", toy, options(tmp_path)).origins["rho 0.2"]
    monkeypatch.setattr(runner, "code_paths", lambda experiment: ["benchmarks/seeds.py"])
    stale = runner.run("toy", toy, options(tmp_path, keep_stale=True, seeds=3))
    assert len(log.read_text().splitlines()) == 6
    # every run says which code made it
    digest = code_digest(["benchmarks/seeds.py"])
    assert [stale.origins["rho 0.2"][seed].code == digest for seed in range(3)] == [False, False, True]
    assert stale.origins["rho 0.2"][0] == before[0]
    log.write_text("")
    runner.run("toy", toy, options(tmp_path))
    log.write_text("\n" * 4 + log.read_text())
    assert len(log.read_text().splitlines()) == 8
    logged(monkeypatch, toy, tmp_path, customers=100)
    runner.run("toy", toy, options(tmp_path))
    assert len(log.read_text().splitlines()) == 12


def test_runs_of_code_that_changes_meanwhile_are_not_kept(toy, tmp_path, monkeypatch):
    log = logged(monkeypatch, toy, tmp_path)
    watched = tmp_path / "code.py"
    watched.write_text("1")
    monkeypatch.setattr(runner, "code_paths", lambda experiment: [str(watched)])
    monkeypatch.setattr(runner, "code_digest", lambda paths: watched.read_text())
    made = lambda paths, traces: Origin(watched.read_text(), "c", True, "m")  # noqa: E731
    monkeypatch.setattr(runner, "origin_of", made)
    one = toy.run_one

    def then_changed(config, seed):
        if seed == 1:
            watched.write_text("2")
        return one(config, seed)

    monkeypatch.setattr(toy, "run_one", then_changed)
    with pytest.raises(ExperimentError, match="the code has changed since the start"):
        runner.run("toy", toy, options(tmp_path))
    assert log.read_text().splitlines() == ["0.2 0", "0.5 0", "0.2 1"]
    again = runner.run("toy", toy, options(tmp_path, keep_stale=True))
    assert {seed: run.code for seed, run in again.origins["rho 0.2"].items()} == {0: "1", 1: "2"}


def test_runs_of_several_origins_stay_told_apart_in_the_results_file(tmp_path):
    origins = [Origin("aa", "1", True, "m"), Origin("bb", "2", False, "n")]
    runs = {"v": {0: {"x": 1.0}, 1: {"x": 2.0}}, "w": {0: {"x": 3.0}, 1: {"x": 4.0}}}
    made = {"v": {0: origins[0], 1: origins[1]}, "w": {0: origins[1], 1: origins[1]}}
    results = Results("e", False, {"v": {}, "w": {}}, runs, made)
    path = results_io.save(tmp_path, Stored.now(results, "", [], [], "code", "command"))
    assert results_io.load(path).results.origins == made
    whole = json.loads(path.read_text())
    assert [origin["code"] for origin in whole["origins"]] == ["aa", "bb"]
    assert (whole["variants"]["v"]["origin"], whole["variants"]["w"]["origin"]) == ([0, 1], [1, 1])


def test_stored_runs_without_an_origin_are_run_again(tmp_path):
    cache = RunCache(tmp_path, "e", Origin("code", "c", True, "m"), keep_stale=True)
    cache.put({}, 0, {"x": 1.0}, {})
    assert cache.get({}, 0) == Run({"x": 1.0}, Origin("code", "c", True, "m"), {})
    (stored,) = (tmp_path / "e").iterdir()
    whole = json.loads(stored.read_text())
    stored.write_text(
        json.dumps({**whole, "origin": None} | {"code": "code"}).replace('"origin": null, ', "")
    )
    assert cache.get({}, 0) is None


@pytest.mark.parametrize(
    ("code", "clean", "taken"),
    [
        ("code", True, Origin("code", "c2", True, "m")),
        ("code", False, Origin("code", "c1", False, "m")),
        ("b", True, None),
    ],
)
def test_a_run_of_uncommitted_code_counts_as_of_the_commit_that_has_the_same_code(
    tmp_path, code, clean, taken
):
    RunCache(tmp_path, "e", Origin("code", "c1", False, "m")).put({}, 0, {"x": 1.0}, {})
    found = RunCache(tmp_path, "e", Origin(code, "c2", clean, "n")).get({}, 0)
    assert (found and found.origin) == taken


def test_a_run_of_other_traces_is_run_again(tmp_path):
    here = Origin("code", "c", True, "m", ("a.xz sha256:1",))
    RunCache(tmp_path, "e", here).put({}, 0, {"x": 1.0}, {})
    assert RunCache(tmp_path, "e", here).get({}, 0) == Run({"x": 1.0}, here, {})
    for traces in ((), ("a.xz sha256:2",)):
        assert RunCache(tmp_path, "e", replace(here, traces=traces)).get({}, 0) is None


def test_results_keep_all_parameters_of_the_policies_that_ran(toy, tmp_path, monkeypatch):
    one = toy.run_one

    def built(config, seed):
        note("decode", "netkv", decode_policy("netkv", {"step_base_s": 5.0}))
        return one(config, seed)

    monkeypatch.setattr(toy, "run_one", built)
    assert program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    resolved = results_io.load(tmp_path / "toy.json").results.resolved["rho 0.5"]
    assert resolved["decode"]["name"] == "netkv" and resolved["decode"]["params"]["step_base_s"] == 5.0
    # what the configuration leaves out has its default
    assert resolved["decode"]["params"]["step_per_seq_s"] == NetKV().step_per_seq_s
    # kept runs have them, too
    assert runner.run("toy", toy, options(tmp_path)).resolved["rho 0.2"] == resolved


def test_an_experiment_has_one_place_below_the_folder_of_results(toy, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.EXPERIMENTS, "netkv_toy", TOY)
    assert program.main(["run", "netkv_toy", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert results_io.load(tmp_path / "netkv/netkv_toy.json").results.experiment == "netkv_toy"
    assert (tmp_path / "netkv/netkv_toy/wait.png").exists() and (tmp_path / "toy.json").exists()
    places = [registry.place(name) for name in registry.EXPERIMENTS]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("clean", [True, False])
def test_committed_results_take_only_runs_of_the_committed_code(toy, tmp_path, monkeypatch, capsys, clean):
    monkeypatch.setattr(program, "COMMITTED", tmp_path)
    monkeypatch.setattr(program, "is_clean", lambda paths: clean)
    arguments = ["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path / "experiments")]
    assert program.main([*arguments, "--keep-stale"]) == 2
    assert "--keep-stale" in capsys.readouterr().err
    assert program.main(arguments) == (0 if clean else 2)
    assert clean or "commit the code first" in capsys.readouterr().err
    assert (tmp_path / "experiments/toy.json").exists() is clean


def test_a_run_without_its_traces_says_so_and_is_not_committed(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLUICE_TRACES", str(tmp_path))
    monkeypatch.setattr(program, "COMMITTED", tmp_path / "committed")
    monkeypatch.setattr(program, "is_clean", lambda paths: True)
    monkeypatch.setattr(runner, "code_paths", lambda *which: ["benchmarks/workloads/azure2024.py"])
    out = ["run", "toy", "--quick", "--jobs", "1", "--out"]
    assert program.main([*out, str(tmp_path / "tried")]) == 0
    assert "WARNING: toy WITHOUT azure2024_digitised.tar: " in capsys.readouterr().err
    assert program.main([*out, str(tmp_path / "committed")]) == 2
    assert "toy WITHOUT azure2024_digitised.tar" in capsys.readouterr().err
    (tmp_path / "azure2024_digitised.tar.xz").write_text("1")
    assert program.main([*out, str(tmp_path / "committed")]) == 0
    assert "WITHOUT" not in capsys.readouterr().err
    [origin] = json.loads((tmp_path / "committed/toy.json").read_text())["origins"]
    assert [trace.partition(" ")[0] for trace in origin["traces"]] == ["azure2024_digitised.tar.xz"]


def test_a_failing_run_is_named_and_the_others_are_kept(toy, tmp_path, monkeypatch):
    log = logged(monkeypatch, toy, tmp_path, fails_on=1)
    with pytest.raises(
        runner.RunsFailedError, match=r"2 of 4 runs failed.*\n  rho .*, seed 1: RuntimeError: no such"
    ):
        runner.run("toy", toy, options(tmp_path))
    assert len(log.read_text().splitlines()) == 4
    with pytest.raises(runner.RunsFailedError, match="2 of 2 runs failed"):
        runner.run("toy", toy, options(tmp_path))


def test_metrics_that_are_no_numbers_fail_the_run(toy, tmp_path, monkeypatch):
    logged(monkeypatch, toy, tmp_path, breaks=True)
    with pytest.raises(runner.RunsFailedError, match="metric 'wait' is nan"):
        runner.run("toy", toy, options(tmp_path))
    for value in (True, "1", float("inf"), [1.0]):
        with pytest.raises(ExperimentError, match="give a finite number"):
            checked_metrics({"x": value})
    assert checked_metrics({"x": 3, "y": None}) == {"x": 3.0, "y": None}


def test_a_damaged_stored_run_is_refused(toy, tmp_path):
    runner.run("toy", toy, options(tmp_path))
    stored = next((tmp_path / "runs" / "toy").iterdir())
    stored.write_text("{")
    with pytest.raises(ExperimentError, match=rf"{stored.name}: not a finished run.*delete it"):
        runner.run("toy", toy, options(tmp_path))


def test_variants_are_checked(toy, tmp_path, monkeypatch):
    with pytest.raises(ExperimentError, match="no variant with 'netkv'"):
        runner.run("toy", toy, options(tmp_path, only="netkv"))
    assert list(runner.run("toy", toy, options(tmp_path, only="0.5")).runs) == ["rho 0.5"]
    monkeypatch.setattr(toy, "variants", lambda quick: [Variant("a", {}), Variant("a", {"x": 1})])
    with pytest.raises(ExperimentError, match="names two variants alike"):
        runner.run("toy", toy, options(tmp_path))
    monkeypatch.setattr(toy, "variants", lambda quick: [Variant("a", {"x": {1, 2}})])
    with pytest.raises(ExperimentError, match="plain JSON"):
        runner.run("toy", toy, options(tmp_path))
    with pytest.raises(ExperimentError, match="at least 1"):
        runner.run("toy", toy, options(tmp_path, seeds=0))


def test_a_key_depends_on_all_of_the_config_and_the_seed_but_not_on_its_order():
    base = config_key("e", {"a": 1, "b": {"c": 2}}, 0)
    assert base == config_key("e", {"b": {"c": 2}, "a": 1}, 0)
    others = [config_key("f", {"a": 1, "b": {"c": 2}}, 0), config_key("e", {"a": 1, "b": {"c": 3}}, 0)]
    assert len({base, *others, config_key("e", {"a": 1, "b": {"c": 2}}, 1)}) == 4


def test_a_stored_run_is_whole_or_not_there(tmp_path, monkeypatch):
    cache = RunCache(tmp_path, "e", Origin("code", "c", True, "m"))
    with pytest.raises(ValueError):
        cache.put({}, 0, {"x": float("nan")}, {})
    assert cache.get({}, 0) is None


def test_what_is_asked_of_results():
    runs = {
        "base": {0: {"t": 10.0, "n": None}, 1: {"t": 20.0}, 2: {"t": 5.0}},
        "ours": {0: {"t": 9.0}, 1: {"t": 16.0}},
    }
    results = Results("e", False, {"base": {"p": 1}, "ours": {"p": 2}}, runs)
    assert results.seeds == (0, 1)  # those that both have
    assert results.values("base", "t") == [10.0, 20.0]
    assert results.mean("ours", "t") == 12.5
    assert results.paired("base", "ours", "t").difference.mean == -2.5
    assert results.reduction_percent("base", "ours", "t")[0] == pytest.approx(15.0)  # of 10 % and 20 %
    assert results.where(p=2) == ["ours"]
    with pytest.raises(ExperimentError, match="no variant 'x'"):
        results.values("x", "t")
    with pytest.raises(ExperimentError, match="did not measure 'n'"):
        results.values("base", "n")


@pytest.mark.parametrize(
    ("row", "difference", "shown"),
    [
        (Row("a", 200.0, 150.0, "ms"), -25.0, ("a", "200.0 ms", "150.0 ms", "-25.0 %", "")),
        (Row("b", -18.9, -17.4, "%", 0.5), 1.5, ("b", "-18.90 %", "-17.40 ± 0.5000 %", "+1.5 points", "")),
        (Row("c", None, 1e6), None, ("c", "–", "1,000,000", "–", "")),
        (Row("d", 0.0, 1.0, "s"), None, ("d", "0.0000 s", "1.000 s", "–", "")),
        (Row("e", 2.0, None, aim=">= 9x", met=False), None, ("e", "2.000", "–", "–", ">= 9x: missed")),
    ],
)
def test_a_row_and_its_difference(row, difference, shown):
    assert row.difference == (None if difference is None else pytest.approx(difference))
    assert report.cells(row) == shown


def test_aims_are_counted_by_what_became_of_them() -> None:
    judged = [Row("", None, 1.0, aim="x", met=met) for met in (True, True, False, None)]
    assert report.aims([*judged, Row("", None, 1.0)], "") == "our own aims: 2 of 4 met, 1 missed, 1 open"
    of_paper = [replace(row, paper=1.0) for row in judged[:2]]
    assert (
        report.aims([*of_paper, judged[2]], "")
        == "papers' aims: 2 of 2 met; our own aims: 0 of 1 met, 1 missed"
    )
    assert report.aims([Row("", None, 1.0)], "") == ""


def test_an_aim_says_where_a_form_of_ours_is_held_against_a_papers_figure_and_where_it_is_not_counted() -> (
    None
):
    form = Row(
        "agent: mean CCT, MFS with Q_1 = 1 vs fair", -43.1, -50.0, "%", aim="at most -43.1 %", met=True
    )
    assert report.cells(form, "mfs_testbed")[-1] == "at most -43.1 %: met, by a form of ours"
    assert report.cells(form)[-1] == "at most -43.1 %: met"
    quiet = Row("quiet: longest over shortest mean TTFT", 0.0, 0.0, "%", aim="within 1 point", met=True)
    assert report.cells(quiet, "netkv_staleness")[-1] == "within 1 point: met, not counted"


def test_the_program_runs_stores_and_reports(toy, tmp_path, capsys):
    out = tmp_path / "out"
    assert program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "rho 0.5" in printed and "closed form: met" in printed and "papers' aims: 2 of 2 met" in printed
    stored = results_io.load(out / "toy.json")
    assert stored.command == "python -m benchmarks run toy --quick"
    whole = runner.run("toy", toy, options(out))
    assert stored.results.seeds == whole.seeds and stored.results.variants == whole.variants
    # what rows and plots read is kept, `unmeasured` is not
    for name in whole.variants:
        assert stored.results.values(name, "wait") == pytest.approx(whole.values(name, "wait"), rel=1e-8)
        assert list(stored.results.runs[name][0]) == ["wait"]
    assert [row.name for row in stored.rows] == ["rho 0.2", "rho 0.5", "longer at 0.5"]
    assert {"commit", "code", "date", "seeds"} <= set(json.loads((out / "toy.json").read_text()))
    assert str(tmp_path) not in (out / "toy.json").read_text()

    assert program.main(["report", "--results", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "data:image/png;base64," in page and "rho 0.5" in page and "aims: 2 of 2 met" in page
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert balanced(page)


def test_the_cpu_of_each_experiment_and_of_all_is_printed(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(registry.EXPERIMENTS, "twin", TOY)
    arguments = ["--quick", "--jobs", "1", "--only", "rho 0.2", "--out", str(tmp_path)]
    assert program.main(["run", "toy", "twin", *arguments]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^toy took \d+\.\d s of CPU$", printed, re.M)
    assert re.search(r"^twin took \d+\.\d s of CPU$", printed, re.M)
    assert re.search(r"^all 2 took \d+\.\d min of CPU in \d+\.\d min$", printed, re.M)
    assert program.main(["run", "toy", *arguments]) == 0
    assert "all 1" not in capsys.readouterr().out


def test_results_that_cannot_be_compared_do_not_stop_the_other_experiments(
    toy, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(registry.EXPERIMENTS, "odd", "tests_odd_experiment")
    odd = ModuleType("tests_odd_experiment")
    odd.__dict__.update({part: getattr(toy, part) for part in registry.NEEDED})
    odd.__dict__["compare"] = lambda results: results.values("rho 0.2", "unmeasured")
    monkeypatch.setitem(sys.modules, "tests_odd_experiment", odd)
    assert program.main(["run", "odd", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 1
    assert "odd cannot be compared" in capsys.readouterr().err
    assert (tmp_path / "toy.json").exists()
    assert not (tmp_path / "odd.json").exists()


def balanced(page: str) -> bool:
    """Whether every element that must be closed is."""
    open_elements: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br", "img"):
                open_elements.append(tag)

        def handle_endtag(self, tag):
            assert open_elements.pop() == tag

    reader = Reader()
    reader.feed(page)
    return open_elements == []


def test_plots_are_the_same_for_the_same_data(toy, tmp_path):
    for folder in ("a", "b"):
        program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path / folder)])
    assert (tmp_path / "a/toy/wait.png").read_bytes() == (tmp_path / "b/toy/wait.png").read_bytes()


def test_a_missing_plot_is_named_in_the_report(toy, tmp_path):
    program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path)])
    (tmp_path / "toy/wait.png").unlink()
    report.write_html(tmp_path, tmp_path / "r.html")
    assert "wait.png is missing" in (tmp_path / "r.html").read_text()


def test_the_report_takes_folders_below_and_names_what_is_no_result(toy, tmp_path, capsys):
    program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path / "below")])
    (tmp_path / "other.json").write_text("[1]")
    assert program.main(["report", "--results", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "1 experiments written" in out and f"left out: {tmp_path}/other.json" in err
    assert "data:image/png" in (tmp_path / "report.html").read_text()
    (tmp_path / "torn.json").write_text('{"format": 1')
    assert program.main(["report", "--results", str(tmp_path)]) == 2
    assert "torn.json: not a results file" in capsys.readouterr().err


def test_rows_and_plots_are_made_anew_from_the_stored_measures(toy, tmp_path):
    program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path)])
    drawn, stored = (tmp_path / "toy/wait.png").read_bytes(), results_io.load(tmp_path / "toy.json")
    (tmp_path / "toy/wait.png").unlink()
    changed = replace(stored, rows=())
    changed.results.read.update((name, "wait") for name in changed.results.variants)
    results_io.save(tmp_path, changed)
    assert program.main(["remake", "--results", str(tmp_path)]) == 0
    again = results_io.load(tmp_path / "toy.json")
    assert (tmp_path / "toy/wait.png").read_bytes() == drawn
    assert [(row.name, row.ours) for row in again.rows] == [(row.name, row.ours) for row in stored.rows]
    assert (again.commit, again.date, again.code) == (stored.commit, stored.date, stored.code)


def test_rows_are_of_the_measures_that_the_file_keeps(toy, tmp_path, monkeypatch):
    """Two runs differ by less than a file keeps of them, so a row of their difference is 0."""
    monkeypatch.setattr(toy, "run_one", lambda config, seed: {"wait": 1.0 + config["rho"] * 1e-12})
    monkeypatch.setattr(
        toy,
        "compare",
        lambda results: [
            Row("difference", 0.0, results.mean("rho 0.5", "wait") - results.mean("rho 0.2", "wait"), "")
        ],
    )
    program.main(["run", "toy", "--quick", "--jobs", "1", "--out", str(tmp_path)])
    assert [row.ours for row in results_io.load(tmp_path / "toy.json").rows] == [0.0]


def test_a_file_of_the_older_format_is_reduced(toy, tmp_path):
    runs = {"0": {"wait": 0.25, "unmeasured": None, "other": 3.0}}
    whole = {
        "format": 1, "experiment": "toy", "summary": "s", "quick": True, "seeds": [0], "commit": "c", "code": "d",
        "command": "e", "date": "f", "rows": [], "plots": ["wait.png", "wait.svg"],
        "variants": {v.name: {"config": v.config, "runs": runs} for v in toy.variants(True)},
    }  # fmt: skip
    (tmp_path / "toy.json").write_text(json.dumps(whole))
    assert program.main(["remake", "--results", str(tmp_path)]) == 0
    again = results_io.load(tmp_path / "toy.json")
    assert again.results.runs["rho 0.5"] == {0: {"wait": 0.25}} and again.plots == ("wait.png",)
    assert [row.ours for row in again.rows] == [0.25, 0.25, 0.0] and again.commit == "c"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "nothing"], 2, "no experiment is called 'nothing'"),
        (["run", "toy", "--jobs", "0"], 2, "at least 1"),
        (["run", "toy", "--seeds", "0"], 2, "at least 1"),
        (["report", "--results", "/nonexistent"], 2, "holds no results"),
        (["workload", "nothing"], 2, "no workload is called"),
    ],
)
def test_wrong_use_says_what_to_do(toy, capsys, arguments, code, message):
    assert program.main(arguments) == code
    assert message in capsys.readouterr().err


def test_only_some_variants_give_metrics_and_no_comparison(toy, tmp_path, capsys):
    assert (
        program.main(["run", "toy", "--quick", "--jobs", "1", "--only", "0.2", "--out", str(tmp_path)]) == 0
    )
    assert "rho 0.2, seed 1: wait 0." in capsys.readouterr().out
    assert not (tmp_path / "toy.json").exists()


def test_failed_runs_give_another_exit_code(toy, tmp_path, monkeypatch, capsys):
    logged(monkeypatch, toy, tmp_path, fails_on=0)
    assert program.main(["run", "toy", "--jobs", "1", "--out", str(tmp_path)]) == 1
    assert "RuntimeError" in capsys.readouterr().err


def test_list_names_experiments_and_workloads(toy, capsys):
    assert program.main(["list"]) == 0
    printed = capsys.readouterr().out
    assert toy.SUMMARY in printed and "synthetic-chat" in printed


def test_a_workload_is_described(capsys):
    assert program.main(["workload", "synthetic-chat", "--requests", "300"]) == 0
    assert re.search(r"requests +300\.0", capsys.readouterr().out)


def test_rows_made_with_numpy_are_stored_as_plain_numbers(tmp_path):
    row = Row("a", 2.0, np.float32(1.5), half_width=np.float64(0.25), met=np.bool_(True))
    results = Results("e", False, {"v": {}}, {"v": {0: {"x": 1.0}}})
    path = results_io.save(tmp_path, Stored.now(results, "", [row], [], "code", "command"))
    assert results_io.load(path).rows == (Row("a", 2.0, 1.5, half_width=0.25, met=True),)
    assert json.loads(path.read_text())["rows"][0]["difference"] == -25.0


def test_results_of_another_format_are_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{", '{"format": 99}', "[]"):
        path.write_text(text)
        with pytest.raises(ExperimentError, match=r"x\.json: not a results file"):
            results_io.load(path)


def test_every_registered_experiment_has_its_parts():
    for name in registry.EXPERIMENTS:
        experiment = registry.load(name)
        assert experiment.SUMMARY
        made = experiment.variants(True)
        assert len({v.name for v in made}) == len(made) > 0
        for variant in made:
            config_key(name, variant.config, 0)


def test_a_module_that_lacks_a_part_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "tests_half_experiment", ModuleType("tests_half_experiment"))
    with pytest.raises(ExperimentError, match="lacks SUMMARY, variants"):
        registry.load_module("tests_half_experiment")
