"""The loaders here read the published traces on which predictors are fitted and judged. The project ships none of
them.

- mooncake: Mooncake (FAST'25), github.com/kvcache-ai/Mooncake; JSON lines of timestamp ms, input_length,
  output_length, hash_ids
- azure2023: github.com/Azure/AzurePublicDataset; CSV of TIMESTAMP, ContextTokens, GeneratedTokens. The rows of 2024
  have the same columns.
- burstgpt: github.com/HPMLL/BurstGPT; CSV of Timestamp (s), Request tokens, Response tokens, and others
- servegen: github.com/alibaba/ServeGen; per client rate windows and length marginals (`servegen.py`)

The first line of a file tells its kind, whatever its name is; only .xz at its end counts.

The traces say when a request came, not when it ended. A finish time is needed to decide which lengths are known at
a given time. It is set to arrival + FIRST_TOKEN_S + output * TOKEN_S, and is used for nothing else.

ServeGen's prompts have no identity, and BurstGPT and Azure have only lengths. Mooncake's `hash_ids` name the prompt's
512-token blocks, which identify the prompt, its head and its conversation. A field that the source lacks stays None.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from predictors.protocol import Arrival, Outcome, PredictorError
from predictors.text import digest

# ASSUMPTION: queue and prefill under load
FIRST_TOKEN_S = 1.0
TOKEN_S = 0.03  # ASSUMPTION: 33 tokens/s per request
MOONCAKE_BLOCK_TOKENS = 512
_TEMPLATE_BLOCKS = 2
MOST_TOKENS = 10_000_000
"""ASSUMPTION: no prompt and no output has more tokens; a count above it is a damaged one."""
MOST_MS = 1e15
"""ASSUMPTION: no time lies so far from its clock's zero; it is 31,000 years."""
_LONGEST_HEADER = 10_000
"""Characters of a file's first line that are looked at to tell its kind."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


class TraceError(PredictorError):
    """A trace file cannot be read; the message names the file and, if there is one, the line."""


def open_text(path: Path) -> io.TextIOBase:
    """Opens a trace file as text, decompressing a name that ends in .xz. Raises TraceError if there is no such
    file.
    """
    if not path.is_file():
        raise TraceError(
            f"{path}: no such trace file; predictors/traces.py says where the originals are published"
        )
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open("r", encoding="utf-8-sig", newline="")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One line of a trace as published, checked. `hash_ids` name the 512-token blocks of a Mooncake prompt, the
    last of which may be partly filled; other traces have none.
    """

    line: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def trace_rows(path: Path) -> Iterator[TraceRow]:
    """Yields the rows of a Mooncake, Azure or BurstGPT trace, plain or .xz, in the file's order. Raises TraceError
    with file and line.
    """
    read = _READERS[trace_format(path)]
    with open_text(path) as lines:
        try:
            yield from read(path, lines)
        except (lzma.LZMAError, EOFError, UnicodeDecodeError, csv.Error) as error:
            raise TraceError(f"{path}: damaged file: {error}") from error


def trace_format(path: Path) -> str:
    """Returns `mooncake`, `azure2023` or `burstgpt`, according to the first line that is not empty. Raises TraceError
    if it is that of no such trace.
    """
    with open_text(path) as lines:
        try:
            number, first = 1, lines.readline(_LONGEST_HEADER)
            while first and not first.strip():
                number, first = number + 1, lines.readline(_LONGEST_HEADER)
        except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: damaged file: {error}") from error
    if not first:
        raise TraceError(f"{path}:1: no requests in it: the file is empty")
    if first.lstrip().startswith("{"):
        return "mooncake"
    columns = {column.strip().strip('"') for column in first.split(",")}
    for kind, wanted in (("azure2023", _AZURE), ("burstgpt", _BURSTGPT)):
        if columns.issuperset(wanted):
            return kind
    azure, burstgpt = (", ".join(c for c in wanted if c not in columns) for wanted in (_AZURE, _BURSTGPT))
    raise TraceError(
        f"{path}:{number}: cannot tell the trace's kind: the header lacks {azure} of Azure's traces and {burstgpt} of"
        " BurstGPT's, and the line is no JSON object like Mooncake's (timestamp, input_length, output_length,"
        " hash_ids): name the columns as one of them does"
    )


def load_trace(path: Path) -> list[Outcome]:
    """Returns the requests of the trace at `path` as outcomes in order of arrival. Raises TraceError if it is
    damaged or empty.
    """
    of = _OUTCOMES[trace_format(path)]
    outcomes = list(of(path, trace_rows(path)))
    if not outcomes:
        raise TraceError(f"{path}: no requests in it")
    return sorted(outcomes, key=lambda o: o.arrival.arrival_s)


def finish_time_s(arrival_s: float, output_tokens: int) -> float:
    """Returns the time at which a traced request is assumed to have ended, by the module's formula."""
    return arrival_s + FIRST_TOKEN_S + TOKEN_S * output_tokens


