"""The boards in deploy/grafana are those that the script writes, and ask for what there is."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_prometheus import unknown

ROOT = Path(__file__).parents[2]
BOARDS = ROOT / "deploy" / "grafana" / "boards"
NAMES = ("overview", "engines", "transfers", "scaling")


def queries(name: str) -> list[tuple[str, str]]:
    """Title and expression of every query of a board's panels."""
    board: dict[str, Any] = json.loads((BOARDS / f"{name}.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def test_the_files_are_what_the_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "grafana_boards.py"))
    made = {board.name: script["built"](board) for board in script["BOARDS"]}
    assert set(made) == set(NAMES) == {file.stem for file in BOARDS.glob("*.json")}
    wrong = [name for name, text in made.items() if (BOARDS / f"{name}.json").read_text() != text]
    assert wrong == [], "run python scripts/grafana_boards.py"


@pytest.mark.parametrize("name", NAMES)
def test_panels_ask_for_what_there_is_and_lie_beside_one_another(name: str) -> None:
    assert [(title, unknown(expr)) for title, expr in queries(name) if unknown(expr)] == []
    board = json.loads((BOARDS / f"{name}.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    assert board["uid"] == f"sluice-{name}"
