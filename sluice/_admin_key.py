"""The admin key that a server on this machine has made for itself, read from the file in which it keeps it.

A server without configured keys writes one into `admin-key-PORT` of its user's own folder for temporary files
(`app/admin_key.py`). The key is read only for a server at a loopback address, and only from a file of this user's into
which nobody else could have put anything.
"""

from __future__ import annotations

import os
import stat
import tempfile

import httpx

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_MAX_BYTES = 1024


def key_of_this_machine(base_url: str) -> str | None:
    """Returns the key in the file of the server at `base_url`, or None without such a file or for another machine."""
    url = httpx.URL(base_url)
    if url.host not in LOOPBACK_HOSTS or not hasattr(os, "getuid"):
        return None
    folder = os.path.join(tempfile.gettempdir(), f"sluice-{os.getuid()}")
    name = f"admin-key-{url.port or (443 if url.scheme == 'https' else 80)}"
    try:
        if not _own(os.lstat(folder), stat.S_IFDIR, 0o022):
            return None
        with open(os.path.join(folder, name), "rb", opener=_without_links) as file:
            found = file.read(_MAX_BYTES) if _own(os.fstat(file.fileno()), stat.S_IFREG, 0o077) else b""
    except OSError:
        # the server's answer says where its key is
        return None
    key = found.decode("latin-1").strip()
    return key if key.isascii() and key.isprintable() and key else None


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _own(found: os.stat_result, kind: int, forbidden: int) -> bool:
    """Returns whether this is of the kind, belongs to this user, and gives others none of the `forbidden` rights."""
    return (
        stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.getuid() and not found.st_mode & forbidden
    )
