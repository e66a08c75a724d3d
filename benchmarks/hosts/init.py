"""Runs as process 1 of a namespace that stands for a host: it mounts what is the host's own and waits.

    init.py TMP_PATH TMP_BYTES SHM_BYTES

The host gets a /proc, a /dev/shm and a folder for temporary files of its own; everything else on disk is the machine's.
The process prints its id outside of the namespace, and ends when its standard input does. The kernel then kills every
process of the host and gives back mounts and network devices.
"""

import os
import signal
import subprocess
import sys


def main(tmp_path: str, tmp_bytes: int, shm_bytes: int) -> None:
    outer_pid = os.readlink("/proc/self")
    mounts = [
        ["-t", "proc", "proc", "/proc"],
        ["-t", "tmpfs", "-o", f"size={shm_bytes}", "shm", "/dev/shm"],
        ["-t", "tmpfs", "-o", f"size={tmp_bytes},mode=1777", "tmp", tmp_path],
    ]
    for mount in mounts:
        subprocess.run(["mount", *mount], check=True)
    # Orphans of the host become children of this process; ignoring the signal has the kernel collect them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(outer_pid, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
