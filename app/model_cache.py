"""A cache of converted models. A model in it is complete or absent, is made once, and is checked before each reuse.

A model appears under its final name by one rename, after its files were flushed and a manifest with sizes and SHA-256
sums was written beside them. A file lock keeps concurrent converters apart: the second waits and reuses the result of
the first. A damaged model is converted anew.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "sluice-manifest.json"
FORMAT = 1
"""Number of the conversion's format, which is part of a model's folder name.

It is raised when the conversion changes, so that older results are not reused.
"""
QUICK_HASH_LIMIT_BYTES = 16 * 2**20
"""Size up to which a quick check hashes a file; of larger files it compares the sizes only."""

Progress = Callable[[str], None]
Converter = Callable[[Path, Path], None]


class ModelError(Exception):
    """A model cannot be served; the message says what to do."""


def check_directory(path: Path) -> None:
    """Raises ModelError, naming what is missing, unless `path` looks like a complete Hugging Face model directory."""
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"model directory {path} has no config.json")
    try:
        json.loads(config.read_bytes())
    except ValueError as error:
        raise ModelError(f"model directory {path}: config.json is not JSON ({error})") from error
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"model directory {path} has no *.safetensors weights")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tekken.json")):
        raise ModelError(
            f"model directory {path} has no tokenizer (tokenizer.json, tokenizer.model or tekken.json)"
        )


def damage(path: Path, *, full: bool = False) -> str | None:
    """Returns the first difference between the converted model at `path` and its manifest in words, or None.

    With `full` all files are hashed, else only those of at most `QUICK_HASH_LIMIT_BYTES`.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files: dict[str, dict[str, int | str]] = manifest["files"]
    except FileNotFoundError:
        return "no manifest"
    except (ValueError, KeyError, TypeError) as error:
        return f"unreadable manifest ({error})"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if (full or size <= QUICK_HASH_LIMIT_BYTES) and _sha256(file) != expected["sha256"]:
            return f"{name} has another SHA-256 than when it was written"
    return None


def install(
    name: str,
    target: Path,
    source: Path,
    convert: Converter,
    *,
    need_bytes: int,
    full_check: bool = False,
    say: Progress,
) -> Path:
    """Makes `target` hold the intact conversion of `source`, and returns `target`.

    However many callers ask, the conversion runs at most once. `convert(source, directory)` writes the files, and
    `target` appears by a rename after the manifest was written. Raises ModelError if less than `need_bytes` of disk are
    free, and passes on what `convert` raises; `target` is then as before or absent.
    """
    if target.is_dir() and damage(target, full=full_check) is None:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(
        target.with_name(f".{target.name}.lock"), lambda: say(f"waiting: {name} is being converted elsewhere")
    ):
        if target.is_dir():
            trouble = damage(target, full=full_check)
            if trouble is None:
                return target
            say(f"{target} is damaged ({trouble}); converting again")
        for leftover in target.parent.glob(f".{target.name}.tmp-*"):  # left by a killed converter
            shutil.rmtree(leftover)
        free_bytes = shutil.disk_usage(target.parent).free
        if free_bytes < need_bytes:
            raise ModelError(
                f"converting {name} needs {need_bytes / 1e9:.1f} GB in {target.parent}, {free_bytes / 1e9:.1f} GB are "
                "free: make room, or set SLUICE_CACHE to a directory on a larger disk"
            )
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        try:
            (scratch / "new").mkdir()
            convert(source, scratch / "new")
            _seal(scratch / "new", source)
            if target.exists():
                target.rename(scratch / "old")
            (scratch / "new").rename(target)
        finally:
            shutil.rmtree(scratch)
    return target


def _seal(directory: Path, source: Path) -> None:
    """Checks what a converter wrote, makes it readable and durable, and writes the manifest beside it."""
    check_directory(directory)
    files = {}
    for file in sorted(directory.iterdir()):
        file.chmod(0o644)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    manifest = {
        "format": FORMAT,
        "source": {"file": source.name, "bytes": source.stat().st_size, "sha256": _sha256(source)},
        "files": files,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the kernel releases it if the process dies."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
