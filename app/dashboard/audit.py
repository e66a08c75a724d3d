"""The audit log: every change that an administrator asked for, as JSON lines that are only appended.

A change is written twice: before it is made, with what was asked, and after it, with what was before and after. A
change that cannot be written is not made. The file is rotated, and only its owner can read it. After a restart the
last changes are read again; a line that was cut off by a crash is left out.
"""

import contextlib
import logging
import os
import secrets
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from app.dashboard.refusal import Refusal

log = logging.getLogger("ray.serve.dashboard")

REMEMBERED = 200
"""Changes that the page shows and that can be undone."""
MAX_BYTES = 2**20
FILES = 5
"""Files of the log, each of `MAX_BYTES` at most, the present one among them."""


@dataclass(slots=True)
class Change:
    """One change. `kind` and `asked` are what was asked of the router; `target` is the thing that was changed, such as
    "policy" or "engine E". `done` is False while it is not known whether it was made.
    """

    id: str
    at: float
    who: str
    what: str
    kind: str
    target: str
    asked: Any
    before: Any = None
    after: Any = None
    done: bool = False
    undone: bool = False
    undoes: str | None = None


class Audit:
    """The log in `folder`. Reading and writing block for a moment, so call the methods in a thread."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES, files: int = FILES) -> None:
        self._path = folder / "audit.jsonl"
        self._max_bytes, self._files = max_bytes, files
        self._changes: OrderedDict[str, Change] = OrderedDict()

    def open(self) -> None:
        """Reads the last changes. A log that cannot be read is reported and taken for empty."""
        for number in range(self._files - 1, -1, -1):
            try:
                lines = self._file(number).read_bytes().splitlines()
            except FileNotFoundError:
                continue
            except OSError as error:
                log.error("the audit log %s cannot be read: %s", self._file(number), error)
                continue
            for line in lines:
                self._read(line)

    def begin(self, change: Change) -> None:
        """Writes what is about to be changed. Raises Refusal 503 if that is not possible."""
        try:
            self._append(asdict(change))
        except OSError as error:
            raise Refusal(
                503,
                f"the audit log {self._path} cannot be written ({error.strerror or error}), so nothing was changed:"
                " make room there, or set dashboard.folder to another folder",
            ) from None
        self._remember(change)

    def end(self, change: Change) -> None:
        """Writes how a change ended. It has been made, so a failure is only logged."""
        try:
            self._append(asdict(change))
        except OSError as error:
            log.error("change %s was made, and is not in the audit log: %s", change.id, error)

    def find(self, change_id: str) -> Change | None:
        """Returns a change by its id; None if it is not remembered."""
        return self._changes.get(change_id)

    def changes(self) -> list[Change]:
        """Returns the last changes that were made, the newest first."""
        return [one for one in reversed(self._changes.values()) if one.done]

    def latest(self, target: str) -> Change | None:
        """Returns the last change of one thing that was neither undone nor an undoing; None without one."""
        made = (
            one for one in self.changes() if one.target == target and not one.undone and one.undoes is None
        )
        return next(made, None)

    def _remember(self, change: Change) -> None:
        self._changes[change.id] = change
        if change.done and change.undoes is not None and (before := self._changes.get(change.undoes)):
            before.undone = True
        while len(self._changes) > REMEMBERED:
            self._changes.popitem(last=False)

    def _read(self, line: bytes) -> None:
        try:
            change = Change(**orjson.loads(line))
        except (orjson.JSONDecodeError, TypeError):
            return
        self._remember(change)

    def _file(self, number: int) -> Path:
        return self._path.with_suffix(f".jsonl.{number}") if number else self._path

    def _append(self, value: dict[str, Any]) -> None:
        line = orjson.dumps(value) + b"\n"
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size + len(line) > self._max_bytes:
                self._rotate()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # what a crash or a full disk has cut off must not swallow this line
            if os.fstat(file).st_size and not self._ends_a_line():
                line = b"\n" + line
            if os.write(file, line) != len(line):
                raise OSError(28, "no space is left")
            os.fsync(file)
        finally:
            os.close(file)

    def _ends_a_line(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _rotate(self) -> None:
        for number in range(self._files - 2, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._file(number), self._file(number + 1))


def new_id() -> str:
    """Returns an id for a change."""
    return secrets.token_hex(6)
