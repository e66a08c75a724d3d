"""Opens many streams, measures what they take in ingress and router, and finds how many may be open at once."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hostile.run import ingress_pid
from benchmarks.live.proctree import Usage, cpu_by_role, machine_busy_s, snapshot, usage_of
from benchmarks.live.servers import ROOT, Command, Server, ServerError, administrator, python
from benchmarks.live.streams.clients import Counted, quantile_ms
from benchmarks.live.streams.report import WITHIN_MS
from benchmarks.live.targets import SimTiming, sim_args, sluice_app

PREFILL, DECODE = 1, 4
SPARE_SLOTS = 1.25
"""Decode slots for each stream: engines need not have equally many."""
KV_BLOCKS = 1 << 17
WARM_STREAMS = 40
"""Streams that begin and end before memory is looked at, so that imports and caches do not count as theirs."""
WARM_S = 2.0
SAMPLE_S = 0.5
OPEN_S = 10.0
"""Longest time until the slow readers are there after the others."""
GONE_S = 60.0
"""Longest time until nothing is left of streams whose clients are gone."""
ASK_S = 30.0
CLOSE = 1.1
"""Ratio of the fewest streams known to be too many to the most known to be served at which a search ends."""
QUANTILES: Mapping[str, float] = {"p50": 0.5, "p99": 0.99, "worst": 1.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """A measurement of `streams` at once, of which one in a hundred is read slowly.

    They are begun at `rate_per_s`, have `settle_s` to settle and are measured for `window_s`. The clients are
    `processes` processes.
    """

    streams: int
    step_s: float
    rate_per_s: float = 400.0
    settle_s: float = 5.0
    window_s: float = 30.0
    processes: int = 2

    @property
    def slow(self) -> int:
        """The number of slow readers among the streams."""
        return self.streams // 100

    @property
    def seconds(self) -> float:
        """About how long the measurement lasts."""
        return self.streams / self.rate_per_s + self.settle_s + self.window_s + 5.0

    def shares(self) -> list[int]:
        """Returns how many streams each process of well-behaved clients has; none has no stream."""
        reading = self.streams - self.slow
        shares = [len(range(i, reading, self.processes)) for i in range(self.processes)]
        return [share for share in shares if share]


def application(step_s: float, most: int, folder: Path) -> Command:
    """Returns the command that serves up to `most` streams of `step_s` a step without Ray. Its files are in
    `folder`.
    """
    (folder / "orders").mkdir(parents=True)
    args = sim_args(SimTiming(decode_base_s=step_s), PREFILL, DECODE)
    for group in args["engines"]:
        slots = int(SPARE_SLOTS * most / DECODE) + 64 if group["role"] == "decode" else 256
        group["options"] = {**group["options"], "slots": slots, "kv_blocks": KV_BLOCKS}
    room = most + 256
    limits = {"max_connections": room, "max_connections_per_address": room, "max_in_flight": room}
    args |= {
        "wire": {"socket_dir": str(folder / "sockets")},
        "ingress": {"replicas": 1, "options": limits},
    }
    made = sluice_app(f"Sluice, streams of {1e3 * step_s:g} ms", folder / "app.yaml", args, 120.0)
    argv = list(made.argv)
    argv[argv.index("app.serve")] = "benchmarks.chaos.bare"
    return replace(made, argv=[*argv, "--orders", str(folder / "orders")])


@contextlib.contextmanager
def clients(server: Server, plan: Plan) -> Iterator[list["subprocess.Popen[str]"]]:
    """A context with the processes of the well-behaved clients; all streams are open. Slow readers are there, too.

    Raises ServerError if a process fails.
    """
    port = str(server.command.port)
    started: list[subprocess.Popen[str]] = []
    rate, first = plan.rate_per_s / plan.processes, 0
    try:
        for share in plan.shares():
            words = ["--streams", str(share), "--first", str(first), "--rate", str(rate)]
            words += ["--step-ms", str(1e3 * plan.step_s), "--port", port]
            started.append(_process("benchmarks.live.streams.clients", *words))
            first += share
        if plan.slow:
            seconds = str(10.0 * plan.seconds + 100.0)
            words = ["slow_readers", "--count", str(plan.slow), "--seconds", seconds, "--port", port]
            started.append(_process("benchmarks.hostile.clients", *words))
        yield started[: len(plan.shares())]
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(server: Server, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what `plan.streams` streams at once take, and how late their tokens are.

    `rss_per_stream_bytes` is the growth of the ingress's RSS to its highest while they were open, for each of them.
    `cpu_us_per_token` is by role. Tokens of slow readers are counted as those of the others. Raises ServerError if a
    process fails or the ingress ends.
    """
    pid = ingress_pid(server)
    before = usage_of(pid).rss_bytes
    with administrator(server.command.port, ASK_S) as admin:
        with clients(server, plan) as reading:
            told = [_line(process) for process in reading]
            in_flight = _all_there(admin, plan.streams)
            time.sleep(plan.settle_s)
            for process in reading:
                _order(process, "begin")
            start, start_s, busy_s = snapshot(server.pid), time.monotonic(), machine_busy_s()
            highest = _highest_rss(pid, plan.window_s)
            end, end_s, busy_s = snapshot(server.pid), time.monotonic(), machine_busy_s() - busy_s
            for process in reading:
                _order(process, "end")
            counted = Counted()
            for process in reading:
                counted.add(Counted.of(_line(process)))
        _gone(admin)
    result = figures(plan, counted, start, end, end_s - start_s)
    result |= {
        "open": sum(one["open"] for one in told),
        "in_flight": in_flight,
        "rss_before_bytes": before,
        "rss_highest_bytes": highest,
        "rss_after_bytes": usage_of(pid).rss_bytes,
        "rss_per_stream_bytes": (highest - before) / plan.streams,
        "busy_cores": busy_s / (end_s - start_s),
    }
    say(json.dumps(result))
    return result


