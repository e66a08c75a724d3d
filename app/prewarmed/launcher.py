"""The Python of an engine replica's process, as Ray starts it: `python -I -S launcher.py FOLDER WORKER.py ARGUMENTS`.

It hands the command, the environment and the standard streams to a process that waits in FOLDER (`process`), and ends.
Where none takes them it runs the command itself. It is a script of the standard library only, because it stands between
Ray and every start; without `-S`, Python would look for installed packages and their hooks first.
"""

import json
import os
import socket
import sys
from pathlib import Path

ANSWER_S = 2.0
"""Seconds that a waiting process has for its answer. ASSUMPTION: one that needs longer would not start faster."""
SUFFIX = ".sock"
STARTING = ".starting"
"""The suffix of a socket's name from when its process is taken until the engine in it has started."""
READY, GO = b"r", b"g"
_LENGTH_BYTES = 4


def main(argv: list[str]) -> int:
    """Runs the command; returns 0 once a waiting process has taken it, and otherwise does not return."""
    folder, command = Path(argv[1]), argv[2:]
    if command and command[0].endswith(".py"):
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if handed_over(path, command):
                return 0
    os.execv(sys.executable, [sys.executable, *command])


def handed_over(path: Path, command: list[str]) -> bool:
    """Returns whether the process that waits at `path` has taken the command."""
    order = {"command": command, "environment": dict(os.environ), "folder": os.getcwd()}
    text = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as process:
        process.settimeout(ANSWER_S)
        try:
            process.connect(str(path))
            socket.send_fds(process, [len(text).to_bytes(_LENGTH_BYTES, "big")], [0, 1, 2])
            process.sendall(text)
            if process.recv(1) != READY:
                return False
            # a process that was too slow hears nothing here, and waits on
            process.sendall(GO)
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv))
