"""The page about a request's life is what the table says."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "document_life.py"


def test_the_committed_page_is_the_tables() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text() == script["page"](), "run python scripts/document_life.py"
