"""Loaders of the published traces that predictors are fitted and judged on. The project ships none of them.

- mooncake: Mooncake (FAST'25), github.com/kvcache-ai/Mooncake; JSON lines of timestamp ms, input_length,
  output_length, hash_ids
- azure2023: github.com/Azure/AzurePublicDataset; CSV of TIMESTAMP, ContextTokens, GeneratedTokens
- servegen: github.com/alibaba/ServeGen; per client rate windows and length marginals (`servegen.py`)

The traces say when a request came, not when it ended. A finish time is needed to decide whose length is known
when: it is set to arrival + FIRST_TOKEN_S + output * TOKEN_S. Nothing else uses it.

ServeGen's prompts have no identity; Mooncake's `hash_ids` name the prompt's 512-token blocks, so its prompt,
its head and its conversation can be told; Azure has lengths alone. What a source lacks stays None.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from predictors.protocol import Arrival, Outcome, PredictorError
from predictors.text import digest

FIRST_TOKEN_S = 1.0  # ASSUMPTION: queue and prefill of a loaded system
TOKEN_S = 0.03  # ASSUMPTION: about 33 tokens a second and request
_MOONCAKE_BLOCK_TOKENS = 512
_TEMPLATE_BLOCKS = 2


class TraceError(PredictorError):
    """A trace file that cannot be read; names the file, and the line where there is one."""


def open_text(path: Path) -> io.TextIOBase:
    """The file as text, xz-compressed or not."""
    if not path.is_file():
        raise TraceError(
            f"{path}: no such trace file; predictors/traces.py says where the originals are published"
        )
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8", newline="")
    return path.open("r", encoding="utf-8", newline="")


def load_trace(path: Path) -> list[Outcome]:
    """A Mooncake (.jsonl) or Azure 2023 (.csv) trace, plain or .xz, in order of arrival. Raises TraceError."""
    kinds = {".jsonl": _mooncake, ".csv": _azure2023}
    suffix = Path(path.stem).suffix if path.suffix == ".xz" else path.suffix
    if suffix not in kinds:
        raise TraceError(
            f"{path}: cannot tell the trace's kind; expected a name ending in .jsonl or .csv, or with .xz"
        )
    with open_text(path) as lines:
        try:
            outcomes = list(kinds[suffix](path, lines))
        except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: damaged file: {error}") from error
    if not outcomes:
        raise TraceError(f"{path}: no requests in it")
    return sorted(outcomes, key=lambda o: o.arrival.arrival_s)


def finish_time_s(arrival_s: float, output_tokens: int) -> float:
    """When a traced request is taken to have ended: see the module."""
    return arrival_s + FIRST_TOKEN_S + TOKEN_S * output_tokens


def _mooncake(path: Path, lines: io.TextIOBase) -> Iterator[Outcome]:
    turns: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            arrival_s, prompt, output = row["timestamp"] / 1e3, row["input_length"], row["output_length"]
            blocks = [int(b) for b in row["hash_ids"]]
            _check_counts(prompt, output)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}:{number}: not a Mooncake row: {error!r}") from error
        session = _conversation(blocks)
        turn = None
        if session is not None:
            turn = turns[session] = turns.get(session, 0) + 1
        arrival = Arrival(
            request_id=f"{path.name}:{number}",
            arrival_s=arrival_s,
            prompt_tokens=prompt,
            session=session,
            turn=turn,
            prompt_key=digest(f"{blocks} {prompt}"),
            template_key=digest(str(blocks[:_TEMPLATE_BLOCKS])),
        )
        yield Outcome(arrival, output, finish_time_s(arrival_s, output))


def _conversation(blocks: Sequence[int]) -> str | None:
    """Turns of one conversation repeat its head; the first block alone is a system prompt that all share. A
    head is whole blocks only, so a prompt of less than three has none that a later turn would repeat.
    """
    return None if len(blocks) <= _TEMPLATE_BLOCKS else digest(str(blocks[:_TEMPLATE_BLOCKS]))


def _azure2023(path: Path, lines: io.TextIOBase) -> Iterator[Outcome]:
    reader = csv.DictReader(lines)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not wanted <= set(reader.fieldnames or ()):
        raise TraceError(
            f"{path}:1: not an Azure 2023 trace: the header lacks {sorted(wanted - set(reader.fieldnames or ()))}"
        )
    for row in reader:
        try:
            # Seven decimals of a second: one more than datetime takes.
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            _check_counts(prompt, output)
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}:{reader.line_num}: not an Azure 2023 row: {error}") from error
        at_s = moment.timestamp()
        arrival = Arrival(f"{path.name}:{reader.line_num}", at_s, prompt, wall_clock_s=at_s)
        yield Outcome(arrival, output, finish_time_s(at_s, output))


def _check_counts(prompt: int, output: int) -> None:
    if type(prompt) is not int or type(output) is not int or prompt < 0 or output < 0:
        raise ValueError(f"token counts must be whole and >= 0, not {prompt!r} and {output!r}")
