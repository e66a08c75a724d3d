"""Server processes: ready, measured, ended with all they started, ports free again; and what a failed start says."""

import socket
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.live import measure, targets
from benchmarks.live.servers import (
    Command,
    ServerError,
    answers,
    free_ports,
    is_free,
    running,
    running_together,
)

pytestmark = pytest.mark.live

# Leaves a child in a session of its own, which outlives its parent like Ray's daemons do, and a child of that. Answers
# /health with 200 once both are there: `exec` closes their end of the pipe.
DAEMON = """
import http.server, os, sys
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    open(sys.argv[2], "w").write(str(os.getpid()))
    if os.fork() == 0:
        open(sys.argv[2] + "2", "w").write(str(os.getpid()))
    os.execvp("sleep", ["sleep", "300"])
os.close(write)
os.read(read, 1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def silent(_text: str) -> None:
    """Progress that nobody reads."""


def test_the_bare_listener_is_measured() -> None:
    plan = measure.Plan(concurrency=4, requests=40, tokens=16, max_s=30.0)
    with running(targets.bare(), silent) as server:
        assert answers(server.command.port, "/health")
        case = measure.with_python(server, "bare", plan, seed=1)
        tree = measure.tree_state(server, 0.1)
        pids = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert is_free(server.command.port)
    assert (case.requests, case.failures) == (40, {})
    assert set(case.cpu_ms_per_request) == {"reaper", "listener"}
    assert set(tree.memory) == {"reaper", "listener"}
    assert tree.total["processes"] == 2
    assert case.events_per_request == 18  # role, 16 tokens, [DONE]


def test_daemons_end_with_the_server(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    note = tmp_path / "pid"
    command = Command("daemons", [sys.executable, "-c", DAEMON, str(port), str(note)], port, timeout_s=30.0)
    with running(command, silent):
        pids = [int(note.read_text()), int((tmp_path / "pid2").read_text())]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_error_while_it_is_used_ends_it_too() -> None:
    command = targets.bare()
    with pytest.raises(ZeroDivisionError), running(command, silent) as server:
        raise ZeroDivisionError
    assert not psutil.pid_exists(server.pid)
    assert is_free(command.port)


def test_a_server_that_dies_shows_its_log() -> None:
    (port,) = free_ports(1)
    command = Command("dies", [sys.executable, "-c", "raise SystemExit('no such model')"], port)
    with pytest.raises(ServerError, match=r"(?s)dies ended with 1.*no such model"), running(command, silent):
        pass


def test_a_server_that_never_answers_is_given_up() -> None:
    (port,) = free_ports(1)
    command = Command("mute", ["sleep", "300"], port, timeout_s=0.5)
    with pytest.raises(ServerError, match="mute was not ready"), running(command, silent):
        pass


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = Command("late", ["true"], 1, ports=(port,))
        with pytest.raises(ServerError, match=f"port {port} is in use"), running(command, silent):
            pass


def test_free_ports_differ() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_free(port) for port in ports)


def test_the_cause_is_shown_though_it_stands_far_above() -> None:
    (port,) = free_ports(1)
    code = "print('ValueError: no such dtype'); print(*range(100), sep='\\n'); raise SystemExit(3)"
    command = Command("chatty", [sys.executable, "-c", code], port)
    cause = r"(?s)ended with 3:\nValueError: no such dtype\n70\n.*99$"
    with pytest.raises(ServerError, match=cause), running(command, silent):
        pass


def test_servers_that_start_together_are_all_ready_and_all_end() -> None:
    commands = [targets.bare(), targets.bare()]
    with running_together(commands, silent) as servers:
        assert [server.command for server in servers] == commands
        assert all(answers(server.command.port, "/health") and server.started_s > 0 for server in servers)
    assert all(is_free(command.port) for command in commands)


def test_one_that_does_not_start_ends_the_others_at_once() -> None:
    (port,) = free_ports(1)
    dies = Command("dies", [sys.executable, "-c", "raise SystemExit('no such model')"], port)
    mute = Command("mute", ["sleep", "300"], free_ports(1)[0], timeout_s=300.0)
    said = pytest.raises(ServerError, match=r"(?s)dies ended with 1.*no such model")
    with said, running_together([mute, dies], silent):
        pass
