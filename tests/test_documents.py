"""The documents name files that are there."""

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


def missing(document: str, text: str) -> list[str]:
    """Links of a document and paths in backticks that lead nowhere. A path is written from the root."""
    folder = (ROOT / document).parent
    links = [link for link in LINK.findall(text) if not (folder / link).exists()]
    paths = [path for path in PATH.findall(text) if path.rstrip("/") not in TRACKED | FOLDERS]
    return links + paths


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    assert missing(document, (ROOT / document).read_text()) == []


def test_what_leads_nowhere_is_found() -> None:
    text = "[a](no.md) [b](README.md#x) [c](https://x.invalid/y) `app/nothing.py` `app/serve.py` `tests/`"
    assert missing("README.md", text) == ["no.md", "app/nothing.py"]
