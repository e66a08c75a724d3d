"""The latest requests of a running application, from its router's journal, and how they went.

They are those of the journal's last minutes where its folder can be read here, else those that the router's ring of
events holds and those that came while it was watched.

Not claimed: requests with several choices and those of clients that left (both are left out), and what is older than
the window.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.live.stats import percentile
from benchmarks.sim.config import ControlPlane
from benchmarks.whatif.live.errors import FromLiveError
from policies.journal.codec import CodecError, loads
from policies.journal.lines import JournalError, parse_event
from policies.request.attempts import request_id_of
from policies.state import events as ev
from policies.state.views import Request
from predictors.traces import MOONCAKE_BLOCK_TOKENS

MOST_JOURNAL_BYTES = 64 << 20
"""Most bytes that are read from the end of a journal. ASSUMPTION: they hold some minutes of any load."""
MOST_REQUESTS = 20_000
SIMULATED_TIMEOUT_S = ControlPlane().request_timeout_s
"""The time that every simulated request may take, which is an ingress's default, too."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request of the live application: its arrival (Unix seconds), lengths, objectives, how it went, and what its
    client asked for. `lost` says that it asked for something that the simulation leaves out.
    """

    at_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    outcome: str
    ttft_s: float | None
    tpot_s: float | None
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    hash_ids: tuple[int, ...] = ()
    request_class: str = "standard"
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    lost: bool = False


def latest(
    journal: Mapping[str, Any], ring: Mapping[int, dict[str, Any]], minutes: float
) -> tuple[list[Seen], tuple[float, float], str, list[str]]:
    """Returns the latest requests that have ended, (bytes, tokens) of their KV, where they are from, and problems."""
    problems: list[str] = []
    lines: dict[int, dict[str, Any]] = dict(ring)
    source = (
        "the router's last events and those of the seconds that were watched (no journal is kept in a folder)"
    )
    folder = journal.get("folder")
    if folder and os.access(folder, os.R_OK):
        lines = {
            int(line["n"]): line for line in _journal_lines(Path(folder), str(journal.get("file") or ""))
        } | lines
        source = f"the journal's last {minutes:g} minutes"
    elif folder:
        problems.append(
            f"the journal's folder {folder} cannot be read on this machine: the router's last events stand for it"
        )
    elif not lines:
        problems.append("the router keeps no events (router.journal.ring_events is 0): there is no workload")
    requests, kv_bytes, left_out = requests_of(_events(lines))
    if requests:
        since_s = requests[-1].at_s - 60.0 * minutes
        requests = [one for one in requests if one.at_s >= since_s][-MOST_REQUESTS:]
    if left_out:
        problems.append(
            f"{left_out} requests with several choices or cancelled by their clients are left out"
        )
    return requests, kv_bytes, source, problems


def _journal_lines(folder: Path, current: str) -> Iterator[dict[str, Any]]:
    """Yields the lines about requests at the end of the log to which the file `current` belongs."""
    run = Path(current).name.rpartition("-")[0]
    files = sorted(folder.glob(f"{run}-*.jsonl" if run else "journal-*.jsonl"))
    left, chosen = MOST_JOURNAL_BYTES, []
    for file in reversed(files):
        size = file.stat().st_size
        chosen.append((file, max(0, size - left)))
        left -= size
        if left <= 0:
            break
    for file, skip in reversed(chosen):
        with file.open("rb") as source:
            source.seek(skip)
            if skip:
                source.readline()
            for raw in source:
                if (
                    b'"event":"Arrived"' in raw
                    or b'"event":"Closed"' in raw
                    or b'"event":"PrefillDone"' in raw
                ):
                    try:
                        line = loads(raw.decode())
                    except (CodecError, UnicodeDecodeError):
                        # the last line, which is being written
                        continue
                    yield line


def _events(lines: Mapping[int, dict[str, Any]]) -> Iterator[ev.Event]:
    for n in sorted(lines):
        try:
            yield parse_event(lines[n])
        except (CodecError, JournalError) as error:
            raise FromLiveError(f"event {n} of the journal cannot be read: {error}") from error


def requests_of(events: Iterable[ev.Event]) -> tuple[list[Seen], tuple[float, float], int]:
    """Returns the requests that ended in `events` by arrival, (bytes, tokens) of their KV, and how many were left out.

    A request that was tried again arrived with its first attempt. One whose arrival is not among the events is unknown.
    """
    first: dict[str, Request] = {}
    # A later attempt computes the tokens of the answer that its client already has, too.
    attempt_tokens: dict[str, int] = {}
    found: list[Seen] = []
    n_bytes = n_tokens = 0.0
    left_out = 0
    for event in events:
        match event:
            case ev.Arrived():
                first.setdefault(request_id_of(event.request.attempt_id), event.request)
                attempt_tokens[event.request.attempt_id] = event.request.prompt_tokens
            case ev.PrefillDone():
                tokens = attempt_tokens.pop(event.attempt_id, 0)
                if tokens and event.kv_bytes > 0:
                    n_bytes, n_tokens = n_bytes + event.kv_bytes, n_tokens + tokens
            case ev.Closed() if event.ended is not None:
                request = first.pop(request_id_of(event.attempt_id), None)
                if request is None:
                    continue
                if request.slots != 1 or event.ended.outcome == "cancelled":
                    left_out += 1
                    continue
                found.append(_seen(request, event))
    return sorted(found, key=lambda one: one.at_s), (n_bytes, n_tokens), left_out


def _seen(request: Request, event: ev.Closed) -> Seen:
    ended = event.ended
    assert ended is not None
    # what was refused or failed would have had some length; its limit is all that is known of it
    output = ended.output_tokens if ended.outcome == "finished" else request.max_tokens
    terms = request.terms
    return Seen(
        request.arrived_s,
        event.now_s,
        request.prompt_tokens,
        max(output, 1),
        ended.outcome,
        ended.ttft_s,
        ended.tpot_s,
        terms.ttft_slo_s,
        terms.tpot_slo_s,
        _hash_ids(request),
        terms.request_class,
        terms.priority,
        terms.tenant,
        terms.weight,
        lost=terms.local or terms.mode is not None or terms.timeout_s not in (None, SIMULATED_TIMEOUT_S),
    )


def _hash_ids(request: Request) -> tuple[int, ...]:
    """Returns the names of the prompt's full blocks of 512 tokens: a chained hash of a small block names all before."""
    small = request.block_tokens
    if not small or MOONCAKE_BLOCK_TOKENS % small:
        return ()
    step = MOONCAKE_BLOCK_TOKENS // small
    return tuple(h % 2**63 for h in request.block_hashes[step - 1 :: step])


