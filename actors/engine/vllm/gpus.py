"""Facts about GPUs that a process can learn without initialising CUDA, which would fix the GPUs that it sees.

CUDA reads `CUDA_VISIBLE_DEVICES` once, when a process initialises the driver (`cuInit`). Ray sets the variable only in
the task that makes a replica's actor (`set_visible_accelerator_ids`), so a pre-warmed process and the process of its
core must import without initialising CUDA.
"""

import contextlib
import ctypes
import os
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that says which GPUs a process sees."""

_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
_INFORMATION = Path("/proc/driver/nvidia/gpus")


def driver_initialised() -> bool:
    """Returns whether this process has initialised the CUDA driver, after which `VISIBLE` has no effect."""
    try:
        # with RTLD_NOLOAD a driver that nobody has loaded is an OSError
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)


def gpu_models(folder: Path = _INFORMATION) -> tuple[str, ...]:
    """Returns the names of the models of this node's GPUs, each once and sorted. Returns an empty tuple where NVIDIA's
    driver does not list its GPUs below `folder`.
    """
    found = set()
    for file in folder.glob("*/information"):
        with contextlib.suppress(OSError):
            for line in file.read_text(errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "Model":
                    found.add(value.strip())
    return tuple(sorted(found))
