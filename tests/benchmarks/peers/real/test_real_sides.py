"""The commands of the sides on real engines: the same engines everywhere."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from benchmarks.live.targets import MODEL
from benchmarks.peers.real import ray_llm
from benchmarks.peers.real.sides import (
    OPTIONS,
    RAY,
    ROUTER,
    SIDES,
    SLUICE,
    command_of,
    cores,
    kv_transfer,
    server_argv,
)


def test_all_sides_have_the_same_engines(tmp_path: Path) -> None:
    command_of(SLUICE, tmp_path, "/m", None, None)
    [file] = tmp_path.glob("*.yaml")
    ours = yaml.safe_load(file.read_text())["applications"][0]["args"]["engines"]
    assert [(one["role"], one["options"]) for one in ours] == [
        ("prefill", asdict(OPTIONS)),
        ("decode", asdict(OPTIONS)),
    ]
    theirs = ray_llm.engine("/m", "kv_producer", "0", 1, asdict(OPTIONS))
    options = theirs["engine_kwargs"]
    assert (options["dtype"], options["max_num_seqs"], options["max_model_len"]) == ("float32", 16, 2048)
    assert options["kv_cache_memory_bytes"] == 2**30
    argv = server_argv(OPTIONS, "/m", 1, "kv_consumer")
    for name, value in (
        ("--dtype", "float32"),
        ("--max-num-seqs", "16"),
        ("--max-model-len", "2048"),
        ("--kv-cache-memory-bytes", str(2**30)),
    ):
        assert argv[argv.index(name) + 1] == value
    assert json.loads(argv[argv.index("--kv-transfer-config") + 1]) == kv_transfer("kv_consumer")
    assert theirs["model_loading_config"] == {"model_id": MODEL, "model_source": "/m"}
    assert argv[argv.index("--served-model-name") + 1] == MODEL


def test_each_engine_has_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6, 9, 11})
    assert cores() == ("3,5", "6,9,11")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4})
    assert cores() == ("4", "4")


@pytest.mark.parametrize("side", [ROUTER, RAY])
def test_a_peer_that_is_not_installed_is_named(side: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=side):
        command_of(side, tmp_path, "/m", None, None)


def test_the_ports_of_a_side_are_its_own(tmp_path: Path) -> None:
    made = [command_of(side, tmp_path, "/m", Path("/r"), Path("/p")) for side in SIDES]
    assert all(len(set(one.all_ports)) == len(one.all_ports) for one in made)
