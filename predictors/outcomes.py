"""The outcome log records the requests that ended, and refits read it. It is append-only, rotated and bounded in
size.

    <folder>/outcomes-00000001.jsonl, ...   one JSON object a line: arrival, output tokens, finish time, reason

A line holds counts, parameters and keyed digests; it holds the prompt's text only with `keep_text`. Each line is
written by one call, so a crash leaves at most one torn line at the end of a file. A reader reports each damaged
line and goes on.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from predictors.protocol import Arrival, FinishReason, Outcome, Sampling, TextSignals

LOG_VERSION = 1
_PREFIX, _SUFFIX = "outcomes-", ".jsonl"


@dataclass(frozen=True, slots=True)
class Damage:
    """A line of the log that could not be read."""

    file: Path
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class LogContents:
    """The contents of a log: its outcomes in order of writing, and its damaged lines."""

    outcomes: tuple[Outcome, ...]
    damage: tuple[Damage, ...]


class OutcomeLog:
    """A writer of the log in one folder. Only one process may write there; others may read at any time."""

    def __init__(
        self, folder: Path, max_file_bytes: int = 16 << 20, max_files: int = 16, keep_text: bool = False
    ) -> None:
        """The log keeps at most `max_files` files of at most `max_file_bytes` each (more for a single longer line)
        and deletes the oldest.
        """
        if max_file_bytes < 1 or max_files < 1:
            raise ValueError(f"a log of {max_files} files of {max_file_bytes} bytes holds nothing")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._keep_text = keep_text
        self._file: BinaryIO | None = None
        self._bytes = 0

    def __enter__(self) -> OutcomeLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, outcome: Outcome, prompt: str | None = None) -> None:
        """Writes one outcome. `prompt` is kept only by a log made with keep_text. Raises OSError if the disk
        refuses.
        """
        row = to_json(outcome)
        if self._keep_text and prompt is not None:
            row["prompt"] = prompt
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        if self._file is None or self._bytes + len(line) > self._max_file_bytes:
            self._rotate()
        assert self._file is not None
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "only a part of the line found room", str(self._folder))
        except OSError:
            # Without this the next line would be damaged too.
            self._file.truncate(self._bytes)
            raise
        self._bytes += len(line)

    def close(self) -> None:
        """Closes the current file; a later `append` starts a new one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self) -> None:
        self.close()
        files = log_files(self._folder)
        number = 1 + (_number(files[-1]) if files else 0)
        # A restart starts a new file as well, because appending to a torn last line would damage two records.
        self._file = (self._folder / f"{_PREFIX}{number:08d}{_SUFFIX}").open("ab", buffering=0)
        self._bytes = 0
        for old in log_files(self._folder)[: -self._max_files]:
            old.unlink()


def log_files(folder: Path) -> list[Path]:
    """Returns the files of the log in `folder`, oldest first."""
    found = [p for p in folder.glob(f"{_PREFIX}*{_SUFFIX}") if p.stem.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix(_PREFIX))


def read_log(folder: Path, newest: int | None = None) -> LogContents:
    """Returns the outcomes of a log folder, or only its last `newest` ones, together with the damaged lines. Raises
    FileNotFoundError if there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such outcome log; the router writes one when it is configured to"
        )
    outcomes: list[Outcome] = []
    damage: list[Damage] = []
    for path in reversed(log_files(folder)):
        here: list[Outcome] = []
        bad: list[Damage] = []
        for number, read in _lines(path):
            if isinstance(read, Outcome):
                here.append(read)
            else:
                bad.append(Damage(path, number, read))
        outcomes[:0] = here
        damage[:0] = bad
        if newest is not None and len(outcomes) >= newest:
            outcomes = outcomes[len(outcomes) - newest :]
            break
    return LogContents(tuple(outcomes), tuple(damage))


def _lines(path: Path) -> Iterator[tuple[int, Outcome | str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                yield number, f"{type(error).__name__}: {error}"


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Returns the JSON object of one line of the log, without values that are absent."""
    arrival = {k: v for k, v in asdict(outcome.arrival).items() if v is not None}
    arrival["sampling"] = {k: v for k, v in arrival["sampling"].items() if v is not None}
    return {
        "v": LOG_VERSION,
        "arrival": arrival,
        "output_tokens": outcome.output_tokens,
        "finish_s": outcome.finish_s,
        "reason": outcome.reason.value,
    }


def from_json(row: Mapping[str, Any]) -> Outcome:
    """Returns the outcome of which `to_json` made `row`. Raises KeyError, TypeError or ValueError for other data."""
    if row["v"] != LOG_VERSION:
        raise ValueError(f"log version {row['v']!r}, this code reads {LOG_VERSION}")
    facts = dict(row["arrival"])
    text = facts.pop("text", None)
    arrival = Arrival(
        **{
            **facts,
            "sampling": Sampling(**facts.get("sampling", {})),
            "text": None if text is None else TextSignals(**{"requested_words": None, **text}),
        }
    )
    output, finish_s = row["output_tokens"], row["finish_s"]
    if type(output) is not int or output < 0 or type(arrival.prompt_tokens) is not int:
        raise ValueError(
            f"output_tokens {output!r} and prompt_tokens {arrival.prompt_tokens!r} must be whole"
        )
    if not (math.isfinite(finish_s) and math.isfinite(arrival.arrival_s)):
        raise ValueError("times must be finite")
    return Outcome(arrival, output, float(finish_s), FinishReason(row["reason"]))
