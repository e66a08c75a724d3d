"""Replay of a journal: a fresh dispatcher handles the recorded events, and every decision must come out the same.

    for step in replay(open(path)):
        assert step.recorded == step.replayed

The lines are compared as text: worker, ranking, terms to the last digit, reason, waits, and messages of failures. The
lines of several files of one log are passed one file after the other. A gap between them, or at the start, is refused,
because decisions depend on all earlier events. Not claimed: that another version of the software decides the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from policies.admission.registry import admission_policy
from policies.dispatch.dispatcher import Dispatcher
from policies.fairness.registry import fairness_policy
from policies.journal.codec import CodecError, loads
from policies.journal.lines import Header, JournalError, outcome_lines, parse_event, parse_header
from policies.routing.base import PolicyError
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev


class TornJournal(JournalError):
    """The log ends inside a record (because its writer was killed, say). All records before it have been yielded."""


@dataclass(frozen=True, slots=True)
class Record:
    """One event as recorded; `outcome` holds the lines below it."""

    n: int
    event: ev.Event
    outcome: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One event, the lines that were recorded below it, and the lines that the replay gave for it."""

    n: int
    event: ev.Event
    recorded: tuple[str, ...]
    replayed: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.recorded == self.replayed


def replay(lines: Iterable[str]) -> Iterator[Step]:
    """Yields a step for each event of a journal, handled by a dispatcher that is made from the journal's header.

    Raises JournalError, naming the line, for a journal that cannot be read.
    """
    records = read(lines)
    header = next(records)
    assert isinstance(header, Header)
    dispatcher = dispatcher_of(header)
    for record in records:
        if isinstance(record, Record):
            yield Step(record.n, record.event, record.outcome, outcome(dispatcher, record.event))


def dispatcher_of(header: Header) -> Dispatcher:
    """Returns a dispatcher as it was before the log's first event. Raises JournalError where that is missing."""
    if header.first:
        raise JournalError(
            f"the log begins at event {header.first}: give its earlier files too, oldest first"
        )
    prefill = prefill_policy(header.prefill.name, header.prefill.params)
    decode = decode_policy(header.decode.name, header.decode.params)
    admission = admission_policy(header.admission.name, header.admission.params)
    fairness = fairness_policy(header.fairness.name, header.fairness.params)
    return Dispatcher(header.dispatch, prefill, decode, admission, fairness)


def outcome(dispatcher: Dispatcher, event: ev.Event) -> tuple[str, ...]:
    """Lets the dispatcher handle an event, and returns the lines of its actions or failure as a journal holds them."""
    try:
        return outcome_lines(dispatcher.handle(event))
    except PolicyError as error:
        return outcome_lines(error.decided, error)
    except Exception as error:  # the recorded failure must come again
        return outcome_lines((), error)


def read(lines: Iterable[str]) -> Iterator[Header | Record]:
    """Yields a journal's headers and records in order; the first item is a header.

    Raises JournalError for a line that cannot be read and for a gap, TornJournal where the last record is cut off.
    """
    source = enumerate(lines, start=1)
    number, line = next(source, (1, ""))
    if not line.strip():
        raise JournalError("the journal is empty")
    header = _header(number, line)
    yield header
    expected = header.first
    for number, line in source:
        if line.startswith('{"journal"'):
            header = _header(number, line)
            _check_next(number, header.first, expected)
            yield header
            continue
        n, record = _record(number, line, source)
        _check_next(number, n, expected)
        yield record
        expected = n + 1


def _header(number: int, line: str) -> Header:
    try:
        data = loads(line)
        if not isinstance(data, dict):
            raise JournalError("no header")
        return parse_header(data)
    except (CodecError, JournalError) as error:
        raise JournalError(f"line {number}: {error}") from None


def _record(number: int, line: str, source: Iterator[tuple[int, str]]) -> tuple[int, Record]:
    try:
        data: dict[str, Any] = loads(line)
    except CodecError as error:
        if next(source, None) is None:
            raise TornJournal(f"line {number}: the log ends inside it") from None
        raise JournalError(f"line {number}: {error}") from None
    if not isinstance(data, dict) or not {"n", "follow", "event"} <= data.keys():
        raise JournalError(f"line {number}: an event was expected here")
    follow = [text.rstrip("\n") for _, text in zip(range(data["follow"]), _texts(source), strict=False)]
    if len(follow) < data["follow"] or (follow and not _is_json(follow[-1])):
        raise TornJournal(f"line {number}: the log ends inside the record of event {data['n']}")
    try:
        return data["n"], Record(data["n"], parse_event(data), tuple(follow))
    except (CodecError, JournalError) as error:
        raise JournalError(f"line {number}: {error}") from None


def _is_json(line: str) -> bool:
    try:
        loads(line)
    except CodecError:
        return False
    return True


def _texts(source: Iterator[tuple[int, str]]) -> Iterator[str]:
    for _, text in source:
        yield text


def _check_next(number: int, found: int, expected: int) -> None:
    if found != expected:
        raise JournalError(f"line {number}: event {found} where {expected} should come: the log is not whole")
