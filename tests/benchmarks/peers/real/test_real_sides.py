"""The commands of the sides on real engines: the same engines everywhere."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from actors.engine.vllm.plugin import NAP_ENV
from benchmarks.live.targets import MODEL
from benchmarks.peers.real import ray_llm
from benchmarks.peers.real.sides import (
    COLOCATED,
    ONE_OPTIONS,
    OPTIONS,
    RAY,
    ROUTER,
    SIDES,
    SLUICE,
    VLLM,
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


def test_one_engine_of_sluice_is_that_of_vllms_own_server(tmp_path: Path) -> None:
    ours = command_of(COLOCATED, tmp_path, "/m", None, None)
    [file] = tmp_path.glob("*.yaml")
    [engine] = yaml.safe_load(file.read_text())["applications"][0]["args"]["engines"]
    assert (engine["role"], engine["options"]) == ("colocated", asdict(ONE_OPTIONS))
    theirs = command_of(VLLM, tmp_path, "/m", None, None)
    assert (ours.name, theirs.name) == (SIDES[COLOCATED], SIDES[VLLM])
    assert theirs.argv[1:3] == ["-m", "benchmarks.peers.real.beside"]
    for name, value in (
        ("--dtype", "float32"),
        ("--max-num-seqs", "32"),
        ("--max-model-len", "2048"),
        ("--kv-cache-memory-bytes", str(2**30)),
        ("--scheduling-policy", "priority"),
        ("--port", str(theirs.port)),
    ):
        assert theirs.argv[theirs.argv.index(name) + 1] == value
    # no connector, all cores, and waits that sleep, as those of Sluice's engines do
    assert "--kv-transfer-config" not in theirs.argv
    assert theirs.env["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert theirs.env[NAP_ENV] == "1"


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
