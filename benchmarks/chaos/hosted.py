"""vLLM engines and a flow agent on the two hosts of a link: processes that can be killed and started again.

Engines read by permits of the agent, and compare all blocks by checksums.
"""

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.mfs.engines import OnLink, Sizes
from benchmarks.mfs.link import Pair

AGENT = "agent"
START_S = 600.0
END_S = 30.0


class StartError(Exception):
    """An engine or the agent did not start. The message has the end of its log."""


class Hosted:
    """The processes by name. An engine is named by its role and a number, as in `Sizes.names`.

    `begin` starts a process, for the first time or after `kill`. The agent gets `agent_args` besides its own.
    """

    def __init__(self, pair: Pair, folder: Path, sizes: Sizes, agent_args: Sequence[str] = ()) -> None:
        self.pair = pair
        self._place = OnLink(pair, sizes)
        self._folder = folder
        self._agent_args = agent_args
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._starts = itertools.count(1)

    def options(self, name: str) -> dict[str, Any]:
        """Returns the options of an engine."""
        return self._place.options(name, self.address(AGENT), False) | {"integrity": "full"}

    def side_of(self, name: str) -> str:
        """Returns the host of a process: "prefill" or "decode"."""
        return "decode" if name == AGENT else name.partition("-")[0]

    def address(self, name: str) -> str:
        """Returns where a process listens; its socket can be reached from both hosts."""
        return f"unix:{self._folder}/{name}.sock"

    def begin(self, name: str) -> None:
        """Starts an engine or the agent."""
        log = self._logs[name] = self._folder / f"{name}-{next(self._starts)}.log"
        command = [sys.executable, "-m"]
        if name == AGENT:
            command += ["actors.flow.host", "--node", "decode", "--knows", "prefill", *self._agent_args]
        else:
            command += ["actors.engine.host", "--kind", "vllm", "--role", name.partition("-")[0]]
            command += ["--id", name, "--router", self.address("router")]
            command += ["--config", json.dumps(self.options(name))]
        command += ["--listen", self.address(name)]
        self._processes[name] = self._place.start(self.side_of(name), command, log)

    def runs(self, name: str) -> bool:
        """Returns whether a process that was started has not ended."""
        return self._processes[name].poll() is None

    def log(self, name: str) -> str:
        """Returns what a process has written since its latest start."""
        return self._logs[name].read_text(errors="replace")

    def keep_logs(self, folder: Path) -> None:
        """Copies the logs of all processes, in all their lives, to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for log in self._folder.glob("*.log"):
            shutil.copy(log, folder)

    def no_start(self, name: str) -> StartError:
        """Returns the error of a process that does not serve."""
        return StartError(f"{name} does not serve; its log ends:\n{self.log(name)[-3000:]}")

    def tree(self, name: str) -> list[psutil.Process]:
        """Returns the processes of an engine or the agent: its core is the one with the most memory."""
        root = psutil.Process(self._processes[name].pid)
        return [root, *root.children(recursive=True)]

    def core(self, name: str) -> psutil.Process:
        """Returns the process that has an engine's KV."""
        return max(self.tree(name), key=lambda process: process.memory_info().rss)

    async def kill(self, name: str, tree: Sequence[psutil.Process] | None = None) -> None:
        """Kills a process with its children (SIGKILL), and waits until all have gone. A caller to whom the moment
        matters names the `tree`, which takes a while to find.
        """
        tree = self.tree(name) if tree is None else tree
        send(tree, signal.SIGKILL)
        await asyncio.to_thread(self._processes[name].wait, END_S)
        await asyncio.to_thread(psutil.wait_procs, list(tree), END_S)

    def count(self) -> int:
        """Returns the number of processes on both hosts."""
        return len(self.pair.prefill.processes()) + len(self.pair.decode.processes())

    async def end(self) -> None:
        """Ends all processes."""
        await asyncio.to_thread(self._place.end)


def send(tree: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Sends a signal to processes, children before their parents. Those that have gone get none."""
    for process in reversed(list(tree)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
