"""The key file on disk: read whole or not at all, changed under a lock, and watched for changes.

Writers replace the file (`os.replace`), so a reader sees the old content or the new one. A file that somebody edits in
place is read half at worst; then it is no JSON, or it has changed while it was read, and the old keys stay until it is
whole.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from actors.router.worker_thread import WorkerThread
from app.ingress.tenants.keys import BadKeyFile, KeyBook, Keys, dump, empty, parse

log = logging.getLogger(__name__)

MAX_BYTES = 64 * 2**20
"""Bytes of the largest key file. ASSUMPTION: some 500 bytes a key; a file of 100,000 keys has 50 MB."""
WATCH_S = 1.0
"""Seconds between two looks at the file: a revoked key is refused after this time and that of reading the file."""


class KeyFileError(OSError):
    """The key file cannot be used; the message says why and what to do."""


class Stamp(NamedTuple):
    """The identity of one state of a file."""

    inode: int
    modified_ns: int
    size: int


def read(path: Path) -> tuple[Keys, Stamp]:
    """Returns the content of the file and the state of the file that had it. Raises KeyFileError."""
    try:
        # a pipe would otherwise be waited for
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            before = os.fstat(file.fileno())
            _check_mode(path, before)
            data = file.read(MAX_BYTES + 1)
            after = os.fstat(file.fileno())
    except KeyFileError:
        raise
    except FileNotFoundError as error:
        raise KeyFileError(
            f"there is no key file {path}: make one with `sluice key create --file {path}`"
        ) from error
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise KeyFileError(f"the key file {path} has more than {MAX_BYTES} bytes")
    if _stamp(before) != _stamp(after):
        raise KeyFileError(f"the key file {path} was changed while it was read")
    try:
        return parse(data), _stamp(after)
    except BadKeyFile as error:
        raise KeyFileError(f"{path} is no key file: {error}") from None


def stamp_of(path: Path) -> Stamp | None:
    """Returns the state of the file, or None without a file."""
    try:
        return _stamp(os.stat(path))
    except OSError:
        return None


@contextlib.contextmanager
def changed(path: Path, create: bool = False) -> Iterator[list[Keys]]:
    """Gives the content of the file in a list, and replaces the file by what the list holds at the end.

    A lock on the file beside it (`.lock`) keeps other writers out. After an error nothing is changed. With `create` a
    missing file is begun. Raises KeyFileError.
    """
    # a link, as Kubernetes makes them, stays one: the file that it names is replaced
    path = Path(os.path.realpath(path))
    try:
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be locked: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = [empty() if create and not path.exists() else read(path)[0]]
        before = held[0]
        yield held
        if held[0] is not before or not path.exists():
            _replace(path, dump(held[0]))
    finally:
        os.close(lock)


class Watch:
    """Has a key file read whenever it changes, in a thread of its own, until `stop`.

    `taken(book)` is called in the loop for each new content, and `failed(message)` for each state of the file that
    cannot be used.
    """

    def __init__(
        self, path: Path, stamp: Stamp, taken: Callable[[KeyBook], None], failed: Callable[[str], None]
    ) -> None:
        self._path, self._seen = path, stamp
        self._taken, self._failed = taken, failed
        self._told: str | None = None
        self._thread = WorkerThread("key file")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to watch."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="key file")

    async def stop(self) -> None:
        """Ends the watch."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._thread.close()

    async def look(self) -> None:
        """Reads the file if it has changed."""
        try:
            found = await self._thread.call(self._changed)
        except KeyFileError as error:
            message = str(error)
            if message != self._told:
                log.error("the API keys stay as they are: %s", message)
                self._failed(message)
            self._told = message
            return
        if found is not None:
            self._told = None
            self._taken(found)
            log.info("%d API keys read from %s", len(found.content.keys), self._path)

    def _changed(self) -> KeyBook | None:
        if self._told is None and stamp_of(self._path) == self._seen:
            return None
        keys, stamp = read(self._path)
        if self._told is None and stamp == self._seen:
            return None
        self._seen = stamp
        return KeyBook.of(keys)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self.look()
            except Exception:  # a bug: the watch goes on
                log.exception("the key file could not be looked at")


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size)


def _check_mode(path: Path, found: os.stat_result) -> None:
    """Raises KeyFileError for a file by which another user could make keys, or read the secret of the salts."""
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"the key file {path} is not a file")
    if found.st_uid not in (0, os.getuid()):
        raise KeyFileError(f"the key file {path} belongs to user {found.st_uid}, who could make keys")
    # a group may read it, because Kubernetes gives secrets to a pod's group
    if mode & 0o037:
        raise KeyFileError(f"other users may use the key file {path} (mode {mode:o}): `chmod 600 {path}`")


def _replace(path: Path, data: bytes) -> None:
    """Puts a file of mode 0600 with this content in place of `path`, on the disk before it has the name."""
    try:
        file, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(file, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be written: {error}") from error
