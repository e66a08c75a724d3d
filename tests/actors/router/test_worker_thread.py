"""Calls in a thread of their own: in order, with their results, and without waiting for one that was given up."""

import asyncio
import threading

import pytest

from actors.router.worker_thread import WorkerThread


async def test_results_errors_and_order() -> None:
    worker, seen = WorkerThread("test"), list[int]()
    worker.post(lambda: seen.append(1))
    assert await worker.call(lambda: [*seen, 2]) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0)
    assert await worker.call(threading.current_thread) is not threading.main_thread()
    worker.close()
    worker.close()


async def test_its_thread_is_no_reason_for_a_process_to_go_on() -> None:
    worker = WorkerThread("test")
    thread = await worker.call(threading.current_thread)
    assert thread.daemon
    worker.close()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


async def test_a_call_that_was_given_up_runs_and_its_failure_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, hangs = WorkerThread("test"), threading.Event()

    def fails() -> None:
        hangs.wait(60)
        raise OSError("no disk")

    call = asyncio.ensure_future(worker.call(fails))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    hangs.set()
    await worker.call(lambda: None)  # the one before has ended
    assert "nobody waits for any more failed" in caplog.text
    worker.close()
