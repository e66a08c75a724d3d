"""Serves Ray Serve LLM's P/D application on one machine, until SIGINT or SIGTERM.

    PYTHON -m benchmarks.peers.real.ray_llm --port 8040 --model DIR --options '{"slots": 16, ...}' --side-channels 1 2

PYTHON is the interpreter of `benchmarks.peers.real.environment`. The application is what `build_pd_openai_app` makes of
two configurations for CPUs; beside the engines' options nothing differs from Ray's defaults but the number of requests
that Serve lets a replica run, whose default would bound the load. Ray has its own dashboard and usage report off, as
under Sluice.
"""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from benchmarks.live.targets import MODEL, EngineOptions
from benchmarks.peers.real.sides import cores, engine_environment, kv_transfer, prepare_ray

ONGOING = 1024
"""The requests that a replica may run at once: more than there are clients."""


def engine(model: str, role: str, bound: str, channel: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns Ray's LLMConfig of one engine, as its fields."""
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": model},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"num_replicas": 1, "max_ongoing_requests": ONGOING},
        "experimental_configs": {"NIXL_SIDE_CHANNEL_PORT_BASE": channel},
        "engine_kwargs": {
            "dtype": options["dtype"],
            "max_model_len": options["max_model_len"],
            "max_num_seqs": options["slots"],
            "kv_cache_memory_bytes": options["kv_space_gib"] << 30,
            "enforce_eager": True,
            "kv_transfer_config": kv_transfer(role),
        },
        "runtime_env": {"env_vars": engine_environment(EngineOptions(**options), bound)},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.real.ray_llm", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--options", type=json.loads, required=True, help="EngineOptions as JSON")
    parser.add_argument(
        "--side-channels", type=int, nargs=2, required=True, help="ports of NIXL's handshakes"
    )
    args = parser.parse_args(argv)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    prepare_ray()
    # These import vLLM, which takes seconds, and are installed in this command's environment only.
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.llm import build_pd_openai_app

    ray.init(address="local", num_cpus=16, include_dashboard=False, _node_ip_address="127.0.0.1")
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=args.port))
    roles = ("kv_producer", "kv_consumer")
    prefill, decode = (
        engine(args.model, role, bound, channel, args.options)
        for role, bound, channel in zip(roles, cores(), args.side_channels, strict=True)
    )
    serve.run(build_pd_openai_app({"prefill_config": prefill, "decode_config": decode}))
    ended.wait()
    serve.shutdown()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
