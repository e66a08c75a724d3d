"""Measures one side at one load, and the capacity of an engine."""

import bisect
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.live import load as closed
from benchmarks.live.measure import CHAT
from benchmarks.live.servers import Server, ServerError, running
from benchmarks.overload.client import Form, sent
from benchmarks.overload.figures import figures
from benchmarks.overload.load import Mix, Times, Work, works
from benchmarks.overload.sides import Target

WARM_LOAD, WARM_S = 0.5, 5.0
"""The load with which a side begins, as a share of the capacity, and its seconds: servers import and connect, and
Sluice sees how fast its engines are.
"""
READY_S = 60.0
"""Longest time until a first request is answered whole; a router may take a while to find its engines."""
CLOSED_S, CLOSED_RAMP_S = 40.0, 10.0
"""Seconds of the closed loop that measures a capacity, and of its beginning, which does not count."""

Say = Callable[[str], None]
Made = Callable[[Path], Target]
"""A function that returns a side, ready to be started, with its files in an empty folder."""


def measured(
    made: Made, mix: Mix, load: float, capacity_per_s: float, times: Times, seed: int, say: Say
) -> dict[str, Any]:
    """Starts a side, sends the load, and returns its figures. Raises ServerError."""
    with _served(made, mix, seed, say) as (server, form):
        port = server.command.port
        warm = works(mix, WARM_LOAD, capacity_per_s, WARM_S, seed + 2)
        sent(port, warm, form, WARM_S + READY_S)
        requests = works(mix, load, capacity_per_s, times.sending_s, seed)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        outcomes = sent(port, requests, form, times.cut_s)
        cores = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
    return {**figures(outcomes, times), "client_cores": cores}


def capacity_per_s(made: Made, mix: Mix, slots: int, seed: int, say: Say) -> float:
    """Returns the requests per second that a side ends while twice as many as it has slots are always under way.
    Raises ServerError.
    """
    with _served(made, mix, seed, say) as (server, form):
        plan = works(mix, 1.0, 10.0, 60.0, seed)
        bodies, heads = zip(*map(form, plan), strict=True)
        begun_s = time.perf_counter()
        found = closed.drive(
            closed.Load(
                server.command.port, CHAT, bodies, 2 * slots, len(bodies) * 100, CLOSED_S, heads=heads
            )
        )
    if found.failures:
        raise ServerError(
            f"{server.command.name}: requests of the closed loop failed: {dict(found.failures)}"
        )
    ends_s = [first_s + stream_s for first_s, stream_s in zip(found.first_at_s, found.stream_s, strict=True)]
    return rate_per_s(ends_s, begun_s + CLOSED_RAMP_S, begun_s + CLOSED_S)


def rate_per_s(ends_s: Sequence[float], since_s: float, until_s: float) -> float:
    """Returns how many of these moments a second lie in [since, until)."""
    ordered = sorted(ends_s)
    count = bisect.bisect_left(ordered, until_s) - bisect.bisect_left(ordered, since_s)
    return count / (until_s - since_s)


@contextlib.contextmanager
def _served(made: Made, mix: Mix, seed: int, say: Say) -> Iterator[tuple[Server, Form]]:
    """A context in which a side runs and has answered, with the form of its requests. Raises ServerError."""
    # a unix socket's path is short
    with tempfile.TemporaryDirectory(prefix="sluice-over-") as folder:
        target = made(Path(folder))
        with running(target.command, say) as server:
            form = target.forms.form()
            _first(server, form, works(mix, 1.0, 1.0, READY_S, seed + 1))
            if target.forms.secrets:
                _asks_for_keys(server, replace(target.forms, secrets={}).form(), mix)
            yield server, form


def _asks_for_keys(server: Server, without: Form, mix: Mix) -> None:
    """Raises ServerError unless a request without a key is refused: else all tenants would be one."""
    work = replace(works(mix, 1.0, 1.0, READY_S, 0)[0], at_s=0.0)
    (found,) = sent(server.command.port, [work], without, READY_S)
    if found.reason != "status 401 invalid_api_key":
        raise ServerError(f"{server.command.name} does not ask for API keys: {found.end} {found.reason}")


def _first(server: Server, form: Form, requests: Sequence[Work]) -> None:
    """Sends one request after the other until one is answered whole. Raises ServerError."""
    until_s = time.monotonic() + READY_S
    reason = ""
    for work in requests:
        (found,) = sent(server.command.port, [replace(work, at_s=0.0)], form, READY_S)
        if found.end == "whole":
            return
        reason = f"{found.end} {found.reason}"
        if time.monotonic() >= until_s:
            break
        time.sleep(0.5)
    raise ServerError(
        f"{server.command.name}: no request was answered, the last one {reason}:\n{server.tail()}"
    )
