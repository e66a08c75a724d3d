"""The renewals of leases under way between a vLLM engine and its cores.

A lease lives in the workers' memory (`actors.engine.vllm.connector.worker`), so only their report says that it was
renewed. Until then it may still end, and the engine's own table of leases says so (`ended`). A core that stands still
reports nothing, and nothing is answered: the asker's lease then runs out on its own clock.
"""

from collections.abc import Callable
from dataclasses import dataclass

from actors.engine.leases import AttemptLeases

Post = Callable[[dict[str, float], int], None]
"""A function that sends the core of a rank the seconds for which its leases are to last, by vLLM's request id."""


@dataclass(frozen=True, slots=True)
class _Asked:
    attempt_id: str
    lease_s: float
    asked_s: float


class Renewals:
    """The renewals of one engine. `answer(attempt_id, left_s)` is called once for each `ask`: with the seconds that are
    left of the lease, or with 0 if it has ended. `clock` returns seconds.
    """

    def __init__(
        self,
        leases: AttemptLeases,
        post: Post,
        answer: Callable[[str, float], None],
        clock: Callable[[], float],
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """Makes an empty table. `soon(call)` calls back in the next turn of the event loop, so that the renewals of one
        turn reach a core together.
        """
        self._leases, self._post, self._answer, self._clock, self._soon = leases, post, answer, clock, soon
        self._asked: dict[str, _Asked] = {}
        self._unsent: dict[int, dict[str, float]] = {}

    def ask(self, attempt_id: str, lease_s: float) -> None:
        """Asks for the latest lease of an attempt; one that is asked for already is asked for again."""
        held = self._leases.of(attempt_id)
        if not held:
            self._answer(attempt_id, 0.0)
            return
        request_id, rank = held[-1]
        before = self._asked.get(request_id)
        asked = _Asked(attempt_id, lease_s, self._clock())
        if before is not None:
            # Its report is late. When one comes it may be that of the first question, so it promises no more.
            self._answer(attempt_id, 0.0)
            asked = _Asked(attempt_id, min(lease_s, before.lease_s), before.asked_s)
        self._asked[request_id] = asked
        if not self._unsent:
            self._soon(self._send)
        self._unsent.setdefault(rank, {})[request_id] = lease_s

    def renewed(self, request_id: str) -> None:
        """Takes a worker's report that it has renewed a lease. Those of its other workers change nothing."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            # the worker counts from a moment after the question
            self._answer(asked.attempt_id, max(0.0, asked.asked_s + asked.lease_s - self._clock()))

    def ended(self, request_id: str) -> None:
        """Notes that a lease has ended, in place of a renewal or before it."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._answer(asked.attempt_id, 0.0)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, {}
        for rank, wishes in unsent.items():
            self._post(wishes, rank)
