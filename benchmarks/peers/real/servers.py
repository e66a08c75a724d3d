"""Starts vllm-router between two servers of vLLM's own, a prefill and a decode engine, and ends all three together.

    python -m benchmarks.peers.real.servers --program PATH --model DIR --options '{"slots": 16, ...}' --port 8030 \\
        --prefill-port 8031 --decode-port 8032 --metrics-port 8033 --side-channels 8034 8035

The servers are up before the router starts (`benchmarks.peers.launch`, whose options of the router these are).
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.live.targets import EngineOptions
from benchmarks.peers.launch import Servers, router_argv
from benchmarks.peers.real.sides import START_S, cores, engine_environment, server_argv


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGINT or SIGTERM, or until one of the three has ended; returns 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.real.servers", description=__doc__)
    parser.add_argument("--program", required=True, help="path of vllm-router")
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--options", type=json.loads, required=True, help="EngineOptions as JSON")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill-port", type=int, required=True)
    parser.add_argument("--decode-port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument(
        "--side-channels", type=int, nargs=2, required=True, help="ports of NIXL's handshakes"
    )
    args = parser.parse_args(argv)
    ports, options = (args.prefill_port, args.decode_port), EngineOptions(**args.options)
    with Servers() as servers:
        for role, port, bound, channel in zip(
            ("kv_producer", "kv_consumer"), ports, cores(), args.side_channels, strict=True
        ):
            environment = engine_environment(options, bound) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel)}
            argv_of_server = server_argv(options, args.model, port, role)
            servers.started.append(subprocess.Popen(argv_of_server, env=os.environ | environment))
        servers.wait(ports, START_S)
        argv_of_router = router_argv(args.program, args.port, *ports, args.metrics_port)
        servers.started.append(subprocess.Popen(argv_of_router))
        servers.watch()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
