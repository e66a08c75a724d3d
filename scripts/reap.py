"""Runs a command and ends whatever it leaves behind, by process id: reap.py COMMAND [ARGUMENT...].

The kernel makes this process the parent of orphaned descendants (PR_SET_CHILD_SUBREAPER), so daemons that left their
session or process group, as Ray's do, are found too. The exit status is the command's, and leftovers are listed on
stderr. The script runs on Linux only and needs the standard library only.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def parents() -> dict[int, int]:
    """Returns the parent of every live process, by process id; zombies are left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        if fields[0] != "Z":
            found[int(entry.name)] = int(fields[1])
    return found


def descendants(root: int) -> list[int]:
    """Returns all live descendants of `root`, parents before children."""
    tree = parents()
    order, frontier = [], {root}
    while frontier := {pid for pid, parent in tree.items() if parent in frontier}:
        order += sorted(frontier)
    return order


def describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = "(ended)"
    return f"{pid} {command.strip()[:100]}"


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def collect() -> None:
    """Collects every child that has ended, so that none stays a zombie."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def wait_for(pid: int) -> int:
    """Waits for a child and returns its exit status, or minus the signal that ended it.

    Orphans that end meanwhile are collected.
    """
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def end_all() -> None:
    """Sends SIGTERM to all descendants, then SIGKILL to those that are still there after GRACE_S."""
    deadline_s = time.monotonic() + GRACE_S
    send(descendants(os.getpid()), signal.SIGTERM)
    while left := descendants(os.getpid()):
        collect()
        if time.monotonic() > deadline_s:
            send(left, signal.SIGKILL)
        time.sleep(0.1)
    collect()


def main() -> int:
    if len(sys.argv) < 2:
        print((__doc__ or "").split("\n")[0], file=sys.stderr)
        return 2
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal changes nothing
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
        status = child.returncode = wait_for(child.pid)
        if left := descendants(os.getpid()):
            print("left behind, ending now:", *map(describe, left), sep="\n  ", file=sys.stderr)
    finally:
        end_all()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
