"""Two hosts and the cable between them, whose bandwidth is set by `tc tbf` in both directions."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.hosts import network
from benchmarks.hosts.network import Host

PREFILL, DECODE = "10.79.0.1", "10.79.0.2"
DEVICE = "eth0"
BURST_BYTES = 131_072
"""Bytes that the shaper sends at once: two of the largest packets that a veth passes on unsplit."""
QUEUE_S = 0.05
"""Longest wait in the shaper's queue; what comes then is dropped, which TCP takes as the sign to slow down."""


def why_not() -> str | None:
    """Returns why the link cannot be made here, in words, or None if it can."""
    if (reason := network.why_not()) is not None:
        return reason
    if subprocess.run(["which", "tc"], capture_output=True).returncode:
        return "the program tc is not installed (Debian's package iproute2)"
    probe = "ip link add one type veth peer name two && tc qdisc add dev one root " + _shaper(1_000_000)
    done = subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True)
    return f"this machine's kernel has no tc tbf: {done.stderr.strip()}" if done.returncode else None


@dataclass(frozen=True, slots=True)
class Pair:
    """The host of the prefill engine and the host of the decode engines."""

    prefill: Host
    decode: Host

    def received_bytes(self) -> int:
        """Returns how many bytes the decode engines' host has received so far, with all headers."""
        (found,) = json.loads(self.decode.run(["ip", "-s", "-j", "link", "show", DEVICE]))
        return int(found["stats64"]["rx"]["bytes"])

    def reset(self) -> None:
        """Resets the TCP connections that the decode engines' host has made to the other one, as after a network that
        was cut for longer than TCP waits. Both hosts can make new ones at once.
        """
        self.decode.run(["ss", "--kill", "state", "established", "dst", str(self.prefill.address)])


@contextlib.contextmanager
def pair(bits_per_s: int) -> Iterator[Pair]:
    """Makes both hosts and the cable for the time of a block; afterwards nothing of them is left."""
    hosts: list[Host] = []
    try:
        for name, address in (("prefill", PREFILL), ("decode", DECODE)):
            hosts.append(Host(name, address))
        ends = [["name", DEVICE, "netns", str(host.pid)] for host in hosts]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for host in hosts:
            host.run(["ip", "address", "add", f"{host.address}/24", "dev", DEVICE])
            host.link("up")
            host.run(["tc", "qdisc", "add", "dev", DEVICE, "root", *_shaper(bits_per_s).split()])
        yield Pair(*hosts)
    finally:
        for host in hosts:
            host.off()
        left = [process for host in hosts for process in host.survivors()]
        assert not left, f"processes survived the end of their host: {left}"


def _shaper(bits_per_s: int) -> str:
    return f"tbf rate {bits_per_s}bit burst {BURST_BYTES}b latency {QUEUE_S * 1e3:g}ms"
