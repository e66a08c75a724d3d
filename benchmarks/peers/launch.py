"""Starts vllm-router with a prefill source and a decode source, and ends all three together.

    python -m benchmarks.peers.launch --program PATH --port 8030 --prefill-port 8031 --decode-port 8032 \\
        --metrics-port 8033 --step-s 0.001 --server uvicorn

The sources are up before the router starts, which otherwise looks for them twice a minute only. The router decides in
turn, the cheapest of its policies, and logs warnings only: with its default it writes several lines a request. All
other options are its own defaults.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from benchmarks.live.servers import answers, python

START_S = 20.0
"""Seconds within which the sources must answer."""
END_S = 5.0
"""Seconds that a process has to end after SIGTERM."""


def source_argv(role: str, port: int, step_s: float, server: str) -> list[str]:
    """Returns the command line of a source."""
    where = ("--port", str(port), "--step-s", str(step_s), "--server", server)
    return python("-m", "benchmarks.peers.source", role, *where)


def router_argv(program: str, port: int, prefill_port: int, decode_port: int, metrics_port: int) -> list[str]:
    """Returns the command line of vllm-router between one prefill and one decode engine."""
    return [
        program, "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation",
        "--prefill", f"http://127.0.0.1:{prefill_port}", "--decode", f"http://127.0.0.1:{decode_port}",
        "--policy", "round_robin", "--log-level", "warning", "--prometheus-port", str(metrics_port),
        "--worker-startup-check-interval", "1",
    ]  # fmt: skip


class Servers:
    """Processes that end together: a context that ends them, the last started first, at its end or at SIGTERM or
    SIGINT, which it takes for its end.
    """

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Servers":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for one in reversed(self.started):
            one.terminate()
        for one in reversed(self.started):
            try:
                one.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        return kind is not None and issubclass(kind, KeyboardInterrupt)

    def wait(self, ports: Sequence[int], limit_s: float) -> None:
        """Waits until all of these ports answer. Raises TimeoutError or RuntimeError."""
        end_s = time.monotonic() + limit_s
        while not all(answers(port, "/health") for port in ports):
            if any(one.poll() is not None for one in self.started):
                raise RuntimeError("a server has ended before it answered")
            if time.monotonic() > end_s:
                raise TimeoutError(f"the servers did not answer within {limit_s:.0f} s")
            time.sleep(0.05)

    def watch(self) -> None:
        """Returns when one of the processes has ended, and says which."""
        while all(one.poll() is None for one in self.started):
            time.sleep(0.5)
        print(f"ended by itself: {[one.args for one in self.started if one.poll() is not None]}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGINT or SIGTERM, or until one of the three has ended; returns 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.launch", description=__doc__)
    parser.add_argument("--program", required=True, help="path of vllm-router")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill-port", type=int, required=True)
    parser.add_argument("--decode-port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--server", choices=("uvicorn", "bare"), required=True)
    args = parser.parse_args(argv)
    with Servers() as servers:
        for role, port in (("prefill", args.prefill_port), ("decode", args.decode_port)):
            servers.started.append(subprocess.Popen(source_argv(role, port, args.step_s, args.server)))
        servers.wait((args.prefill_port, args.decode_port), START_S)
        ports = (args.port, args.prefill_port, args.decode_port, args.metrics_port)
        servers.started.append(subprocess.Popen(router_argv(args.program, *ports)))
        servers.watch()
        return 1
    return 0


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
