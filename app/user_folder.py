"""The folder of this user's processes on this machine, in which internal sockets, claims to cores and admin keys lie.

The folder for temporary files belongs to everybody, so another user may have made a folder of this name first.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def user_folder() -> Path:
    """Returns the path of the folder, which may not exist yet."""
    return Path(tempfile.gettempdir(), f"sluice-{os.getuid()}")


def make_private(folder: Path) -> None:
    """Makes sure that `folder` exists and that only this user can enter it. Raises OSError as `check_own` does."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if check_own(folder) & 0o077:
        # Nobody else could write here, so what lies here is ours.
        folder.chmod(0o700)


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
    return mode
