"""Requests as the page shows them: what ingresses kept of each one, with a waterfall of its parts."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from actors.telemetry.facts import Answered, Attempt
from actors.telemetry.parts import parts_of

SHOWN = 50
"""Requests in each of the two lists."""
REMEMBERED = 2048
"""Requests that can be asked for by their id. ASSUMPTION: some 2 kB each, with their names."""
WORST_FOR_S = 900.0
"""Time for which a bad request stays in the list of the worst: that of the charts."""

Shown = dict[str, Any]


def shown_request(answered: Answered, at: float) -> Shown:
    """Returns a request that was received at `at` (Unix time) as plain data; times inside it count from then."""
    attempts = answered.kept.attempts
    start_s, first_s = answered.started_s, answered.first_s
    last_s = max((one.times.last_s for one in attempts if one.times.last_s is not None), default=None)
    per_choice = answered.output_tokens / max(1, answered.choices)
    tpot_s = None
    if first_s is not None and last_s is not None and per_choice > 1:
        tpot_s = (last_s - first_s) / (per_choice - 1)
    return {
        "id": answered.shown_id or answered.request_id,
        "attempts": [one.attempt_id for one in attempts],
        "at": round(at, 4),
        "class": answered.request_class,
        "status": answered.status,
        "result": _result(answered),
        "ttft_s": None if first_s is None else _s(first_s - start_s),
        "tpot_s": None if tpot_s is None else _s(tpot_s),
        "e2e_s": _s(answered.ended_s - start_s),
        "prompt_tokens": answered.input_tokens,
        "output_tokens": answered.output_tokens,
        "cached_tokens": _cached_tokens(attempts),
        "trace_id": answered.trace_id or None,
        "parts": list(_parts(attempts, start_s)),
    }


def _s(value: float) -> float:
    return round(value, 6)


def _result(answered: Answered) -> str | None:
    """Returns what became of the objectives: the first that was missed, else "met"; None without any."""
    results = [result for result in answered.kept.results if result is not None]
    return next((result for result in results if result != "met"), "met" if results else None)


def _cached_tokens(attempts: Iterable[Attempt]) -> int:
    """Returns the tokens of all prompts that came from a prefix cache, each prompt's by the attempt with most."""
    by_prompt: dict[int, int] = {}
    for one in attempts:
        by_prompt[one.prompt] = max(by_prompt.get(one.prompt, 0), one.cached_tokens)
    return sum(by_prompt.values())


def _parts(attempts: Iterable[Attempt], start_s: float) -> Iterable[Shown]:
    """Yields the parts of all attempts in the order of their submission: waits, tasks, and what led to a next one."""

    def part(
        name: str,
        begin_s: float,
        end_s: float,
        engine: str | None,
        failed: bool = False,
        note: str | None = None,
    ) -> Shown:
        return {
            "name": name,
            "start_s": _s(begin_s - start_s),
            "end_s": _s(end_s - start_s),
            "engine": engine,
            "failed": failed,
            "note": note,
        }

    ended: list[Attempt] = []
    for attempt in sorted(attempts, key=lambda one: one.times.submitted_s):
        times, end_s = attempt.times, attempt.ended_s
        before = [e for e in ended if e.prompt == attempt.prompt and e.ended_s <= times.submitted_s]
        if before:
            first_s = times.attempt_first_s
            why = before[-1].code or before[-1].outcome
            name = "migration" if attempt.carried_tokens else "retry"
            yield part(
                name, before[-1].ended_s, end_s if first_s is None else first_s, before[-1].failed, note=why
            )
        yield part("queue", times.submitted_s, end_s if times.routed_s is None else times.routed_s, None)
        tasks = {one.name: one for one in parts_of(attempt)}
        for task in tasks.values():
            if task.name == "transfer" and times.pooled_s is not None:
                yield part("pool", times.pooled_s, task.start_s, attempt.prefill_engine)
            note = attempt.code if task.failed else _note(task.name, attempt)
            yield part(task.name, task.start_s, task.end_s, task.engine, task.failed, note)
        if "transfer" not in tasks and times.pooled_s is not None:
            yield part("pool", times.pooled_s, end_s, attempt.prefill_engine)
        if attempt.goes_on:
            ended.append(attempt)


