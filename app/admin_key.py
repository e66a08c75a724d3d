"""The admin key of an ingress for which none was configured: made at its start and kept in a file of its user's.

All ingress replicas of a node that serve the same port share one file, `admin-key-PORT` in `user_folder()`, so
applications on different ports do not meet. Only the file's owner can read it: whoever may read it may administer. The
replicas read it again for every request of an administrator; so they always agree, a removed file is replaced by a new
key, and a restart changes nothing.

The key is random on a machine by itself. Nodes that share a wire secret derive it from that, so that every ingress
behind a load balancer takes the same key, and each node has it in its file.

The SDK has a reader of its own (`sluice/_admin_key.py`), because it imports nothing of the server.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.private_folder import check_own, make_private
from app.user_folder import user_folder

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("ray.serve")

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Hosts by which a machine reaches itself, and at which nobody else reaches it. A client of this machine may send a key
that it has read from a file to no other host."""
ADMIN = "admin key"
_MAX_BYTES = 1024


def keys_of_environment(variable: str = "SLUICE_ADMIN_KEYS") -> tuple[str, ...]:
    """Returns the keys in a variable of the environment, which commas separate."""
    given = os.environ.get(variable, "")
    return tuple(key.strip() for key in given.split(",") if key.strip())


def warn_of_shown_keys(options: Mapping[str, Any]) -> None:
    """Logs a warning if the configured `ingress.options` have admin keys, which then are readable in clear text."""
    if options.get("admin_keys"):
        log.warning(
            "ingress.options.admin_keys is set: the keys are in clear text in the configuration file, and Ray's"
            " dashboard and `serve config` show them. Put them into the environment variable SLUICE_ADMIN_KEYS instead"
        )


def name_of_key(key: str) -> str:
    """Returns a name of a key for the audit logs, from which it cannot be guessed unless it is a bad one."""
    return hashlib.sha256(b"sluice audit " + key.encode("utf-8", "surrogateescape")).hexdigest()[:8]


class KeyFileError(OSError):
    """The file cannot be trusted, read or written; the message says why and what to do."""


def key_path(port: int, name: str = ADMIN) -> Path:
    """Returns the path of the key's file for the ingress replicas whose public port is `port`."""
    return user_folder() / f"{name.replace(' ', '-')}-{port}"


class KeyFile:
    """The key of the ingress replicas of one port. With a wire `secret` it is derived from that, else random.

    The replicas may share another secret in such a file, which has another `name`, and then another path.
    """

    def __init__(self, port: int, secret: bytes | None = None, name: str = ADMIN) -> None:
        self._name = name
        self.path = key_path(port, name)
        self._derived = None if secret is None else _derived(secret, name)

    def take(self) -> str:
        """Returns the key, and writes the file if it is missing. Raises KeyFileError."""
        try:
            make_private(self.path.parent)
            key = _read(self.path, self._name)
            if key is None or self._derived not in (None, key):
                self._write()
                key = _read(self.path, self._name)
        except KeyFileError:
            raise
        except OSError as error:
            raise KeyFileError(f"no {self._name} can be kept in {self.path}: {error}") from error
        if key is None:
            raise KeyFileError(f"the {self._name} in {self.path} was removed as soon as it was written")
        return key

    def remove(self) -> None:
        """Removes the file, if there is one, when its key is not taken any more."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _write(self) -> None:
        file, name = tempfile.mkstemp(prefix=".admin-key-", dir=self.path.parent)
        try:
            with os.fdopen(file, "w") as out:
                out.write((self._derived or secrets.token_urlsafe(32)) + "\n")
            if self._derived is not None:
                os.replace(name, self.path)
            else:
                # A link fails where a file exists, and the file is whole when it appears: the first replica wins.
                os.link(name, self.path)
        except FileExistsError:
            pass
        finally:
            Path(name).unlink(missing_ok=True)


def authorize(request: "httpx.Request") -> "httpx.Request":
    """Adds the key in this machine's file to a request for an ingress of this machine: an `auth` of httpx's clients.

    Nothing is changed in a request for another host, or where there is no file.
    """
    url = request.url
    if url.host in LOOPBACK_HOSTS:
        try:
            key = _read(key_path(url.port or (443 if url.scheme == "https" else 80)))
        except OSError:
            # the server's answer says what is missing
            key = None
        if key is not None:
            request.headers["authorization"] = f"Bearer {key}"
    return request


def _derived(secret: bytes, name: str) -> str:
    return hmac.new(secret, f"sluice {name}".encode(), hashlib.sha256).hexdigest()


def _read(path: Path, name: str = ADMIN) -> str | None:
    """Returns the key in the file at `path`, or None without a file.

    Raises KeyFileError for a file that another user has written or can read, or which has no key in it, and
    PermissionError for a folder into which others may write.
    """
    try:
        check_own(path.parent)
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
            raise KeyFileError(
                f"the {name} in {path} is not this user's alone (owner {found.st_uid}, mode {mode:o}): remove the"
                " file, and a new key is made"
            )
        key = opened.read(_MAX_BYTES).decode("latin-1").strip()
    if len(key) < 8 or not (key.isascii() and key.isprintable()):
        raise KeyFileError(f"{path} holds no {name}: remove the file, and a new key is made")
    return key
