"""Weights come into the page cache before anything reads them, and only those that a loader would read."""

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from actors.engine.weights import ahead
from benchmarks.live.scaling_steps import cached_share, evict

MIB = 1 << 20
PATIENCE_S = 60.0


def write(file: Path, size: int) -> None:
    file.write_bytes(os.urandom(size))


@pytest.fixture
def evicted(tmp_path: Path) -> Path:
    """A folder with two weight files of together 36 MiB, of which the page cache has next to nothing."""
    for name, mib in (("model-1.safetensors", 33), ("model-2.safetensors", 3)):
        write(tmp_path / name, mib * MIB)
    evict(tmp_path)
    if cached_share(tmp_path) > 0.1:
        pytest.skip("this file system keeps its files in memory")
    return tmp_path


def wait_cached(folder: Path) -> float:
    """Returns the share of the weights that is in the page cache once it is all of them, or after a minute."""
    end_s = time.monotonic() + PATIENCE_S
    while cached_share(folder) < 1.0 and time.monotonic() < end_s:
        time.sleep(0.02)
    return cached_share(folder)


def test_evicted_weights_are_in_the_page_cache_again(evicted: Path) -> None:
    thread = ahead.read_ahead(evicted)
    assert thread is not None
    thread.join(PATIENCE_S)
    assert wait_cached(evicted) == 1.0


def test_more_than_the_free_memory_is_left_to_the_loader(
    evicted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=36 * MIB - 1))
    assert ahead.read_ahead(evicted) is None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=36 * MIB))
    assert ahead.read_ahead(evicted) is not None


def test_a_file_that_goes_away_is_left_to_the_loader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thread = ahead.ReadAhead([tmp_path / "model.safetensors"])
    thread.start()
    thread.join(PATIENCE_S)
    assert "the weights are not read ahead" in caplog.text


def test_the_thread_that_reads_gives_way_to_others(evicted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nice: list[int] = []
    asked = os.posix_fadvise

    def seen(*args: int) -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        asked(*args)

    monkeypatch.setattr(os, "posix_fadvise", seen)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = ahead.read_ahead(evicted)
    assert thread is not None
    thread.join(PATIENCE_S)
    # 33 MiB and 3 MiB in steps of 128 KiB
    assert nice == [min(19, before + ahead.NICE)] * (36 * 8)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize(
    ("present", "found"),
    [
        (["b.safetensors", "a.safetensors", "a.bin"], ["a.safetensors", "b.safetensors"]),
        (["a.bin", "b.pt", "tokenizer.json"], ["a.bin"]),
        (["b.pt"], ["b.pt"]),
        (["tokenizer.json"], []),
    ],
)
def test_weight_files(tmp_path: Path, present: list[str], found: list[str]) -> None:
    for name in present:
        write(tmp_path / name, 10)
    assert [file.name for file in ahead.weight_files(tmp_path)] == found


def test_a_model_that_is_no_folder_has_no_files_here(tmp_path: Path) -> None:
    assert ahead.weight_files(tmp_path / "org" / "model") == []
    assert ahead.read_ahead(tmp_path) is None
