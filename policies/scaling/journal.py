"""The lines of a scaling policy's journal, in JSON; `replay` decides them again.

    {"scaling": 1, "version": .., "policy": "joint", "params": {..}, "state": {..}}    header: the state before step 1
    {"seen": {..}, "plan": {..}, "reasons": [..]}                                      one step

A file can begin at any step, since the header has the state. Values are exact (`policies.journal.codec`). Nothing here
does I/O: the caller passes lines.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from policies.journal.codec import CodecError, decoder, dumps, encoder, loads
from policies.routing.params import BadParameter
from policies.scaling.base import Plan, ScalingPolicy, Step
from policies.scaling.observation import Observation
from policies.scaling.registry import SCALING, make, params_of

FORMAT = 1


class ScalingJournalError(ValueError):
    """The lines are not a journal that this version can read; the message names the line and the fault."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One step as it is written."""

    seen: Observation
    plan: Plan
    reasons: tuple[str, ...]


_LINE, _READ_LINE = encoder(_Line), decoder(_Line)


def header_line(policy: ScalingPolicy, state: Any, version: str) -> str:
    """Returns the first line of a journal file for `policy`, whose next step begins with `state`."""
    kind: Any = SCALING[policy.name][1]
    encode = encoder(kind)
    assert encode is not None
    return dumps(
        {
            "scaling": FORMAT,
            "version": version,
            "policy": policy.name,
            "params": params_of(policy),
            "state": encode(state),
        }
    )


def step_line(seen: Observation, step: Step) -> str:
    """Returns the line of one step."""
    assert _LINE is not None
    return dumps(_LINE(_Line(seen, step.plan, step.reasons)))


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a replay: what was written, what is decided now, and whether both are equal."""

    seen: Observation
    written: Plan
    decided: Plan
    reasons: tuple[str, ...]
    same: bool


def replay(lines: Iterable[str]) -> Iterable[Replayed]:
    """Yields each step of a journal, decided again. Raises ScalingJournalError for a line that cannot be read."""
    policy: ScalingPolicy | None = None
    state: Any = None
    for number, line in enumerate(lines, 1):
        try:
            plain = loads(line)
            if isinstance(plain, dict) and "scaling" in plain:
                policy, state = _opened(plain)
                continue
            if policy is None:
                raise ScalingJournalError(
                    f"line {number}: a journal begins with its header; give the whole file"
                )
            written = _READ_LINE(plain) if _READ_LINE is not None else plain
        except (CodecError, BadParameter, KeyError, TypeError) as error:
            raise ScalingJournalError(f"line {number}: {error}") from error
        step = policy.step(written.seen, state)
        state = step.state
        same = (step.plan, step.reasons) == (written.plan, written.reasons)
        yield Replayed(written.seen, written.plan, step.plan, step.reasons, same)


def _opened(plain: dict[str, Any]) -> tuple[ScalingPolicy, Any]:
    if plain["scaling"] != FORMAT:
        raise ScalingJournalError(
            f"format {plain['scaling']!r} is not {FORMAT}: replay it with the version that wrote it,"
            f" {plain.get('version')}"
        )
    policy = make(plain["policy"], plain["params"])
    kind: Any = SCALING[policy.name][1]
    decode = decoder(kind)
    return policy, plain["state"] if decode is None else decode(plain["state"])
