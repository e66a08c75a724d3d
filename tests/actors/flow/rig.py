"""Agents in processes of their own, what they report, and workers that move bytes by time alone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.flow.client import ReadsClient
from actors.flow.reader import Finished, Post, ReaderConfig
from actors.wire.channel import Channel, Identity
from actors.wire.messages import FlowReport, Message
from actors.wire.sockets import listen
from policies.flow.base import Flow, Stage


class AgentProcess:
    """`python -m actors.flow.host` on a unix socket, for the node `z` or another; it knows `a`. `more` are further
    arguments, and `addresses` are where it listens.
    """

    def __init__(
        self, folder: Path, secret: str = "", node: str = "z", more: Sequence[str] = (), **config: object
    ) -> None:
        self.address = f"unix:{folder}/agent-{node}.sock"
        self._command = [sys.executable, "-m", "actors.flow.host", "--node", node, "--knows", "a", *more]
        self._command += ["--listen", self.address, "--config", json.dumps(config)]
        self._secret = secret
        self.start()

    def start(self) -> None:
        """Starts the process and waits until it takes connections."""
        env = {**os.environ, "SLUICE_WIRE_SECRET": self._secret}
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, env=env, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready ")
        self.addresses: list[str] = json.loads(line.removeprefix("ready "))["addresses"]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class ReportsOnly:
    """The part of a router that takes the reports of agents, in a thread of its own."""

    def __init__(self, address: str, secret: bytes) -> None:
        self.address = address
        self.reports: list[FlowReport] = []
        self._me = Identity("router", "r", secret)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(listen(address, lambda: Channel(self._me, self._take)))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def _take(self, channel: Channel, message: Message) -> None:
        assert isinstance(message, FlowReport)
        self.reports.append(message)

    def stop(self) -> None:
        """Takes no more reports."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class ReadingWorker:
    """A worker that drives a `ReadsClient`, and lets each post take `seconds`. By default it waits long for a silent
    agent, which on a busy machine may only wait for its turn."""

    def __init__(
        self,
        address: str,
        name: str = "w",
        secret: bytes | None = None,
        seconds: float = 0.0,
        silent_s: float = 30.0,
        node: str = "z",
    ) -> None:
        self.client = ReadsClient(address, node, name, secret, ReaderConfig(silent_s))
        self._node = node
        self.seconds = seconds
        self.posts: list[Post] = []
        self.finished: dict[str, Finished] = {}
        self._moving: list[tuple[float, Post]] = []

    def read(self, name: str, chunks: int = 4, bound_s: float = 30.0, due_s: float | None = 5.0) -> None:
        """Submits a read of this many chunks of 1 MiB."""
        size = 2**20
        flow = Flow(
            flow_id=name,
            request_id=f"r-{name}",
            batch=f"b-{name}",
            stage=Stage.P2D,
            source="a",
            target=self._node,
            size=chunks * size,
            due_s=due_s,
        )
        self._do(self.client.submit(flow, [size] * chunks, bound_s))

    def step(self) -> None:
        """Takes what came, and ends posts whose time is over."""
        self._do(self.client.step())
        now_s = time.monotonic()
        for done_s, post in [moving for moving in self._moving if moving[0] <= now_s]:
            self._moving.remove((done_s, post))
            self._do(self.client.chunk_done(post, self.seconds))

    def run(self, until: Callable[[], object], limit_s: float = 60.0) -> None:
        """Steps until `until()` holds. Raises TimeoutError if it does not within `limit_s`."""
        end_s = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > end_s:
                raise TimeoutError(f"finished {sorted(self.finished)}, held {self.client.reader.held}")
            self.step()
            self.client.wait(0.001)

    @property
    def moving(self) -> int:
        """Posts that are on their way."""
        return len(self._moving)

    def done(self, *names: str) -> Callable[[], bool]:
        """Returns a condition: the reads of these names are over."""
        return lambda: all(name in self.finished for name in names)

    def _do(self, what: list[Post | Finished]) -> None:
        for item in what:
            if isinstance(item, Post):
                self.posts.append(item)
                self._moving.append((time.monotonic() + self.seconds, item))
            else:
                self.finished[item.flow_id] = item
