"""The lines of a scaling policy's journal, in JSON; `replay` decides them again.

    {"scaling": 1, "version": .., "policy": "joint", "params": {..}, "state": {..}}    header: the state before step 1
    {"seen": {..}, "plan": {..}, "reasons": [..]}                                      one step
    {"seen": {..}, "error": "..", "by_step": true}                                     an error instead of a step

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
from policies.scaling.registry import decoded_state, encoded_state, make, params_of

FORMAT = 1


class ScalingJournalError(ValueError):
    """The lines are not a journal that this version can read; the message names the line and the fault."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One step as it is written."""

    seen: Observation
    plan: Plan
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _FaultLine:
    """One observation at which the policy failed: `by_step` in its step, else its plan could not be carried out."""

    seen: Observation
    error: str
    by_step: bool


_LINE, _READ_LINE = encoder(_Line), decoder(_Line)
_FAULT, _READ_FAULT = encoder(_FaultLine), decoder(_FaultLine)


def header_line(policy: ScalingPolicy, state: Any, version: str) -> str:
    """Returns the first line of a journal file for `policy`, whose next step begins with `state`."""
    return dumps(
        {
            "scaling": FORMAT,
            "version": version,
            "policy": policy.name,
            "params": params_of(policy),
            "state": encoded_state(policy, state),
        }
    )


def step_line(seen: Observation, step: Step) -> str:
    """Returns the line of one step."""
    assert _LINE is not None
    return dumps(_LINE(_Line(seen, step.plan, step.reasons)))


def fault_line(seen: Observation, error: str, by_step: bool) -> str:
    """Returns the line of an observation at which the policy failed with `error`, the text of an exception: `by_step`
    in its step, else with a plan that could not be carried out.
    """
    assert _FAULT is not None
    return dumps(_FAULT(_FaultLine(seen, error, by_step)))


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a replay: what was written, what is decided now, and whether both are equal. An error of the policy
    stands in the place of a plan.
    """

    seen: Observation
    written: Plan | str
    decided: Plan | str
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
            assert _READ_LINE is not None
            assert _READ_FAULT is not None
            failed = isinstance(plain, dict) and "error" in plain
            written = _READ_FAULT(plain) if failed else _READ_LINE(plain)
        except (CodecError, BadParameter, KeyError, TypeError) as error:
            raise ScalingJournalError(f"line {number}: {error}") from error
        try:
            step = policy.step(written.seen, state)
        except Exception as error:
            # what a policy raises is its own
            told = written.error if failed else written.plan
            yield Replayed(
                written.seen, told, repr(error), (), failed and written.by_step and told == repr(error)
            )
            continue
        if failed:
            # a plan that could not be carried out has changed no state
            yield Replayed(written.seen, written.error, step.plan, step.reasons, not written.by_step)
            continue
        state = step.state
        same = (step.plan, step.reasons) == (written.plan, written.reasons)
        yield Replayed(written.seen, written.plan, step.plan, step.reasons, same)


def opened(line: str) -> tuple[ScalingPolicy, Any]:
    """Returns the policy and the state of a header line. Raises ScalingJournalError for a line that is none."""
    try:
        plain = loads(line)
        if not isinstance(plain, dict) or "scaling" not in plain:
            raise ScalingJournalError("no header of a scaling journal")
        return _opened(plain)
    except (CodecError, BadParameter, KeyError, TypeError) as error:
        raise ScalingJournalError(f"header: {error}") from error


def _opened(plain: dict[str, Any]) -> tuple[ScalingPolicy, Any]:
    if plain["scaling"] != FORMAT:
        raise ScalingJournalError(
            f"format {plain['scaling']!r} is not {FORMAT}: replay it with the version that wrote it,"
            f" {plain.get('version')}"
        )
    policy = make(plain["policy"], plain["params"])
    return policy, decoded_state(policy, plain["state"])
