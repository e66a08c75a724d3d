"""The device on which the tests on real vLLM engines run, and the one real application that many of them share.

`SLUICE_TEST_DEVICE=cuda pytest ...` starts all engines of a test on the first GPU, each with a fraction of it. Whatever
differs by device is here.

The application of the live and chaos tests is 1 prefill + 1 decode vLLM engine behind Ray Serve: deploy/cpu.yaml with
short leases, and reads held for half a second so that requests can be met in their transfer. The prefill policy looks
at prefix hits, so the index is fed and asked, though with one prefill engine it has no choice.
"""

import math
import os
from typing import Any

import pytest

from actors.engine.cores import divide_cores, usable_cores
from app.models import resolve

DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "cpu")
"""Where the engines of all tests run: "cpu", or "cuda" for the first GPU."""

ON_CPU = {"cpu": True, "cuda": False}[DEVICE]

DTYPE = os.environ.get("SLUICE_TEST_DTYPE", "float32" if ON_CPU else "bfloat16")
"""The dtype in which the vLLM engines of all tests compute; `SLUICE_TEST_DTYPE=bfloat16 pytest ...` tries the other."""

NEAR_TIE = {"float32": 0.01, "bfloat16": 0.15}[DTYPE]
"""Nats between two candidates that count as a tie: sums differ by batch shape, in bfloat16 by up to this much.

ASSUMPTION: about ten times what `pytest -s tests/live/test_app_vllm.py` printed where two texts parted, on CPUs.
"""

VALUE_BYTES = {"float32": 4, "bfloat16": 2}[DTYPE]
KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * VALUE_BYTES
"""Of SmolLM2-135M: 30 layers, K and V, 3 KV heads of 64 values."""

APP_BLOCK = 128 if ON_CPU else 16
"""Tokens of a KV block where nobody sets them, as in the application: vLLM's choice (`check_and_update_config` of
`vllm.platforms.cpu`; `CacheConfig.DEFAULT_BLOCK_SIZE`, which FlashAttention takes as it is)."""

BLOCK = 128
"""Tokens of a KV block of engines without an application, on either device."""

CORE_PROCESSES = 2 if ON_CPU else 1
"""Processes of an engine beside its owner: on a GPU the core itself computes (vLLM's `UniProcExecutor`)."""

COMPUTING = "Worker" if ON_CPU else "EngineCore"
"""Word in the title of the process that computes, and lends and reads KV."""

TCP = "tcp,self" if ON_CPU else "tcp,self,cuda_copy"
"""UCX_TLS of engines whose KV goes over TCP. Without `cuda_copy` UCX cannot reach the memory of a GPU."""

MODEL = "smollm2-135m-instruct"
LEASE_S = 12
SLOTS = 16
MAX_MODEL_LEN = 2304

on_a_slow_device = pytest.mark.skipif(not ON_CPU, reason="a GPU has computed the prompt by then")


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Returns the mark of tests that make no sense on a GPU, or cannot run there."""
    return pytest.mark.skipif(not ON_CPU, reason=reason)


def engine(core: int, **options: Any) -> dict[str, Any]:
    """The configuration of one of two engines without an application; `core` is 0 or 1."""
    return {
        "model": str(resolve(MODEL)), "served_name": "small", "device": DEVICE, "dtype": DTYPE, "kv_space_gib": 0.25,
        "slots": 4, "max_model_len": 1536, "lease_s": LEASE_S, "block_size_tokens": BLOCK,
        "cores": divide_cores(usable_cores(), 2)[core], **options,
    }  # fmt: skip


def place(args: dict[str, Any]) -> None:
    """Changes an application's args in place: on a GPU, all its engines share the first one in equal parts."""
    if ON_CPU:
        return
    engines = sum(
        group.get("scaling", {}).get("max") or group.get("replicas", 1) for group in args["engines"]
    )
    for group in args["engines"]:
        # Ray knows four decimals
        group["num_gpus"] = math.floor(1e4 / engines) / 1e4
        group["options"] = {"kv_space_gib": 1, **group.get("options", {}), "device": DEVICE}


def chaos_config(args: dict[str, Any]) -> None:
    """Changes the application's args in place."""
    for group in args["engines"]:
        group["options"] |= {
            "dtype": DTYPE,
            "slots": SLOTS,
            "lease_s": LEASE_S,
            "max_model_len": MAX_MODEL_LEN,
        }
        group["options"]["connector_args"] = {"hold_reads_s": 0.5}
    args["router"] = {"dispatch": {"lease_margin_s": 4.0}, "prefill": {"name": "locality"}}
    place(args)
