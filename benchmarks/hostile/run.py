"""Measures what hostile clients of one kind do to the well-behaved streams and to the ingress."""

import json
import select
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.hostile.clients import Kind
from benchmarks.hostile.setups import budget_bytes, limits
from benchmarks.hostile.streams import Seen, window
from benchmarks.live.proctree import snapshot, usage_of
from benchmarks.live.servers import ROOT, Server, ServerError, administrator, python

BEGIN_S = 60.0
"""Longest time until the well-behaved clients read."""
WARM_S = 3.0
"""Seconds from then on that do not count."""
SETTLE_S = 3.0
"""Seconds after the end of the hostile clients that still count as theirs, since what they left is put away then."""
SAMPLE_S = 0.5
LEFT_S = 60.0
"""Longest time until nothing is left of the clients. ASSUMPTION: the longest lease of a KV lasts for half of it."""
ASK_S = 30.0
REFUSALS = ("sluice_listener_refusals", "sluice_slow_clients", "sluice_requests")
COUNTS = ("in_flight", "queued", "pool")


@dataclass(frozen=True, slots=True)
class Plan:
    """How long the well-behaved streams are alone and how long hostile clients stay, in seconds, and how many streams
    there are.
    """

    alone_s: float = 30.0
    seconds: float = 45.0
    streams: int = 6


