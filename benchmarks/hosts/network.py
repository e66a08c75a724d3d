"""Namespaces of this machine that stand for hosts, joined by a switch: made and removed by one context manager.

    10.77.0.1 "head"  --- veth ---+
    10.77.0.2 "worker" -- veth ---+--- bridge, in a namespace of its own
    10.77.0.9 "client" -- veth ---+

A host has processes, network, shared memory, host name and temporary files of its own. It shares with the other hosts
the machine's clock, cores and disk (the checkout, the environment, the model). No device, address or rule is made in
the machine's own network, and everything goes with the processes that hold the namespaces, also when the test run is
killed.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TMP_PATH = Path("/tmp/sluice-host")
"""Folder that each host has for itself: every host sees its own under this one path, as real hosts see their /tmp.

The path is short because Ray puts sockets below it, whose paths have 107 characters at most.
"""
TMP_BYTES = 256 * 2**20
SHM_BYTES = 256 * 2**20
CLONE_NEWNET = 0x40000000  # linux/sched.h
_SIOCETHTOOL = 0x8946  # linux/sockios.h
# ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO of linux/ethtool.h
_OFFLOADS = (0x17, 0x1F, 0x24)
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Returns why hosts cannot be made here, in words, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if subprocess.run(["which", tool], capture_output=True).returncode:
            return f"the program {tool} is not installed"
    probe = "ip link add one type veth peer name two && ip link add name bridge type bridge && mount -t tmpfs none /mnt"
    command = ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "sh", "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"this machine forbids namespaces: {done.stderr.strip()}" if done.returncode else None


class Host:
    """One host. `address` is None for the switch, which has none."""

    def __init__(self, name: str, address: str | None = None) -> None:
        self.name, self.address = name, address
        TMP_PATH.mkdir(exist_ok=True)
        kinds = ["--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        command = ["unshare", *kinds, "--propagation", "private", sys.executable, "-I", str(HERE / "init.py")]
        self._holder = subprocess.Popen(
            [*command, str(TMP_PATH), str(TMP_BYTES), str(SHM_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        first = self._holder.stdout.readline()
        assert first, f"host {name} did not start: {self._holder.stderr.read()}"
        self.pid = int(first)
        self._space = os.readlink(f"/proc/{self.pid}/ns/pid")
        self.run(["hostname", name])
        self.run(["ip", "link", "set", "lo", "up"])

    def inside(self, command: Sequence[str], cwd: Path = ROOT) -> list[str]:
        """Returns the command that runs `command` in this host."""
        spaces = ["--net", "--mount", "--pid", "--ipc", "--uts"]
        return ["nsenter", "--target", str(self.pid), *spaces, f"--wd={cwd}", "--", *command]

    def run(self, command: Sequence[str], timeout_s: float = 60.0, **options: Any) -> str:
        """Runs a command in the host and returns what it printed. Raises AssertionError with its errors if it fails."""
        done = subprocess.run(
            self.inside(command), capture_output=True, text=True, timeout=timeout_s, **options
        )
        assert done.returncode == 0, (
            f"{self.name}: {' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def start(
        self,
        command: Sequence[str],
        log: IO[Any] | int = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Starts a command in the host, which lives as long as the host does."""
        return subprocess.Popen(
            self.inside(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(os.environ if env is None else env),
            start_new_session=True,
        )

    def processes(self, words: str = "") -> list[psutil.Process]:
        """Returns the host's processes, without its first one, whose command line contains `words`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                mine = os.readlink(f"/proc/{process.pid}/ns/pid") == self._space
                if mine and process.pid != self.pid and words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def link(self, state: str) -> None:
        """Sets the host's network device `up` or `down`: peers get neither FIN nor RST."""
        self.run(["ip", "link", "set", "eth0", state])

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Puts the calling thread, and no other, into the host's network for the time of a block.

        Sockets and threads that the block makes belong to the host's network, also after the block.
        """
        back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(back)
            os.close(there)
            os.close(back)

    def off(self) -> None:
        """Ends the host and every process in it at once, as when power is lost. Idempotent."""
        if self._holder.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._holder.wait(60)
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert stream is not None
            stream.close()

    def survivors(self, timeout_s: float = 60.0) -> list[psutil.Process]:
        """Returns the processes that are left after `off`; the kernel may take a moment to end them."""
        end_s = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < end_s:
            time.sleep(0.1)
        return left


class Impairment:
    """Something between a host and the switch that delays frames and loses some of them (`relay`)."""

    def __init__(self, lan: "Lan", host: Host, seed: int) -> None:
        port, near, far = f"p-{host.name}", "near", "far"
        switch = lan.switch
        switch.run(["ip", "link", "set", port, "nomaster"])
        switch.run(["ip", "link", "add", near, "type", "veth", "peer", "name", far])
        for device in (near, far):
            plain_frames(switch, device)
            switch.run(["ip", "link", "set", device, "up"])
        switch.run(["ip", "link", "set", far, "master", "br0"])
        self._lan, self._port, self._near = lan, port, near
        self._relay = subprocess.Popen(
            switch.inside([sys.executable, "-I", str(HERE / "relay.py"), port, near, str(seed)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == "relays\n"

    def set(
        self,
        delay_s: float = 0.0,
        loss: float = 0.0,
        loss_to_host: float | None = None,
        loss_from_host: float | None = None,
    ) -> dict[str, list[int]]:
        """Sets delay and loss of both directions, and returns how many frames each has carried and dropped so far."""
        losses = {"to_host": loss_to_host, "from_host": loss_from_host}
        settings = {
            name: {"delay_s": delay_s, "loss": loss if own is None else own} for name, own in losses.items()
        }
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(settings) + "\n")
        self._relay.stdin.flush()
        counts: dict[str, list[int]] = json.loads(self._relay.stdout.readline())
        return counts

    def remove(self) -> None:
        """Joins host and switch by a plain cable again."""
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.close()
        self._relay.wait(30)
        self._relay.stdout.close()
        self._lan.switch.run(["ip", "link", "del", self._near])
        self._lan.switch.run(["ip", "link", "set", self._port, "master", "br0"])


@dataclass
class Lan:
    """Hosts at one switch. `hosts` holds them by name."""

    switch: Host
    hosts: dict[str, Host] = field(default_factory=dict)

    def add(self, name: str, address: str) -> Host:
        """Adds a host and connects it to the switch."""
        host = self.hosts[name] = Host(name, address)
        port = f"p-{name}"
        pair = ["ip", "link", "add", "eth0", "netns", str(host.pid), "type", "veth"]
        subprocess.run([*pair, "peer", "name", port, "netns", str(self.switch.pid)], check=True)
        plain_frames(host, "eth0")
        plain_frames(self.switch, port)
        self.switch.run(["ip", "link", "set", port, "master", "br0", "up"])
        host.run(["ip", "address", "add", f"{address}/24", "dev", "eth0"])
        host.link("up")
        return host

    @contextlib.contextmanager
    def impaired(self, host: Host, seed: int = 0) -> Iterator[Impairment]:
        """Puts an impairment, which does nothing yet, between host and switch for the time of a block."""
        impairment = Impairment(self, host, seed)
        try:
            yield impairment
        finally:
            impairment.remove()


def plain_frames(host: Host, device: str) -> None:
    """Has a device send frames of at most its MTU with complete checksums, so that a program can carry them on."""
    with host.network(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        for command in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(opened, _SIOCETHTOOL, request)


def _enter(space: int) -> None:
    if _libc.setns(space, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def lan(addresses: Mapping[str, str]) -> Iterator[Lan]:
    """Makes a network with these hosts (address by name) for the time of a block. Afterwards nothing of it is left."""
    made = Lan(Host("switch"))
    try:
        made.switch.run(["ip", "link", "add", "br0", "type", "bridge"])
        made.switch.run(["ip", "link", "set", "br0", "up"])
        for name, address in addresses.items():
            made.add(name, address)
        yield made
    finally:
        every = [made.switch, *made.hosts.values()]
        for host in every:
            host.off()
        left = [process for host in every for process in host.survivors()]
        assert not left, f"processes survived the end of their host: {left}"
