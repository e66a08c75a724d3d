"""Readers of vLLM's shared memory sleep in a CPU engine's processes, wake up when told, and never yield in a loop."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from actors.engine.vllm.plugin import NAP_ENV, PARENT_ENV, nap_instead_of_spinning

shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")


class Yielded(Exception):
    pass


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A writer and a reader that would spin now, as after a message; a yield is an error."""

    def refuse() -> None:
        raise Yielded

    monkeypatch.setattr(shm_broadcast, "sched_yield", refuse)
    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", shm_broadcast.SpinCondition.wait)  # put back
    with zmq.Context() as context:
        address = f"inproc://{time.monotonic_ns()}"
        writer = shm_broadcast.SpinCondition(False, context, address)
        reader = shm_broadcast.SpinCondition(True, context, address)
        reader.record_read()
        yield writer, reader
        for name in ("local_notify_socket", "read_cancel_socket", "write_cancel_socket"):
            for one in (writer, reader):
                if getattr(one, name) is not None:
                    getattr(one, name).close(0)


def test_vllm_s_own_reader_yields(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own reader yields in a loop; a vLLM that waits otherwise does not need the patch."""
    monkeypatch.delenv(NAP_ENV, raising=False)
    nap_instead_of_spinning()
    with pytest.raises(Yielded):
        pair[1].wait(timeout_ms=10)


def test_a_reader_naps_while_messages_are_frequent(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAP_ENV, "1")
    nap_instead_of_spinning()
    nap_instead_of_spinning()
    # Without a message and without a limit it comes back by itself.
    pair[1].wait()


def test_an_idle_reader_wakes_up_when_told(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAP_ENV, "1")
    nap_instead_of_spinning()
    writer, reader = pair
    reader.last_read -= 3600
    reader.wait(timeout_ms=1)  # the subscription has arrived by now
    writer.notify()
    reader.wait()  # would not end
    assert not reader.poller.poll(0), "the message was taken"


@pytest.mark.parametrize("value", ["", pytest.param("1", marks=pytest.mark.nightly)])
def test_the_plugin_of_vllm_s_own_server_naps_if_it_is_told_to(value: str) -> None:
    """The benchmark of real engines gives other servers the waits of our engines by this variable alone."""
    code = (
        "from actors.engine.vllm.plugin import register; register()\n"
        "from vllm.distributed.device_communicators.shm_broadcast import SpinCondition\n"
        "print(getattr(SpinCondition.wait, 'naps', False))"
    )
    env = {name: text for name, text in os.environ.items() if name != PARENT_ENV} | {NAP_ENV: value}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split()[-1] == str(bool(value))