def measured(requests: Sequence[Seen], slo: tuple[float | None, float | None]) -> dict[str, float | None]:
    """Returns the figures of requests as the simulator names them; all are judged by the objectives `slo`."""
    if not requests:
        return {}
    seconds = max(max(one.ended_s for one in requests) - requests[0].at_s, 1e-9)
    done = [one for one in requests if one.outcome == "finished"]
    met = sum(_met(one, slo) for one in done)
    found: dict[str, float | None] = {
        "slo_share": None if slo == (None, None) else met / len(requests),
        "goodput_per_s": met / seconds,
        "throughput_tok_s": sum(one.output_tokens for one in done) / seconds,
    }
    for name, values in (
        ("ttft", [one.ttft_s for one in done if one.ttft_s is not None]),
        ("tpot", [one.tpot_s for one in done if one.tpot_s is not None]),
    ):
        found[f"{name}_mean_s"] = math.fsum(values) / len(values) if values else None
        for q in (50, 95):
            found[f"{name}_p{q}_s"] = percentile(values, q / 100) if values else None
    return found


def _met(one: Seen, slo: tuple[float | None, float | None]) -> bool:
    pairs = zip((one.ttft_s, one.tpot_s), slo, strict=True)
    return all(value is None or limit is None or value <= limit for value, limit in pairs)
