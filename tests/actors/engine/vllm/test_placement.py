"""The device of an engine and what starts its workers, by the GPUs of its replica and of its placement group."""

from typing import Any

import pytest

from actors.engine.vllm.placement import placed

ONE_EACH = (0, 1, 1, 1, 1)
"""A bundle for the replica, and four of one GPU."""


@pytest.mark.parametrize(
    ("options", "gpus", "bundles", "device", "executor"),
    [
        # without GPUs an engine computes on the CPU, whatever the machine has
        ({}, 0, (), "cpu", None),
        ({"device": "auto"}, 0, (0, 0), "cpu", None),
        ({"device": "cpu"}, 0, (), "cpu", None),
        ({"tensor_parallel_size": 2}, 0, (0,), "cpu", "mp"),
        # one rank, on a part of a GPU, on one, or on one of a bundle
        ({}, 0.5, (), "cuda", None),
        ({"device": "cuda"}, 1, (), "cuda", None),
        ({}, 1, (1, 0), "cuda", None),
        # several ranks on one node: in processes of the replica, also in a placement group
        ({"tensor_parallel_size": 2}, 2, (), "cuda", "mp"),
        ({"tensor_parallel_size": 2}, 2, (2,), "cuda", "mp"),
        ({"data_parallel_size": 4}, 4, (4,), "cuda", "mp"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, 4, (), "cuda", "mp"),
        ({"engine_args": {"pipeline_parallel_size": 2}}, 2, (), "cuda", "mp"),
        # several ranks in bundles of one GPU: by Ray, which places them
        ({"tensor_parallel_size": 4}, 0, ONE_EACH, "cuda", "ray"),
        ({"tensor_parallel_size": 2, "engine_args": {"pipeline_parallel_size": 2}}, 0, ONE_EACH, "cuda", "ray"),
    ],
)  # fmt: skip
def test_device_and_executor_follow_from_the_gpus(
    options: dict[str, Any], gpus: float, bundles: tuple[float, ...], device: str, executor: str | None
) -> None:
    made = placed(options, gpus, bundles)
    assert made["device"] == device
    assert made.get("engine_args", {}).get("distributed_executor_backend") == executor
    # nothing else has changed, and nothing of what was given
    kept = {name: value for name, value in made.items() if name not in ("device", "engine_args")}
    assert kept == {name: value for name, value in options.items() if name not in ("device", "engine_args")}
    assert options.get("engine_args", {}).items() <= made.get("engine_args", {}).items()
    assert "distributed_executor_backend" not in options.get("engine_args", {})


@pytest.mark.parametrize(
    "given",
    [{"distributed_executor_backend": "ray"}, {"nnodes": 2}, {"data_parallel_backend": "ray"}],
    ids=lambda given: next(iter(given)),
)
def test_who_says_how_ranks_are_spread_decides_it(given: dict[str, Any]) -> None:
    options = {"tensor_parallel_size": 8, "engine_args": given}
    assert placed(options, 2, (2,)) == {**options, "device": "cuda"}


@pytest.mark.parametrize(
    ("options", "gpus", "bundles", "message"),
    [
        ({"device": "cuda"}, 0, (), r"num_gpus is 0, but options\.device is cuda: set the GPUs"),
        ({"device": "cpu"}, 1, (), r"options\.device is cpu, but Ray reserves GPUs"),
        ({"device": "cpu"}, 0, (0, 1), r"options\.device is cpu, but Ray reserves GPUs"),
        ({}, 0, (0, 1), "num_gpus is 0, but an engine of one rank computes in its replica"),
        ({"tensor_parallel_size": 4}, 2, (), "num_gpus is 2, but an engine has 4 ranks .* set num_gpus: 4"),
        # the replica would hold a GPU that Ray's workers wait for
        ({"tensor_parallel_size": 4}, 1, (1, 1, 1, 1), "num_gpus is 1, but an engine has 4 ranks"),
        # vLLM's Ray workers take no bundle of several GPUs
        ({"tensor_parallel_size": 4}, 0, (0, 2, 2), "4 placement_group_bundles with GPU: 1 each"),
        ({"tensor_parallel_size": 4}, 0, (0, 1, 1), "num_gpus is 0, but an engine has 4 ranks"),
        ({"data_parallel_size": 4}, 0, ONE_EACH, "num_gpus is 0, but an engine has 4 ranks"),
        ({"engine_args": {"pipeline_parallel_size": "2"}}, 2, (), r"pipeline_parallel_size is '2': it must be"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_the_gpus_are_refused_with_what_to_do(
    options: dict[str, Any], gpus: float, bundles: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        placed(options, gpus, bundles)
