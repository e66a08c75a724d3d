"""The journal of a flow arbiter, in JSON lines: every event with its time, and below it the permits or the refusal.

    {"flow_journal": 4, "version": .., "config": {..}, "policy": {"name", "params"}}                  header
    {"n": 0, "now_s": .., "event": "Submitted", "flow": {..}, "in_flight": [], "permits": [{..}]}
    {"n": 1, "now_s": .., "event": "Done", .., "refused": "UnknownFlow", "message": ".."}

Permits depend on these lines and the software version only: an arbiter reads no clock and draws nothing. `replay` makes
a fresh arbiter from the header, lets it hear the events, and every permit must come out the same. Values are exact
(`policies.journal.codec`). Nothing here does I/O: the caller passes `write`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from policies.flow.arbiter import Arbiter
from policies.flow.base import FlowError, FlowPolicy
from policies.flow.config import ArbiterConfig
from policies.flow.events import FlowEvent, Permit
from policies.flow.registry import flow_policy
from policies.journal.codec import CodecError, Decode, Encode, decoder, dumps, encoder, loads
from policies.journal.lines import JournalError
from policies.routing.params import BadParameter
from policies.state.events import PolicyChoice

FORMAT = 4
"""The format's number. It rises with each change after which an arbiter gives other permits for the same events: in 2
whole reads need their ports to themselves, chunks are larger where messages take long, and flows may be gated; in 3
chunks in flight are told one by one, and an ingress cuts the permits of its sources while it is not alone; in 4 late
chunks take no slot, and no permit is for less than a flow's least part.
"""


class TornFlowJournal(JournalError):
    """The journal ends inside a line (because its writer was killed, say). All events before it have been yielded."""


@dataclass(frozen=True, slots=True)
class FlowHeader:
    """An arbiter's configuration and policy before its first event. `version` is the version of the software."""

    version: str
    config: ArbiterConfig
    policy: PolicyChoice


@dataclass(frozen=True, slots=True)
class FlowStep:
    """One event, the outcome that was recorded for it, and the outcome of the replay, both as JSON text."""

    n: int
    now_s: float
    event: FlowEvent
    recorded: str
    replayed: str

    @property
    def equal(self) -> bool:
        return self.recorded == self.replayed


def _encoder(kind: Any) -> Encode:
    made = encoder(kind)
    assert made is not None  # dataclasses always have one
    return made


_EVENTS: dict[type, Encode] = {kind: _encoder(kind) for kind in get_args(FlowEvent)}
_READ: dict[str, Decode] = {kind.__name__: decoder(kind) for kind in get_args(FlowEvent)}
_PERMIT = _encoder(Permit)
_HEADER, _READ_HEADER = _encoder(FlowHeader), decoder(FlowHeader)


def choice_of(policy: FlowPolicy) -> PolicyChoice:
    """Returns a flow policy's registered name and all its parameters."""
    fields = dataclasses.fields(policy)  # type: ignore[arg-type]  # every policy is a dataclass
    return PolicyChoice(
        policy.name,
        {each.name: getattr(policy, each.name) for each in fields if each.init and each.name != "name"},
    )


class FlowJournal:
    """Wraps an arbiter: `apply` does what the arbiter's does, and writes one line for each event.

    It must begin before the arbiter's first event (ValueError otherwise), because a log without its beginning cannot be
    replayed.
    """

    def __init__(self, write: Callable[[str], None], arbiter: Arbiter, version: str) -> None:
        if arbiter.started:
            raise ValueError("flow journal: begin it before the arbiter's first event")
        self.arbiter = arbiter
        self._write = write
        self._n = 0
        header = FlowHeader(version, arbiter.config, choice_of(arbiter.policy))
        write(dumps({"flow_journal": FORMAT, **_HEADER(header)}) + "\n")

    def apply(self, event: FlowEvent, now_s: float) -> list[Permit]:
        """Lets the arbiter hear the event, records it with its outcome, and returns the permits.

        Raises what the arbiter raises; the refusal is recorded.
        """
        try:
            permits = self.arbiter.apply(event, now_s)
        except (FlowError, BadParameter) as error:
            self._record(event, now_s, _refused(error))
            raise
        self._record(event, now_s, _permitted(permits))
        return permits

    def _record(self, event: FlowEvent, now_s: float, outcome: Mapping[str, Any]) -> None:
        head = {"n": self._n, "now_s": now_s, "event": type(event).__name__}
        self._write(dumps({**head, **_EVENTS[type(event)](event), **outcome}) + "\n")
        self._n += 1


def replay(lines: Iterable[str]) -> Iterator[FlowStep]:
    """Yields a step for each event of a journal, heard by an arbiter that is made from the journal's header.

    Raises JournalError, naming the line, for a journal that cannot be read, and TornFlowJournal where its last line is
    not whole.
    """
    arbiter: Arbiter | None = None
    for number, line in enumerate(lines, 1):
        try:
            data = loads(line)
            if arbiter is None:
                arbiter = _arbiter(data)
            else:
                yield _step(arbiter, data, number - 2)
        except (CodecError, KeyError, TypeError) as error:
            if not line.endswith("\n"):
                raise TornFlowJournal(f"the journal ends inside line {number}") from None
            raise JournalError(f"flow journal, line {number}: {error}") from None


def _arbiter(data: Any) -> Arbiter:
    if not isinstance(data, dict) or "flow_journal" not in data:
        raise JournalError("flow journal: the first line is no header")
    if data["flow_journal"] != FORMAT:
        raise JournalError(
            f"flow journal: the format is {data['flow_journal']!r}, this version reads {FORMAT}: "
            "use the version that wrote it"
        )
    header: FlowHeader = _READ_HEADER({key: value for key, value in data.items() if key != "flow_journal"})
    return Arbiter(flow_policy(header.policy.name, header.policy.params), header.config)


def _step(arbiter: Arbiter, data: dict[str, Any], expected: int) -> FlowStep:
    n, now_s, name = data.pop("n"), data.pop("now_s"), data.pop("event")
    if n != expected:
        raise JournalError(f"flow journal: event {n} follows event {expected - 1}: a part is missing")
    if name not in _READ:
        raise JournalError(f"flow journal: event {name!r} is not known; there are {', '.join(_READ)}")
    recorded = dumps({key: data.pop(key) for key in ("permits", "refused", "message") if key in data})
    event: FlowEvent = _READ[name](data)
    try:
        outcome = _permitted(arbiter.apply(event, float(now_s)))
    except (FlowError, BadParameter) as error:
        outcome = _refused(error)
    return FlowStep(n, float(now_s), event, recorded, dumps(outcome))


def _permitted(permits: Sequence[Permit]) -> dict[str, Any]:
    return {"permits": [_PERMIT(permit) for permit in permits]}


def _refused(error: Exception) -> dict[str, Any]:
    return {"refused": type(error).__name__, "message": str(error)}
