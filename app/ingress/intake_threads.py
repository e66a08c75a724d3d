"""The threads in which long prompts are parsed and tokenised, so that the streams of others go on.

A tenant is an API key's, else a user or an address. Tenants share the threads: the next prompt is one of the tenant for
which the fewest characters were begun, so a tenant that sends many long prompts waits behind its own. A tenant that had
nothing here begins level with the one that got least.

At most `max_chars` wait or are worked on at a time; a longer prompt is taken when there is none. Where they are full,

    a tenant that would still hold less than another has its place: of the tenant that holds most the prompt that came
    last, and waits, is refused in its stead;
    a tenant that would hold no more than its equal share is taken in any case, because what threads work on cannot be
    refused any more;
    all others are refused.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from app.api.errors import ApiError

R = TypeVar("R")


@dataclass(eq=False, slots=True)
class Turn:
    """The place of one prompt of `chars` characters. `comes` is done when a thread is free for it, which it then holds
    until it is `gone`.
    """

    chars: int
    tenant: str
    number: int
    comes: asyncio.Future[None]
    begun: bool = False
    gone: bool = False


@dataclass(slots=True)
class _Tenant:
    """A tenant with prompts here: `turns` that wait or are worked on, with `held` characters. `served` are the
    characters of those that were begun, counted from the level on which the tenant came in.
    """

    served: int
    turns: int = 0
    held: int = 0
    waiting: list[Turn] = field(default_factory=list)


class IntakeThreads:
    """The threads, and the prompts that wait for them. All calls are of one event loop."""

    def __init__(self, threads: int, max_chars: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="intake")
        self._free = threads
        self._max_chars = max_chars
        self._chars = 0
        self._tenants: dict[str, _Tenant] = {}
        self._number = 0

    def take(self, chars: int, tenant: str) -> Turn:
        """Counts a prompt as waiting until its `run` ends. Raises `ApiError` 429 if there is no room for it."""
        for refused in self._make_room(chars, tenant):
            # whoever waits for it leaves as after an error of its work
            refused.comes.set_exception(self._full())
            self._leaves(refused)
        owner = self._tenants.get(tenant)
        if owner is None:
            level = min((other.served for other in self._tenants.values()), default=0)
            owner = self._tenants[tenant] = _Tenant(level)
        self._number += 1
        turn = Turn(chars, tenant, self._number, asyncio.get_running_loop().create_future())
        owner.waiting.append(turn)
        owner.turns += 1
        owner.held += chars
        self._chars += chars
        self._go_on()
        return turn

    async def run(self, turn: Turn, work: Callable[[], R]) -> R:
        """Returns what `work` returns in a thread, when its turn has come. Raises `ApiError` 429 if another tenant's
        prompt has got its place meanwhile.
        """
        try:
            await turn.comes
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._leaves(turn)

    def _make_room(self, chars: int, tenant: str) -> list[Turn]:
        """Returns the waiting prompts that are to be refused so that one more finds room. Raises `ApiError` if none
        may.
        """
        over = self._chars + chars - self._max_chars
        if over <= 0 or not self._tenants:
            return []
        own = self._tenants.get(tenant)
        mine = chars + (own.held if own is not None else 0)
        held = {name: one.held for name, one in self._tenants.items() if one is not own}
        waiting = {name: list(self._tenants[name].waiting) for name in held}
        refused: list[Turn] = []
        while over > 0:
            most = max((n for n in held if waiting[n]), key=held.__getitem__, default=None)
            if most is None or held[most] <= mine:
                break
            last = waiting[most].pop()
            refused.append(last)
            held[most] -= last.chars
            over -= last.chars
        if over > 0 and mine * (len(held) + 1) > self._max_chars:
            raise self._full()
        return refused

    def _full(self) -> ApiError:
        message = f"Long prompts of {self._chars} characters wait to be tokenised here; try again later."
        return ApiError(429, message, code="tokenising_full", retry_after_s=1.0)

    def _go_on(self) -> None:
        """Gives free threads to the tenants that got least, and of two that got the same to the one that came first."""
        while self._free:
            waiting = [one for one in self._tenants.values() if one.waiting]
            if not waiting:
                return
            least = min(waiting, key=lambda one: (one.served, one.waiting[0].number))
            turn = least.waiting.pop(0)
            # the task that waits for it may have been cancelled
            if turn.comes.done():
                continue
            least.served += turn.chars
            turn.begun = True
            self._free -= 1
            turn.comes.set_result(None)

    def _leaves(self, turn: Turn) -> None:
        """Counts a prompt no more: it is done, was refused, or nobody waits for it. Idempotent."""
        if turn.gone:
            return
        turn.gone = True
        owner = self._tenants[turn.tenant]
        owner.turns -= 1
        owner.held -= turn.chars
        self._chars -= turn.chars
        if turn.begun:
            self._free += 1
        elif turn in owner.waiting:
            owner.waiting.remove(turn)
        if not owner.turns:
            del self._tenants[turn.tenant]
        self._go_on()
