"""Profiles a server's CPU time: py-spy samples its processes under load, and this module counts the stacks.

Only threads that hold the GIL are sampled, because in a container py-spy cannot distinguish a thread that waits in the
kernel from one that computes. So C code that runs without the GIL (libuv's reads, Ray's threads) is missing. --native
shows the frames of C code that holds the GIL.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.live import proctree
from benchmarks.live.servers import Server

ROLES = ("ingress", "router", "prefill", "decode", "colocated")
RATE_HZ = 200
_FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")


class ProfileError(RuntimeError):
    """The error of a missing py-spy, or of one that may not read the processes; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A function or line, with its shares (0..1) of the CPU samples of its process."""

    where: str
    self_share: float
    total_share: float


@dataclass(slots=True)
class Profile:
    """The profile of one process. `busy` is the share of samples in which it held the GIL, about its share of a core.

    `functions` and `lines` are ordered by self time, `callers` (functions) by total time.
    """

    role: str
    pid: int
    samples: int
    busy: float
    functions: list[Spot]
    callers: list[Spot]
    lines: list[Spot]


@dataclass(slots=True)
class Recording:
    """A running py-spy that records one process."""

    role: str
    pid: int
    seconds: int
    process: subprocess.Popen[str]
    output: Path


def find() -> str:
    """Returns the path of py-spy, which is beside this interpreter or on PATH. Raises ProfileError."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise ProfileError("py-spy is not installed: pip install py-spy, or leave --profile out")
    return found


def start(server: Server, seconds: int, folder: Path, *, native: bool) -> list[Recording]:
    """Begins to record all processes of ROLES for `seconds`; returns the recordings. Raises ProfileError."""
    executable = find()
    recordings = []
    for usage in proctree.snapshot(server.pid):
        if usage.role not in ROLES:
            continue
        output = folder / f"{usage.role}-{usage.pid}.raw"
        command = [
            executable,
            "record",
            "--pid",
            str(usage.pid),
            "--duration",
            str(seconds),
            "--rate",
            str(RATE_HZ),
        ]
        command += ["--gil", "--format", "raw", "--output", str(output)] + (["--native"] if native else [])
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        recordings.append(Recording(usage.role, usage.pid, seconds, process, output))
    return recordings


def finish(recordings: Sequence[Recording], timeout_s: float, top: int = 15) -> list[Profile]:
    """Waits for the recordings and returns their profiles. Raises ProfileError when one failed."""
    try:
        return [_read(recording, timeout_s, top) for recording in recordings]
    finally:
        for recording in recordings:
            if recording.process.poll() is None:
                recording.process.kill()
                recording.process.wait(timeout=5)


def _read(recording: Recording, timeout_s: float, top: int) -> Profile:
    try:
        said, _ = recording.process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ProfileError(f"py-spy on {recording.role} did not end in {timeout_s:.0f} s") from None
    if recording.process.returncode != 0 or not recording.output.exists():
        raise ProfileError(
            f"py-spy could not look into {recording.role} (pid {recording.pid}); it needs ptrace rights "
            f"(root, or kernel.yama.ptrace_scope=0): {said[-300:]}"
        )
    samples = parse(recording.output.read_text())
    functions = hot_spots(samples, by_line=False)
    everything = sum(count for _, count in samples)
    return Profile(
        role=recording.role,
        pid=recording.pid,
        samples=everything,
        busy=everything / (recording.seconds * RATE_HZ),
        functions=functions[:top],
        callers=sorted(functions, key=lambda spot: -spot.total_share)[: 2 * top],
        lines=hot_spots(samples, by_line=True)[:top],
    )


def parse(text: str) -> list[tuple[list[str], int]]:
    """Reads py-spy's raw format; returns pairs (stack with the outermost frame first, number of samples)."""
    stacks = []
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack:
            stacks.append((stack.split(";"), int(count)))
    return stacks


def hot_spots(samples: Iterable[tuple[Sequence[str], int]], *, by_line: bool) -> list[Spot]:
    """Returns all functions or lines by self time, largest first.

    The total time counts a place once for each stack, however often it occurs in it.
    """
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for stack, count in samples:
        names = [place(frame, by_line=by_line) for frame in stack]
        own[names[-1]] += count
        for name in set(names):
            total[name] += count
    everything = sum(own.values())
    order = sorted(total, key=lambda name: (-own[name], -total[name], name))
    return [Spot(name, own[name] / everything, total[name] / everything) for name in order]


def place(frame: str, *, by_line: bool) -> str:
    """Returns `function (file)` or `function (file:line)`, with the path relative to the packages' folder."""
    match = _FRAME.match(frame)
    if match is None:
        return frame
    file = match["file"].rpartition("site-packages/")[2]
    line = f":{match['line']}" if by_line and match["line"] else ""
    return f"{match['function']} ({file}{line})"
