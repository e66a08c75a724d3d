"""The tasks of an attempt at engines, as its ingress knows them: traces make spans of them, and the dashboard bars.

Nothing of OpenTelemetry is loaded here.
"""

from collections.abc import Iterator
from typing import NamedTuple

from actors.telemetry.facts import Attempt

Attributes = dict[str, str | int | float | bool]


class Part(NamedTuple):
    """One task of an attempt, from `start_s` to `end_s`, at an engine. `failed` says whether the attempt ended there
    because the engine failed.
    """

    name: str
    start_s: float
    end_s: float
    engine: str
    failed: bool
    attributes: Attributes


def parts_of(attempt: Attempt) -> Iterator[Part]:
    """Yields the tasks that the attempt began, in their order. They do not overlap."""
    times, end_s = attempt.times, attempt.ended_s
    colocated = attempt.prefill_engine is None
    first = attempt.decode_engine if colocated else attempt.prefill_engine
    if times.routed_s is None or first is None:
        return
    until_s = times.attempt_first_s if colocated else times.pooled_s
    yield _part(
        "prefill", attempt, times.routed_s, until_s, first, {"sluice.cached_tokens": attempt.cached_tokens}
    )
    if attempt.decode_engine is None or until_s is None:
        return
    if not colocated:
        if times.decode_routed_s is None:
            return
        moved: Attributes = {
            "sluice.transfer.bytes": attempt.transfer_bytes,
            "sluice.transfer.seconds": attempt.transfer_s,
            "sluice.transfer.held_seconds": attempt.held_s,
        }
        if attempt.level is not None:
            moved["sluice.transfer.level"] = attempt.level
        yield _part(
            "transfer", attempt, times.decode_routed_s, times.attempt_first_s, attempt.decode_engine, moved
        )
    if times.attempt_first_s is not None:
        generated: Attributes = {"gen_ai.usage.output_tokens": attempt.tokens}
        done_s = end_s if attempt.failed is not None or times.last_s is None else times.last_s
        yield Part(
            "decode", times.attempt_first_s, done_s, attempt.decode_engine,
            attempt.failed == attempt.decode_engine, generated,
        )  # fmt: skip


def _part(
    name: str, attempt: Attempt, start_s: float, until_s: float | None, engine: str, attributes: Attributes
) -> Part:
    """Returns a task that ended at `until_s`, or with the attempt if that is None."""
    ended_here = until_s is None
    failed = ended_here and attempt.failed in (engine, attempt.prefill_engine, attempt.decode_engine)
    end_s = attempt.ended_s if until_s is None else until_s
    return Part(name, start_s, end_s, engine, failed and attempt.failed is not None, attributes)
