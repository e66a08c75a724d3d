"""The one real application that the live and chaos tests share: 1 prefill + 1 decode vLLM engine behind Ray Serve.

It is deploy/cpu.yaml with short leases, and reads held for half a second so that requests can be met in their transfer.
The prefill policy looks at prefix hits, so the index is fed and asked, though with one prefill engine it has no choice.
"""

import os
from typing import Any

DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "cpu")
"""Where the engines of tests/live/test_vllm_engines.py and test_vllm_resume.py run: `SLUICE_TEST_DEVICE=cuda
SLUICE_TEST_DTYPE=bfloat16 pytest ...` starts both on the first GPU."""

DTYPE = os.environ.get("SLUICE_TEST_DTYPE", "float32")
"""The dtype in which the vLLM engines of all tests compute; `SLUICE_TEST_DTYPE=bfloat16 pytest ...` tries the other."""

NEAR_TIE = {"float32": 0.01, "bfloat16": 0.15}[DTYPE]
"""Nats between two candidates that count as a tie: sums differ by batch shape, in bfloat16 by up to this much.

ASSUMPTION: about ten times what `pytest -s tests/live/test_app_vllm.py` printed where two texts parted.
"""

VALUE_BYTES = {"float32": 4, "bfloat16": 2}[DTYPE]
KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * VALUE_BYTES
"""Of SmolLM2-135M: 30 layers, K and V, 3 KV heads of 64 values."""

LEASE_S = 12
SLOTS = 16
MAX_MODEL_LEN = 2304


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
