"""scripts/setup.sh says what is missing, before it installs anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """A directory of programs that stand before the real ones in PATH, and a place for an environment."""

    def __init__(self, root: Path) -> None:
        self.programs = root / "bin"
        self.programs.mkdir()
        self.venv = root / "venv"

    def program(self, name: str, script: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def setup(self, variant: str = "cpu", python: str = sys.executable) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "VENV": str(self.venv),
            "PYTHON": python,
        }
        return subprocess.run(
            [ROOT / "scripts" / "setup.sh", variant],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_wrong_python_is_named(machine: Machine) -> None:
    machine.program("python-old", '[ "$1" = -V ] && echo "Python 3.9.2"; exit 1')
    said = refused(machine.setup(python="python-old"))
    assert "3.11 to 3.14 is needed, found: Python 3.9.2" in said
    assert "make setup PYTHON=" in said
    assert not machine.venv.exists()


def test_missing_venv_module_names_the_package(machine: Machine) -> None:
    machine.program("python-bare", f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"')
    assert "apt-get install python3-venv" in refused(machine.setup(python="python-bare"))
    assert not machine.venv.exists()


def test_full_disk_is_said_before_the_download(machine: Machine) -> None:
    machine.program("df", 'echo header; echo "disk 9999 8765 1234 88% /"')
    assert "1234 MB of disk are free" in refused(machine.setup())
    assert not machine.venv.exists()


def test_foreign_machine_is_refused(machine: Machine) -> None:
    machine.program("uname", '[ "$1" = -s ] && echo Darwin || echo arm64')
    assert "Darwin on arm64 is not supported" in refused(machine.setup())


def test_a_folder_that_is_no_environment_is_left_alone(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "precious").write_text("data")
    assert "is no virtual environment" in refused(machine.setup())
    assert (machine.venv / "precious").read_text() == "data"


def test_unknown_variant_is_refused(machine: Machine) -> None:
    assert "unknown variant tpu: cpu or cuda" in refused(machine.setup(variant="tpu"))
