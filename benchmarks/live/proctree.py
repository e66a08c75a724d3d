"""Reads CPU and memory of a server's process tree, for each process with its role.

CPU seconds are user + system time from /proc (in ticks of 10 ms). Memory is RSS and PSS. PSS divides shared pages among
the processes that share them, so its sum is what the tree really takes. Processes that end between two readings are
not counted.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# The first pattern that matches the command line gives the role of the process.
_NAMES = [
    (re.compile(pattern), name)
    for pattern, name in [
        (r"^ray::ServeReplica:[^:]+:Ingress\b", "ingress"),
        (r"^ray::ServeReplica:[^:]+:Router\b", "router"),
        (r"^ray::ServeReplica:[^:]+:Prefill\w*Engine\b", "prefill"),
        (r"^ray::ServeReplica:[^:]+:Decode\w*Engine\b", "decode"),
        (r"^ray::ServeReplica:[^:]+:Colocated\w*Engine\b", "colocated"),
        (r"^ray::(ServeReplica:[^:]+:Flow)?AgentActor\b", "flow agent"),
        (r"^ray::(ServeReplica:[^:]+:Flow)?CoordinatorActor\b", "flow coordinator"),
        (r"^ray::ServeReplica:[^:]+:(\w+)", "replica {}"),
        (r"^ray::ServeController", "serve controller"),
        (r"^ray::(HTTP)?Proxy", "serve proxy"),
        (r"haproxy", "serve proxy"),
        (r"^ray::IDLE", "ray idle worker"),
        (r"^ray::(\S+)", "ray {}"),
        (r"raylet/raylet\b", "raylet"),
        (r"gcs_server", "gcs"),
        (r"log_monitor", "ray log monitor"),
        (r"autoscaler/_private/monitor|ray/_private/monitor", "ray monitor"),
        (r"dashboard/agent|DashboardAgent", "ray agent"),
        (r"runtime_env/agent|RuntimeEnvAgent", "ray runtime-env agent"),
        (r"dashboard/dashboard", "ray dashboard"),
        (r"VLLM::Engine", "core"),
        (r"VLLM::(Worker|.*[Ww]orker)", "worker"),
        (r"resource_tracker", "resource tracker"),
        (r"forkserver", "fork server"),
        (r"scripts/reap\.py", "reaper"),
        # before the servers that their command lines name
        (r"-m benchmarks\.peers\.(launch|real\.(beside|ray_llm|servers))\b", "launcher"),
        (r"-m app\.serve\b", "launcher"),
        (r"vllm\.entrypoints", "api server"),
        (r"benchmarks\.live\.bare", "listener"),
        (r"^vllm::router", "vllm-router"),
        (r"benchmarks\.peers\.source (\w+)", "{} source"),
    ]
]
_LOCAL = {"core", "worker", "resource tracker", "fork server", "python child"}


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU and memory of one process at one moment."""

    pid: int
    role: str
    cpu_s: float
    rss_bytes: int
    pss_bytes: int


def name_of(cmdline: Sequence[str]) -> str | None:
    """Returns the role of a process by its command line, or None where that does not tell (as for a shell)."""
    text = " ".join(cmdline).strip()
    for pattern, name in _NAMES:
        if match := pattern.search(text):
            return name.format(*match.groups()[-1:]) if "{}" in name else name
    return None


def role_of(lineage: Iterable[Sequence[str]]) -> str:
    """Returns the role of a process from its command line and those of its ancestors, nearest first.

    A helper is named after the process that it belongs to: "prefill/worker".
    """
    own: str | None = None
    for depth, cmdline in enumerate(lineage):
        name = name_of(cmdline)
        if depth == 0:
            own = name or "python child"
            if own not in _LOCAL:
                return own
        elif name is not None and name not in _LOCAL:
            return f"{name}/{own}"
    return own or "python child"


def snapshot(root_pid: int) -> list[Usage]:
    """Returns all live processes of the tree, including the root. Raises psutil.NoSuchProcess if the root has ended."""
    root = psutil.Process(root_pid)
    found = {root.pid: root} | {child.pid: child for child in root.children(recursive=True)}
    lines = {pid: _cmdline(process) for pid, process in found.items()}
    usages = []
    for pid, process in found.items():
        try:
            cpu, rss = process.cpu_times(), process.memory_info().rss
            usages.append(
                Usage(
                    pid, role_of(_lineage(process, found, lines)), cpu.user + cpu.system, rss, _pss_bytes(pid)
                )
            )
        except (psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return usages


def usage_of(pid: int) -> Usage:
    """Returns the usage of one process, with its role as its own command line says it. Raises psutil.NoSuchProcess if
    it has ended.
    """
    process = psutil.Process(pid)
    cpu, rss, role = process.cpu_times(), process.memory_info().rss, role_of([_cmdline(process)])
    return Usage(pid, role, cpu.user + cpu.system, rss, _pss_bytes(pid))


def cpu_by_role(before: Sequence[Usage], after: Sequence[Usage]) -> dict[str, float]:
    """Returns the CPU seconds between two snapshots by role, largest first."""
    then = {usage.pid: usage.cpu_s for usage in before}
    spent: dict[str, float] = defaultdict(float)
    for usage in after:
        spent[usage.role] += usage.cpu_s - then.get(usage.pid, 0.0)
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def machine_busy_s() -> float:
    """Returns the CPU seconds that all cores of the machine have spent, or lost to its host, since it started."""
    times = psutil.cpu_times()
    return float(
        sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    )  # guest is part of user


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of all processes of one role."""

    processes: int
    rss_bytes: int
    pss_bytes: int


def memory_by_role(usages: Sequence[Usage]) -> dict[str, Memory]:
    """Returns the memory by role, the largest PSS first."""
    rows: dict[str, list[Usage]] = defaultdict(list)
    for usage in usages:
        rows[usage.role].append(usage)
    table = {
        role: Memory(len(own), sum(u.rss_bytes for u in own), sum(u.pss_bytes for u in own))
        for role, own in rows.items()
    }
    return dict(sorted(table.items(), key=lambda item: -item[1].pss_bytes))


def total(table: Mapping[str, Memory]) -> Memory:
    """Returns the sum over all roles."""
    rows = table.values()
    return Memory(
        sum(m.processes for m in rows), sum(m.rss_bytes for m in rows), sum(m.pss_bytes for m in rows)
    )


def _lineage(
    process: psutil.Process, found: Mapping[int, psutil.Process], lines: Mapping[int, Sequence[str]]
) -> Iterable[Sequence[str]]:
    current: psutil.Process | None = process
    while current is not None:
        yield lines[current.pid]
        current = found.get(current.ppid())


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
