"""The router's event log on a real disk: whole, rotated, bounded, and no harm to serving when the disk refuses."""

import asyncio
import os
import resource
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.router.journal import SLICE, JournalConfig, RouterJournal
from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher, Reject, RoutePrefill
from policies.engine_model.blocks import Cleared, Removed, Stored
from policies.journal.lines import JournalError
from policies.journal.replay import Step, replay
from policies.network.oracle import Oracle, PairEstimate
from policies.routing.base import Decision, Ranked, Reason
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import NodeLoad, PortBand, PortLoad, Request, Role


def made(folder: Path | None, **options: object) -> tuple[RouterJournal, Dispatcher]:
    dispatcher = Dispatcher(DispatchConfig(seed=4), prefill_policy("random"), decode_policy("random"))
    config = JournalConfig(folder=str(folder) if folder else None, **options)  # type: ignore[arg-type]
    return RouterJournal(config, dispatcher, "test"), dispatcher


def feed(journal: RouterJournal, dispatcher: Dispatcher, requests: int, first: int = 0) -> None:
    """Feeds `requests` requests to their end, with one stale event each, and the fleet first if it is not there yet."""
    events: list[ev.Event] = []
    if journal.n == 0:
        events += [ev.EngineUp(0.0, f"c{i}", Role.COLOCATED, "g", "n", 4, 4096) for i in range(3)]
    for i in range(first, first + requests):
        attempt_id, now_s = f"r{i}", float(i)
        events += [ev.EngineStatus(now_s, f"c{k}", 0, 0, 0) for k in range(3)]
        events += [ev.Arrived(now_s, Request(attempt_id, now_s, 64, 8)), ev.Admitted(now_s, attempt_id)]
        events += [ev.Closed(now_s, attempt_id, "finished", 8), ev.Closed(now_s, attempt_id, "finished", 8)]
    for event in events:
        try:
            journal.record(event, dispatcher.handle(event))
        except ev.StaleEvent as stale:
            journal.record(event, (), stale)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def replayed(folder: Path) -> list[Step]:
    lines = [line for path in files(folder) for line in path.read_text().splitlines()]
    return list(replay(lines))


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Makes the kernel refuse writes beyond `n_bytes` a file, after a part of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_what_was_recorded_is_on_disk_after_stop_and_replays(tmp_path: Path) -> None:
    journal, dispatcher = made(tmp_path / "journal")
    feed(journal, dispatcher, 50)
    await journal.stop()
    steps = replayed(tmp_path / "journal")
    assert len(steps) == journal.n == 3 + 50 * 7
    assert all(step.equal for step in steps)
    assert sum(step.recorded != () for step in steps) == 100  # a decision and a stale event each
    (file,) = files(tmp_path / "journal")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_the_task_writes_without_being_asked(tmp_path: Path) -> None:
    journal, dispatcher = made(tmp_path, flush_s=0.01)
    task = asyncio.create_task(journal.run())
    feed(journal, dispatcher, 3)
    async with asyncio.timeout(60):
        while journal.status()["records_written"] != journal.n:
            await asyncio.sleep(0.005)
    task.cancel()
    await journal.stop()
    assert all(step.equal for step in replayed(tmp_path))


async def test_a_cancelled_flush_loses_nothing(tmp_path: Path) -> None:
    journal, dispatcher = made(tmp_path)
    feed(journal, dispatcher, 200)
    task = asyncio.create_task(journal.flush())
    for _ in range(4):
        await asyncio.sleep(0)
    task.cancel()
    await journal.stop()
    assert len(replayed(tmp_path)) == journal.n


async def test_files_are_rotated_and_are_one_log_together(tmp_path: Path) -> None:
    journal, dispatcher = made(tmp_path, max_bytes=20_000, files=100)
    feed(journal, dispatcher, 200)
    await journal.stop()
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert len(sizes) > 3 and max(sizes) <= 20_000
    assert len(replayed(tmp_path)) == journal.n


async def test_only_the_newest_files_stay_and_then_a_replay_is_refused(tmp_path: Path) -> None:
    journal, dispatcher = made(tmp_path, max_bytes=20_000, files=2)
    feed(journal, dispatcher, 200)
    await journal.stop()
    assert len(files(tmp_path)) == 2
    with pytest.raises(JournalError, match="give its earlier files too"):
        replayed(tmp_path)


async def test_a_disk_that_refuses_half_a_write_costs_nothing_once_it_has_room(tmp_path: Path) -> None:
    journal, dispatcher = made(tmp_path)
    feed(journal, dispatcher, 20)
    await journal.flush()
    (file,) = files(tmp_path)
    whole = file.stat().st_size
    with largest_file(whole + 1000):
        feed(journal, dispatcher, 30, first=20)
        await journal.flush()
    assert file.stat().st_size == whole  # the half-written part was taken back
    status = journal.status()
    assert status["write_errors"] == 1 and status["unwritten_records"] == 30 * 7
    await journal.stop()
    steps = replayed(tmp_path)
    assert len(steps) == journal.n and all(step.equal for step in steps)


