"""The order in which tests/conftest.py puts files."""

from pathlib import Path

from tests.conftest import LONGEST


def test_the_longest_files_are_there() -> None:
    assert [name for name in LONGEST if not (Path(__file__).parent / name).is_file()] == []
