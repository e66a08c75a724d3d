"""Reads the weights of a model into the page cache before a loader needs them.

A start spends its first seconds on imports, in which the disk has nothing to do. The kernel is asked to read the files
then, by a thread of low priority, so that the loader finds them in memory.
"""

import logging
import os
import threading
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

STEP_BYTES = 128 << 10
"""Bytes that the kernel is asked for at a time. It reads no more for one call than the device's read-ahead, which is
this by default (`force_page_cache_ra` of Linux; /sys/class/bdi/*/read_ahead_kb).
"""

NICE = 10
"""How far the thread's priority is lowered; the kernel derives the priority of its reads from it (ioprio_set(2))."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a model that hold its weights, in the order of their names. As in vLLM, PyTorch's own format
    counts only where there is no safetensors file. A model that is no folder on this machine has none.
    """
    if not folder.is_dir():
        return []
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        found = sorted(folder.glob(pattern))
        if found:
            return found
    return []


def read_ahead(folder: Path) -> "ReadAhead | None":
    """Begins to read the weights of the model in `folder` in the background. Returns None if there are none, or more
    than this machine has memory available: the first pages would then be gone before the loader came to them.
    """
    files = weight_files(folder)
    size_bytes = sum(file.stat().st_size for file in files)
    free_bytes = psutil.virtual_memory().available
    if size_bytes > free_bytes:
        log.info(
            "weights of %.1f GB are not read ahead: %.1f GB are free", size_bytes / 1e9, free_bytes / 1e9
        )
        return None
    if not files:
        return None
    ahead = ReadAhead(files)
    ahead.start()
    return ahead


class ReadAhead(threading.Thread):
    """The thread that asks the kernel to read `files`."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__(name="weights ahead", daemon=True)
        self._files = files

    def run(self) -> None:
        """Asks for all files, in order. A file that cannot be read is left to the loader, which reports it."""
        try:
            # on Linux this concerns the thread alone
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICE)
            for file in self._files:
                self._ask(file)
        except OSError as error:
            log.warning("the weights are not read ahead: %s", error)

    def _ask(self, file: Path) -> None:
        with file.open("rb") as opened:
            for at in range(0, os.fstat(opened.fileno()).st_size, STEP_BYTES):
                os.posix_fadvise(opened.fileno(), at, STEP_BYTES, os.POSIX_FADV_WILLNEED)
