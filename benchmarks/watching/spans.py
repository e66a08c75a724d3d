"""Traces as a collector has them, against the router's journal: the tasks of each attempt, and the time of a request.

A request's time is that of the ingress's whole span. It is compared with the sum of what the trace says about it: the
waits and the ingress's own work (the events `prepare`, `queue`, `pool` and `finish`), the tasks (`prefill`, `transfer`,
`decode`) and, where an engine has failed, the time from the end of one attempt to the submission of the next. What is
missing from the sum, or counts twice in it, is time that the trace places wrongly.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.live.collector import attributes
from policies.journal.codec import loads
from policies.journal.replay import Record, read
from policies.request.troubles import NOT_CONNECTED
from policies.state import events as ev

TASKS = ("prefill", "transfer", "decode")
GOING_ON = ("migration", "retry")
_NS = 1e9


@dataclass(slots=True)
class Traces:
    """The spans of all requests.

    `whole` are the whole spans by the id in the answer, `tasks` the numbers of each task's spans by attempt, and
    `orphans` the names of spans whose parent never came.
    """

    whole: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Counter[str]] = field(default_factory=dict)
    orphans: Counter[str] = field(default_factory=Counter)
    going_on: int = 0
    _below: dict[bytes, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def below(self, whole: Any) -> list[Any]:
        """Returns the spans below a whole span."""
        return self._below[whole.span_id]

    def missing_s(self, request: str) -> float:
        """Returns the seconds of a request that its waits, tasks and gaps do not account for; below 0 if these are too
        many.
        """
        whole = self.whole[request]
        return _seconds(whole) - accounted_s(whole, self.below(whole))


def traces_of(spans: Sequence[Any]) -> Traces:
    """Returns what the collected spans of requests say. Spans of engines' starts stand alone and are left out."""
    found, known = Traces(), {(span.trace_id, span.span_id) for span in spans}
    for span in spans:
        if span.parent_span_id:
            if (span.trace_id, span.parent_span_id) not in known:
                found.orphans[span.name] += 1
            found._below[span.parent_span_id].append(span)
        elif span.name.startswith("POST "):
            found.whole[str(attributes(span).get("gen_ai.response.id", ""))] = span
        if span.name in TASKS and "sluice.attempt" in (told := attributes(span)):
            found.tasks.setdefault(told["sluice.attempt"], Counter())[span.name] += 1
        found.going_on += span.name in GOING_ON
    return found


def accounted_s(whole: Any, below: Iterable[Any]) -> float:
    """Returns the seconds of a request's waits and tasks, and of the gaps between its attempts."""
    below = list(below)
    total = sum(_seconds(span) for span in below if span.name in TASKS)
    submitted: list[int] = []
    for event in whole.events:
        told = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in event.attributes}
        total += float(told["seconds"])
        if event.name == "queue":
            submitted.append(event.time_unix_nano - round(float(told["seconds"]) * _NS))
    for span in below:
        if span.name in GOING_ON:
            # the clock's offset differs by microseconds between batches, so that a next attempt may seem to begin first
            later = [at for at in submitted if at >= span.start_time_unix_nano - 1_000_000]
            following = min(later, default=span.end_time_unix_nano)
            total += (following - span.start_time_unix_nano) / _NS
    return total


def _seconds(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / _NS


def tasks_in(journal: Path) -> dict[str, Counter[str]]:
    """Returns the tasks of each attempt by the router's journal in this folder.

    A prefill and a transfer are decisions of the router, unless the ingress had no connection to the chosen engine:
    then nothing was sent, and no task began. An attempt that ended with output was decoded.
    """
    found: dict[str, Counter[str]] = {}
    for record in read(_lines(journal)):
        if not isinstance(record, Record):
            continue
        for line in record.outcome:
            action: Mapping[str, Any] = loads(line)
            name = {"RoutePrefill": "prefill", "RouteDecode": "transfer"}.get(action.get("action", ""))
            if name is not None:
                found.setdefault(str(action["attempt_id"]), Counter())[name] += 1
        event = record.event
        if isinstance(event, ev.Closed) and event.output_tokens:
            found.setdefault(event.attempt_id, Counter())["decode"] += 1
        if isinstance(event, ev.AttemptFailed) and event.code == NOT_CONNECTED:
            unsent = "transfer" if found[event.attempt_id]["transfer"] else "prefill"
            del found[event.attempt_id][unsent]
    return found


def _lines(folder: Path) -> Iterable[str]:
    for file in sorted(folder.glob("journal-*.jsonl")):
        with file.open() as text:
            yield from text


def differences(expected: Mapping[str, Counter[str]], found: Mapping[str, Counter[str]]) -> list[str]:
    """Returns a sentence for each attempt whose tasks and spans are not the same."""
    said = []
    for attempt in sorted(expected.keys() | found.keys()):
        tasks, spans = expected.get(attempt, Counter()), found.get(attempt, Counter())
        if tasks != spans:
            said.append(f"{attempt}: tasks {_shown(tasks)}, spans {_shown(spans)}")
    return said


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
