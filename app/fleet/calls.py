"""Administrators' calls to the router that wait for its answer. Each is answered exactly once, whatever happens."""

import itertools
from collections.abc import Callable

import orjson

from actors.loop_timeout import LoopTimeout
from actors.wire.messages import Admin, AdminAnswer, Message

TIMEOUT_S = 30.0

Answered = Callable[[int, bytes], None]
"""A callback for an answer: its HTTP status and its JSON, which is {"message"} for any status but 200."""


class AdminCalls:
    """The administrators' calls of one ingress. `send` sends a message to the router, or returns False without one."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Answered, LoopTimeout]] = {}

    def call(self, what: str, body: bytes, answered: Answered) -> None:
        """Sends one call to the router. `answered` runs later, or at once with 503 where there is no router."""
        number = next(self._numbers)
        if not self._send(Admin(number, what, body)):  # type: ignore[arg-type]
            answered(
                503, _message("The router is not connected; this replica decides alone. Try again later.")
            )
            return
        late = _message(f"The router has not answered within {TIMEOUT_S:g} s; whether it acted is not known.")
        timeout = LoopTimeout(TIMEOUT_S, lambda: self._end(number, 504, late))
        self._waiting[number] = (answered, timeout)

    def answer(self, message: AdminAnswer) -> None:
        """Hands the router's answer to its caller, or drops it where nobody waits for it any more."""
        self._end(message.ask, message.status, message.body)

    def lost(self) -> None:
        """Ends every open call with 503, because the router is gone."""
        for number in list(self._waiting):
            self._end(
                number,
                503,
                _message("The router was lost before it answered; whether it acted is not known."),
            )

    def _end(self, number: int, status: int, body: bytes) -> None:
        answered, timeout = self._waiting.pop(number, (None, None))
        if answered is not None and timeout is not None:
            timeout.cancel()
            answered(status, body)


def _message(text: str) -> bytes:
    return orjson.dumps({"message": text})
