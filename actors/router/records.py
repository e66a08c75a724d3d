"""The records of the events that the router handles: those of the journal, and the decisions in the log.

Both are written behind the messages that an event led to, so that no answer waits for them. `note` only keeps what will
be written, in the order of the events. An iteration of the event loop handles some events, their messages leave in the
next one (`actors.wire.channel`), and their records are written in the one after it. A router that dies in between loses
the last records, as it loses those that the journal had not put on disk yet. Whoever reads the journal or the log calls
`catch_up` first.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from actors import no_memory
from actors.router.decisions import DecisionLog, Quarantined
from actors.router.journal import RouterJournal
from policies.dispatch.dispatcher import Action
from policies.routing.base import DecodePolicy, PrefillPolicy
from policies.state import events as ev


class Handled(NamedTuple):
    """An event that the dispatcher has handled in `took_s`, the actions or the error that it led to, the policies then
    in use, and the workers that were then kept from them.
    """

    event: ev.Event
    actions: Sequence[Action]
    failure: Exception | None
    took_s: float
    prefill: PrefillPolicy
    decode: DecodePolicy
    quarantined: Quarantined


class Records:
    """Writes what was noted to `decisions` and to the journal, if there is one, behind the messages of its event."""

    def __init__(self, decisions: DecisionLog, journal: RouterJournal | None) -> None:
        self._decisions, self._journal = decisions, journal
        # what was noted in this iteration of the loop
        self._fresh: deque[Handled] = deque()
        # what was noted before, whose messages leave in this iteration
        self._due: deque[Handled] = deque()

    def note(self, handled: Handled) -> None:
        """Keeps a handled event, which is written down two iterations of the running event loop later."""
        self._fresh.append(handled)
        if len(self._fresh) == 1:
            asyncio.get_running_loop().call_soon(self._messages_leave)

    def catch_up(self) -> None:
        """Writes down all that was noted so far."""
        self._due += self._fresh
        self._fresh.clear()
        self._write()

    def _messages_leave(self) -> None:
        self._due += self._fresh
        self._fresh.clear()
        asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        try:
            while self._due:
                one = self._due.popleft()
                if self._journal is not None:
                    self._journal.record(one.event, one.actions, one.failure)
                if one.actions:
                    used = one.prefill, one.decode, one.quarantined
                    self._decisions.record(one.event.now_s, one.actions, one.took_s, *used)
        except MemoryError:
            no_memory.end()
