"""A wall clock for some processes alone: they see it jump, and the machine's clock stays as it is.

`wall_clock.c`, a library of 170 lines that those processes preload, adds an offset to every reading of the wall clock
and takes it from every deadline on it. Debian's libfaketime 0.9.10 cannot do that for Python 3.11: its
`clock_nanosleep` takes a deadline on CLOCK_MONOTONIC for one on the wall clock, and the kernel answers EINVAL to every
`time.sleep`.
"""

import shutil
import struct
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "wall_clock.c"
LIBRARY = "wall_clock.so"
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None,
    reason="no C compiler (cc) is installed: no process can get a clock of its own",
)


def compilation(library: Path) -> list[str]:
    """Returns the command that makes the library at this path."""
    return ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]


def environment(library: Path, file: Path) -> dict[str, str]:
    """Returns what Python processes need in their environment to see the clock of `file`, which must exist by then."""
    return {"LD_PRELOAD": str(library), "WALL_CLOCK": str(file)}


def set_offset(file: Path, offset_s: int) -> None:
    """Moves the clock of `file` to this many seconds ahead of the machine's (behind it, if negative).

    The bytes are written in place, because processes have the file mapped.
    """
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.write(struct.pack("=q", offset_s))