def measure(
    server: Server, setup: str, kind: Kind, count: int, plan: Plan, say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the figures of `count` hostile clients. Raises ServerError if the ingress dies or a client's process
    fails.
    """
    pid = ingress_pid(server)
    with administrator(server.command.port, ASK_S) as admin:
        refused = refusals(admin)
        before = connections(pid, server.command.port)
        usage: list[tuple[float, int, float]] = []
        streams = _process(server, "streams", "--streams", str(plan.streams), stdin=subprocess.PIPE)
        try:
            begun(streams)
            _sample(pid, usage, _for(WARM_S))
            alone_s = time.monotonic()
            _sample(pid, usage, _for(plan.alone_s))
            hostile_s = time.monotonic()
            hostile = _process(server, "clients", kind, "--count", str(count), "--seconds", str(plan.seconds))
            try:
                _sample(pid, usage, lambda: hostile.poll() is not None)
            finally:
                hostile.kill()
            found = _told(hostile)
            gone_s = time.monotonic()
            _sample(pid, usage, _for(SETTLE_S))
            end_s = time.monotonic()
            _stdin(streams).close()
            told = _told(streams)
        finally:
            streams.kill()
            streams.wait()
        seen = Seen(**told)
        waiting_s = time.monotonic()
        left = _left(admin, lambda: connections(pid, server.command.port) - before)
        result = {
            "setup": setup,
            "kind": kind,
            "count": count,
            "alone": asdict(window(seen, alone_s, hostile_s)),
            "hostile": asdict(window(seen, hostile_s, end_s)),
            "failed": dict(seen.failed),
            **found,
            "refused": {name: n for name, n in (refusals(admin) - refused).items() if n},
            "budget_bytes": budget_bytes(limits(setup), count),
            **_memory(usage, hostile_s, usage_of(pid).rss_bytes),
            "cpu_share_alone": _cpu_share(usage, alone_s, hostile_s),
            "cpu_share_hostile": _cpu_share(usage, hostile_s, gone_s),
            "left": left,
            "clean_after_s": time.monotonic() - waiting_s,
            "usage": [(round(at_s - hostile_s, 2), rss, round(cpu_s, 2)) for at_s, rss, cpu_s in usage],
        }
    shown = {name: value for name, value in result.items() if name != "usage"}
    say(json.dumps(shown))
    return result


def ingress_pid(server: Server) -> int:
    """Returns the process id of the one ingress."""
    found = [one.pid for one in snapshot(server.pid) if one.role == "ingress"]
    if len(found) != 1:
        raise ServerError(f"there are {len(found)} ingresses instead of one:\n{server.tail()}")
    return found[0]


def connections(pid: int, port: int) -> int:
    """Returns the number of connections that a process has on its listening port."""
    all_tcp = psutil.Process(pid).net_connections("tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in all_tcp)


def refusals(admin: httpx.Client) -> Counter[str]:
    """Returns what the ingress has counted of refusals, cuts and answers, by metric and labels."""
    counted: Counter[str] = Counter()
    answer = admin.get("/metrics").raise_for_status()
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if family.name in REFUSALS and sample.name.endswith("_total"):
                labels = sample.labels.get("reason") or sample.labels.get("code") or ""
                counted[f"{family.name} {labels}".strip()] += int(sample.value)
    return counted


def _process(server: Server, module: str, *arguments: str, stdin: int = subprocess.DEVNULL) -> Any:
    command = python("-m", f"benchmarks.hostile.{module}", *arguments, "--port", str(server.command.port))
    return subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, text=True)


def _stdin(process: "subprocess.Popen[str]") -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def begun(process: "subprocess.Popen[str]") -> None:
    """Waits until the clients of a process of streams read. Raises ServerError if that takes longer than `BEGIN_S`, or
    if the process ends.
    """
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], BEGIN_S)
    if not (readable and process.stdout.readline()):
        raise ServerError(
            f"the well-behaved streams have not begun in {BEGIN_S:g} s, or their process has ended"
        )


def _told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Returns what a process prints before it ends. Raises ServerError if it fails."""
    assert process.stdout is not None
    text = process.stdout.read()
    if process.wait() != 0 or not text:
        raise ServerError(f"a process of clients ended with {process.returncode}: its error output says why")
    told: dict[str, Any] = json.loads(text)
    return told


def _for(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def _sample(pid: int, usage: list[tuple[float, int, float]], over: Callable[[], bool]) -> None:
    """Adds (time, RSS in bytes, CPU seconds) of the ingress to `usage` until `over`."""
    while not over():
        try:
            one = usage_of(pid)
        except psutil.NoSuchProcess:
            raise ServerError("the ingress has ended") from None
        usage.append((time.monotonic(), one.rss_bytes, one.cpu_s))
        time.sleep(SAMPLE_S)


def _memory(usage: list[tuple[float, int, float]], hostile_s: float, after_bytes: int) -> dict[str, int]:
    """Returns the RSS of the ingress in bytes: just before the hostile clients, its peak with them, and afterwards."""
    before = [rss for at_s, rss, _ in usage if at_s < hostile_s]
    return {
        "rss_before_bytes": before[-1],
        "rss_peak_bytes": max(rss for at_s, rss, _ in usage if at_s >= hostile_s),
        "rss_after_bytes": after_bytes,
    }


def _cpu_share(usage: list[tuple[float, int, float]], start_s: float, end_s: float) -> float | None:
    """Returns the cores that the ingress used on average; None with fewer than two samples."""
    within = [(at_s, cpu_s) for at_s, _, cpu_s in usage if start_s <= at_s < end_s]
    if len(within) < 2:
        return None
    (first_s, before_s), (last_s, after_s) = within[0], within[-1]
    return (after_s - before_s) / (last_s - first_s)


def _left(admin: httpx.Client, more: Callable[[], int]) -> dict[str, int]:
    """Waits until nothing is left of the clients, for `LEFT_S` at most, and returns what is: requests and leases by the
    router's count and the ingress's, and `more` connections than before.
    """
    until_s = time.monotonic() + LEFT_S
    while left := dict(_still(admin.get("/sluice/status").raise_for_status().json(), more())):
        if time.monotonic() >= until_s:
            break
        time.sleep(SAMPLE_S)
    return left


def _still(status: Mapping[str, Any], more: int) -> Iterator[tuple[str, int]]:
    found = {name: status["requests"][name] for name in COUNTS}
    found |= {"leases": status["leases"], "in_flight of the ingress": status["replica"]["in_flight"]}
    found["connections"] = max(0, more)
    yield from ((name, n) for name, n in found.items() if n)
