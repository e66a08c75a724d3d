"""The file: written, read, named by a configuration; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.options import ConfigError
from app.config import AppConfig, parse
from app.profile.file import (
    SHIPPED,
    HeatmapFileError,
    load_heatmap,
    pairs_of,
    plain_data,
    read,
    shipped,
    write,
)
from app.profile.fold import fold
from app.profile.plan import Grid
from app.serve import load
from policies.routing.deepflow.heatmap import Heatmap, heatmap_from
from policies.routing.deepflow.pd_heatmap import PdHeatmap
from policies.routing.registry import prefill_policy
from tests.app.profile.test_fold import GRID, whole

OK: dict[str, Any] = {"engines": [{"name": "all", "role": "colocated", "kind": "sim"}]}


def written(folder: Path, pairs: Any = None) -> Path:
    path = folder / "map.json"
    pairs = whole() if pairs is None else pairs
    write(path, fold(GRID, pairs), pairs, {"seed": 1})
    return path


def args(heatmap: object, name: str = "pd_heatmap") -> dict[str, Any]:
    return OK | {"router": {"prefill": {"name": name, "params": {"heatmap": heatmap}}}}


def policy_of(config: AppConfig) -> PdHeatmap:
    choice = config.router.prefill
    policy = prefill_policy(choice.name, choice.params)
    assert isinstance(policy, PdHeatmap)
    return policy


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = read(path)
    assert pairs_of(data, path) == whole()
    assert heatmap_from(data["heatmap"]) == fold(GRID, whole()).heatmap
    assert data["provenance"] == {"seed": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["map.json"]


@pytest.mark.parametrize("name", ["pd_heatmap", "combined"])
def test_the_configuration_names_a_file_beside_it(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    config = parse(args("map.json", name), tmp_path)
    assert policy_of(config).heatmap == fold(GRID, whole()).heatmap
    assert isinstance(config.router.prefill.params["heatmap"], dict)  # the router's node reads no file


def test_app_serve_puts_the_heatmap_into_what_it_deploys(tmp_path: Path) -> None:
    written(tmp_path)
    schema = {
        "applications": [{"name": "sluice", "import_path": "app.graph:build", "args": args("map.json")}]
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(schema))
    deployed = load(str(tmp_path / "my.yaml"), None, None)["applications"][0]["args"]
    assert policy_of(parse(deployed, Path("/"))).heatmap == fold(GRID, whole()).heatmap


def test_plain_data_in_the_configuration_works_too() -> None:
    heatmap = Heatmap((100.0,), (1.0,), ((0.5,),))
    assert policy_of(parse(args(plain_data(heatmap)))).heatmap == heatmap


def changed(folder: Path, **changes: Any) -> None:
    path = written(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CELLS = {"prefill_tokens": [1, 2], "ratios": [1], "cells": [[0.5]], "rates": 1}


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (
            lambda folder: None,
            "there is no file .*map.json; measure one with `sluice profile heatmap --out map.json`",
        ),
        (lambda folder: (folder / "map.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "map.json").write_text("[]"), '"format" is not'),
        (lambda folder: changed(folder, format="other"), '"format" is not'),
        (lambda folder: changed(folder, heatmap=None), "no cell is measured yet"),
        (lambda folder: changed(folder, heatmap=CELLS), "cells must be 2 rows"),
        (lambda folder: changed(folder, heatmap=CELLS | {"x": 1}), "'x' is missing or unknown"),
        (lambda folder: changed(folder, heatmap=[1]), "is no table"),
    ],
)
def test_a_missing_or_malformed_file_is_refused(tmp_path: Path, prepare: Any, says: str) -> None:
    prepare(tmp_path)
    with pytest.raises(HeatmapFileError, match=says):
        load_heatmap("map.json", tmp_path)
    with pytest.raises(ConfigError, match=says):
        parse(args("map.json"), tmp_path)


def test_pairs_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    changed(tmp_path, pairs=[{"point": {}}])
    with pytest.raises(HeatmapFileError, match="--fresh"):
        pairs_of(read(tmp_path / "map.json"), tmp_path / "map.json")


def test_another_policy_does_not_take_a_heatmap(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ConfigError, match="no parameter 'heatmap'"):
        parse(args("map.json", "round_robin"), tmp_path)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_heatmap_is_measured_and_can_be_named(name: str) -> None:
    data = read(SHIPPED / f"{name}.json")
    axes = data["provenance"]["axes"]
    grid = Grid(tuple(axes["prefill_tokens"]), tuple(axes["ratios"]), tuple(axes["rates_per_s"]))
    folded = fold(grid, pairs_of(data, SHIPPED / name))
    assert folded.heatmap is not None
    # The cells follow from the measured times.
    assert data["heatmap"] == plain_data(folded.heatmap)
    assert data["marks"] == [list(row) for row in folded.marks]
    assert policy_of(parse(args(name))).heatmap == folded.heatmap


def test_a_heatmap_comes_with_sluice() -> None:
    assert {"sim-cpu_smollm2", "vllm-cpu_smollm2"} <= set(shipped())
