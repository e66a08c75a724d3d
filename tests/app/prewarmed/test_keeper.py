"""Groups share pre-warmed processes where their engines import alike, and Ray starts their replicas by the launcher."""

import os
import shlex
import sys
from typing import Any

import pytest
from ray._private.utils import set_visible_accelerator_ids
from ray.serve._private.build_app import build_app

from app.config import parse
from app.graph import build
from app.prewarmed import launcher
from app.prewarmed.keeper import ENVIRONMENT, PrewarmedShare, prefix


def made(number: int = 1, enabled: bool = True, gpus: float = 0, **decode: Any) -> dict[str, Any]:
    """Returns the deployments of a prefill and a decode group of vLLM engines and one of sim engines. `decode` are
    options of the second, whose replicas have `gpus` GPUs.
    """
    args = {
        "model": {"path": "org/model"},
        "engines": [
            {"name": "p", "role": "prefill", "scaling": {"max": 2}},
            {
                "name": "d",
                "role": "decode",
                "num_gpus": gpus,
                "options": decode,
                "env": {"A": "1"} if decode.get("slots") else {},
            },
            {"name": "s", "role": "decode", "kind": "sim"},
        ],
        "scaling": {"enabled": enabled, "prewarmed": number},
        "wire": {"socket_dir": "/tmp/s"},
    }
    built = build_app(build(args), name="app", default_runtime_env={})
    return {one.name: one for one in built.deployments}


def python_of(deployment: Any) -> list[str] | None:
    options = deployment._replica_config.ray_actor_options
    command = options.get("runtime_env", {}).get("py_executable")
    return None if command is None else shlex.split(command)


def share_of(deployment: Any) -> PrewarmedShare | None:
    share = deployment._replica_config.init_args[5]
    assert share is None or isinstance(share, PrewarmedShare)
    return share


def test_replicas_are_started_by_the_launcher_from_one_folder_whatever_their_role() -> None:
    deployments = made()
    p, d = (share_of(deployments[name]) for name in ("PEngine", "DEngine"))
    assert p is not None
    assert d is not None
    assert p.key == d.key
    expected = [sys.executable, "-I", "-S", launcher.__file__, f"/tmp/s/pre-{p.key}"]
    assert python_of(deployments["PEngine"]) == python_of(deployments["DEngine"]) == expected
    # the autoscaler wants the keepers of this kind
    assert deployments["Autoscaler"]._replica_config.init_args[2] == (p.key,)
    assert prefix("app", p.key) != prefix("other", p.key)
    # engines of other kinds have nothing to wait with
    assert python_of(deployments["SEngine"]) is None
    assert share_of(deployments["SEngine"]) is None


@pytest.mark.parametrize(("options", "gpus"), [({"enforce_eager": False}, 0), ({}, 1), ({"slots": 4}, 0)])
def test_what_imports_read_keeps_processes_apart(options: dict[str, Any], gpus: float) -> None:
    """The second one computes on a GPU, and the last one has an environment of its own."""
    deployments = made(gpus=gpus, **options)
    p, d = (share_of(deployments[name]) for name in ("PEngine", "DEngine"))
    assert p is not None
    assert d is not None
    assert p.key != d.key
    assert len(deployments["Autoscaler"]._replica_config.init_args[2]) == 2


def test_engines_whose_cores_cannot_start_early_have_ordinary_starts() -> None:
    deployments = made(data_parallel_size=2)
    assert share_of(deployments["DEngine"]) is None
    assert python_of(deployments["DEngine"]) is None
    assert share_of(deployments["PEngine"]) is not None


@pytest.mark.parametrize(("number", "enabled"), [(0, True), (1, False)])
def test_nothing_is_pre_warmed_without_a_number_or_an_autoscaler(number: int, enabled: bool) -> None:
    deployments = made(number, enabled)
    assert python_of(deployments["PEngine"]) is None
    assert share_of(deployments["PEngine"]) is None


def test_a_keeper_hides_no_gpus_from_the_processes_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own function, in a process that has no GPU, where the node's Ray hides GPUs from such processes."""
    context = type("Context", (), {"get_accelerator_ids": lambda self: {"GPU": []}})
    monkeypatch.setattr("ray.get_runtime_context", context)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    assert set_visible_accelerator_ids() == {"CUDA_VISIBLE_DEVICES": None}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert set_visible_accelerator_ids() == {}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_more_than_a_few_are_refused() -> None:
    with pytest.raises(ValueError, match="prewarmed"):
        parse({"engines": [{"name": "d", "role": "colocated", "kind": "sim"}], "scaling": {"prewarmed": 65}})
