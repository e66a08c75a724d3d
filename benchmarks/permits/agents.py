"""Measures permits from agents in processes of their own: the time from a read's submission to its permit, and how much
longer a read takes that comes chunk by chunk with nobody else at its ports.

The transport is a clock: a port that moves one chunk after another, each in its time. Whatever a read takes beyond that
is the cost of permits.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from actors.flow.client import ReadsClient
from actors.flow.reader import Finished, Post, ReaderConfig
from actors.wire.messages import UnscheduledReason
from benchmarks.decisions.measure import Timing, timed
from policies.flow.base import Flow, Stage

CHUNK_S = 0.010
CHUNKS = 50
CHUNK_BYTES = 500_000
"""A chunk's bytes: 10 ms of a port of 50 MB/s."""
PATIENT_S = 30.0
"""Silence after which an agent is given up: a worker or an agent that a busy machine keeps waiting must not be measured
as a read without permits."""
SETTLE_S = 1.0
"""Seconds in which agents connect to one another."""


class Worker:
    """A reading thread whose chunks take `CHUNK_S` each, one after another. It gives its agent up after `silent_s`."""

    def __init__(self, address: str, silent_s: float = PATIENT_S) -> None:
        self._client = ReadsClient(address, "z", "w", config=ReaderConfig(silent_s))
        self._posts: list[tuple[float, Post]] = []
        self._free_s = 0.0
        self.reads = 0
        self.finished = 0
        self.permitted = 0

    @property
    def open(self) -> int:
        """Number of reads that have not ended."""
        return self.reads - self.finished

    @property
    def unscheduled(self) -> Mapping[UnscheduledReason, int]:
        """Number of reads of which a part was posted without a permit, by reason."""
        return self._client.reader.unscheduled

    def connect(self) -> None:
        """Waits for the agent, and reads once, so that agents meet."""
        while not self._client.connected:
            self.step()
        self.read(1)
        end_s = time.perf_counter() + SETTLE_S
        while time.perf_counter() < end_s:
            self.step()

    def begin(self, chunks: int) -> None:
        """Submits a read."""
        self.reads += 1
        flow = Flow(
            flow_id=f"f{self.reads}",
            request_id=f"r{self.reads}",
            batch=f"b{self.reads}",
            stage=Stage.P2D,
            source="a",
            target="z",
            size=chunks * CHUNK_BYTES,
            due_s=60.0,
        )
        self._do(self._client.submit(flow, [CHUNK_BYTES] * chunks, 60.0))

    def submit(self, chunks: int) -> None:
        """Submits a read and waits until its first chunk is posted."""
        before = self.permitted
        self.begin(chunks)
        while self.permitted == before:
            self.step()

    def read(self, chunks: int) -> None:
        """Submits a read and waits for its end."""
        before = self.finished
        self.submit(chunks)
        while self.finished == before:
            self.step()

    def end(self) -> None:
        """Waits until nothing is open."""
        while self.open:
            self.step()

    def close(self) -> None:
        """Closes the line to the agent."""
        self._client.close()

    def step(self) -> None:
        """Ends the chunks whose time has come and hears the agent. Waits for what comes next if that was nothing."""
        now_s = time.perf_counter()
        for entry in [entry for entry in self._posts if entry[0] <= now_s]:
            self._posts.remove(entry)
            self._do(self._client.chunk_done(entry[1], CHUNK_S * entry[1].n_chunks))
        if heard := self._client.step():
            self._do(heard)
            return
        until_s = min((at_s for at_s, _ in self._posts), default=now_s + CHUNK_S)
        self._client.wait(max(0.0, until_s - time.perf_counter()))

    def _do(self, what: list[Post | Finished]) -> None:
        for item in what:
            if isinstance(item, Finished):
                self.finished += 1
            else:
                self.permitted += 1
                self._free_s = max(self._free_s, time.perf_counter()) + CHUNK_S * item.n_chunks
                self._posts.append((self._free_s, item))


@contextlib.contextmanager
def agents(nodes: int) -> Iterator[str]:
    """Runs the agent of the readers' node, with `nodes` = 2 also that of the sender's, and yields its address."""
    with tempfile.TemporaryDirectory(prefix="sluice-permits-") as folder, contextlib.ExitStack() as stack:
        peer = f"unix:{folder}/a.sock"
        if nodes == 2:
            stack.enter_context(_agent("a", peer, ["--knows", "z"]))
        own = f"unix:{folder}/z.sock"
        more = ["--peer", f"a={peer}"] if nodes == 2 else ["--knows", "a"]
        stack.enter_context(_agent("z", own, more))
        yield own


@contextlib.contextmanager
def _agent(node: str, address: str, more: list[str]) -> Iterator[None]:
    config = json.dumps({"silent_s": PATIENT_S, "lost_s": PATIENT_S})
    command = [
        sys.executable,
        "-m",
        "actors.flow.host",
        "--node",
        node,
        "--listen",
        address,
        "--config",
        config,
    ]
    env = {name: value for name, value in os.environ.items() if name != "SLUICE_WIRE_SECRET"}
    process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        yield
    finally:
        process.kill()
        process.wait()


def rows(calls: int) -> Iterator[Timing]:
    """Yields the times of a permit from one agent and from two, and of a lone read of half a second without permits, by
    one agent's and by two agents'.
    """
    for nodes in (1, 2):
        with agents(nodes) as address:
            yield timed(f"read permitted by {nodes} agent{'s' * (nodes - 1)}", _submits(address, calls))
    yield timed("lone read of 500 ms, unscheduled", _reads("", calls))
    for nodes in (1, 2):
        with agents(nodes) as address:
            yield timed(f"lone read of 500 ms, {nodes} agent{'s' * (nodes - 1)}", _reads(address, calls))


def _submits(address: str, calls: int) -> Iterator[Callable[[], object]]:
    worker = Worker(address)
    worker.connect()
    for _ in range(calls):
        yield partial(worker.submit, 1)
        worker.end()
    worker.close()


def _reads(address: str, calls: int) -> Iterator[Callable[[], object]]:
    worker = Worker(address)
    if address:
        worker.connect()
    for _ in range(calls):
        yield partial(worker.read, CHUNKS)
    worker.close()
