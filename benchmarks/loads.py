"""Reads the loads of the decode engines from a live router's journal, separately for each policy.

The journal is replayed (`policies.journal.replay`): every decision is made again and compared with the recorded one.
The loads are read from the dispatcher's state at the router's clock ticks.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from policies.journal.codec import loads
from policies.journal.lines import Header
from policies.journal.replay import Record, dispatcher_of, outcome, read
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import Role


@dataclass(slots=True)
class Window:
    """The interval [start_s, end_s) in which a policy is measured, in seconds since the epoch."""

    policy: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Seen:
    """The samples from one policy's windows, one for each clock tick, and the output tokens of requests that ended.

    `imbalance` is the highest less the lowest KV tokens of the decode engines, `mean_load` their mean, and `pool` the
    number of pooled requests. `waits_s` has the time in the pool of each request that was sent to a decode engine, and
    `departures` the number of departures that were forecast.
    """

    imbalance: list[float] = field(default_factory=list)
    pool: list[int] = field(default_factory=list)
    mean_load: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    departures: int = 0
    tokens: int = 0


def look(folder: Path, windows: Sequence[Window]) -> tuple[dict[str, Seen], int]:
    """Replays the journal in `folder`.

    Returns (samples by policy, number of events whose decision differs from the recorded one). A number above 0 means
    that there is a bug.
    """
    seen = {window.policy: Seen() for window in windows}
    records = read(_lines(folder))
    header = next(records)
    assert isinstance(header, Header)
    dispatcher, differ = dispatcher_of(header), 0
    for record in records:
        if not isinstance(record, Record):
            continue
        differ += outcome(dispatcher, record.event) != record.outcome
        at_s = record.event.now_s
        window = next((w for w in windows if w.start_s <= at_s < w.end_s), None)
        if window is not None:
            _sample(seen[window.policy], dispatcher.state, record.event)
            seen[window.policy].waits_s += _waits_s(record.outcome)
    return seen, differ


def _lines(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("journal-*.jsonl")):
        with file.open() as text:
            yield from text


def _waits_s(outcome: Sequence[str]) -> list[float]:
    """Returns the time in the pool of each request that an event sent to a decode engine, from its recorded lines."""
    actions = [loads(line) for line in outcome if '"RouteDecode"' in line]
    return [float(action["waited_s"]) for action in actions if isinstance(action, dict)]


def _sample(seen: Seen, state: ClusterState, event: ev.Event) -> None:
    if isinstance(event, ev.Closed):
        seen.tokens += event.output_tokens
    if isinstance(event, ev.ForecastMade) and event.finishes_in_tokens is not None:
        seen.departures += 1
    if not isinstance(event, ev.Tick):
        return
    workers = state.snapshot(event.now_s).workers.values()
    loads = [w.kv_tokens for w in workers if w.role is Role.DECODE]
    seen.imbalance.append(max(loads) - min(loads))
    seen.mean_load.append(statistics.fmean(loads))
    seen.pool.append(state.pool_size)
