"""Starts a server as a separate process tree, waits until it answers, and always ends the whole tree.

The command runs below `scripts/reap.py`. The kernel makes this reaper the parent of daemons that leave their parents
(as Ray's do), so the tree is complete when it is measured and when it is ended. The reaper itself gets SIGTERM when
this process dies.
"""

import contextlib
import ctypes
import http.client
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
REAPER = ROOT / "scripts" / "reap.py"
# Seconds that a server has to end by itself after SIGINT; then the reaper ends it.
STOP_S = 60.0
# Seconds that a server has which never became ready; it is short because many do not handle signals until then.
HURRY_S = 5.0
# Seconds that the reaper has (10 of them are its own grace period); then everything is killed.
REAP_S = 20.0
ADMIN_KEY = secrets.token_urlsafe(32)
"""The admin key of every Sluice that this process starts."""
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CAUSE = re.compile(r"\b\w*(Error|Exception): ")
_libc = ctypes.CDLL(None, use_errno=True)


class ServerError(RuntimeError):
    """The error of a server that did not start, died, or left something behind; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Command:
    """A server to run.

    `ports` must be free before and after the run. `ready_path` answers 200 once requests are served. `cwd` is the
    checkout whose code serves. `head` has further header lines that the load's requests have, such as an API key.
    """

    name: str
    argv: Sequence[str]
    port: int
    ready_path: str = "/health"
    ports: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    cwd: Path = ROOT
    head: Sequence[str] = ()

    @property
    def all_ports(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.port, *self.ports)))


@dataclass(slots=True)
class Server:
    """A running server. `started_s` is the time in seconds from the start of the process, at `begun_s` of the monotonic
    clock, until it is ready.
    """

    command: Command
    process: subprocess.Popen[bytes]
    log: Path
    started_s: float = 0.0
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """The process id of the tree's root, which is the reaper."""
        return self.process.pid

    def tail(self, lines: int = 30) -> str:
        """Returns the end of the log, after its first lines that name an error, because causes are often far above."""
        log = self.log.read_text(errors="replace").splitlines()
        causes = [line for line in log[:-lines] if _CAUSE.search(line)][:5]
        return "\n".join([*causes, *log[-lines:]])


def free_ports(count: int) -> list[int]:
    """Returns `count` different loopback TCP ports that are free at the moment. Raises ServerError without enough.

    They are below the kernel's ephemeral range, because Ray's processes take dozens of ephemeral ports before the
    server listens.
    """
    first_given = int(_GIVEN.read_text().split()[0])
    found: list[int] = []
    for port in random.SystemRandom().sample(range(_FIRST_PORT, max(first_given, _FIRST_PORT + 1000)), 500):
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    if len(found) < count:
        raise ServerError(f"no {count} free loopback ports between {_FIRST_PORT} and {first_given}")
    return found


def is_free(port: int) -> bool:
    """Returns whether a listener could be opened on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def python(*arguments: str) -> list[str]:
    """Returns a command line that runs this interpreter with `arguments`."""
    return [sys.executable, *arguments]


@contextlib.contextmanager
def running(command: Command, say: Callable[[str], None]) -> Iterator[Server]:
    """A context in which the server runs and is ready.

    Raises ServerError when the server does not start, or leaves a process or a listener behind.
    """
    with running_together([command], say) as (server,):
        yield server


@contextlib.contextmanager
def running_together(commands: Sequence[Command], say: Callable[[str], None]) -> Iterator[list[Server]]:
    """A context in which several servers run, which start at the same time, and all are ready.

    Raises ServerError when one of them does not start, and then ends the others, or when one leaves a process or a
    listener behind.
    """
    for command in commands:
        taken = [port for port in command.all_ports if not is_free(port)]
        if taken:
            raise ServerError(f"{command.name}: port {taken[0]} is in use; end what listens there")
    servers: list[Server] = []
    left: list[tuple[str, list[str]]] = []
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        patience_s = HURRY_S
        try:
            for number, command in enumerate(commands):
                servers.append(_start(command, Path(folder) / f"log-{number}"))
            _wait_ready(servers, say)
            patience_s = STOP_S
            yield servers
        finally:
            left += [(server.command.name, stop(server, patience_s)) for server in servers]
    for name, remains in left:
        if remains:
            raise ServerError(f"{name}: after it was stopped there was still {'; '.join(remains)}")
        say(f"{name}: stopped, its ports are free")


def administrator(port: int, timeout_s: float) -> httpx.Client:
    """Returns a client that may administer the Sluice on this port, which `running` has started or will start."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout_s, headers=headers)


def stop(server: Server, patience_s: float) -> list[str]:
    """Ends the tree: SIGINT to the server, after `patience_s` its reaper, then SIGKILL. Returns what remains."""
    try:
        tree = psutil.Process(server.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    with contextlib.suppress(psutil.NoSuchProcess):
        own = [child for child in tree if child.ppid() == server.pid]
        if own:
            min(own, key=lambda child: child.create_time()).send_signal(
                signal.SIGINT
            )  # the rest are orphans of its
    if not _ended(server.process, patience_s):
        server.process.send_signal(signal.SIGTERM)
        _ended(server.process, REAP_S)
    for member in [*tree, *_children(server.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            # psutil refuses when the pid has been reused.
            member.kill()
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait(timeout=5)
    _, alive = psutil.wait_procs(tree, timeout=5)
    left = [f"process {process.pid}" for process in alive]
    return left + [f"a listener on port {port}" for port in server.command.all_ports if not _wait_free(port)]


def answers(port: int, path: str) -> bool:
    """Returns whether GET `path` answers 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _start(command: Command, log: Path) -> Server:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(REAPER), *command.argv],
            cwd=command.cwd,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "SLUICE_ADMIN_KEYS": ADMIN_KEY} | dict(command.env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal reaches only this process, which ends the tree in order.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    return Server(command, process, log)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait_ready(servers: Sequence[Server], say: Callable[[str], None]) -> None:
    waiting = list(servers)
    while waiting:
        for server in list(waiting):
            command, waited_s = server.command, time.monotonic() - server.begun_s
            if answers(command.port, command.ready_path):
                server.started_s = time.monotonic() - server.begun_s
                waiting.remove(server)
                say(f"{command.name}: ready after {server.started_s:.1f} s")
            elif server.process.poll() is not None:
                raise ServerError(f"{command.name} ended with {server.process.returncode}:\n{server.tail()}")
            elif waited_s > command.timeout_s:
                raise ServerError(
                    f"{command.name} was not ready in {command.timeout_s:.0f} s:\n{server.tail()}"
                )
        if waiting:
            time.sleep(0.1)


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_free(port: int) -> bool:
    for _ in range(50):
        if is_free(port):
            return True
        time.sleep(0.1)
    return False
