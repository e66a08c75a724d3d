"""Set-up compiles the hot path, and compiled modules are used only where the sources are those that were compiled.

A small project with two modules is compiled by the real compilers. Fresh interpreters without the module `site`, which
know nothing of this environment's own compiled modules, import from it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actors.code_form import code_form
from actors.wire import channel
from scripts.compiled import build, finder

HOT = "policies.hot"
SOURCES = {
    "policies/__init__.py": "",
    "policies/hot.py": "from policies.other import STEP\n\n\ndef twice(x: int) -> int:\n    return x * 2 + STEP\n",
    "policies/other.py": "STEP = 1\n",
    "policies/apart.py": "",
}
SAY = "from policies import hot; print(type(hot.__loader__).__name__, hot.twice(20))"
COMPILED, PURE = "ExtensionFileLoader 41\n", "SourceFileLoader 41\n"

needs_compiler = pytest.mark.skipif(build.missing() is not None, reason=f"{build.missing()}")


class Project:
    """A checkout and an environment that has its compiled modules."""

    def __init__(self, folder: Path) -> None:
        self.root, self.site = folder / "checkout", folder / "site"
        self.place = build.Place(self.site)

    def update(self) -> str:
        """Does what set-up does, and returns its note."""
        build.update(self.place, [HOT], self.root)
        return self.place.note()

    def run(self, *, root: Path | None = None, pure: str = "", code: str = SAY) -> tuple[str, str]:
        """Returns what a fresh interpreter with the environment prints, and its standard error."""
        start = f"import site, sys; sys.path[:0] = [{str(root or self.root)!r}]; site.addsitedir({str(self.site)!r})"
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"{start}; {code}"],
            env={finder.PURE: pure, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        path.write_text(path.read_text().replace(old, new))


def write(folder: Path) -> Project:
    project = Project(folder)
    project.site.mkdir()
    for name, text in SOURCES.items():
        (project.root / name).parent.mkdir(parents=True, exist_ok=True)
        (project.root / name).write_text(text)
    return project


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a project that was compiled once."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(finder.PURE, raising=False)
        assert write(folder).update() == ""
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of the compiled project, which the test may change."""
    monkeypatch.delenv(finder.PURE, raising=False)
    return Project(Path(shutil.copytree(made, tmp_path / "project")))


@needs_compiler
def test_unchanged_sources_run_compiled(project: Project) -> None:
    assert project.run() == (COMPILED, "")


@needs_compiler
def test_a_copy_of_the_sources_runs_compiled_too(project: Project, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(project.root, tmp_path / "copy"))
    assert project.run(root=copy) == (COMPILED, "")


@needs_compiler
@pytest.mark.parametrize(
    ("file", "old", "new", "result"),
    [
        ("policies/hot.py", "* 2", "* 3", "61"),  # 20 x 3 + 1
        # the compiler reads what a module imports, too: 20 x 2 + 5
        ("policies/other.py", "1", "5", "45"),
        ("policies/hot.py", "\n\n\n", "\n\n\n\n", "41"),
    ],
)
def test_an_edited_source_runs_as_it_is_and_is_named(
    project: Project, file: str, old: str, new: str, result: str
) -> None:
    project.edit(file, old, new)
    printed, said = project.run()
    assert printed == f"SourceFileLoader {result}\n"
    assert said.startswith(f"sluice: {file} has changed since it was compiled")
    assert said.count("\n") == 1


@needs_compiler
def test_a_file_that_no_compiled_module_imports_does_not_count(project: Project) -> None:
    project.edit("policies/apart.py", "", "X = 1\n")
    assert project.run() == (COMPILED, "")


@needs_compiler
def test_a_checkout_without_one_of_the_sources_runs_pure(project: Project) -> None:
    project.edit("policies/hot.py", "from policies.other import STEP", "STEP = 1")
    (project.root / "policies" / "other.py").unlink()
    assert project.run()[0] == PURE


@needs_compiler
def test_the_variable_turns_compiled_modules_off(project: Project) -> None:
    assert project.run(pure="1") == (PURE, "")
    assert project.run(pure="0") == (COMPILED, "")


@needs_compiler
def test_setup_compiles_an_edited_source_and_finds_the_former_state_again(project: Project) -> None:
    first = project.place.manifest()["at"]
    project.edit("policies/hot.py", "* 2", "* 4")
    assert project.update() == ""
    assert project.run() == ("ExtensionFileLoader 81\n", "")  # 20 x 4 + 1
    second = project.place.manifest()["at"]
    library = next((project.place.folder / first).glob(f"{finder.LIBRARY}*"))
    written = library.stat().st_mtime_ns
    project.edit("policies/hot.py", "* 4", "* 2")
    assert project.update() == ""
    assert project.run() == (COMPILED, "")
    assert (project.place.manifest()["at"], library.stat().st_mtime_ns) == (first, written)
    assert second != first


@needs_compiler
def test_pure_setup_holds_until_the_next_setup(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(finder.PURE, "1")
    assert project.update() == "pure Python runs, because SLUICE_PURE asks for it"
    assert project.run() == (PURE, "")
    monkeypatch.delenv(finder.PURE)
    assert project.update() == ""
    assert project.run() == (COMPILED, "")


@needs_compiler
def test_sources_that_cannot_be_compiled_run_pure(project: Project) -> None:
    project.edit("policies/hot.py", "x * 2", "''")
    assert project.update().startswith("compiling failed, so pure Python runs")
    assert "Unsupported operand types" in (project.place.folder / build.LOG).read_text()
    printed, said = project.run(code="from policies import hot; print(type(hot.__loader__).__name__)")
    assert (printed, said) == ("SourceFileLoader\n", "")
    assert project.place.is_current(build.recipe([HOT]), project.root)  # the next set-up does not try again


def test_without_a_compiler_pure_python_runs_and_the_note_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(finder.PURE, raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    project = write(tmp_path)
    note = project.update()
    assert note.startswith("no C compiler was found, so pure Python runs")
    assert "apt-get install gcc python3-dev" in note
    assert project.run() == (PURE, "")


def test_modules_that_are_to_be_compiled_exist_and_stand_once() -> None:
    names = build.modules()
    assert len(set(names)) == len(names) > 0
    assert [name for name in names if not (build.ROOT / f"{name.replace('.', '/')}.py").is_file()] == []
    assert {name.partition(".")[0] for name in names} <= finder.PACKAGES


def test_this_environment_runs_what_setup_could_compile() -> None:
    if finder.pure_wanted() or build.missing() is not None:
        assert code_form(channel) == "pure Python"
    else:
        assert code_form(channel) == "compiled", build.Place(build.SITE).note() or "run `make setup`"
