"""Runs a server beside a Ray that has nothing to do, and ends both together.

    python -m benchmarks.peers.real.beside python -m vllm.entrypoints.openai.api_server --port 8040 ...

The Ray is the one that Sluice starts for itself (`app.own_ray`): a cluster of one node on free ports of 127.0.0.1, with
its files in a folder of its own. No program but this one uses it, nothing is deployed on it, and no other Ray of the
machine is joined or stopped. Without Ray's control process or its raylet nothing idle would stand beside the server, so
this program ends when one of them ends.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil

from app.own_ray import OwnRay
from benchmarks.peers.launch import Servers
from benchmarks.peers.real.sides import prepare_ray

WATCH_PERIOD_S = 0.5

Say = Callable[[str], None]


@contextmanager
def idle_ray(say: Say) -> Iterator[list[psutil.Process]]:
    """A context in which this process has an idle Ray; gives the processes of it that this process has started."""
    prepare_ray()
    # a Ray that nobody mends: what is measured beside a broken one is thrown away
    stop = threading.Event()
    stop.set()
    ray_of_this = OwnRay(say, stop)
    before = {child.pid for child in psutil.Process().children()}
    try:
        ray_of_this.start()
        import ray

        try:
            members = [child for child in psutil.Process().children() if child.pid not in before]
            if not members:
                raise RuntimeError("Ray has started no process below this one")
            yield members
        finally:
            ray.shutdown()
    finally:
        ray_of_this.remove()


def watch(server: subprocess.Popen[bytes], members: Sequence[psutil.Process]) -> str:
    """Returns what has ended, as soon as the server or one of `members` has."""
    while True:
        if server.poll() is not None:
            return f"the server, with status {server.returncode}"
        gone, _ = psutil.wait_procs(members, timeout=WATCH_PERIOD_S)
        if gone:
            return f"process {gone[0].pid} of Ray"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `argv` until SIGINT or SIGTERM, or until it or Ray has ended by itself; returns 0 or 1."""
    command = list(sys.argv[1:] if argv is None else argv)
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    # what Ray's start sets is nothing to the server
    environment = dict(os.environ)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)

    def say(text: str) -> None:
        print(text, flush=True)

    # its handlers come after those of Ray, which replaces others
    with idle_ray(say) as members, Servers() as servers:
        servers.started.append(subprocess.Popen(command, env=environment))
        say(f"ended by itself: {watch(servers.started[0], members)}")
        return 1
    return 0


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
