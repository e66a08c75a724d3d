"""The state of an application that is harmed, in its own words: the status of every ingress, and its counters.

A counter of a process begins at 0 again when the process is replaced; its increases are added up all the same.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.ingress.metrics import INGRESS
from benchmarks.chaos.http import Connection, connect, get
from benchmarks.chaos.processes import Member

TIMEOUT_S = 1.0
"""Seconds for the answer of an ingress about itself; one that takes longer is not well at this moment."""

TRIES = 8
"""Connections that are tried at once to reach an ingress, since the kernel chooses which one accepts."""

_COUNTERS = {metric.name for metric in INGRESS if metric.kind == "counter"}
_LINE = re.compile(r"^(sluice_\w+_total)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Seen:
    """One ingress, the connection to it, and its last answers."""

    connection: Connection
    status: dict[str, Any] | None = None
    answered: bool = False


class Watch:
    """Asks every ingress for its status and counters. `totals` are the increases of all counters of the ingresses."""

    def __init__(self, port: int, ingresses: Callable[[], list[Member]]) -> None:
        self._port = port
        self._ingresses = ingresses
        self.seen: dict[int, Seen] = {}
        self.totals: Counter[str] = Counter()
        self._last: dict[int, dict[str, float]] = {}
        """The counters of each process by pid, which outlive the connection to it."""

    async def look(self) -> None:
        """Asks all ingresses once."""
        alive = {member.pid: member for member in self._ingresses()}
        for pid in list(self.seen):
            if pid not in alive or self.seen[pid].connection.ended:
                self.seen.pop(pid).connection.drop()
        if len(self.seen) < len(alive):
            await self._reach(list(alive.values()))
        await asyncio.gather(*(self._ask(pid, seen) for pid, seen in self.seen.items()))

    def statuses(self) -> list[dict[str, Any]]:
        """Returns the last status of each ingress that answered just now."""
        return [seen.status for seen in self.seen.values() if seen.answered and seen.status is not None]

    async def _reach(self, members: list[Member]) -> None:
        """Opens connections until each ingress has one."""
        for _ in range(TRIES):
            try:
                connection = await connect(self._port, TIMEOUT_S)
            except (OSError, TimeoutError):
                return
            try:
                await get(connection, "/health/live", TIMEOUT_S)
            except (OSError, TimeoutError):
                continue
            port = connection.local_port
            owner = next((m.pid for m in members if port in m.remote_ports()), None)
            if owner is None or owner in self.seen:
                connection.drop()
            else:
                self.seen[owner] = Seen(connection)
            if len(self.seen) == len(members):
                return

    async def _ask(self, pid: int, seen: Seen) -> None:
        try:
            _, text = await get(seen.connection, "/metrics", TIMEOUT_S)
            # last, because loans that it shows are over soon
            status, body = await get(seen.connection, "/sluice/status", TIMEOUT_S)
            seen.status, seen.answered = json.loads(body), status == 200
        except (OSError, TimeoutError):
            seen.answered = False
            return
        self.count(pid, text.decode())

    def count(self, pid: int, metrics: str) -> None:
        """Adds to `totals` by how much the counters of a process have grown since they were last counted. `metrics` is
        the text that it shows.
        """
        now: dict[str, float] = {}
        for name, labels, value in _LINE.findall(metrics):
            # The totals of engines and router, which every ingress shows, are not its own.
            if name in _COUNTERS:
                key = f"{name}{{{_kept(labels)}}}" if labels else name
                now[key] = now.get(key, 0.0) + float(value)
        last = self._last.get(pid, {})
        for key, amount in now.items():
            if (more := amount - last.get(key, 0.0)) > 0:
                self.totals[key] += int(more)
        self._last[pid] = now


def _kept(labels: str) -> str:
    return ",".join(part for part in labels.split(",") if not part.startswith(("model=", "class=")))
