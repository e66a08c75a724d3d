"""The journal of a running router: a ring of the latest events in memory, and files of all events if a folder is
configured.

`policies.journal.lines` defines the content of a file, and `policies.journal.replay` decides the events again.
Recording an event costs two appends. Its lines are made a moment later, in slices between which the event loop serves
others, and a thread writes them.

A disk that fails or hangs is counted and logged, and never delays serving. Records that could not be written are kept
for the next attempt, up to `max_unwritten_bytes`. Records beyond that are dropped and leave a gap, which a replay
names. `stop` waits `stop_s` for the disk, then logs what is lost and abandons the thread.

    <folder>/journal-<start, UTC>-<pid>-00000.jsonl, -00001 ...   one log per life of a router, in files of `max_bytes`
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, NamedTuple

from actors.router.worker_thread import WorkerThread
from policies.dispatch.dispatcher import Action, Dispatcher, Reject
from policies.engine_model.blocks import Change, Cleared
from policies.journal.lines import CodecError, action_line, error_line, header_line, record_text
from policies.network.oracle import Oracle
from policies.routing.params import Number, Whole, check
from policies.state import events as ev

log = logging.getLogger(__name__)

SLICE = 64
"""Number of records that are made into lines before the event loop serves others, which takes about 1 ms."""

BYTES_PER_RECORD = 2048
"""ASSUMPTION: average memory in bytes of a record that waits to be written."""

# ASSUMPTION for these five: a hash takes some 40 bytes, an item of progress 170, a candidate 400, a pair and a band 270
HASHES_PER_RECORD = 32
"""Number of block hashes, in KV events or of a prompt, that weigh as much as an ordinary record."""

ITEMS_PER_RECORD = 16
"""Number of items of ProgressedMany that weigh as much as an ordinary record."""

CANDIDATES_PER_RECORD = 5
"""Number of ranked candidates in the decisions of an event that weigh as much as an ordinary record."""

PAIRS_PER_RECORD = 8
"""Number of an oracle's estimates of pairs that weigh as much as an ordinary record."""

BANDS_PER_RECORD = 8
"""Number of bands of a node's ports, in the report of a flow agent, that weigh as much as an ordinary record."""

_PREFIX, _SUFFIX = "journal-", ".jsonl"


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """Settings of the journal. Without a `folder` no file is written. Without `events` only decisions are written, and
    these cannot be replayed.

    The folder keeps the newest `files` files of at most `max_bytes` each; older ones are deleted. (A log without its
    first file can be read but not replayed.) Every `flush_s` new records are written. `ring_events` bounds the ring,
    which takes some 2 kB an event; a large event counts as several. 0 means no ring. `stop_s` is how long `stop` waits
    for a disk that does not answer.
    """

    folder: str | None = None
    events: bool = True
    max_bytes: Annotated[int, Whole(4096)] = 256 << 20
    files: Annotated[int, Whole(1)] = 16
    ring_events: Annotated[int, Whole(0)] = 2048
    flush_s: Annotated[float, Number(above=0)] = 0.1
    max_unwritten_bytes: Annotated[int, Whole(1)] = 64 << 20
    stop_s: Annotated[float, Number(above=0)] = 5.0

    def __post_init__(self) -> None:
        check(self, "journal")
        if self.folder is not None and not os.path.isabs(self.folder):
            where = "an absolute path (the router runs in a folder of Ray's)"
            raise ValueError(f"journal: folder is {self.folder!r}: it must be {where}")


class _Entry(NamedTuple):
    n: int
    event: ev.Event
    actions: Sequence[Action]
    failure: str | None
    weight: int
    """The memory of the entry, in multiples of an ordinary record."""


class _Chunk(NamedTuple):
    first: int
    records: int
    data: bytes


