"""The options of an engine that follow from the GPUs that Ray reserves for its replica.

An engine would otherwise find these facts out by looking around in its replica's process, and what it finds there
misleads it. Without GPUs of its own the replica still sees all GPUs of the node, because Ray sets no
`CUDA_VISIBLE_DEVICES` for zero GPUs (`set_visible_accelerator_ids` in `ray/_private/utils.py`), so the engine would
take the first one. In a placement group vLLM starts the workers of several ranks by Ray
(`ParallelConfig.__post_init__`), which refuses a bundle of more than one GPU, and which waits for a GPU that the
replica itself holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

EXECUTOR = "distributed_executor_backend"
"""vLLM's argument that says what starts the workers of an engine: `mp` (processes of this node) or `ray`."""

CHOICES = (EXECUTOR, "data_parallel_backend", "nnodes")
"""Arguments of vLLM that say how the ranks of an engine are spread. Where the user gives one, the user decides."""

SIZES = ("pipeline_parallel_size", "prefill_context_parallel_size")
"""Arguments of vLLM that multiply the ranks of an engine, beside the tensor parallel size."""


def placed(options: Mapping[str, Any], gpus: float, bundles: Sequence[float]) -> dict[str, Any]:
    """Returns the options with the device, and with what starts the workers of several ranks.

    Ray reserves `gpus` GPUs for the replica itself, and `bundles` are the GPUs of each bundle of its placement group,
    of which the first contains `gpus`; there are none without a placement group. Raises ValueError that begins with the
    group's key where the options do not fit the GPUs.
    """
    device = options.get("device", "auto")
    reserved = bool(gpus or any(bundles))
    if device == "cuda" and not reserved:
        raise ValueError(
            "num_gpus is 0, but options.device is cuda: set the GPUs of one replica (0.5 is half of one), so that Ray"
            " gives each replica its own"
        )
    if device == "cpu" and reserved:
        raise ValueError(
            f"options.device is cpu, but Ray reserves GPUs for each replica (num_gpus is {gpus:g}): take the GPUs or"
            " the device out"
        )
    made = {**options, "device": "cuda" if reserved else "cpu"}
    arguments = options.get("engine_args", {})
    if any(name in arguments for name in CHOICES):
        return made
    if reserved:
        executor = _executor(options, arguments, gpus, bundles)
    else:
        executor = "mp" if _ranks(options, arguments) > 1 else None
    return made if executor is None else {**made, "engine_args": {**arguments, EXECUTOR: executor}}


def _executor(
    options: Mapping[str, Any], arguments: Mapping[str, Any], gpus: float, bundles: Sequence[float]
) -> str | None:
    """Returns what starts the workers on GPUs, None for a single rank. Raises ValueError where no way has the GPUs."""
    ranks = _ranks(options, arguments)
    if ranks == 1 and gpus:
        return None
    if gpus >= ranks:
        return "mp"
    one_each = all(amount in (0, 1) for amount in bundles) and sum(bundles) >= ranks
    if ranks > 1 and one_each and not gpus and options.get("data_parallel_size", 1) == 1:
        return "ray"
    if ranks == 1:
        raise ValueError(
            "num_gpus is 0, but an engine of one rank computes in its replica, which has none of the GPUs of"
            " placement_group_bundles: set num_gpus: 1"
        )
    raise ValueError(
        f"num_gpus is {gpus:g}, but an engine has {ranks} ranks (options.tensor_parallel_size and the like), each with"
        f" a GPU: set num_gpus: {ranks} if these are on one node; if they are on several, num_gpus: 0 and {ranks}"
        " placement_group_bundles with GPU: 1 each, and data_parallel_size: 1"
    )


def _ranks(options: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """Returns the number of workers of one engine. Raises ValueError for a size that is no whole number above 0."""
    ranks = options.get("tensor_parallel_size", 1) * options.get("data_parallel_size", 1)
    for name in SIZES:
        size = arguments.get(name, 1)
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"options.engine_args.{name} is {size!r}: it must be a whole number of at least 1"
            )
        ranks *= size
    return int(ranks)
