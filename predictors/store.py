"""Fitted models are stored as one checksummed file each, beside a pointer to the model in use.

    <folder>/<version>.sluicemodel      magic, header length, header (JSON), payload (zlib of JSON)
    <folder>/current.json               {"current": version, "previous": version or null}

The header holds the metadata and the payload's SHA-256 and size, so a torn or edited file is refused before it is
used. A file is written under another name and then renamed, so it never appears half-written. The payload is data
only, and loading it runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from predictors.features import FEATURE_NAMES, FEATURES_VERSION
from predictors.lgbm import LgbmModel, LgbmPredictor, from_payload, to_payload
from predictors.protocol import PredictorError

FORMAT_VERSION = 1
SUFFIX = ".sluicemodel"
_MAGIC = b"SLUICE-PREDICTOR\n"
_POINTER = "current.json"


class ModelRefused(PredictorError):
    """A model file must not be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a fitted model. Times are seconds on the clock of the data it was fitted on."""

    version: str
    source: str
    requests: int
    first_arrival_s: float
    last_arrival_s: float
    windows: tuple[int, int]
    features: tuple[str, ...]
    config: dict[str, Any]
    metrics: dict[str, Any]
    versions: dict[str, str]
    features_version: int = FEATURES_VERSION
    features_digest: str = field(default_factory=lambda: features_digest())
    format_version: int = FORMAT_VERSION


def features_digest() -> str:
    """Returns a digest of the names and the order of the features that this code makes."""
    return hashlib.sha256("\n".join(FEATURE_NAMES).encode()).hexdigest()[:16]


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries on which a model's predictions depend."""
    from importlib.metadata import version

    return {name: version(name) for name in ("lightgbm", "numpy", "scikit-learn")}


def save(folder: Path, model: LgbmModel, metadata: Metadata) -> Path:
    """Writes <folder>/<version>.sluicemodel atomically and durably, and returns its path. Raises PredictorError if
    the version exists already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{metadata.version}{SUFFIX}"
    if path.exists():
        raise PredictorError(f"{path}: this version is there already; choose another one")
    payload = zlib.compress(json.dumps(to_payload(model)).encode(), 6)
    header = json.dumps(
        {
            **asdict(metadata),
            "payload_sha256": hashlib.sha256(payload).hexdigest(),
            "payload_bytes": len(payload),
        }
    ).encode()
    write_atomically(path, _MAGIC + len(header).to_bytes(8, "big") + header + payload)
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Writes all of `data` to `path`, or nothing: it writes a temporary file in the same folder, syncs it, and
    renames it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_metadata(path: Path) -> Metadata:
    """Returns the metadata of a model file after checking its payload. Raises ModelRefused for a damaged file."""
    return _open(path)[0]


def load(path: Path) -> tuple[LgbmPredictor, Metadata]:
    """Returns the predictor in `path` and its metadata. Raises ModelRefused if the file is damaged, or was made
    with other features or an incompatible version.
    """
    metadata, payload = _open(path)
    _require_compatible(path, metadata)
    try:
        model = from_payload(json.loads(zlib.decompress(payload)))
    except (KeyError, TypeError, ValueError, zlib.error, PredictorError) as error:
        raise ModelRefused(f"{path}: the model cannot be rebuilt ({error!r}); fit it again") from error
    return LgbmPredictor(model), metadata


def _open(path: Path) -> tuple[Metadata, bytes]:
    again = "copy it again, or fit a new one with `python -m predictors.fit`"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ModelRefused(f"{path}: cannot be read: {error.strerror}; {again}") from error
    if not raw.startswith(_MAGIC):
        raise ModelRefused(f"{path}: not a Sluice predictor (its first bytes are others); {again}")
    start = len(_MAGIC) + 8
    end = start + int.from_bytes(raw[len(_MAGIC) : start], "big")
    if len(raw) < start or len(raw) < end:
        raise ModelRefused(f"{path}: cut short within its header ({len(raw)} bytes); {again}")
    try:
        header: dict[str, Any] = json.loads(raw[start:end])
        digest, size = header.pop("payload_sha256"), header.pop("payload_bytes")
        format_version = header.get("format_version")
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelRefused(f"{path}: damaged header ({error!r}); {again}") from error
    if format_version != FORMAT_VERSION:
        raise ModelRefused(f"{path}: file format {format_version}, this code reads {FORMAT_VERSION}; {again}")
    payload = raw[end:]
    if len(payload) != size:
        raise ModelRefused(f"{path}: {len(payload)} bytes of model where there should be {size}; {again}")
    if hashlib.sha256(payload).hexdigest() != digest:
        raise ModelRefused(f"{path}: the checksum of the model does not match; {again}")
    return _metadata(path, header), payload


def _metadata(path: Path, header: Mapping[str, Any]) -> Metadata:
    try:
        low, high = header["windows"]
        return Metadata(**{**header, "windows": (low, high), "features": tuple(header["features"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ModelRefused(f"{path}: metadata of another version ({error!r}); fit it again") from error


def _require_compatible(path: Path, metadata: Metadata) -> None:
    if (metadata.features_version, metadata.features_digest) != (FEATURES_VERSION, features_digest()):
        raise ModelRefused(
            f"{path}: fitted on features version {metadata.features_version} ({metadata.features_digest}), "
            f"this code makes version {FEATURES_VERSION} ({features_digest()}); fit it again with this code"
        )
    ours, theirs = library_versions()["lightgbm"], metadata.versions.get("lightgbm", "none")
    if ours.split(".")[0] != theirs.split(".")[0]:
        raise ModelRefused(f"{path}: fitted with lightgbm {theirs}, installed is {ours}; fit it again")


@dataclass(frozen=True, slots=True)
class Pointer:
    """The promoted version, and the one promoted before it."""

    current: str | None
    previous: str | None


def read_pointer(folder: Path) -> Pointer:
    """Returns the folder's pointer, whose fields are both None if nothing was promoted yet. Raises ModelRefused if
    it is damaged.
    """
    path = folder / _POINTER
    if not path.exists():
        return Pointer(None, None)
    try:
        read = json.loads(path.read_bytes())
        return Pointer(read["current"], read["previous"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelRefused(f"{path}: damaged ({error!r}); delete it to start from survival") from error


def promote(folder: Path, version: str) -> Pointer:
    """Makes `version` the current model after loading it once, and the current one the previous. Returns the new
    pointer. No file is deleted. Raises ModelRefused if the model cannot be loaded.
    """
    load(folder / f"{version}{SUFFIX}")
    old = read_pointer(folder)
    new = Pointer(version, old.current if old.current != version else old.previous)
    write_atomically(folder / _POINTER, json.dumps(asdict(new)).encode())
    return new


def load_current(folder: Path) -> tuple[LgbmPredictor, Metadata] | None:
    """Returns the promoted model and its metadata, or None if there is none. Raises ModelRefused if it cannot be
    used.
    """
    pointer = read_pointer(folder)
    return None if pointer.current is None else load(folder / f"{pointer.current}{SUFFIX}")


def prune(folder: Path, keep: int) -> list[str]:
    """Deletes the oldest models until `keep` are left besides the current and the previous one. Returns the deleted
    versions.
    """
    if keep < 0:
        raise ValueError(f"keep {keep} must be >= 0")
    pointer = read_pointer(folder)
    held = {pointer.current, pointer.previous}
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda p: (p.stat().st_mtime_ns, p.name))
    gone = [p for p in files if p.stem not in held]
    gone = gone[: max(0, len(gone) - keep)]
    for path in gone:
        path.unlink()
    return [p.stem for p in gone]