async def test_what_a_disk_refuses_for_too_long_is_dropped_counted_and_a_gap(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal, dispatcher = made(folder, max_unwritten_bytes=10_000)
    feed(journal, dispatcher, 5)
    await journal.flush()
    (file,) = files(folder)
    with largest_file(file.stat().st_size):
        feed(journal, dispatcher, 100, first=5)
        await journal.flush()
    feed(journal, dispatcher, 5, first=105)
    await journal.stop()
    dropped = journal.status()["records_dropped"]
    assert isinstance(dropped, int) and 0 < dropped <= 700
    with pytest.raises(JournalError, match=r"event \d+ where 38 should come: the log is not whole"):
        replayed(folder)


async def test_a_folder_that_is_gone_is_no_reason_to_stop(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal, dispatcher = made(folder)
    folder.rmdir()
    feed(journal, dispatcher, 5)
    await journal.flush()
    assert journal.totals()["journal_write_errors"] == 1.0
    folder.mkdir()
    await journal.stop()
    assert len(replayed(folder)) == journal.n


async def test_decisions_alone_can_be_logged(tmp_path: Path) -> None:
    journal, dispatcher = made(tmp_path, events=False)
    feed(journal, dispatcher, 4)
    await journal.stop()
    (file,) = files(tmp_path)
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + 4
    assert lines[1].startswith('{"at_s":0.0,"action":"RoutePrefill","attempt_id":"r0","decision":{"worker":')
    with pytest.raises(JournalError, match="line 2: an event was expected"):
        replayed(tmp_path)


def test_the_ring_is_bounded_and_block_hashes_weigh(tmp_path: Path) -> None:
    journal, dispatcher = made(None, ring_events=50)
    feed(journal, dispatcher, 40)
    assert journal.status()["ring_events"] == 50
    assert journal.tail(1) == [
        f'{{"n":{journal.n - 1},"follow":1,"event":"Closed","now_s":39.0,"attempt_id":"r39","outcome":"finished",'
        '"output_tokens":8,"ended":null}',
        '{"error":"StaleEvent","message":"request r39 is not known (closed, or from before a restart)"}',
    ]
    batch = ev.KvBatch(40.0, "c0", "e", 0, (Stored(tuple(range(640))),))
    journal.record(batch, dispatcher.handle(batch))
    assert journal.status()["ring_events"] == 50 - 20
    assert files(tmp_path) == []


REQUEST = Request("r", 0.0, 10_240, 8, block_hashes=tuple(range(640)), block_tokens=16)
RANKING = tuple(Ranked(f"w{i}", 0.0, {}) for i in range(100))
PAIRS = {("p", f"n{i}"): PairEstimate(1e9, 0.0) for i in range(160)}
BANDS = PortLoad(1e9, tuple(PortBand(1, (float(i),), 1, 1) for i in range(80)))


@pytest.mark.parametrize(
    ("event", "actions", "weight"),
    [
        (ev.Tick(0.0), (), 1),
        (ev.ProgressedMany(0.0, tuple((f"r{i}", 1) for i in range(320))), (), 21),
        (ev.Arrived(0.0, REQUEST), (), 21),
        (ev.Adopted(0.0, REQUEST, "pooled", "p", None, 0, 30.0, 1), (), 21),
        (ev.KvSnapshot(0.0, "w", "e", 0, (Stored(tuple(range(640))),)), (), 21),
        (ev.KvBatch(0.0, "w", "e", 0, (Cleared(), Removed(tuple(range(640))))), (), 21),
        (ev.OracleRefreshed(0.0, Oracle(pairs=PAIRS)), (), 21),
        (ev.OracleRefreshed(0.0, None), (), 1),
        (ev.FlowsReported(0.0, ev.PolicyChoice("mfs"), NodeLoad("n", BANDS, BANDS)), (), 21),
        (
            ev.Tick(0.0),
            (RoutePrefill("r", Decision("w0", RANKING, Reason.LEAST_COST), False, False, 0.0),),
            21,
        ),
        (ev.Tick(0.0), (Reject("r", 503, "pool_timeout", 1.0),), 1),
    ],
)
def test_large_records_weigh_in_the_ring_and_in_what_waits_to_be_written(
    event: ev.Event, actions: tuple[Action, ...], weight: int, tmp_path: Path
) -> None:
    journal, _ = made(tmp_path, max_unwritten_bytes=1, ring_events=1000)
    for _ in range(2000):
        journal.record(event, actions)
    status = journal.status()
    assert status["ring_events"] == 1000 // weight
    # one more than fits is the first that is refused
    assert status["unwritten_records"] == -(-16 * SLICE // weight)
    assert status["records_dropped"] == 2000 - -(-16 * SLICE // weight)


async def test_what_was_written_weighs_no_more(tmp_path: Path) -> None:
    journal, dispatcher = made(tmp_path, max_unwritten_bytes=1)
    feed(journal, dispatcher, 100)
    await journal.stop()
    assert (journal._pending_weight, journal.status()["records_dropped"]) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "log"}, "folder is 'log': it must be an absolute path"),
        ({"max_bytes": 1}, "max_bytes is 1: it must be a whole number >= 4096"),
        ({"flush_s": 0.0}, "flush_s is 0.0: it must be a number > 0"),
        ({"stop_s": 0.0}, "stop_s is 0.0: it must be a number > 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"journal: {message}"):
        JournalConfig(**options)  # type: ignore[arg-type]


async def test_a_disk_that_hangs_costs_records_and_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, dispatcher = made(tmp_path, max_unwritten_bytes=1, ring_events=0)
    hangs, write = threading.Event(), journal._write_chunks
    monkeypatch.setattr(journal, "_write_chunks", lambda: (hangs.wait(60), write()))
    feed(journal, dispatcher, 1)
    flush = asyncio.create_task(journal.flush())
    while journal.status()["unwritten_records"] != 3 + 7 or journal._pending:
        # at the end its records are lines, and the writer's thread has them
        await asyncio.sleep(0)
    feed(journal, dispatcher, 200, first=1)
    status = journal.status()
    assert status["unwritten_records"] == 3 + 7 + 16 * SLICE
    assert status["records_dropped"] == 200 * 7 - 16 * SLICE
    hangs.set()
    await flush
    await journal.stop()
    assert journal.status()["records_written"] == 3 + 7 + 16 * SLICE


def dead_disk(journal: RouterJournal) -> None:
    """Makes the first file one that nobody can write: a FIFO without a reader hangs in open(2) without end."""
    assert journal.config.folder is not None
    os.mkfifo(Path(journal.config.folder) / f"{journal._run_name}-00000.jsonl")


async def test_a_disk_that_hangs_for_ever_does_not_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, dispatcher = made(tmp_path, stop_s=0.2, flush_s=0.01)
    dead_disk(journal)
    feed(journal, dispatcher, 3)
    task = asyncio.create_task(journal.run())
    await asyncio.sleep(0.05)  # the task's own write hangs by now
    feed(journal, dispatcher, 2, first=3)
    await journal.stop()
    n_bytes = len("".join(f"{line}\n" for line in journal.tail(journal.n)))
    totals = journal.totals()
    assert totals["journal_records_unwritten_at_stop"] == journal.n == 3 + 5 * 7
    assert totals["journal_bytes_unwritten_at_stop"] == n_bytes
    assert f"without its last {journal.n} records ({n_bytes} bytes)" in caplog.text
    feed(journal, dispatcher, 1, first=5)
    assert journal.status()["unwritten_records"] == 3 + 5 * 7  # what comes later is in the ring only
    await journal.stop()
    task.cancel()
    (fifo,) = files(tmp_path)
    assert await asyncio.to_thread(lambda: len(fifo.read_bytes())) > n_bytes  # lets the thread end


async def test_a_disk_that_refuses_until_the_end_is_told_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, dispatcher = made(tmp_path / "journal")
    (tmp_path / "journal").rmdir()
    feed(journal, dispatcher, 1)
    await journal.stop()
    assert journal.totals()["journal_records_unwritten_at_stop"] == 3 + 7
    assert "refused them" in caplog.text


async def test_a_bug_while_writing_does_not_end_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, dispatcher = made(tmp_path, flush_s=0.01)
    write = journal._write_chunks
    failures = [ValueError("a bug"), None]

    def breaks_once() -> None:
        failure = failures.pop(0) if failures else None
        if failure is not None:
            raise failure
        write()

    monkeypatch.setattr(journal, "_write_chunks", breaks_once)
    task = asyncio.create_task(journal.run())
    feed(journal, dispatcher, 1)
    async with asyncio.timeout(60):
        while journal.status()["records_written"] != journal.n:
            await asyncio.sleep(0.005)
    assert journal.status()["write_errors"] == 1
    await journal.stop()
    await task


PROCESS = """
    import asyncio, sys
    from pathlib import Path
    from actors.router.journal import JournalConfig, RouterJournal
    from actors.router.server import RouterServer
    from actors.wire.channel import Identity
    from policies.state import events as ev
    from tests.actors.router.test_journal import dead_disk, feed, made

    async def main():
        journal, dispatcher = made(Path(sys.argv[1]), stop_s=0.3, flush_s=0.01)
        dead_disk(journal)
        server = RouterServer(Identity("router", "r"), dispatcher, journal=journal)
        await server.start([f"unix:{sys.argv[1]}/router.sock"])
        feed(journal, dispatcher, 5)
        await asyncio.sleep(0.1)
        await server.stop()
        print("stopped", int(server.status().totals["journal_records_unwritten_at_stop"]), ">=", 3 + 5 * 7, flush=True)

    asyncio.run(main())
"""


@pytest.mark.timeout(400)
def test_the_process_of_a_router_whose_disk_hangs_really_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)  # at best some 2 s
    assert ended.returncode == 0, ended.stderr
    word, unwritten, _, fed = ended.stdout.split()
    assert word == "stopped"
    assert int(unwritten) >= int(fed)
    assert "has not answered for 0.3 s" in ended.stderr
