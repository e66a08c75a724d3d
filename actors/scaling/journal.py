"""The journal of an autoscaler's policy, written by a thread, so that a slow disk delays no order.

    <folder>/scaling-<start, UTC>-<pid>-00000.jsonl, ...-00001.jsonl

`policies.scaling.journal` defines the lines, and `sluice replay` decides them again. Every file begins with a header
that has the policy's state, so any file can be replayed without those before it. A disk that fails ends the journal,
not the autoscaler.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from actors.scaling.control import Fault
from policies.routing.params import Whole, check
from policies.scaling.base import ScalingPolicy, Step
from policies.scaling.journal import fault_line, header_line, step_line
from policies.scaling.observation import Observation

log = logging.getLogger(__name__)

MOST_WAITING = 1_000
"""Lines that wait for the disk; with more the journal ends. ASSUMPTION: a quarter of an hour, some 10 MB."""


@dataclass(frozen=True, slots=True)
class ScalingJournalConfig:
    """Settings of the journal. Without a `folder` none is written; it keeps the newest `files` files of this run, of
    about `max_bytes` each.
    """

    folder: str | None = None
    max_bytes: Annotated[int, Whole(4096)] = 64 << 20
    files: Annotated[int, Whole(1)] = 16

    def __post_init__(self) -> None:
        check(self, "scaling.journal")
        if self.folder is not None and not os.path.isabs(self.folder):
            where = "an absolute path (the autoscaler runs in a folder of Ray's)"
            raise ValueError(f"scaling.journal: folder is {self.folder!r}: it must be {where}")


class ScalingJournal:
    """Writes the steps of policies into files, for each of which a file begins. The constructor raises OSError if the
    first file cannot be made.
    """

    def __init__(self, config: ScalingJournalConfig, version: str) -> None:
        assert config.folder is not None
        self._config, self._version = config, version
        self._policy: ScalingPolicy | None = None
        self._folder = Path(config.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._stem = f"scaling-{started}-{os.getpid()}"
        self._number = 0
        self._file = self._path(0).open("x", encoding="ascii")
        self._begun = False
        self._bytes = 0
        self._lines: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="scaling journal", daemon=True)
        self._thread.start()

    def write(self, policy: ScalingPolicy, before: Any, seen: Observation, step: Step | Fault) -> None:
        """Queues one step of a policy, before which it had the state `before`, or the error that it made instead. Does
        nothing once the journal has ended.
        """
        if self._ended:
            return
        if self._lines.qsize() >= MOST_WAITING:
            self._ended = True
            log.error("the scaling journal ends: the disk is %d lines behind", MOST_WAITING)
            return
        self._lines.put(lambda: self._put(policy, before, seen, step))

    def close(self, limit_s: float = 5.0) -> None:
        """Writes what is queued and closes the file, or gives up after `limit_s`. Idempotent."""
        self._ended = True
        self._lines.put(None)
        self._thread.join(limit_s)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._stem}-{number:05d}.jsonl"

    def _put(self, policy: ScalingPolicy, before: Any, seen: Observation, step: Step | Fault) -> None:
        if self._begun and (self._bytes >= self._config.max_bytes or policy is not self._policy):
            self._file.close()
            self._number += 1
            self._file = self._path(self._number).open("x", encoding="ascii")
            self._begun, self._bytes = False, 0
            self._path(self._number - self._config.files).unlink(missing_ok=True)
        try:
            lines = [] if self._begun else [header_line(policy, before, self._version)]
            if isinstance(step, Fault):
                lines.append(fault_line(seen, repr(step.error), step.by_step))
            else:
                lines.append(step_line(seen, step))
        except (ValueError, TypeError, AttributeError) as error:
            # a plan or a state that is not what its type says: the policy's bug
            log.error("a step cannot be journalled: %r", error)
            return
        self._begun, self._policy = True, policy
        for line in lines:
            self._bytes += self._file.write(line + "\n")

    def _work(self) -> None:
        try:
            while (put := self._lines.get()) is not None:
                put()
                if self._lines.empty():
                    self._file.flush()
            self._file.close()
        except OSError as error:
            self._ended = True
            log.error("the scaling journal ends: %s", error)
