"""Exits with 1, and names the holder, if a TCP port of 127.0.0.1 is taken: check_port.py PORT.

It uses the standard library and /proc only, so that it works before anything is installed.
"""

import errno
import os
import socket
import sys
from pathlib import Path

LISTENING = "0A"  # state column of /proc/net/tcp


def holder(port: int) -> str:
    """Returns a description of the process that listens on `port`, as far as this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if any(os.readlink(link) in inodes for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"process {process.name} ({command.strip()[:80]})"
        except OSError:  # ended, or another user's
            continue
    return "a process of another user"


def main() -> int:
    text = sys.argv[1]
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        print(f"error: PORT={text} is not a port: give a number from 1 to 65535", file=sys.stderr)
        return 1
    port = int(text)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EACCES:
                print(
                    f"error: port {port} is reserved for root; choose another: make serve PORT=8010",
                    file=sys.stderr,
                )
            elif error.errno == errno.EADDRINUSE:
                print(
                    f"error: port {port} is taken by {holder(port)}; stop it, or choose another: make serve PORT=8010",
                    file=sys.stderr,
                )
            else:
                raise
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
