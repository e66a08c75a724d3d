"""Records come behind the messages of their event, and in the order of the events."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors import no_memory
from actors.router.decisions import DecisionLog
from actors.router.journal import JournalConfig, RouterJournal
from actors.router.records import Handled, Records
from actors.router.server import RouterServer
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.registry import decode_policy, prefill_policy
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import Request, Role
from tests.actors.router.test_journal import replayed
from tests.actors.router.test_server import serving, until


def made(journal: RouterJournal | None, dispatcher: Dispatcher) -> tuple[Records, Callable[[ev.Event], None]]:
    """Returns records, and what has `dispatcher` handle an event that they note."""
    records = Records(DecisionLog(), journal)

    def handle(event: ev.Event) -> None:
        actions = dispatcher.handle(event)
        used = dispatcher.prefill, dispatcher.decode, ()
        records.note(Handled(event, actions, None, 1e-5, *used))

    return records, handle


def a_dispatcher() -> Dispatcher:
    return Dispatcher(DispatchConfig(seed=4), prefill_policy("random"), decode_policy("random"))


def arrived(n: int) -> ev.Arrived:
    return ev.Arrived(float(n), Request(f"r{n}", float(n), 64, 8))


UP = (ev.EngineUp(0.0, "c", Role.COLOCATED, "g", "n", 4, 4096), ev.EngineStatus(0.0, "c", 0, 0, 0))


async def test_records_are_written_when_the_messages_of_their_iteration_have_left() -> None:
    """A channel flushes by `call_soon`. The records of two iterations come after the flush of each."""
    dispatcher = a_dispatcher()
    journal = RouterJournal(JournalConfig(), dispatcher, "test")
    _, handle = made(journal, dispatcher)
    loop, flushed = asyncio.get_running_loop(), list[int]()
    for event in UP:
        handle(event)
    loop.call_soon(lambda: flushed.append(journal.n))
    # the flush of the first iteration; another event comes in this one
    await asyncio.sleep(0)
    handle(arrived(0))
    loop.call_soon(lambda: flushed.append(journal.n))
    assert (flushed, journal.n) == ([0], 0)
    await asyncio.sleep(0)
    # the two records of the first iteration are there before the second flush, its own is not
    assert (flushed, journal.n) == ([0, 2], 2)
    await asyncio.sleep(0)
    assert journal.n == 3


async def test_records_keep_the_order_of_the_events_and_replay(tmp_path: Path) -> None:
    """Some are written by the loop and some by `catch_up`, in the middle of an iteration."""
    dispatcher = a_dispatcher()
    journal = RouterJournal(JournalConfig(folder=str(tmp_path)), dispatcher, "test")
    records, handle = made(journal, dispatcher)
    for event in UP:
        handle(event)
    for n in range(30):
        handle(arrived(n))
        if n % 7 == 3:
            records.catch_up()
            assert journal.n == n + 3
        if n % 5 == 2:
            await asyncio.sleep(0)
    records.catch_up()
    await journal.stop()
    steps = replayed(tmp_path)
    assert [step.n for step in steps] == list(range(32))
    assert all(step.equal for step in steps)


async def test_decisions_are_logged_without_a_journal() -> None:
    records, handle = made(None, a_dispatcher())
    for event in (*UP, arrived(0)):
        handle(event)
    assert records._decisions.explain("r0") == []
    records.catch_up()
    assert [decision["action"] for decision in records._decisions.explain("r0")] == ["RoutePrefill"]


async def test_a_router_that_gets_no_memory_for_records_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    records, handle = made(None, a_dispatcher())

    def starved(*_: object) -> None:
        raise MemoryError

    ended: list[bool] = []
    monkeypatch.setattr(no_memory, "end", lambda: ended.append(True))
    monkeypatch.setattr(DecisionLog, "record", starved)
    for event in (*UP, arrived(0)):
        handle(event)
    records.catch_up()
    assert ended == [True]


@pytest.mark.pure
async def test_the_first_answers_of_a_burst_leave_before_anything_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = JoinShortestQueue()
    dispatcher = Dispatcher(DispatchConfig(), policy, policy)
    journal = RouterJournal(JournalConfig(), dispatcher, "test")
    router = RouterServer(Identity("router", "r"), dispatcher, journal=journal)
    await router.start([f"unix:{tmp_path}/r.sock"])
    _, _, ingress = await serving(router)
    router.status()
    before, seen = journal.n, list[int]()
    write = Channel._write

    def watched(channel: Channel, batch: list[wire.Message]) -> None:
        if any(isinstance(message, wire.RoutePrefill) for message in batch):
            seen.append(sum(isinstance(entry.event, ev.Arrived) for entry in journal._ring))
        write(channel, batch)

    monkeypatch.setattr(Channel, "_write", watched)
    # one write, so that the router reads all four together
    for n in range(4):
        ingress.channel.send(wire.Submit(f"x{n}", prompt_tokens=10, max_tokens=4))
    await until(lambda: router.status().in_flight == 4)
    await until(lambda: bool(seen))
    assert seen[0] == 0
    # whoever asks gets all
    assert [decision["action"] for decision in router.decisions.explain("x0")] == ["RoutePrefill"]
    assert journal.n > before
    await router.stop()
