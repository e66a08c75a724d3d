"""The folder of this user's processes on this machine, in which internal sockets, claims to cores and admin keys lie.

The folder for temporary files belongs to everybody, so another user may have made a folder of this name first:
`actors.private_folder` makes it and looks whose it is.
"""

import os
import tempfile
from pathlib import Path


def user_folder() -> Path:
    """Returns the path of the folder, which may not exist yet."""
    return Path(tempfile.gettempdir(), f"sluice-{os.getuid()}")
