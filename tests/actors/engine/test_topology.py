"""Labels that reach an engine's process by the downward API."""

from pathlib import Path

import pytest

from actors.engine.topology import labels_of_process


def test_without_anything_there_are_none() -> None:
    assert labels_of_process({}) == {}


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "labels"
    file.write_text('topology.kubernetes.io/zone="z\\"1"\n\nsluice.io/rack="r1"\nplain=x\n')
    env = {"SLUICE_NODE_LABELS_FILE": str(file), "SLUICE_NODE_LABELS": "sluice.io/rack=r2, empty=,"}
    assert labels_of_process(env) == {
        "topology.kubernetes.io/zone": 'z"1',
        "sluice.io/rack": "r2",
        "plain": "x",
    }


@pytest.mark.parametrize("text", ["rack", "=r1"])
def test_what_is_no_label_is_refused_with_the_variable(text: str) -> None:
    with pytest.raises(ValueError, match=f"SLUICE_NODE_LABELS: '{text}' is not name=value"):
        labels_of_process({"SLUICE_NODE_LABELS": text})


def test_a_missing_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SLUICE_NODE_LABELS_FILE: cannot read .*; mount it or unset it"):
        labels_of_process({"SLUICE_NODE_LABELS_FILE": str(tmp_path / "none")})
