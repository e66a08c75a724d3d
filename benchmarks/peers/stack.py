"""Runs several processes as one server: engines first, then the router in front of them.

    python -m benchmarks.peers.stack stack.json

The file is a list of processes, each an object with `argv` and, as it needs them, `env`, and `port` with `path` that
answers 200 once the process is ready; the next one starts then. On SIGINT or SIGTERM all are ended, the last first. If
one ends by itself, all are ended and the exit status is 1.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.live.servers import answers

PATIENCE_S = 20.0
"""Seconds that a process has to end after SIGTERM. ASSUMPTION: a vLLM engine on CPU takes a few of them."""
GLANCE_S = 0.2


class Stack:
    """The processes of a stack, and whether they are to end."""

    def __init__(self, processes: Sequence[Mapping[str, Any]]) -> None:
        self._planned = processes
        self._running: list[subprocess.Popen[bytes]] = []
        self._stop = threading.Event()

    def stop(self, *_: object) -> None:
        """Lets `run` end everything; a signal handler, too."""
        self._stop.set()

    def run(self) -> int:
        """Starts the processes and waits; returns 0 after `stop`, or 1 if one of them ended by itself."""
        try:
            for one in self._planned:
                self._running.append(subprocess.Popen(one["argv"], env=os.environ | one.get("env", {})))
                if not self._wait_ready(one):
                    return self._status()
            while not self._stop.wait(GLANCE_S):
                if self._dead():
                    return 1
            return 0
        finally:
            self._end()

    def _wait_ready(self, one: Mapping[str, Any]) -> bool:
        """Waits until a process answers; returns False where one has ended, or all are to end."""
        if "port" not in one:
            return True
        while not answers(one["port"], one.get("path", "/health")):
            if self._dead() or self._stop.wait(GLANCE_S):
                return False
        return True

    def _status(self) -> int:
        return 0 if self._stop.is_set() else 1

    def _dead(self) -> bool:
        return any(process.poll() is not None for process in self._running)

    def _end(self) -> None:
        for process in reversed(self._running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    (file,) = sys.argv[1:] if argv is None else argv
    stack = Stack(json.loads(Path(file).read_text()))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stack.stop)
    return stack.run()


if __name__ == "__main__":
    sys.exit(main())
