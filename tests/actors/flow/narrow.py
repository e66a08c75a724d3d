"""A flow agent that posts one chunk at a time, and a worker whose read occupies its ports until the test ends it: no
chunk is late there.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from actors.flow.client import ReadsClient
from actors.flow.reader import Post, ReaderConfig
from policies.flow.base import Flow, Stage

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0


class NarrowAgent:
    """`python -m actors.flow.host` for a node, in a process of its own. `knows` is the node that lends."""

    def __init__(self, socket: Path, node: str, knows: str) -> None:
        self.address, self.node, self.knows = f"unix:{socket}", node, knows
        self.process = self.start()

    def start(self) -> "subprocess.Popen[str]":
        """Starts the process, and waits until it takes connections."""
        command = [
            sys.executable, "-m", "actors.flow.host", "--node", self.node, "--knows", self.knows,
            "--listen", self.address, "--config", '{"arbiter": {"window": 1, "late_s": 600}}',
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        return process

    def kill(self) -> None:
        """Kills the process, also a stopped one, and waits for its end."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Occupant:
    """Another worker at the agent's node. It waits long for an agent that is silent, which on a busy machine may only
    wait for its turn.
    """

    def __init__(self, agent: NarrowAgent) -> None:
        self.client = ReadsClient(agent.address, agent.node, "occupant", config=ReaderConfig(silent_s=30.0))
        self._until(lambda: self.client.connected)
        flow = Flow(
            flow_id="occupant/1", request_id="o", batch="o", stage=Stage.P2D,
            source=agent.knows, target=agent.node, size=1000, due_s=60.0,
        )  # fmt: skip
        posts: list[Any] = [*self.client.submit(flow, [1000], 60.0)]
        self._until(lambda: posts, posts)
        (self.post,) = posts
        assert isinstance(self.post, Post)
        assert self.post.level is not None

    def _until(self, holds: Any, posts: list[Any] | None = None) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end_s
            came = self.client.step()
            if posts is not None:
                posts += came
            time.sleep(0.001)

    def done(self) -> None:
        """Ends its read."""
        self.client.chunk_done(self.post, 0.01)

    def stays(self, seconds: float, until: Any = None) -> None:
        """Lets time pass, or until a condition holds."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not (until is not None and until()):
            self.client.step()
            time.sleep(0.002)
