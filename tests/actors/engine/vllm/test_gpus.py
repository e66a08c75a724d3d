"""Whether a process has initialised CUDA, with a library in the driver's place, and the models of a node's GPUs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actors.engine.vllm.gpus import driver_initialised, gpu_models
from tests.actors.engine.vllm.test_plugin import ROOT

DRIVER = """
static int ready;
int cuInit(unsigned flags) { ready = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return ready ? 0 : 3; }
"""


def driver(folder: Path) -> Path:
    """Returns the path of a library that the loader takes for CUDA's driver. Skips the test without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    made = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(made, check=True)
    return library


def test_a_driver_counts_as_initialised_only_once_somebody_has_initialised_it(tmp_path: Path) -> None:
    code = f"""
import ctypes
from actors.engine.vllm.gpus import driver_initialised
print(driver_initialised())
library = ctypes.CDLL({str(driver(tmp_path))!r})
print(driver_initialised())
library.cuInit(0)
print(driver_initialised())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


def test_a_process_without_a_driver_has_not_initialised_it() -> None:
    assert not driver_initialised()


def test_models_are_named_once(tmp_path: Path) -> None:
    assert gpu_models(tmp_path / "missing") == ()
    for bus, model in (
        ("0000:01:00.0", "NVIDIA H200"),
        ("0000:02:00.0", "NVIDIA L4"),
        ("0000:03:00.0", "NVIDIA L4"),
    ):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-1\n"
        )
    assert gpu_models(tmp_path) == ("NVIDIA H200", "NVIDIA L4")
