"""The code that a live result says it measured, at both ends of the measurement."""

import json
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import pytest

from actors.code_form import code_form
from actors.wire import channel
from benchmarks import provenance
from benchmarks.checkout import Origin, code_digest, imported
from benchmarks.live import machine
from benchmarks.live.kept import Parts
from benchmarks.live.machine import at_the_end, command, facts, save

MODULES = {
    "benchmarks.live.balance": "benchmarks/loads.py",
    "benchmarks.live.composition": "benchmarks/experiments/composition_twin.py",
    "benchmarks.experiments.validate_live": "benchmarks/sim/cluster.py",
    "benchmarks.experiments.validate_live ": "benchmarks/experiments/agreement.py",
}


COMPILED = ExtensionFileLoader("channel", "channel.so")


def measured(folder: Path, **more: Any) -> dict[str, Any]:
    """The facts of a measurement of one file, beside the checkout."""
    file = folder / "code.py"
    file.write_text("1")
    found = {
        "code_of": [str(file)],
        "code": machine.origin_of([str(file)]).code,
        "commit": "abc",
        "clean": True,
    }
    return found | {"cpu": "c", "cores": 2, "python": "3", "packages": {}} | more


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of a file is its content, and the present commit is `now`."""

    def origin_of(paths: list[str]) -> Origin:
        return Origin(Path(paths[0]).read_text(), "now", True, "m")

    monkeypatch.setattr(machine, "origin_of", origin_of)
    monkeypatch.setattr("benchmarks.live.kept.code_digest", lambda paths: origin_of(paths).code)


@pytest.mark.parametrize("module", list(MODULES))
def test_the_measured_code_is_the_product_its_configuration_and_all_that_the_module_imports(
    module: str,
) -> None:
    found = facts(module.strip())
    code_of = set(found["code_of"])
    assert {
        "actors",
        "app",
        "policies",
        "predictors",
        "sluice",
        "deploy",
        "benchmarks/sim/profiles",
    } <= code_of
    beyond = [
        file for file in imported(module.strip()) if not any(file.startswith(f"{at}/") for at in code_of)
    ]
    assert set(beyond) <= code_of and MODULES[module] in code_of
    assert found["code"] == code_digest(code_of) and found["code"].startswith("v2:")


def test_the_form_of_the_hot_path_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PURE", "1")
    assert facts("benchmarks.live.balance")["hot_path"] == "pure Python"


@pytest.mark.skipif(
    code_form(channel) != "compiled", reason="pure Python runs here (SLUICE_PURE, or no compiler)"
)
def test_the_form_of_the_hot_path_is_that_of_the_compiled_modules() -> None:
    assert facts("benchmarks.live.balance")["hot_path"] == "compiled"


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        ({}, "commit abc, code v2:1; c, 2 cores; Python 3"),
        ({"hot_path": "compiled"}, "commit abc, code v2:1; c, 2 cores; Python 3; hot path compiled"),
    ],
)
def test_documents_show_the_form_of_the_hot_path_where_it_is_known(known: dict[str, str], shown: str) -> None:
    whole = {
        "machine": {"code": "v2:1", "commit": "abc", "clean": True, "cpu": "c", "cores": 2, "python": "3"}
    }
    whole["machine"] |= known
    assert provenance.shown(provenance.of_other(whole)) == shown


def test_a_result_whose_code_changed_meanwhile_is_put_aside(
    tmp_path: Path, code: None, capsys: pytest.CaptureFixture[str]
) -> None:
    facts_then, out = measured(tmp_path), tmp_path / "out/x.json"
    assert save(out, {"machine": facts_then, "rows": [1]})
    assert json.loads(out.read_text())["rows"] == [1]
    (tmp_path / "code.py").write_text("2")
    assert at_the_end(facts_then) is None
    assert not save(out, {"machine": facts_then, "rows": [2]})
    assert "the code changed" in capsys.readouterr().err
    assert json.loads(out.read_text())["rows"] == [1]
    assert json.loads((tmp_path / "out/x.json.aside").read_text())["rows"] == [2]


def test_code_that_is_committed_meanwhile_counts_as_of_the_commit(tmp_path: Path, code: None) -> None:
    found = at_the_end(measured(tmp_path, clean=False))
    assert found is not None and (found["commit"], found["clean"]) == ("now", True)
    found = at_the_end(measured(tmp_path))
    assert found is not None and found["commit"] == "abc"


def test_parts_are_taken_up_by_the_same_measurement_only(tmp_path: Path, code: None) -> None:
    then = measured(tmp_path, load_1min_before=0.5)
    parts = Parts("x", then, {"rounds": 2}, tmp_path / "kept")
    assert parts.get("0") is None
    stored = parts.put("0", {"found": (1, 2)})
    assert stored["found"] == [1, 2] and stored["load_1min_before"] == 0.5
    later = then | {"load_1min_before": 7.0}
    assert Parts("x", later, {"rounds": 2}, tmp_path / "kept").get("0") == stored
    for other, config in (
        (then, {"rounds": 3}),
        (then | {"code": "2"}, {"rounds": 2}),
        (then | {"cpu": "d"}, {"rounds": 2}),
    ):
        assert Parts("x", other, config, tmp_path / "kept").get("0") is None
    # the code changed during a part, so nobody knows which code that was
    (tmp_path / "code.py").write_text("2")
    parts.put("1", {"found": 3})
    assert Parts("x", then, {"rounds": 2}, tmp_path / "kept").get("1") is None
    parts.forget()
    assert Parts("x", then, {"rounds": 2}, tmp_path / "kept").get("0") is None


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ({"machine": {"cores": 2, "load_1min_before": 2.0}}, None),
        ({"machine": {"cores": 2, "load_1min_before": 82.44}}, "load 82.4 on 2 cores before the run"),
        # the worst of several runs, or of the parts of one that was resumed
        (
            {"runs": [{"machine": {"cores": 4, "load_1min_before": load}} for load in (9.0, 4.5)]},
            "load 9 on 4 cores before the run",
        ),
        (
            {"machine": {"cores": 2, "load_1min_before": 0.5}, "rounds": [{"load_1min_before": 6.25}]},
            "load 6.25 on 2 cores before the run",
        ),
        ({"machine": {"cores": 2}, "rounds": [{"load": 9.0}]}, None),
        ({"machine": "x86_64, 2 cores, load 9.0"}, None),
    ],
)
def test_an_overloaded_machine_is_told_from_what_the_result_keeps(
    whole: dict[str, Any], said: str | None
) -> None:
    assert machine.overload(whole) == said


@pytest.mark.parametrize(("load", "warned"), [(1e6, True), (0.0, False)])
def test_a_measurement_on_an_overloaded_machine_warns_at_its_start(
    load: float, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert facts("benchmarks.live.balance")["load_1min_before"] == load
    assert ("WARNING: load 1e+06 on " in capsys.readouterr().err) is warned


def test_the_command_is_that_of_the_process_if_no_arguments_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--traces", "/here", "--quick"])
    assert command("benchmarks.predictors", None) == "python -m benchmarks.predictors --quick"


@pytest.mark.parametrize(
    ("head", "commit", "kept"),
    [
        # a copy of the files without git
        ("unknown", "abc", {"commit": "abc", "commit_from": "told on the command line", "clean": False}),
        ("unknown", None, {"commit": "unknown", "clean": False}),
        # git knows better
        ("def", "abc", {"commit": "def", "clean": False}),
    ],
)
def test_a_commit_that_was_told_counts_only_where_there_is_no_git(
    head: str, commit: str | None, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "origin_of", lambda _paths: Origin("v2:1", head, False, "m"))
    found = facts("benchmarks.live.balance", commit=commit)
    assert {name: found[name] for name in ("commit", "commit_from", "clean") if name in found} == kept
