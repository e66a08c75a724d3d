"""The memory of requests that have killed engines: a request that is sent again must not begin to kill anew.

`troubles` stops one send of a request at the second engine that dies under it. A send that ends badly after deaths is
remembered here by its fingerprint, so the next send of the same request begins under suspicion:

    deaths before   the next send
    0.5 to 1.5      goes to engines; its deaths add up with those before
    2 or more       goes to none for `FIRST_REFUSAL_S`; after that time it goes to one, and one death more is enough.
                    Each time doubles the refusal, to `LONGEST_REFUSAL_S` at most.

A send that ends well, or gets so far that `troubles` acquits it, clears the fingerprint. So what many send (a health
check, a benchmark's prompt) is refused only if engines died twice under one send, or under sends of which none between
them came through.

Not claimed: that copies of a request that are under way at once are stopped together. Each stops at its own second
death. Nor that a client which changes its prompt by a word is recognised; an API key that can be revoked is what helps
there.
"""

from collections import Counter
from typing import NamedTuple

from policies.record import record
from policies.request.stage import Task
from policies.request.troubles import MOST_KILLS

FIRST_REFUSAL_S = 60.0
"""Seconds for which a request is refused at first. ASSUMPTION: longer than a client's own retries go on, and short
enough for one that was only there when engines died of something else.
"""

LONGEST_REFUSAL_S = 3600.0
"""Longest refusal: a request that goes on to kill costs an engine an hour."""

REMEMBERED_S = 3600.0
"""Seconds after which a request without a further death is forgotten; they begin with the end of a refusal."""

MOST_REMEMBERED = 4096
"""Most requests that are remembered: 1 MiB or so. An engine that dies adds at most those that it took in the last ten
seconds (`troubles.SUSPECT_S`).
"""


class Fingerprint(NamedTuple):
    """A request as it is recognised: the length of its prompt in tokens, and a digest of all that engines get of it and
    of its tenant.
    """

    prompt_tokens: int
    digest: bytes


@record
class Suspicion:
    """The deaths that a request begins with, with the task at which they came, and the seconds for which no engine gets
    it (0: it may go to engines).
    """

    kills: float
    task: Task
    refused_s: float


@record
class _Entry:
    """One remembered request. `refusal_s` is the length of its last refusal (0: it was never refused), which ends, or
    has ended, at `until_s`; without one that is the time of the last death.
    """

    kills: float
    task: Task
    refusal_s: float
    until_s: float


class Killers:
    """The requests that are remembered, at most `most` of them; beyond it those go whose last death is longest ago."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._entries: dict[Fingerprint, _Entry] = {}
        self._lengths = Counter[int]()

    def __len__(self) -> int:
        return len(self._entries)

    def has_length(self, prompt_tokens: int) -> bool:
        """Returns whether a request with a prompt of this length is remembered. Only then a fingerprint need be made,
        which takes as long as reading the prompt.
        """
        return prompt_tokens in self._lengths

    def suspicion(self, request: Fingerprint, now_s: float) -> Suspicion | None:
        """Returns what a send of the request begins with, or None if nothing is remembered of it."""
        entry = self._entries.get(request)
        if entry is None:
            return None
        if now_s > entry.until_s + REMEMBERED_S:
            self.clear(request)
            return None
        kills = entry.kills if entry.kills < MOST_KILLS else MOST_KILLS - 1
        refused_s = max(0.0, entry.until_s - now_s) if entry.refusal_s else 0.0
        return Suspicion(kills, entry.task, refused_s)

    def blame(self, request: Fingerprint, kills: float, task: Task, now_s: float) -> float:
        """Remembers a send that ended badly after `kills` deaths, those that it began with among them. Returns the
        seconds for which the request is refused from now on, or 0.
        """
        before = self._entries.get(request)
        if before is not None:
            if before.refusal_s and now_s < before.until_s:
                # a copy that was under way when the refusal began
                return before.until_s - now_s
            self.clear(request)
        refusal_s = 0.0 if before is None else before.refusal_s
        if kills >= MOST_KILLS:
            refusal_s = min(LONGEST_REFUSAL_S, 2 * refusal_s or FIRST_REFUSAL_S)
            until_s, told_s = now_s + refusal_s, refusal_s
        else:
            until_s, told_s = now_s, 0.0
            if before is not None and before.task == task:
                kills = max(kills, before.kills)
        self._entries[request] = _Entry(kills, task, refusal_s, until_s)
        self._lengths[request.prompt_tokens] += 1
        self._forget(now_s)
        return told_s

    def clear(self, request: Fingerprint) -> None:
        """Forgets a request that came through, or has become old."""
        if self._entries.pop(request, None) is not None:
            self._lengths[request.prompt_tokens] -= 1
            if not self._lengths[request.prompt_tokens]:
                del self._lengths[request.prompt_tokens]

    def _forget(self, now_s: float) -> None:
        """Forgets what is old, as far as it stands first, and what is too much."""
        while self._entries:
            request, entry = next(iter(self._entries.items()))
            if len(self._entries) <= self._most and now_s <= entry.until_s + REMEMBERED_S:
                return
            self.clear(request)
