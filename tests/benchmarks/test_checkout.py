"""The digest of the code that ran, and whether it is that of a commit."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.checkout import code_at, code_digest, depends_on, head, imported, is_clean, no_history


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of one commit, with a module that imports another one within a function, and a profile."""
    files = {
        "policies/__init__.py": "",
        "policies/one.py": "def f():\n    from policies import two\n    import numpy\n    return two, numpy\n",
        "policies/two.py": "",
        "policies/three.py": "import policies.one\n",
        "policies/profile.yaml": "a: 1\n",
        "docs/a.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m")
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)


def test_the_files_of_a_run_are_all_that_its_module_imports_even_late(root: Path) -> None:
    assert imported("policies.one", root) == ["policies/__init__.py", "policies/one.py", "policies/two.py"]
    assert "policies/three.py" in imported("policies.three", root)
    assert imported("numpy", root) == []


@pytest.mark.parametrize("name", ["policies/two.py", "policies/profile.yaml", "policies/new.py"])
def test_a_change_of_code_or_data_changes_the_digest_and_is_not_clean(root: Path, name: str) -> None:
    before = code_digest(["policies"], root)
    assert is_clean(["policies"], root)
    (root / name).write_text("b = 2\n")
    assert code_digest(["policies"], root) != before
    assert not is_clean(["policies"], root)


def test_documents_and_results_do_not_make_code_unclean(root: Path) -> None:
    before = code_digest(["policies"], root)
    (root / "docs/a.md").write_text("more")
    (root / "policies/__pycache__").mkdir()
    assert (code_digest(["policies"], root), is_clean(["policies"], root)) == (before, True)


def test_the_digest_can_be_computed_again_from_the_commit(root: Path) -> None:
    """Ignored files do not count, and the code may have changed since."""
    before, commit = code_digest(["policies"], root), head(root)
    (root / ".gitignore").write_text("build/")
    (root / "policies/build").mkdir()
    (root / "policies/build/one.py").write_text("")
    assert code_digest(["policies"], root) == before
    (root / "policies/one.py").write_text("")
    with code_at(commit, root) as then:
        assert then is not None
        assert code_digest(["policies"], then) == before != code_digest(["policies"], root)
        assert "policies/two.py" in imported("policies.one", then)
    assert not then.exists()
    with code_at("0123456", root) as then:
        assert then is None


def test_a_commit_that_a_fresh_clone_would_lack_is_refused(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    git(root, "checkout", "-qb", "thrown-away")
    (root / "policies/two.py").write_text("c = 3\n")
    git(root, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qam", "m")
    lost = head(root)
    with code_at(lost, root) as then:
        assert then is not None
    git(root, "checkout", "-q", "-")
    with code_at(lost, root) as then:
        assert then is None
    assert no_history(root) is None
    shallow = tmp_path_factory.mktemp("clone") / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{root}", str(shallow)], check=True)
    assert no_history(shallow) == "this is a shallow clone"
    assert no_history(shallow.parent) == "this is no git checkout"


def test_a_measurement_depends_on_its_folders_and_on_what_its_module_imports_beyond_them(root: Path) -> None:
    (root / "actors").mkdir()
    (root / "actors/live.py").write_text("import policies.one\n")
    assert depends_on("actors.live", ["policies"], root) == ["actors/live.py", "policies"]
    assert depends_on("actors.live", [], root)[:2] == ["actors/live.py", "policies/__init__.py"]


def test_outside_a_checkout_nothing_is_clean(tmp_path: Path) -> None:
    assert (head(tmp_path), is_clean(["policies"], tmp_path)) == ("unknown", False)
