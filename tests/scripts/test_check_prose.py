"""The check of sentences: each pattern is found, good sentences pass, and only tracked files are read."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_prose.py"
spec = importlib.util.spec_from_file_location("check_prose", SCRIPT)
assert spec is not None
assert spec.loader is not None
check_prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_prose)


def messages(folder: Path, name: str, text: str) -> list[tuple[int, str]]:
    """Line and message of each finding in a file with this text."""
    (folder / name).write_text(text)
    return [(finding.line, finding.message) for finding in check_prose.check(folder / name)]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('"""The same on each of the rows."""\n', 1, "opens with `The same`"),
        ('x = 1\ndef f():\n    """What may still be placed."""\n', 3, "opens with `What`"),
        ('class C:\n    a: int = 1\n    """Those that come in."""\n', 3, "opens with `Those`"),
        ('"""By id."""\n', 1, "opens with `By id`"),
        ('"""Workers by identifier"""\n', 1, "does not end as a sentence does"),
        ('"""   """\n', 1, "the docstring is empty"),
        ('"""Engines wait so long."""\n', 1, "`so long`"),
        ("x = 1  # at most so many rows\n", 1, "`so many`"),
        ("# A connection stays for ever.\nx = 1\n", 1, "`for ever`"),
        ("x = 1  # this comment is clearly longer than forty characters\n", 1, "put it above the line"),
        ("x = 0.3  # tried\n", 1, "needs its source"),
    ],
)
def test_each_pattern_is_found_at_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    [(at, message)] = messages(tmp_path, "module.py", text)
    assert at == line
    assert says in message


@pytest.mark.parametrize(
    "text",
    [
        '"""Workers that may decode, by identifier."""\n',
        '"""It\'s fine to open with a contraction."""\n',
        '"""A first sentence.\n\nA list without a full stop:\n- one"""\n',
        '"""The wait is as long as it must be, and so long as a lease stands."""\n',
        "x = 1  # short enough\n",
        "# A comment above its line may be as long as the line allows, here some eighty characters.\nx = 1\n",
        "x = f()  # type: ignore[misc]  # Serve awaits it, and mypy knows nothing of that\n",
        'x = "what # stands in a string is no comment, however long it is, so many words"\n',
        "def f():\n    return 1\n",
    ],
)
def test_good_text_passes(tmp_path: Path, text: str) -> None:
    assert messages(tmp_path, "module.py", text) == []


def test_documents_are_checked_for_phrases_line_by_line(tmp_path: Path) -> None:
    found = messages(tmp_path, "page.md", "# Title\n\nWhat stands here may open so.\nIt waits for ever.\n")
    assert [line for line, _ in found] == [4]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a bad tracked module and a bad file that git does not know."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "bad.py").write_text('"""By id."""\n')
    (tmp_path / "untracked.py").write_text('"""By id."""\n')
    for command in (["git", "init", "--quiet"], ["git", "add", "room"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path


def test_findings_of_tracked_files_fail_the_command(repository: Path) -> None:
    done = run(repository)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "room/bad.py:1: the docstring opens with `By id`: name the noun it is about",
        "1 findings",
    ]


def test_a_clean_tree_and_a_count_by_folder(repository: Path) -> None:
    assert run(repository, "--count").stdout.splitlines() == ["     1 room/bad.py", "1 findings"]
    (repository / "room" / "bad.py").write_text('"""Workers by identifier."""\n')
    clean = run(repository)
    assert (clean.returncode, clean.stdout) == (0, "0 findings\n")
