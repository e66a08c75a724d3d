"""Calls in a thread of their own: in order, with their results, and never waited for by those who gave up."""

import asyncio
import threading

import pytest

from actors.router.aside import Aside


async def test_results_errors_and_order() -> None:
    aside, seen = Aside("test"), list[int]()
    aside.post(lambda: seen.append(1))
    assert await aside.call(lambda: [*seen, 2]) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await aside.call(lambda: 1 // 0)
    assert await aside.call(threading.current_thread) is not threading.main_thread()
    aside.close()
    aside.close()


async def test_its_thread_is_no_reason_for_a_process_to_go_on() -> None:
    aside = Aside("test")
    thread = await aside.call(threading.current_thread)
    assert thread.daemon
    aside.close()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


async def test_a_call_that_was_given_up_runs_and_its_failure_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    aside, hangs = Aside("test"), threading.Event()

    def fails() -> None:
        hangs.wait(60)
        raise OSError("no disk")

    call = asyncio.ensure_future(aside.call(fails))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    hangs.set()
    await aside.call(lambda: None)  # the one before has ended
    assert "nobody waits for any more failed" in caplog.text
    aside.close()
