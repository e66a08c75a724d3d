"""The generated configurations are ones that Sluice accepts, and time what they say."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.engine.sim.config import SimEngineConfig
from actors.engine.vllm.config import VllmEngineConfig
from actors.options import from_options
from app.config import parse
from app.serve import load
from benchmarks.live import targets
from policies.engine_model.timing import TICK_1MS


def application(file: Path) -> dict[str, Any]:
    args: dict[str, Any] = yaml.safe_load(file.read_text())["applications"][0]["args"]
    return args


def test_sim(tmp_path: Path) -> None:
    timing = targets.SimTiming()
    command = targets.sim(tmp_path, timing, prefill=2, decode=3)
    load(str(tmp_path / "sim.yaml"), *command.all_ports)
    config = parse(application(tmp_path / "sim.yaml"))
    assert [(group.role, group.replicas) for group in config.engines] == [("prefill", 2), ("decode", 3)]
    for group in config.engines:
        options = {**group.options, "engine_id": "e", "role": group.role}
        profile = from_options(SimEngineConfig, options, "engines").timing_profile()
        # 10 prompt tokens: 1 ms of prefill, 0.1 ms + 230,400 bytes at 10 GB/s = 0.123 ms of transfer, 1 ms of decode
        expected_s = (
            profile.step_s(10, 0, 0) + profile.transfer_s(profile.kv_bytes(10)) + profile.step_s(0, 1, 10)
        )
        assert timing.ttft_s(10) == pytest.approx(expected_s) == pytest.approx(2.12304e-3)
        assert profile.kv_bytes_per_token == TICK_1MS.kv_bytes_per_token


def test_sim_has_the_shortest_queue_or_the_policies_that_are_the_default(tmp_path: Path) -> None:
    timing, found = targets.SimTiming(), {}
    for number, made in enumerate((targets.sim, targets.sim_defaults)):
        folder = tmp_path / str(number)
        folder.mkdir()
        name = made(folder, timing, prefill=1, decode=1).name
        (file,) = folder.iterdir()
        config = parse(application(file))
        found[name] = (config.router.prefill.name, config.router.decode.name)
    assert found == {
        "Sluice, sim engines": ("join_shortest_queue", "join_shortest_queue"),
        "Sluice, sim engines, default policies": ("join_shortest_queue", "composition"),
    }


@pytest.mark.parametrize(("disaggregated", "roles"), [(False, ["colocated"]), (True, ["prefill", "decode"])])
def test_vllm(tmp_path: Path, disaggregated: bool, roles: list[str]) -> None:
    options = targets.EngineOptions()
    targets.sluice_vllm(tmp_path, options, disaggregated=disaggregated)
    (file,) = tmp_path.iterdir()
    config = parse(application(file))
    assert [group.role for group in config.engines] == roles
    for group in config.engines:
        engine = from_options(
            VllmEngineConfig, {**group.options, "engine_id": "e", "model": "m", "role": group.role}, "e"
        )
        assert (engine.dtype, engine.slots, engine.max_model_len) == ("float32", 32, 2048)


def test_the_bare_engine_gets_the_same() -> None:
    argv = list(targets.bare_engine(targets.EngineOptions(dtype="bfloat16"), "dir").argv)
    given = dict(itertools.pairwise(argv))
    assert (given["--dtype"], given["--max-num-seqs"], given["--max-model-len"]) == ("bfloat16", "32", "2048")
    assert given["--kv-cache-memory-bytes"] == str(1 << 30)
    assert given["--model"] == "dir"


def test_ports_differ(tmp_path: Path) -> None:
    command = targets.sim(tmp_path, targets.SimTiming(), 1, 1)
    assert len(set(command.all_ports)) == 2
