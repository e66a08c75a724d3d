"""A log of JSON lines in files that only grow: the usage log (`app.ingress.tenants.gate`) and the audit log
(`app.ingress.audit`) are such logs.

Lines are written by a thread of the log's own, so a slow disk delays no answer; beyond `MAX_WAITING` waiting lines new
ones are dropped and counted. Each process writes its own files, and begins another one after `max_bytes` or an error.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import orjson

from actors.router.worker_thread import WorkerThread

log = logging.getLogger(__name__)

MAX_WAITING = 100_000
"""Lines that may wait for the disk, which are some 100 MB. ASSUMPTION: 20 s of 5,000 requests/s."""
STOP_S = 5.0
"""Seconds that the disk has for the last lines when the process ends."""


class LineLog:
    """The log of one process, in `folder`. The constructor raises OSError if the folder cannot be made.

    `count(result, lines)` learns of lines that were "written" or "dropped", from any thread. When a file is begun, the
    oldest of this kind in the folder are removed until there are `most_files`, those of other processes among them;
    without a number no file is ever removed.
    """

    def __init__(
        self,
        kind: Literal["usage", "audit"],
        folder: Path,
        name: str,
        max_bytes: int,
        count: Callable[[str, int], None] = lambda *_: None,
        most_files: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._folder, self._name, self._max_bytes = (
            folder,
            f"{kind}-{name}-{started}-{os.getpid()}",
            max_bytes,
        )
        self._kind, self._most_files = kind, most_files
        self._waiting: deque[dict[str, Any]] = deque()
        self._posted = False
        self._thread = WorkerThread(f"{kind} log")
        self._file: int | None = None
        self._bytes = self._files = 0
        self._count = count

    def add(self, line: dict[str, Any]) -> None:
        """Has a line written, and returns at once."""
        if len(self._waiting) >= MAX_WAITING:
            self._count("dropped", 1)
            return
        self._waiting.append(line)
        if not self._posted:
            self._posted = True
            self._thread.post(self._write)

    async def stop(self) -> None:
        """Writes the remaining lines and closes the file, unless the disk takes more than `STOP_S`."""
        try:
            ended = await self._thread.end(self._close, STOP_S)
        except OSError:
            log.exception("the %s log in %s could not be closed", self._kind, self._folder)
            ended = True
        if not ended or self._waiting:
            self._count("dropped", len(self._waiting))
            log.error(
                "the %s log in %s ends without its last %d lines",
                self._kind,
                self._folder,
                len(self._waiting),
            )

    def _write(self) -> None:
        """Writes what waits; called in the thread."""
        # a line that is added from now on posts another call
        self._posted = False
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not lines:
            return
        try:
            at = 0
            while at < len(lines):
                file, room = self._room()
                data, count = _joined(lines[at:], room)
                _write_all(file, data)
                self._bytes += len(data)
                self._count("written", count)
                at += count
        except OSError as error:
            lost = len(lines) - at
            self._count("dropped", lost)
            log.error("%d lines of the %s log in %s are lost: %s", lost, self._kind, self._folder, error)
            # the last line may be torn, and nothing may follow it
            self._close_file()

    def _room(self) -> tuple[int, int]:
        """Returns the open file and the bytes that it may still take."""
        if self._file is not None and self._bytes >= self._max_bytes:
            self._close_file()
        if self._file is None:
            path = self._folder / f"{self._name}-{self._files:05d}.jsonl"
            self._files += 1
            self._file = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            self._bytes = 0
            self._remove_oldest()
        return self._file, self._max_bytes - self._bytes

    def _remove_oldest(self) -> None:
        if self._most_files is None:
            return
        files = sorted(self._folder.glob(f"{self._kind}-*.jsonl"), key=_last_written)
        for path in files[: -self._most_files]:
            path.unlink(missing_ok=True)

    def _close(self) -> None:
        self._write()
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _last_written(path: Path) -> tuple[float, str]:
    """Returns when a file was last written, in Unix seconds, and its name: files by it are in order of their ends."""
    try:
        return path.stat().st_mtime, path.name
    except FileNotFoundError:
        # another process removes files, too
        return 0.0, path.name


def _joined(lines: list[dict[str, Any]], room: int) -> tuple[bytes, int]:
    """Returns the first lines as bytes until they fill `room`, one at least, and their number."""
    parts: list[bytes] = []
    size = 0
    for line in lines:
        parts.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        size += len(parts[-1])
        if size >= room:
            break
    return b"".join(parts), len(parts)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