def _note(name: str, attempt: Attempt) -> str | None:
    if name == "prefill" and attempt.cached_tokens:
        return f"{attempt.cached_tokens} tokens cached"
    if name == "transfer" and attempt.transfer_bytes:
        held = f", held for {attempt.held_s * 1e3:.1f} ms" if attempt.held_s else ""
        return f"{attempt.transfer_bytes / 1e6:.2f} MB in {attempt.transfer_s * 1e3:.1f} ms{held}"
    if name == "decode":
        return f"{attempt.tokens} tokens"
    return None


def badness(request: Shown) -> tuple[int, float]:
    """Returns how bad a request was, to be compared: failed ones, then missed objectives, then the slowest."""
    failed = request["status"] >= 500
    missed = request["result"] not in (None, "met")
    return (2 if failed else 1 if missed else 0), request["ttft_s"] or request["e2e_s"]


class _Part(msgspec.Struct, frozen=True, gc=False):
    """A part of a request's waterfall as it is kept, which is smaller than a dict with the same keys."""

    name: str
    start_s: float
    end_s: float
    engine: str | None
    failed: bool
    note: str | None


class _Kept(msgspec.Struct, frozen=True, gc=False, rename={"request_class": "class"}):
    """A request as it is kept. Its fields are the keys of `shown_request`, which `to_builtins` makes again."""

    id: str
    attempts: list[str]
    at: float
    request_class: str
    status: int
    result: str | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    trace_id: str | None
    parts: list[_Part]


class Requests:
    """The latest requests, the worst of the last 15 minutes, and those that can be asked for by an id."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Kept] = OrderedDict()
        self._names: dict[str, str] = {}
        self._new: deque[Shown] = deque(maxlen=SHOWN)
        self._worst: list[Shown] = []
        self.worst_changed = False

    def add(self, answered: Answered, at: float) -> Shown:
        """Takes in a request that was received at `at`, and returns it as the page shows it."""
        shown = shown_request(answered, at)
        self._remember(answered, shown)
        self._new.append(shown)
        if len(self._worst) < SHOWN or badness(shown) > badness(self._worst[-1]):
            self._worst = sorted([*self._worst, shown], key=badness, reverse=True)[:SHOWN]
            self.worst_changed = True
        return shown

    def _remember(self, answered: Answered, shown: Shown) -> None:
        name = answered.request_id
        kept = self._known[name] = msgspec.convert(shown, _Kept)
        for other in (kept.id, *kept.attempts):
            self._names[other] = name
        if len(self._known) > REMEMBERED:
            gone, old = self._known.popitem(last=False)
            for other in (old.id, *old.attempts):
                if self._names.get(other) == gone:
                    del self._names[other]

    def find(self, request_id: str) -> Shown | None:
        """Returns the request with this id: the client's, the answer's, or that of an attempt; None if it is not
        kept.
        """
        kept = self._known.get(self._names.get(request_id, request_id))
        return None if kept is None else _shown(kept)

    def latest(self) -> list[Shown]:
        """Returns the latest requests, the newest first."""
        return [_shown(kept) for kept in itertools.islice(reversed(self._known.values()), SHOWN)]

    def worst(self) -> list[Shown]:
        """Returns the worst requests, the worst first."""
        return self._worst

    def take_new(self, now_s: float) -> list[Shown]:
        """Returns the requests since the last call, the newest first and at most `SHOWN`; forgets bad ones of long
        ago.
        """
        new = list(reversed(self._new))
        self._new.clear()
        kept = [one for one in self._worst if one["at"] > now_s - WORST_FOR_S]
        if len(kept) < len(self._worst):
            self._worst, self.worst_changed = kept, True
        return new


def _shown(kept: _Kept) -> Shown:
    shown: Shown = msgspec.to_builtins(kept)
    return shown
