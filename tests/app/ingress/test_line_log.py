"""A log of JSON lines: every line once and whole, in files of a bounded size, and no waiting for a disk that hangs."""

import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from app.ingress import line_log
from app.ingress.line_log import LineLog


def texts(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("*.jsonl"))]


def lines(folder: Path) -> list[int]:
    return [
        json.loads(line)["n"]
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


async def test_lines_come_in_order_into_files_of_a_bounded_size(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    log = LineLog(
        "usage", tmp_path / "usage", "i0", 100, lambda result, number: counts.update({result: number})
    )
    for n in range(500):
        log.add({"n": n})
    await log.stop()
    assert lines(tmp_path / "usage") == list(range(500))
    assert counts == {"written": 500}
    files = list((tmp_path / "usage").glob("*.jsonl"))
    # a line of at most 10 bytes may go beyond 100 bytes by less than itself
    assert all(file.stat().st_size < 110 for file in files)
    assert len(files) > 500 * 8 // 110


async def test_a_disk_that_hangs_delays_nobody_and_the_dropped_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_log, "MAX_WAITING", 10)
    goes_on, writes = threading.Event(), threading.Event()
    write = line_log._write_all

    def slow(file: int, data: bytes) -> None:
        writes.set()
        goes_on.wait()
        write(file, data)

    monkeypatch.setattr(line_log, "_write_all", slow)
    counts: Counter[str] = Counter()
    log = LineLog("usage", tmp_path, "i0", 10**6, lambda result, number: counts.update({result: number}))
    log.add({"n": 0})
    writes.wait()
    for n in range(1, 16):
        log.add({"n": n})
    assert counts == {"dropped": 5}
    goes_on.set()
    await log.stop()
    assert lines(tmp_path) == list(range(11))
    assert counts == {"written": 11, "dropped": 5}


async def test_after_an_error_lines_go_into_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fails = line_log._write_all, threading.Event()

    def torn(file: int, data: bytes) -> None:
        if fails.is_set():
            write(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(file, data)

    monkeypatch.setattr(line_log, "_write_all", torn)
    counts: Counter[str] = Counter()
    written = threading.Event()

    def count(result: str, number: int) -> None:
        counts.update({result: number})
        written.set()

    log = LineLog("usage", tmp_path, "i0", 10**6, count)
    for n in range(3):
        if n == 1:
            fails.set()
        written.clear()
        log.add({"n": n})
        written.wait()
        fails.clear()
    await log.stop()
    assert counts == {"written": 2, "dropped": 1}
    first, second = texts(tmp_path)
    assert first.startswith('{"n":0}\n')
    assert second == '{"n":2}\n'


async def test_what_still_waits_when_the_process_ends_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_log, "STOP_S", 0.05)
    goes_on, writes = threading.Event(), threading.Event()

    def hangs(file: int, data: bytes) -> None:
        writes.set()
        goes_on.wait()

    monkeypatch.setattr(line_log, "_write_all", hangs)
    counts: Counter[str] = Counter()
    log = LineLog("usage", tmp_path, "i0", 10**6, lambda result, number: counts.update({result: number}))
    log.add({"n": 0})
    writes.wait()
    log.add({"n": 1})
    thread = log._thread._thread
    assert thread is not None
    await log.stop()
    assert counts == {"dropped": 1}
    goes_on.set()
    # it would else write by what another test has put in place of `_write_all`
    thread.join()