def figures(
    plan: Plan, counted: Counted, start: list[Usage], end: list[Usage], window_s: float
) -> dict[str, Any]:
    """Returns the figures that the clients' counts and two snapshots of the processes give."""
    tokens = counted.events * plan.streams / sum(plan.shares())
    cpu_s = cpu_by_role(start, end)
    seen = counted.gaps.total() > 0
    return {
        **asdict(plan),
        "slow": plan.slow,
        "window_s": window_s,
        "events": counted.events,
        "tokens_per_s": tokens / window_s,
        "beyond_ms": {name: quantile_ms(counted.gaps, q) if seen else None for name, q in QUANTILES.items()},
        "late_p99_ms": quantile_ms(counted.late, 0.99) if counted.late else None,
        "cpu_us_per_token": {role: 1e6 * s / tokens for role, s in cpu_s.items()} if tokens else {},
        "cpu_cores": {role: s / window_s for role, s in cpu_s.items()},
        "failed": dict(counted.failed),
    }


def served(result: Mapping[str, Any]) -> bool:
    """Returns whether all streams of a measurement were open and the p99 of their gaps was within the aim.

    Half of the tokens that are due must have come, for streams that stand still have few gaps.
    """
    due_per_s = result["streams"] / result["step_s"]
    return (
        not result["failed"]
        and result["open"] == result["streams"] - result["slow"]
        and result["beyond_ms"]["p99"] is not None
        and result["beyond_ms"]["p99"] <= WITHIN_MS
        and result["tokens_per_s"] >= 0.5 * due_per_s
    )


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: the most streams that were served, the fewest that were not, and whether it had time."""

    most: int | None
    too_many: int | None
    ended: bool


def most_served(
    first: int, largest: int, good: Callable[[int], bool], goes_on: Callable[[int], bool]
) -> Found:
    """Returns the largest number for which `good` holds, up to `CLOSE`, by doubling or halving and then bisection.

    `goes_on(n)` is asked before each call of `good(n)` and says whether there is time for it. `largest` is the highest
    number that may be tried.
    """
    low: int | None = None
    high: int | None = None
    number = min(first, largest)
    while True:
        if not goes_on(number):
            return Found(low, high, ended=False)
        if good(number):
            low = number
        else:
            high = number
        if low == largest or high == 1 or (low is not None and high is not None and high <= CLOSE * low + 1):
            return Found(low, high, ended=True)
        if high is None:
            number = min(2 * number, largest)
        elif low is None:
            number = number // 2
        else:
            number = (low + high) // 2


def search(
    server: Server, plan: Plan, first: int, largest: int, until_s: float, say: Callable[[str], None]
) -> tuple[Found, list[dict[str, Any]]]:
    """Returns the most streams that `plan` serves within the aim, and all measurements; `plan.streams` is not used.

    The search ends at `until_s` of the monotonic clock.
    """
    tried: list[dict[str, Any]] = []

    def good(streams: int) -> bool:
        tried.append(measure(server, replace(plan, streams=streams), say))
        return served(tried[-1])

    def goes_on(streams: int) -> bool:
        return time.monotonic() + replace(plan, streams=streams).seconds < until_s

    return most_served(first, largest, good, goes_on), tried


def warm(server: Server, plan: Plan) -> None:
    """Begins and ends a few streams."""
    few = replace(plan, streams=WARM_STREAMS)
    with administrator(server.command.port, ASK_S) as admin:
        with clients(server, few) as reading:
            for process in reading:
                _line(process)
            time.sleep(WARM_S)
        _gone(admin)


def _process(module: str, *words: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(python("-m", module, *words), cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def _line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Returns the next line that a process tells. Raises ServerError if it has ended."""
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise ServerError(f"a process of clients ended with {process.wait()}: its error output says why")
    told: dict[str, Any] = json.loads(text)
    return told


def _order(process: "subprocess.Popen[str]", order: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{order}\n")
    process.stdin.flush()


def _highest_rss(pid: int, seconds: float) -> int:
    """Returns the highest RSS of a process within `seconds` from now. Raises ServerError if it ends."""
    until_s, highest = time.monotonic() + seconds, 0
    while True:
        try:
            highest = max(highest, psutil.Process(pid).memory_info().rss)
        except psutil.NoSuchProcess:
            raise ServerError("the ingress has ended") from None
        left_s = until_s - time.monotonic()
        if left_s <= 0.0:
            return highest
        time.sleep(min(SAMPLE_S, left_s))


def _status(admin: Any) -> dict[str, Any]:
    status: dict[str, Any] = admin.get("/sluice/status").raise_for_status().json()
    return status


def _all_there(admin: Any, streams: int) -> int:
    """Waits until the ingress has all streams, those of slow readers included, for `OPEN_S` at most. Returns how many
    it has.
    """
    until_s = time.monotonic() + OPEN_S
    while (there := int(_status(admin)["replica"]["in_flight"])) < streams and time.monotonic() < until_s:
        time.sleep(SAMPLE_S)
    return there


def _gone(admin: Any) -> None:
    """Waits until the ingress has no request any more. Raises ServerError after `GONE_S`."""
    until_s = time.monotonic() + GONE_S
    while left := _status(admin)["replica"]["in_flight"]:
        if time.monotonic() >= until_s:
            raise ServerError(f"{left} requests are left {GONE_S:g} s after the clients went")
        time.sleep(SAMPLE_S)
