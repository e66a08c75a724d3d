"""The commands of the sides on one GPU: the same engines everywhere, and nothing that only CPUs need."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.engine.vllm.config import DEFAULT_ENVIRONMENT, VllmEngineConfig, engine_args
from actors.options import from_options
from app.config import parse
from benchmarks.live.measure import BODIES, BODY_WORDS
from benchmarks.live.targets import MODEL, EngineOptions
from benchmarks.peers.gpu.sides import (
    CASES,
    COMPARISONS,
    ONE,
    OPTIONS,
    PD,
    ROUTER,
    SLUICE_ONE,
    SLUICE_PD,
    VLLM,
    aim_one,
    aim_pd,
    commands,
)
from benchmarks.peers.real.sides import engine_environment, kv_transfer, server_argv
from benchmarks.peers.rows import RATE, TTFT_P50


def of_sluice(folder: Path) -> Any:
    """The configuration that was written, as Sluice reads it."""
    (file,) = folder.glob("*.yaml")
    return parse(yaml.safe_load(file.read_text())["applications"][0]["args"])


@pytest.mark.parametrize(("comparison", "roles"), [(ONE, ["colocated"]), (PD, ["prefill", "decode"])])
def test_engines_of_sluice_and_of_vllm_have_the_same_arguments(
    comparison: str, roles: list[str], tmp_path: Path
) -> None:
    commands(comparison, tmp_path, "/m", Path("/r"))
    config = of_sluice(tmp_path)
    assert (config.model.path, config.model.served_name) == ("/m", MODEL)
    assert [(group.role, group.num_gpus) for group in config.engines] == [(role, 0.5) for role in roles]
    argv = server_argv(OPTIONS[comparison], "/m", 1, "kv_consumer")
    theirs = dict(itertools.pairwise(argv))
    for group in config.engines:
        options = {**group.options, "engine_id": "e", "model": "/m", "role": group.role}
        ours = engine_args(from_options(VllmEngineConfig, options, "e"), "cuda")
        for name in ("dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization",
                     "load_format", "scheduling_policy"):  # fmt: skip
            assert theirs[f"--{name.replace('_', '-')}"] == str(ours[name])
        assert not ours["enforce_eager"]
    assert "--enforce-eager" not in argv


def test_the_options_are_those_that_were_agreed() -> None:
    for options in OPTIONS.values():
        assert (options.device, options.dtype, options.slots, options.max_model_len) == (
            "cuda",
            "bfloat16",
            256,
            8192,
        )
    assert (OPTIONS[ONE].kv_space_gib, OPTIONS[PD].kv_space_gib) == (24, 12)


def test_the_sides_of_a_comparison_can_be_up_at_the_same_time(tmp_path: Path) -> None:
    for comparison, sides in ((ONE, [SLUICE_ONE, VLLM]), (PD, [SLUICE_PD, ROUTER])):
        made = commands(comparison, tmp_path, "/m", Path("/r"))
        assert list(made) == list(COMPARISONS[comparison].sides) == sides
        ports = [port for one in made.values() for port in one.all_ports]
        assert len(set(ports)) == len(ports)
        assert {one.timeout_s for one in made.values()} == {420.0}


def test_only_the_router_needs_its_program(tmp_path: Path) -> None:
    assert set(commands(ONE, tmp_path, "/m", None)) == {SLUICE_ONE, VLLM}
    with pytest.raises(ValueError, match="--program"):
        commands(PD, tmp_path, "/m", None)


def test_the_routers_servers_get_the_options(tmp_path: Path) -> None:
    given = dict(itertools.pairwise(commands(PD, tmp_path, "/m", Path("/r"))[ROUTER].argv))
    assert EngineOptions(**json.loads(given["--options"])) == OPTIONS[PD]
    assert (given["--program"], given["--model"]) == ("/r", "/m")


def test_corrections_for_cpus_stay_away_and_ucx_is_set_as_for_sluice(tmp_path: Path) -> None:
    moving, alone = engine_environment(OPTIONS[PD], "0-3"), commands(ONE, tmp_path, "/m", None)[VLLM].env
    assert DEFAULT_ENVIRONMENT["cuda"].items() <= moving.items()
    for env in (moving, alone):
        assert not any(name.startswith(("VLLM_CPU", "SLUICE", "TORCH_COMPILE")) for name in env)
    assert kv_transfer("kv_producer", "cuda") == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_buffer_device": "cuda",
    }


def test_no_prompt_comes_twice_in_a_row_and_rows_end() -> None:
    assert [(case.clients, case.tokens) for case in CASES.values()] == [
        (1, 64),
        (8, 128),
        (32, 128),
        (128, 128),
    ]
    for case in CASES.values():
        plan = case.plan(quick=False)
        assert plan.requests <= min(BODIES, BODY_WORDS // plan.prompt_words)
        assert plan.max_s <= 8.0
    assert next(iter(CASES.values())).requests == 20


def test_aims() -> None:
    for case in CASES.values():
        assert [one and one.text for one in (aim_one(case, RATE), aim_one(case, TTFT_P50))] == [
            "at least 0.98",
            "at most 1.1",
        ]
        assert [one and one.text for one in (aim_pd(case, RATE), aim_pd(case, TTFT_P50))] == [
            "at least 1.05",
            "at most 1",
        ]
        assert aim_one(case, "cpu_ms_per_token") is None


def test_options_go_through_json() -> None:
    assert EngineOptions(**json.loads(json.dumps(asdict(OPTIONS[ONE])))) == OPTIONS[ONE]
