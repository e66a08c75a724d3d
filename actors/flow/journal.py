"""The journal of an agent's arbiter, written by a thread, so that a slow disk delays no permit.

    <folder>/flow-<start, UTC>-<pid>-00000.jsonl

One file for each life of an agent; `policies.journal.flows` defines its lines, and `sluice replay` decides it again.
A disk that fails ends the journal, not the agent; a journal that is cut short can be replayed up to its end.
"""

import importlib.metadata
import logging
import os
import queue
import threading
import time
from pathlib import Path

from policies.flow.arbiter import Arbiter
from policies.journal.flows import FlowJournal

log = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Lines that wait for the disk; with more the journal ends. ASSUMPTION: some 50 MB."""


class JournalWriter:
    """Writes lines to a file in a thread of its own. The constructor raises OSError if the file cannot be made."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self.path = Path(folder, f"flow-{started}-{os.getpid()}-00000.jsonl")
        self._file = self.path.open("x", encoding="ascii")
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="flow journal", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queues a line, unless the journal has ended."""
        if self._ended:
            return
        if self._lines.qsize() >= MOST_WAITING:
            self._ended = True
            log.error("the flow journal %s ends: the disk is %d lines behind", self.path, MOST_WAITING)
            return
        self._lines.put(line)

    def close(self, limit_s: float = 5.0) -> None:
        """Writes what is queued and closes the file, or gives up after `limit_s`. Idempotent."""
        self._ended = True
        self._lines.put(None)
        self._thread.join(limit_s)

    def _work(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._file.write(line)
                if self._lines.empty():
                    self._file.flush()
            self._file.close()
        except OSError as error:
            self._ended = True
            log.error("the flow journal %s ends: %s", self.path, error)


def journal_of(arbiter: Arbiter, writer: JournalWriter) -> FlowJournal:
    """Returns the journal around an arbiter that has not heard anything yet."""
    return FlowJournal(writer.write, arbiter, importlib.metadata.version("sluice-server"))
