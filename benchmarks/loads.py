"""What a live router's journal shows of its decode engines' loads, policy by policy.

The events are replayed through the reducer (`policies.state.reducer`), with the decisions as they were recorded;
the loads are read at the router's clock ticks.
"""

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policies.replay import Record, read
from policies.state import events as ev
from policies.state.reducer import ClusterState
from policies.state.views import Role


@dataclass(slots=True)
class Window:
    """One policy's measured stretch, seconds since the epoch."""

    policy: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Seen:
    """What the journal shows of one policy's windows."""

    imbalance: list[float] = field(default_factory=list)
    pool: list[int] = field(default_factory=list)
    mean_load: list[float] = field(default_factory=list)
    tokens: int = 0


def look(folder: Path, windows: Sequence[Window]) -> dict[str, Seen]:
    """Replays the journal's events through the reducer and samples it at each tick within a window."""
    seen = {window.policy: Seen() for window in windows}
    state = ClusterState()
    for record in _records(folder):
        event = record.event
        if isinstance(event, ev.PoliciesChanged):
            continue
        with contextlib.suppress(ev.StaleEvent):
            state.apply(event)
        window = next((w for w in windows if w.start_s <= event.now_s < w.end_s), None)
        if window is not None:
            _sample(seen[window.policy], state, record)
        for line in record.outcome:  # the dispatcher applies its own decisions: so must we
            with contextlib.suppress(ev.StaleEvent):
                _carry_out(state, event.now_s, json.loads(line))
    return seen


def _records(folder: Path) -> Iterator[Record]:
    def lines() -> Iterator[str]:
        for file in sorted(folder.glob("journal-*.jsonl")):
            with file.open() as text:
                yield from text

    return (item for item in read(lines()) if isinstance(item, Record))


def _carry_out(state: ClusterState, now_s: float, action: dict[str, Any]) -> None:
    match action.get("action"):
        case "RoutePrefill":
            worker = action["decision"]["worker"]
            state.apply(ev.PrefillRouted(now_s, action["rid"], worker, bool(action["colocated"])))
        case "RouteDecode":
            state.apply(ev.DecodeRouted(now_s, action["rid"], action["decision"]["worker"]))
        case "Reject":
            state.apply(ev.Closed(now_s, action["rid"], "rejected"))


def _sample(seen: Seen, state: ClusterState, record: Record) -> None:
    event = record.event
    if isinstance(event, ev.Closed):
        seen.tokens += event.output_tokens
    if not isinstance(event, ev.Tick):
        return
    workers = state.snapshot(event.now_s).workers.values()
    loads = [w.kv_tokens for w in workers if w.role is Role.DECODE]
    seen.imbalance.append(max(loads) - min(loads))
    seen.mean_load.append(statistics.fmean(loads))
    seen.pool.append(state.pool_size)
