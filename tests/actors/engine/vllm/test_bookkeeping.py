"""The engine's small books: leases, what is on its way to the core, and the pace of waiting."""

import asyncio
from typing import Any

import pytest

from actors.engine.leases import AttemptLeases

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from actors.engine.vllm.connector.scheduler import Pace
from actors.engine.vllm.outbox import Outbox


def test_leases_of_a_request_are_found_until_they_end() -> None:
    leases = AttemptLeases()
    leases.granted("r", "r-1", 0)
    leases.granted("r", "r-2", 3)
    leases.granted("s", "s-1", 1)
    assert (leases.of("r"), leases.of("s"), leases.of("t")) == ([("r-1", 0), ("r-2", 3)], [("s-1", 1)], [])
    assert len(leases) == 3
    leases.ended("r-1")
    leases.ended("r-1")
    leases.ended("unknown")
    assert (leases.of("r"), len(leases)) == ([("r-2", 3)], 2)
    leases.ended("r-2")
    assert leases.of("r") == []
    leases.clear()
    assert (len(leases), leases.of("s")) == (0, [])


def test_pauses_grow_while_nothing_happens_and_start_anew_after_an_event() -> None:
    pace = Pace()
    # 5 % of the quiet time: 0, 0.02 * 0.05 = 0.001, 0.1 * 0.05 = 0.005, and no longer than that.
    assert [pace.pause_s(now_s) for now_s in (10.0, 10.02, 10.1, 60.0)] == pytest.approx(
        [0.0, 0.001, 0.005, 0.005]
    )
    pace.event()
    assert pace.pause_s(61.0) == 0.0
    assert pace.pause_s(61.04) == pytest.approx(0.002)


async def test_messages_leave_in_order_and_a_refused_one_is_told_of() -> None:
    sent: list[int] = []
    refused: list[Any] = []
    outbox = Outbox(lambda work, error: refused.append((work, str(error))))

    async def send(number: int) -> None:
        # The first is slow; the others must not pass it.
        await asyncio.sleep(0.01 if number == 0 else 0)
        if number == 1:
            raise RuntimeError("dead")
        sent.append(number)

    for number in range(3):
        outbox.post(lambda number=number: send(number), f"work-{number}")  # type: ignore[misc]
    outbox.start()
    while len(sent) + len(refused) < 3:
        await asyncio.sleep(0.001)
    outbox.post(lambda: send(3))
    while 3 not in sent:
        await asyncio.sleep(0.001)
    assert sent == [0, 2, 3]
    assert refused == [("work-1", "dead")]
    outbox.stop()
    outbox.stop()
