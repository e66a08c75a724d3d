"""The port check of `make serve`: silent where the port is free, and naming the holder where it is not."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_port.py"


def check(port: int | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, str(port)], capture_output=True, text=True, timeout=60)


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def test_taken_port_names_the_process_and_the_way_out(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    done = check(port)
    assert done.returncode == 1
    assert f"port {port} is taken by process {os.getpid()} (" in done.stderr
    assert "make serve PORT=" in done.stderr


def test_port_is_free_again_once_the_listener_is_gone(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    done = check(port)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("text", ["0", "65536", "http", "-1", ""])
def test_what_is_no_port_is_refused(text: str) -> None:
    done = check(text)
    assert done.returncode == 1
    assert f"PORT={text} is not a port" in done.stderr
