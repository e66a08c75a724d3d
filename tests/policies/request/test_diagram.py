"""The page about a request's life is what the table says."""

from pathlib import Path

from policies.request.diagram import page

PAGE = Path(__file__).parents[3] / "docs" / "request-life.md"


def test_the_committed_page_is_the_tables() -> None:
    assert PAGE.read_text() == page(), "python -m policies.request.diagram > docs/request-life.md"