def conversation(hash_ids: Sequence[int]) -> str | None:
    """Returns a key of the prompt's conversation: the digest of its first two blocks, which later turns repeat. One
    block is not enough, because it is a system prompt that all conversations share. Only whole blocks repeat and
    the last block may be partly filled, so a prompt of fewer than three blocks gets None.
    """
    return None if len(hash_ids) <= _TEMPLATE_BLOCKS else digest(str(list(hash_ids[:_TEMPLATE_BLOCKS])))


def prompt_key(hash_ids: Sequence[int], prompt_tokens: int) -> str:
    """Returns a key of the exact prompt."""
    return digest(f"{list(hash_ids)} {prompt_tokens}")


def _mooncake_rows(path: Path, lines: io.TextIOBase) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, output = row["input_length"], row["output_length"]
            _check_counts(prompt, output)
            yield TraceRow(
                number, _seconds(row["timestamp"]), prompt, output, _blocks(row["hash_ids"], prompt)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}:{number}: not a Mooncake row: {error!r}") from error


def _seconds(timestamp_ms: object) -> float:
    if type(timestamp_ms) not in (int, float) or not 0 <= timestamp_ms <= MOST_MS:  # type: ignore[operator]
        raise ValueError(f"timestamp must be milliseconds from 0 to {MOST_MS:g}, not {timestamp_ms!r}")
    return timestamp_ms / 1e3  # type: ignore[operator]


def _blocks(hash_ids: object, prompt_tokens: int) -> tuple[int, ...]:
    if not isinstance(hash_ids, list) or not all(type(b) is int and b >= 0 for b in hash_ids):
        raise ValueError(f"hash_ids must be a list of whole numbers >= 0, not {hash_ids!r}")
    if len(hash_ids) > -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(
            f"{len(hash_ids)} hash_ids of {MOONCAKE_BLOCK_TOKENS} tokens for a prompt of {prompt_tokens}"
        )
    return tuple(hash_ids)


def _mooncake(path: Path, rows: Iterable[TraceRow]) -> Iterator[Outcome]:
    turns: dict[str, int] = {}
    for row in rows:
        session = conversation(row.hash_ids)
        turn = None
        if session is not None:
            turn = turns[session] = turns.get(session, 0) + 1
        arrival = Arrival(
            request_id=f"{path.name}:{row.line}",
            arrival_s=row.at_s,
            prompt_tokens=row.prompt_tokens,
            session=session,
            turn=turn,
            prompt_key=prompt_key(row.hash_ids, row.prompt_tokens),
            template_key=digest(str(list(row.hash_ids[:_TEMPLATE_BLOCKS]))),
        )
        yield Outcome(arrival, row.output_tokens, finish_time_s(row.at_s, row.output_tokens))


def _azure2023_rows(path: Path, lines: io.TextIOBase) -> Iterator[TraceRow]:
    reader = _table(path, lines, "an Azure", _AZURE)
    for row in reader:
        try:
            # The trace has seven decimals of a second, one more than datetime accepts.
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            _check_counts(prompt, output)
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}:{reader.line_num}: not an Azure row: {error}") from error
        yield TraceRow(reader.line_num, moment.timestamp(), prompt, output)


def _burstgpt_rows(path: Path, lines: io.TextIOBase) -> Iterator[TraceRow]:
    reader = _table(path, lines, "a BurstGPT", _BURSTGPT)
    for row in reader:
        try:
            at_s = _seconds(1e3 * float(row["Timestamp"]))
            prompt, output = int(row["Request tokens"]), int(row["Response tokens"])
            _check_counts(prompt, output)
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}:{reader.line_num}: not a BurstGPT row: {error}") from error
        yield TraceRow(reader.line_num, at_s, prompt, output)


def _table(path: Path, lines: io.TextIOBase, what: str, wanted: Sequence[str]) -> csv.DictReader[str]:
    reader = csv.DictReader(lines, skipinitialspace=True)
    missing = [column for column in wanted if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(f"{path}:1: not {what} trace: the header lacks {', '.join(missing)}")
    return reader


def _only_lengths(path: Path, rows: Iterable[TraceRow]) -> Iterator[Outcome]:
    for row in rows:
        arrival = Arrival(f"{path.name}:{row.line}", row.at_s, row.prompt_tokens, wall_clock_s=row.at_s)
        yield Outcome(arrival, row.output_tokens, finish_time_s(row.at_s, row.output_tokens))


def _check_counts(prompt: int, output: int) -> None:
    if type(prompt) is not int or type(output) is not int or prompt < 0 or output < 0:
        raise ValueError(f"token counts must be whole and >= 0, not {prompt!r} and {output!r}")
    if max(prompt, output) > MOST_TOKENS:
        raise ValueError(f"token counts must be at most {MOST_TOKENS:,}, not {prompt:,} and {output:,}")


_Rows: TypeAlias = Callable[[Path, io.TextIOBase], Iterator[TraceRow]]
_READERS: dict[str, _Rows] = {
    "mooncake": _mooncake_rows,
    "azure2023": _azure2023_rows,
    "burstgpt": _burstgpt_rows,
}
_OUTCOMES: dict[str, Callable[[Path, Iterable[TraceRow]], Iterator[Outcome]]] = {
    "mooncake": _mooncake,
    "azure2023": _only_lengths,
    "burstgpt": _only_lengths,
}
