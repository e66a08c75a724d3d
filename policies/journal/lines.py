"""The lines of a dispatcher's journal, in JSON: every event, every action, every failure. `replay` decides them again.

    {"journal": 5, "version": .., "first": 0, "dispatch": {..}, "prefill": {"name", "params"}, ..}   header
    {"n": 0, "follow": 2, "event": "Arrived", "now_s": .., "request": {..}}
    {"action": "RoutePrefill", "attempt_id": .., "decision": {"worker", "ranking", "reason"}, ..}
    {"error": "StaleEvent", "message": ".."}

`follow` lines stand below an event: its actions and, if it failed, its failure as the last line.

`n` is the number of the event, and `dispatch` contains the seed. Decisions depend on these lines and the software
version only, because changes of policy and outputs of predictors are events too. In the header of a later file of the
same log, `first` is the number of the next event. Values are exact (`codec`). Nothing here does I/O: the caller passes
`write`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from policies.admission.base import AdmissionPolicy
from policies.admission.registry import OPEN
from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher
from policies.fairness.base import FairnessPolicy
from policies.fairness.registry import NONE
from policies.journal.codec import CodecError, Decode, Encode, decoder, dumps, encoder, loads
from policies.routing.base import DecodePolicy, PrefillPolicy
from policies.state import events as ev

FORMAT = 5


class JournalError(ValueError):
    """The lines are not a journal that this version can read; the message names the line and the fault."""


@dataclass(frozen=True, slots=True)
class Header:
    """A dispatcher's configuration before event number `first`. `version` is the version of the software."""

    version: str
    first: int
    dispatch: DispatchConfig
    prefill: ev.PolicyChoice
    decode: ev.PolicyChoice
    # journals of earlier versions name none
    admission: ev.PolicyChoice = field(default_factory=lambda: ev.PolicyChoice(OPEN))
    fairness: ev.PolicyChoice = field(default_factory=lambda: ev.PolicyChoice(NONE))


def _codecs(union: Any) -> dict[type, tuple[Encode, Decode]]:
    made: dict[type, tuple[Encode, Decode]] = {}
    for kind in get_args(union):
        encode = encoder(kind)
        assert encode is not None  # dataclasses always have one
        made[kind] = (encode, decoder(kind))
    return made


_EVENTS, _ACTIONS = _codecs(ev.Event), _codecs(Action)
_EVENT_BY_NAME = {kind.__name__: decode for kind, (_, decode) in _EVENTS.items()}
_ACTION_BY_NAME = {kind.__name__: decode for kind, (_, decode) in _ACTIONS.items()}
_HEADER, _READ_HEADER = encoder(Header), decoder(Header)


# --------------------------------------------------------------------------------------------------------- writing


def choice_of(policy: PrefillPolicy | DecodePolicy | AdmissionPolicy | FairnessPolicy) -> ev.PolicyChoice:
    """Returns a policy's registered name and all its parameters. Raises CodecError for one that is no plain data."""
    params: dict[str, Any] = {}
    for f in dataclasses.fields(policy):  # type: ignore[arg-type]  # every policy is a dataclass
        value = getattr(policy, f.name)
        if f.name != "name" and f.init:
            params[f.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    plain: dict[str, Any] = loads(dumps(params))  # tuples become lists
    return ev.PolicyChoice(policy.name, plain)


def header_line(dispatcher: Dispatcher, version: str, first: int = 0) -> str:
    """Returns the first line of a journal file: the header with the dispatcher's present configuration."""
    header = Header(
        version,
        first,
        dispatcher.config,
        choice_of(dispatcher.prefill),
        choice_of(dispatcher.decode),
        choice_of(dispatcher.admission),
        choice_of(dispatcher.fairness),
    )
    assert _HEADER is not None
    return dumps({"journal": FORMAT, **_HEADER(header)})


def event_line(n: int, follow: int, event: ev.Event) -> str:
    """Returns the line of event number `n`, below which `follow` more lines belong to it."""
    return dumps({"n": n, "follow": follow, "event": type(event).__name__, **_EVENTS[type(event)][0](event)})


def action_line(action: Action) -> str:
    """Returns the line of one action, with its whole decision."""
    return dumps({"action": type(action).__name__, **_ACTIONS[type(action)][0](action)})


def error_line(error: Exception) -> str:
    """Returns the line that records a failure to handle an event."""
    return dumps({"error": type(error).__name__, "message": str(error)})


def outcome_lines(actions: Sequence[Action], error: Exception | None = None) -> tuple[str, ...]:
    """Returns the lines below an event: its actions in order, then its failure.

    After a PolicyError the actions are its `decided`.
    """
    lines = tuple([action_line(action) for action in actions])
    return lines if error is None else (*lines, error_line(error))


def record_text(n: int, event: ev.Event, outcome: Sequence[str]) -> str:
    """Returns a whole record, which is an event and the lines of its outcome, as newline-terminated lines."""
    return "\n".join((event_line(n, len(outcome), event), *outcome, ""))


class JournalWriter:
    """Writes a journal: numbers the events and calls `write` once for each record, with newline-terminated lines.

    A new log must begin before the dispatcher's first event, because it could not be replayed otherwise (ValueError).
    With `first` > 0 the writer continues a log.
    """

    def __init__(
        self, write: Callable[[str], None], dispatcher: Dispatcher, version: str, first: int = 0
    ) -> None:
        state = dispatcher.state
        if first == 0 and (state.in_flight or state.snapshot(0.0).workers):
            raise ValueError("journal: begin it before the dispatcher's first event")
        self._write = write
        self.n = first
        write(header_line(dispatcher, version, first) + "\n")

    def record(self, event: ev.Event, actions: Sequence[Action], error: Exception | None = None) -> None:
        """Writes an event and its outcome. `error` is the exception that `handle` raised; after a PolicyError `actions`
        are its `decided`.
        """
        self._write(record_text(self.n, event, outcome_lines(actions, error)))
        self.n += 1


# --------------------------------------------------------------------------------------------------------- reading


def parse_header(data: Mapping[str, Any]) -> Header:
    """Returns the header in a line's data. Raises JournalError for another format, CodecError for wrong fields."""
    if data.get("journal") != FORMAT:
        raise JournalError(
            f"the format is {data.get('journal')!r}, this version reads {FORMAT}: use the version that wrote it"
        )
    header: Header = _READ_HEADER({k: v for k, v in data.items() if k != "journal"})
    return header


def parse_event(data: Mapping[str, Any]) -> ev.Event:
    """Returns the event in a line's data. Raises JournalError for an unknown event, CodecError for wrong fields."""
    fields = {name: value for name, value in data.items() if name not in ("n", "follow", "event")}
    event: ev.Event = _named(_EVENT_BY_NAME, data["event"], "event")(fields)
    return event


def parse_action(line: str) -> Action:
    """Returns the action in a line. Raises JournalError for an unknown action, CodecError for wrong fields."""
    data = loads(line)
    name = data.pop("action", None)
    action: Action = _named(_ACTION_BY_NAME, name, "action")(data)
    return action


def _named(known: Mapping[str, Decode], name: Any, what: str) -> Decode:
    if name not in known:
        raise JournalError(f"{what} {name!r} is not known; there are {', '.join(known)}")
    return known[name]


__all__ = [
    "FORMAT",
    "CodecError",
    "Header",
    "JournalError",
    "JournalWriter",
    "action_line",
    "choice_of",
    "error_line",
    "event_line",
    "header_line",
    "outcome_lines",
    "parse_action",
    "parse_event",
    "parse_header",
    "record_text",
]
