"""Tests that the page about a request's life is the one that the table gives."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "document_life.py"


def test_the_committed_page_is_the_tables() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text() == script["page"](), "run python scripts/document_life.py"
