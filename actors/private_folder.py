"""Folders in which only this user can have put anything: for sockets, keys, claims to cores and logs.

A process that finds a socket or a key in such a folder trusts it. So a folder that another user has made, or into which
others may write, is refused, and so is one that they could put another folder in place of.
"""

import contextlib
import os
import stat
from pathlib import Path

OUTSIDE_USER = 65534
"""The user as whom root's folders appear in a container that does not know root (Linux's `kernel.overflowuid`)."""


def make_private(folder: Path) -> None:
    """Makes sure that `folder` exists and that only this user can enter it. Raises OSError as `make_own` does."""
    if make_own(folder) & 0o077:
        # Nobody else could write here, so what lies here is ours.
        folder.chmod(0o700)


def make_own(folder: Path) -> int:
    """Makes `folder` and what is missing above it, for this user alone, and returns its mode. Raises OSError as
    `check_own` does for one that is there already.
    """
    for one in (*reversed(folder.parents), folder):
        if not one.exists():
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode=0o700)
    return check_own(folder)


def check_own(folder: Path) -> int:
    """Returns the mode of `folder`, into which only this user can have put something.

    Raises PermissionError, which says what to do, for any other folder, and FileNotFoundError without one.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not a folder: remove it")
    if found.st_uid != os.getuid():
        raise PermissionError(
            f"the folder {folder} belongs to user {found.st_uid} and not to {os.getuid()}: remove it, or set TMPDIR"
            " to a folder of your own"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        raise PermissionError(
            f"other users may write into the folder {folder} (mode {mode:o}): look at what lies there, then"
            f" `chmod 700 {folder}`"
        )
    _check_above(folder)
    return mode


def _check_above(folder: Path) -> None:
    """Raises PermissionError if other users could put another folder in place of `folder` or of one above it.

    A folder above must be root's or this user's. One that everybody may write needs the sticky bit, which the folder
    for temporary files has: in it only the owner of an entry can rename or remove it.
    """
    for above in folder.absolute().parents:
        found = above.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (0, os.getuid(), OUTSIDE_USER):
            raise PermissionError(
                f"user {found.st_uid} could put another folder in place of {folder}, because {above} belongs to that"
                " user: choose a folder of your own (TMPDIR, or the key of the configuration that names it)"
            )
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(
                f"other users may put another folder in place of {folder}, because everybody may write into {above}"
                f" (mode {mode:o}): `chmod o-w {above}`, or `chmod +t {above}`"
            )
