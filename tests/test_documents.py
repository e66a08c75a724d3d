"""The documents name files, make targets and modules that are there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
)
TRACKED = {name for name in LISTED.stdout.splitlines() if (ROOT / name).exists()}
FOLDERS = {str(parent) for name in TRACKED for parent in Path(name).parents}
DOCUMENTS = sorted(name for name in TRACKED if name.endswith(".md") and "/results/" not in name)

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
TOPS = "actors|app|benchmarks|deploy|docs|examples|policies|predictors|scripts|sluice|tests"
PATH = re.compile(rf"`((?:{TOPS})/[\w./-]*)`")

CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"\bmake ((?:[A-Z]+=\S+ |-\S+ )*)([a-z][a-z-]*)")
MODULE = re.compile(r"\bpython -m ((?:app|benchmarks|predictors|scripts)[\w.]*)")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def missing(document: str, text: str) -> list[str]:
    """Links of a document and paths in backticks that lead nowhere. A path is written from the root."""
    folder = (ROOT / document).parent
    links = [link for link in LINK.findall(text) if not (folder / link).exists()]
    paths = [path for path in PATH.findall(text) if path.rstrip("/") not in TRACKED | FOLDERS]
    return links + paths


def unknown_commands(text: str) -> list[str]:
    """Targets of `make` and modules of `python -m` that the code in a document names and that do not exist."""
    found = []
    for code in CODE.findall(text):
        found += [f"make {target}" for _, target in MAKE.findall(code) if target not in TARGETS]
        for module in MODULE.findall(code):
            path = module.rstrip(".").replace(".", "/")
            if not {f"{path}.py", f"{path}/__main__.py"} & TRACKED:
                found.append(f"python -m {module}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_are_there(document: str) -> None:
    assert unknown_commands((ROOT / document).read_text()) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    assert missing(document, (ROOT / document).read_text()) == []


def test_what_leads_nowhere_is_found() -> None:
    text = "[a](no.md) [b](README.md#x) [c](https://x.invalid/y) `app/nothing.py` `app/serve.py` `tests/`"
    assert missing("README.md", text) == ["no.md", "app/nothing.py"]


def test_an_unknown_command_is_found() -> None:
    text = """They make nothing of it. `make serve CONFIG=x PORT=1`, `make -k lint`, `make nothing`

```sh
make no-such-target      # says so
python -m benchmarks list && python -m app.models x && python -m app.nothing
```
"""
    assert unknown_commands(text) == ["make nothing", "make no-such-target", "python -m app.nothing"]


def test_every_room_of_the_pure_core_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {folder for folder in FOLDERS if re.fullmatch(r"policies/\w+", folder)}
    assert len(rooms) > 5
    assert sorted(room for room in rooms if f"`{room}/`" not in text) == []
