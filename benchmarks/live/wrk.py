"""The load client `wrk` (in C, from the Debian package of that name), for loads that a Python client cannot send."""

import json
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("wrk.lua")
MARK = "WRK "
# Seconds after the end of the requested duration before wrk itself is ended.
SLACK_S = 30.0


class WrkError(RuntimeError):
    """The error of a wrk that failed or printed no summary."""


@dataclass(frozen=True, slots=True)
class WrkResult:
    """The result of one run. `cpu_s` is wrk's own user + system time; latencies are those of whole answers."""

    requests: int
    wall_s: float
    cpu_s: float
    body_bytes: int
    p50_s: float
    p95_s: float
    p99_s: float
    failures: dict[str, int]

    @property
    def served(self) -> int:
        """The number of answers without an error status."""
        return self.requests - self.failures.get("status", 0)


def find(path: str | None) -> str | None:
    """Returns the executable `path`, or without it the one on PATH; None where there is none."""
    return shutil.which(path or "wrk")


def run(
    executable: str,
    port: int,
    path: str,
    bodies: Sequence[bytes],
    concurrency: int,
    seconds: int,
    head: Sequence[str] = (),
) -> WrkResult:
    """Loads 127.0.0.1:`port` for `seconds` from one thread, with further header lines `head`, and returns the result.
    Raises WrkError.
    """
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(b"\n".join(bodies) + b"\n")
        file.flush()
        command = [
            executable, "-t1", f"-c{concurrency}", f"-d{seconds}s", "--timeout", "30s", "-s", str(SCRIPT),
            f"http://127.0.0.1:{port}{path}", "--", path, file.name, *head,
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + SLACK_S, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise WrkError(f"wrk ended with {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return parse(done.stdout, cpu_s)


def parse(output: str, cpu_s: float) -> WrkResult:
    """Returns the result from the summary line that wrk.lua writes. Raises WrkError when it is missing."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        raise WrkError(f"wrk printed no summary: {output[-500:]}")
    raw = json.loads(lines[-1][len(MARK) :])
    return WrkResult(
        requests=raw["requests"],
        wall_s=raw["duration_us"] / 1e6,
        cpu_s=cpu_s,
        body_bytes=raw["bytes"],
        p50_s=raw["p50_us"] / 1e6,
        p95_s=raw["p95_us"] / 1e6,
        p99_s=raw["p99_us"] / 1e6,
        failures={kind: raw[kind] for kind in ("connect", "read", "write", "status", "timeout") if raw[kind]},
    )
