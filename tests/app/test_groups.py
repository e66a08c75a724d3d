"""The groups of a configuration: which device their engines get, and which GPUs are refused."""

from typing import Any

import pytest

from actors.engine.registry import ENGINES
from actors.options import ConfigError
from app.config import parse
from app.groups import EngineGroupConfig


def group(kind: str = "vllm", **changes: Any) -> EngineGroupConfig:
    """Returns the group `d` of a configuration with this group alone."""
    model = {"path": "org/model"}
    return parse(
        {"model": model, "engines": [{"name": "d", "role": "colocated", "kind": kind, **changes}]}
    ).engines[0]


@pytest.mark.parametrize(
    ("changes", "device", "on_cores"),
    [
        ({}, "cpu", True),
        ({"num_gpus": 0.5}, "cuda", False),
        # Ray's workers take the GPUs, and the replica has none
        (
            {"options": {"tensor_parallel_size": 2}, "placement_group_bundles": [{"CPU": 1}, {"GPU": 1}, {"GPU": 1}]},
            "cuda",
            False,
        ),
    ],
)  # fmt: skip
def test_an_engine_without_gpus_takes_none_whatever_the_machine_has(
    changes: dict[str, Any], device: str, on_cores: bool
) -> None:
    made = group(**changes)
    assert made.engine.options["device"] == device
    assert made.shares_cores == on_cores
    # what was given stays as it was
    assert "device" not in made.options


def test_one_node_s_ranks_run_in_processes_of_the_replica_in_a_placement_group_too() -> None:
    bundle: dict[str, Any] = {"placement_group_bundles": [{"CPU": 4, "GPU": 2}], "num_cpus": 4, "num_gpus": 2}
    made = group(options={"tensor_parallel_size": 2}, **bundle).engine
    assert made.options["engine_args"] == {"distributed_executor_backend": "mp"}
    chosen = {"distributed_executor_backend": "ray"}
    made = group(options={"tensor_parallel_size": 2, "engine_args": chosen}, **bundle).engine
    assert made.options["engine_args"] == chosen


def test_engines_of_other_kinds_have_no_device() -> None:
    assert group("sim", options={"slots": 4}).engine.options == {"slots": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"device": "cuda"}}, r"engines\.d\.num_gpus is 0, but options\.device is cuda"),
        ({"num_gpus": 1, "options": {"device": "cpu"}}, r"engines\.d\.options\.device is cpu"),
        ({"num_gpus": 2, "options": {"tensor_parallel_size": 4}}, r"engines\.d\.num_gpus is 2.*num_gpus: 4"),
    ],
)
def test_gpus_that_do_not_fit_the_options_are_refused_with_their_key(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        group(**changes)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_group_drains_for_longer_than_the_lease_that_its_engines_give_by_default(kind: str) -> None:
    made = group(kind)
    engine = made.engine_config("d-1", "org/model", "model")
    assert made.lease_s == engine.lease_s
    assert made.drain_s == engine.lease_s + 5.0
    assert group(kind, options={"lease_s": 12}).drain_s == 17.0
