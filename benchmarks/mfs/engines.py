"""The processes of a run: one prefill engine, the decode engines, and a flow agent on each host where reads are
scheduled.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.engine.cores import divide_cores, usable_cores
from benchmarks.checkout import ROOT
from benchmarks.hosts.network import Host
from benchmarks.live.targets import model_directory
from benchmarks.mfs.link import DEVICE, Pair

UNSCHEDULED = "unscheduled"
START_S = 600.0
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""KV of one token of SmolLM2-135M: layers, K and V, KV heads, values a head, bytes of float32."""


class StartError(Exception):
    """A process did not start. The message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers and sizes of the engines. A decode engine reads at most `slots` prompts at once."""

    decodes: int = 2
    slots: int = 32
    prefill_kv_gib: float = 4.0
    decode_kv_gib: float = 2.0
    max_model_len: int = 2_048
    lease_s: int = 60
    read_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Running:
    """The addresses of the engines, and what each printed when it was ready."""

    prefill: str
    decodes: tuple[str, ...]
    ready: tuple[dict[str, Any], ...]


@contextlib.contextmanager
def running(
    pair: Pair, folder: Path, policy: str, sizes: Sizes, say: Callable[[str], None]
) -> Iterator[Running]:
    """Runs engines and agents on the hosts for the time of a block, and yields when all are ready.

    `policy` is a flow policy's name, or UNSCHEDULED: then there are no agents, and every read is posted at once.
    Raises StartError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    agent = "" if policy == UNSCHEDULED else _agent(pair, folder, policy)
    names = ["prefill-0", *(f"decode-{n}" for n in range(sizes.decodes))]
    cores = divide_cores(usable_cores(), len(names)) if len(usable_cores()) > 2 else _two_cores(len(names))
    started = []
    model = model_directory()
    begun_s = time.monotonic()
    try:
        for name, own in zip(names, cores, strict=True):
            role = name.partition("-")[0]
            host = pair.prefill if role == "prefill" else pair.decode
            address = f"unix:{folder}/{name}.sock"
            options = _options(host, role, model, sizes, own)
            options["connector_args"] |= {"flow_node": host.name} | ({"flow_agent": agent} if agent else {})
            command = [sys.executable, "-m", "actors.engine.host", "--kind", "vllm", "--role", role]
            command += ["--id", name, "--listen", address, "--config", json.dumps(options)]
            started.append((name, address, _start(host, command, folder / f"{name}.log")))
        ready = [_wait_line(folder / f"{name}.log", "ready ", process) for name, _, process in started]
        say(f"{policy}: {len(names)} engines are ready after {time.monotonic() - begun_s:.0f} s")
        addresses = [address for _, address, _ in started]
        yield Running(addresses[0], tuple(addresses[1:]), tuple(json.loads(line) for line in ready))
    finally:
        for host in (pair.prefill, pair.decode):
            end_all(host)


def end_all(host: Host) -> None:
    """Ends every process of a host but its first one, and waits until they have gone."""
    for process in host.processes():
        with contextlib.suppress(Exception):
            process.kill()
    end_s = time.monotonic() + 60.0
    while host.processes() and time.monotonic() < end_s:
        time.sleep(0.1)


def _options(host: Host, role: str, model: str, sizes: Sizes, cores: Sequence[int]) -> dict[str, Any]:
    prefill = role == "prefill"
    return {
        "model": model,
        "dtype": "float32",
        "slots": sizes.slots,
        "max_model_len": sizes.max_model_len,
        "kv_space_gib": sizes.prefill_kv_gib if prefill else sizes.decode_kv_gib,
        "lease_s": sizes.lease_s,
        "side_channel_host": host.address,
        "cores": list(cores),
        # a queue behind slow reads is what is measured here, and no fault
        "connector_args": {"read_timeout_s": sizes.read_timeout_s},
        # a cached prompt would not be read; only the prefill engine keeps prompts
        "engine_args": {"enable_prefix_caching": prefill},
    }


def _two_cores(engines: int) -> list[tuple[int, ...]]:
    """Returns the first core for the prefill engine, and the last one for all decode engines."""
    cores = usable_cores()
    return [(cores[0],), *([(cores[-1],)] * (engines - 1))]


def _agent(pair: Pair, folder: Path, policy: str) -> str:
    """Starts the flow agent of the decode engines' host, where all reads are submitted, and returns its address.

    It orders both ports of every read; the prefill engine only lends, and submits nothing.
    """
    address, log = f"unix:{folder}/agent.sock", folder / "agent.log"
    command = [
        sys.executable,
        "-m",
        "actors.flow.host",
        "--node",
        pair.decode.name,
        "--knows",
        pair.prefill.name,
    ]
    command += ["--listen", address, "--config", json.dumps({"policy": policy})]
    _wait_line(log, "ready ", _start(pair.decode, command, log))
    return address


def _start(host: Host, command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VLLM_"))}
    env |= {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": DEVICE,
        "VLLM_HOST_IP": str(host.address),
        "SLUICE_WIRE_SECRET": "a secret of the benchmark's",
    }
    with log.open("wb") as opened:
        return host.start(command, opened, env)


def _wait_line(log: Path, head: str, process: "subprocess.Popen[bytes]") -> str:
    """Returns the rest of the first line of a log that begins with `head`, once it is there."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        found = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(head)]
        if found:
            return found[0].removeprefix(head)
        if process.poll() is not None:
            break
        time.sleep(0.3)
    tail = log.read_text(errors="replace")[-3000:]
    raise StartError(f"{log.stem} is not ready; it ended with {process.poll()}, its log with:\n{tail}")