class RouterJournal:
    """The journal of one router. It must be made before the dispatcher handles its first event.

    `record` is on the hot path, and `run` is the task that writes. `stop` writes the rest if the disk allows it; later
    events are recorded only in the ring. The constructor raises OSError if the folder cannot be made.
    """

    def __init__(self, config: JournalConfig, dispatcher: Dispatcher, version: str) -> None:
        self.config = config
        self._dispatcher, self._version = dispatcher, version
        self.n = 0
        self._ring: deque[_Entry] = deque()
        self._ring_weight = 0
        self._pending: deque[_Entry] = deque()
        self._pending_weight = 0
        self._max_pending = max(16 * SLICE, config.max_unwritten_bytes // BYTES_PER_RECORD)
        self._chunks: deque[_Chunk] = deque()
        # one thread, so that writes never overtake each other
        self._writer: WorkerThread | None = None
        self._folder = Path(config.folder) if config.folder else None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = WorkerThread("journal")
            self._first_header = header_line(dispatcher, version)
        started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._run_name = f"{_PREFIX}{started}-{os.getpid()}"
        self._file: FileIO | None = None
        self._path: Path | None = None
        self._file_bytes = 0
        self._segment = 0
        self._counts = dict.fromkeys(
            (
                "records_written", "records_dropped", "bytes_written", "write_errors", "encode_errors",
                "records_unwritten_at_stop", "bytes_unwritten_at_stop",
            ), 0,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- hot path

    def record(self, event: ev.Event, actions: Sequence[Action], error: Exception | None = None) -> None:
        """Records one handled event, with the actions or the error that it led to."""
        failure = None if error is None else error_line(error)
        entry = _Entry(self.n, event, actions, failure, _weight(event, actions))
        self.n += 1
        if self._writer is not None:
            if self._pending_weight < self._max_pending:
                self._pending.append(entry)
                self._pending_weight += entry.weight
            else:
                # a write hangs, or the disk is slower than the events come
                self._counts["records_dropped"] += 1
        if self.config.ring_events:
            self._ring.append(entry)
            self._ring_weight += entry.weight
            while self._ring_weight > self.config.ring_events:
                self._ring_weight -= self._ring.popleft().weight

    # ----------------------------------------------------------------------------------------------------- writing

    async def run(self) -> None:
        """Writes the new records every `flush_s` until `stop`. Returns at once if no folder is configured."""
        while self._writer is not None:
            await asyncio.sleep(self.config.flush_s)
            try:
                await self.flush()
            except Exception:
                # a bug; the loop must go on, or nothing more would be written
                self._counts["write_errors"] += 1
                log.exception(
                    "the journal could not be written; it is tried again in %g s", self.config.flush_s
                )

    async def flush(self) -> None:
        """Writes all records so far. Records that the disk refuses are kept for the next call."""
        await self._encode_pending()
        if self._chunks and self._writer is not None:
            await self._writer.call(self._write_chunks)

    async def stop(self) -> None:
        """Writes the remaining records and closes the file, or gives up after `stop_s` and logs the loss.
        Idempotent.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return
        await self._encode_pending()
        answered = await writer.end(self._write_and_close, self.config.stop_s)
        unwritten = list(self._chunks)
        if unwritten:
            records = sum(chunk.records for chunk in unwritten)
            n_bytes = sum(len(chunk.data) for chunk in unwritten)
            self._counts["records_unwritten_at_stop"] += records
            self._counts["bytes_unwritten_at_stop"] += n_bytes
            why = "refused them" if answered else f"has not answered for {self.config.stop_s:g} s"
            where = f"the disk of {self._folder} {why}"
            log.error("the journal ends without its last %d records (%d bytes): %s", records, n_bytes, where)

    async def _encode_pending(self) -> None:
        for _ in range(0, len(self._pending), SLICE):
            entries = [self._pending.popleft() for _ in range(min(SLICE, len(self._pending)))]
            self._pending_weight -= sum([entry.weight for entry in entries])
            self._encode(entries)
            await asyncio.sleep(0)

    def _encode(self, entries: list[_Entry]) -> None:
        make = _record if self.config.events else _decisions
        try:
            text = "".join([make(entry) for entry in entries])
        except CodecError:
            # a bug; the replay names the gap that it leaves
            self._counts["encode_errors"] += 1
            self._counts["records_dropped"] += len(entries)
            log.exception("the journal cannot hold events %d..%d", entries[0].n, entries[-1].n)
            return
        self._chunks.append(_Chunk(entries[0].n, len(entries), text.encode("ascii")))

    def _write_chunks(self) -> None:
        """Writes the waiting chunks; called in the writer's thread."""
        while self._chunks:
            chunk = self._chunks[0]
            try:
                if self._file is None or self._file_bytes + len(chunk.data) > self.config.max_bytes:
                    self._next_file(chunk.first)
                assert self._file is not None
                _write_all(self._file, chunk.data)
            except OSError as error:
                self._failed(error)
                return
            self._chunks.popleft()
            self._file_bytes += len(chunk.data)
            self._counts["records_written"] += chunk.records
            self._counts["bytes_written"] += len(chunk.data)

    def _write_and_close(self) -> None:
        """Writes the waiting chunks and closes the file; called in the writer's thread, because closing may hang as
        well.
        """
        self._write_chunks()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_file(self, first: int) -> None:
        assert self._folder is not None
        if self._file is not None:
            self._file.close()
            self._file = None
        path = self._folder / f"{self._run_name}-{self._segment:05d}{_SUFFIX}"
        header = self._first_header if first == 0 else header_line(self._dispatcher, self._version, first)
        file = FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")
        try:
            _write_all(file, header.encode("ascii") + b"\n")
        except OSError:
            file.close()
            raise
        self._file, self._path, self._file_bytes = file, path, len(header) + 1
        self._segment += 1
        for old in sorted(self._folder.glob(f"{_PREFIX}*{_SUFFIX}"), key=_age)[: -self.config.files]:
            old.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> None:
        """Removes a half-written chunk from the file, so that it can be written again, and drops the oldest chunks
        beyond `max_unwritten_bytes`.
        """
        if self._counts["write_errors"] % 100 == 0:
            log.error("the journal cannot be written (%s): make room in %s", error, self._folder)
        self._counts["write_errors"] += 1
        if self._file is not None:
            try:
                self._file.truncate(self._file_bytes)
                self._file.seek(self._file_bytes)
            except OSError:
                self._file.close()
                # the file's last line is torn, so the log goes on in another file
                self._file = None
        kept = sum([len(chunk.data) for chunk in list(self._chunks)])
        while self._chunks and kept > self.config.max_unwritten_bytes:
            dropped = self._chunks.popleft()
            kept -= len(dropped.data)
            self._counts["records_dropped"] += dropped.records

    # ----------------------------------------------------------------------------------------------------- showing

    def totals(self) -> dict[str, float]:
        """Returns the totals since the start, for the router's metrics."""
        return {f"journal_{name}": float(value) for name, value in self._counts.items()}

    def status(self) -> dict[str, object]:
        """Returns the state of the journal that `/sluice/admin/journal` shows."""
        return {
            "events": self.n,
            "folder": str(self._folder) if self._folder else None,
            "file": str(self._path) if self._path else None,
            "replayable": self.config.events,
            "ring_events": len(self._ring),
            "unwritten_records": len(self._pending) + sum([chunk.records for chunk in list(self._chunks)]),
            **self._counts,
        }

    def tail(self, events: int) -> list[str]:
        """Returns the lines of the last `events` events in the ring, oldest first."""
        last = list(self._ring)[-events:] if events > 0 else []
        return "".join([_record(entry) for entry in last]).splitlines()


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _record(entry: _Entry) -> str:
    outcome = [action_line(action) for action in entry.actions]
    if entry.failure is not None:
        outcome.append(entry.failure)
    return record_text(entry.n, entry.event, outcome)


def _decisions(entry: _Entry) -> str:
    at = f'{{"at_s":{entry.event.now_s!r},'
    return "".join([f"{at}{action_line(action)[1:]}\n" for action in entry.actions])


def _weight(event: ev.Event, actions: Sequence[Action]) -> int:
    """Returns the memory of an event with its actions, in multiples of an ordinary record."""
    weight = 1
    match event:
        case ev.ProgressedMany():
            weight += len(event.items) // ITEMS_PER_RECORD
        case ev.Arrived() | ev.Adopted():
            weight += len(event.request.block_hashes) // HASHES_PER_RECORD
        case ev.KvBatch():
            weight += _hashes(event.changes) // HASHES_PER_RECORD
        case ev.KvSnapshot():
            weight += _hashes(event.chains) // HASHES_PER_RECORD
        case ev.FlowsReported(load=load):
            weight += (len(load.egress.bands) + len(load.ingress.bands)) // BANDS_PER_RECORD
        case ev.OracleRefreshed(oracle=Oracle(pairs=pairs)):
            weight += len(pairs) // PAIRS_PER_RECORD
    candidates = sum([len(action.decision.ranking) for action in actions if not isinstance(action, Reject)])
    return weight + candidates // CANDIDATES_PER_RECORD


def _hashes(changes: Sequence[Change]) -> int:
    return sum([len(change.hashes) for change in changes if not isinstance(change, Cleared)])


def _age(path: Path) -> tuple[float, str]:
    return path.stat().st_mtime, path.name
