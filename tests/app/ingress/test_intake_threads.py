"""The room and the threads for long prompts are shared out among tenants."""

import asyncio
import threading

import pytest

from app.api.errors import ApiError
from app.ingress.intake_threads import IntakeThreads


class Held:
    """Threads of which each is held by the first work that it gets, until `open`. `order` has the names of all work."""

    def __init__(self, threads: int, max_chars: int) -> None:
        self.threads = IntakeThreads(threads, max_chars)
        self.open = threading.Event()
        self.order: list[str] = []

    def send(self, chars: int, tenant: str, name: str = "") -> asyncio.Task[str]:
        """Sends a prompt. Raises ApiError if it is refused at once."""
        turn = self.threads.take(chars, tenant)
        named = name or tenant

        def work() -> str:
            self.open.wait(60)
            self.order.append(named)
            return named

        return asyncio.create_task(self.threads.run(turn, work))

    def refused(self, chars: int, tenant: str) -> bool:
        """Returns whether a prompt is refused at once; another one stays."""
        try:
            self.send(chars, tenant)
        except ApiError as error:
            return error.code == "tokenising_full"
        return False

    async def done(self, *sent: asyncio.Task[str]) -> list[str | None]:
        """Lets the work go on; returns what each of `sent` returned, or None if it was refused."""
        self.open.set()
        results = await asyncio.gather(*sent, return_exceptions=True)
        assert all(isinstance(result, str | ApiError) for result in results)
        return [result if isinstance(result, str) else None for result in results]


async def test_tenants_take_turns_by_characters() -> None:
    held = Held(1, 1000)
    sent = [held.send(10, "greedy", f"g{n}") for n in range(4)]
    sent += [held.send(10, "other", f"o{n}") for n in range(2)]
    await held.done(*sent)
    # the other one begins level with the greedy one, which waits longer
    assert held.order == ["g0", "g1", "o0", "g2", "o1", "g3"]


async def test_a_long_prompt_counts_as_all_its_characters() -> None:
    held = Held(1, 1000)
    sent = [held.send(300, "long", "l0"), held.send(300, "long", "l1")]
    sent += [held.send(100, "short", f"s{n}") for n in range(4)]
    await held.done(*sent)
    # both are level at 300 when the first is begun; l1 then brings its tenant to 600
    assert held.order == ["l0", "l1", "s0", "s1", "s2", "s3"]


async def test_one_tenant_may_fill_the_room_while_nobody_else_wants_it() -> None:
    held = Held(1, 1000)
    sent = [held.send(250, "a") for _ in range(4)]
    assert held.refused(1, "a")
    assert await held.done(*sent) == ["a"] * 4
    # and when it is empty again
    assert await held.done(held.send(2000, "a")) == ["a"]


async def test_the_newest_prompt_of_the_tenant_that_holds_most_makes_room() -> None:
    held = Held(1, 1000)
    first, second, third, fourth = (held.send(250, "a", f"a{n}") for n in range(4))
    b = held.send(300, "b")
    c = held.send(100, "c")
    assert await held.done(first, second, third, fourth, b, c) == ["a0", "a1", None, None, "b", "c"]


async def test_a_tenant_that_would_hold_as_much_as_others_is_refused() -> None:
    held = Held(1, 1000)
    a = [held.send(500, "a"), held.send(100, "a")]
    b = held.send(400, "b")
    assert held.refused(300, "b")
    assert held.refused(1000, "c")
    assert await held.done(*a, b) == ["a", "a", "b"]


async def test_what_a_thread_works_on_takes_no_share_from_others() -> None:
    held = Held(1, 1000)
    huge = held.send(5000, "huge")
    small = held.send(500, "small")
    assert held.refused(500, "small")
    assert held.refused(1, "huge")
    assert await held.done(huge, small) == ["huge", "small"]


async def test_a_refusal_pushes_out_nobody() -> None:
    held = Held(1, 1000)
    sent = [held.send(700, "a"), held.send(100, "a"), held.send(150, "b")]
    # a's second prompt alone would not make room, and the share of each of three is 333
    assert held.refused(340, "c")
    assert await held.done(*sent) == ["a", "a", "b"]


async def test_a_task_that_is_cancelled_leaves_its_place() -> None:
    held = Held(1, 1000)
    first, waits = held.send(100, "a"), held.send(900, "a")
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    last = held.send(900, "a", "last")
    assert await held.done(first, last) == ["a", "last"]
    assert await held.done(held.send(1000, "a")) == ["a"]
