"""The cache of converted models: one conversion, complete or absent, damage found."""

import json
import threading
from pathlib import Path

import pytest

from app.model_cache import MANIFEST, QUICK_HASH_LIMIT_BYTES, ModelError, damage, install


def write_model(directory: Path, weights: bytes = b"weights") -> None:
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)


class CountingConverter:
    """Copies the source's bytes into a model directory and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: Path, target: Path) -> None:
        self.calls += 1
        write_model(target, source.read_bytes())


class Cache:
    def __init__(self, root: Path) -> None:
        self.source = root / "model.gguf"
        self.source.write_bytes(b"quantised")
        self.target = root / "models" / "tiny-1"
        self.lines: list[str] = []

    def install(self, convert, *, need_bytes: int = 1, full_check: bool = False) -> Path:
        return install(
            "tiny",
            self.target,
            self.source,
            convert,
            need_bytes=need_bytes,
            full_check=full_check,
            say=self.lines.append,
        )

    def entries(self) -> set[str]:
        return {entry.name for entry in self.target.parent.iterdir()}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def test_converts_once_and_reuses(cache: Cache) -> None:
    convert = CountingConverter()
    assert cache.install(convert) == cache.target
    assert cache.install(convert) == cache.target
    assert convert.calls == 1
    assert (cache.target / "model.safetensors").read_bytes() == b"quantised"
    assert damage(cache.target, full=True) is None
    assert cache.entries() == {"tiny-1", ".tiny-1.lock"}


def test_files_are_readable_by_others(cache: Cache) -> None:
    def private(source: Path, target: Path) -> None:
        write_model(target)
        (target / "model.safetensors").chmod(0o600)

    cache.install(private)
    assert {file.stat().st_mode & 0o777 for file in cache.target.glob("*.safetensors")} == {0o644}


def test_concurrent_callers_convert_once(cache: Cache) -> None:
    convert = CountingConverter()
    barrier = threading.Barrier(8)
    results: list[Path] = []

    def call() -> None:
        barrier.wait()
        results.append(cache.install(convert))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache.target] * 8
    assert convert.calls == 1


def test_second_converter_waits_for_the_first_and_says_so(cache: Cache) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(source: Path, target: Path) -> None:
        inside.set()
        assert go_on.wait(100)
        write_model(target)

    second = CountingConverter()
    threads = [threading.Thread(target=cache.install, args=(slow,))]
    threads[0].start()
    assert inside.wait(100)
    threads.append(threading.Thread(target=cache.install, args=(second,)))
    threads[1].start()
    while not cache.lines:  # the second says that it waits
        assert threads[1].is_alive()
    assert not cache.target.exists()
    go_on.set()
    for thread in threads:
        thread.join()
    assert cache.lines == ["waiting: tiny is being converted elsewhere"]
    assert second.calls == 0


def test_failed_conversion_leaves_nothing(cache: Cache) -> None:
    def fails(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        cache.install(fails)
    assert cache.entries() == {".tiny-1.lock"}
    convert = CountingConverter()
    cache.install(convert)
    assert convert.calls == 1


def test_incomplete_conversion_is_refused(cache: Cache) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        cache.install(lambda source, target: None)
    assert cache.entries() == {".tiny-1.lock"}


def test_leftovers_of_a_killed_converter_are_removed(cache: Cache) -> None:
    cache.target.parent.mkdir()
    (cache.target.parent / ".tiny-1.tmp-killed" / "new").mkdir(parents=True)
    cache.install(CountingConverter())
    assert cache.entries() == {"tiny-1", ".tiny-1.lock"}


def test_too_little_disk_is_said_before_converting(cache: Cache) -> None:
    convert = CountingConverter()
    with pytest.raises(ModelError, match="SLUICE_CACHE"):
        cache.install(convert, need_bytes=10**18)
    assert convert.calls == 0


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "truncated": (lambda d: (d / "model.safetensors").write_bytes(b"w"), "has 1 bytes instead of 9"),
    "missing": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "flipped": (lambda d: flip_bit(d / "config.json"), "config.json has another SHA-256"),
    "no manifest": (lambda d: (d / MANIFEST).unlink(), "no manifest"),
    "bad manifest": (lambda d: (d / MANIFEST).write_text("[]"), "unreadable manifest"),
    "cut manifest": (lambda d: (d / MANIFEST).write_text("{"), "unreadable manifest"),
}


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_damage_is_found_and_mended(cache: Cache, kind: str) -> None:
    harm, expected = DAMAGES[kind]
    convert = CountingConverter()
    cache.install(convert)
    harm(cache.target)
    assert expected in str(damage(cache.target))
    cache.install(convert)
    assert convert.calls == 2
    assert expected in cache.lines[-1]
    assert damage(cache.target, full=True) is None
    assert cache.entries() == {"tiny-1", ".tiny-1.lock"}


def test_large_files_are_hashed_only_on_a_full_check(cache: Cache) -> None:
    cache.source.write_bytes(bytes(QUICK_HASH_LIMIT_BYTES + 1))
    convert = CountingConverter()
    cache.install(convert)
    flip_bit(cache.target / "model.safetensors")
    assert damage(cache.target) is None
    assert "model.safetensors" in str(damage(cache.target, full=True))
    cache.install(convert)
    assert convert.calls == 1
    cache.install(convert, full_check=True)
    assert convert.calls == 2


def test_manifest_names_the_source(cache: Cache) -> None:
    cache.install(CountingConverter())
    source = json.loads((cache.target / MANIFEST).read_text())["source"]
    assert source == {
        "file": "model.gguf",
        "bytes": 9,
        # printf quantised | sha256sum
        "sha256": "6c560674e78e8b5892f85ee4c8558d604ebc80df417f8bf81972b1061cc890dd",
    }


def test_reuse_does_not_need_the_source(cache: Cache) -> None:
    cache.install(CountingConverter())
    cache.source.unlink()
    assert cache.install(CountingConverter()) == cache.target
