"""The processes of a run: one prefill engine, the decode engines, and the flow agent where reads are scheduled.

`OnLink` has vLLM engines on the two hosts of `link`. `OneMachine` has sim engines on this machine: one prefill engine
that sends to all others over one simulated link, which its transfers share.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from actors.engine.cores import divide_cores, usable_cores
from benchmarks.checkout import ROOT
from benchmarks.hosts.network import Host
from benchmarks.live.targets import model_directory
from benchmarks.mfs.link import DEVICE, Pair

UNSCHEDULED = "unscheduled"
SECRET = "a secret of the benchmark's"
AGENTS: Mapping[str, Mapping[str, Any]] = {
    "edf": {"policy": "edf"},
    "mfs": {"policy": "mfs"},
    "mfs-u4": {"policy": "mfs", "params": {"scale": 4.0}},
    "fair": {"policy": "fair"},
    "sjf": {"policy": "sjf"},
    "karuna": {"policy": "karuna"},
}
"""The configuration of the flow agent by the names of the command line. `mfs` has the thresholds that MFS prints (U =
0.5, E = 4): a read is at the highest level as soon as it needs an eighth of the link, which here all do from the start.
With U = 4 Q_1 is 1, and a read comes there only when it needs all of it.
"""
START_S = 600.0
END_S = 60.0


class StartError(Exception):
    """A process did not start. The message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers and sizes of the engines. A decode engine reads at most `slots` prompts at once.

    `prefill_kv_gib`, `decode_kv_gib` and `read_timeout_s` are those of vLLM engines; `bytes_per_s` is the bandwidth of
    the sim engines' link; `arbiter` has fields of the agent's `ArbiterConfig`.
    """

    decodes: int = 2
    slots: int = 32
    max_model_len: int = 2_048
    lease_s: int = 60
    prefill_kv_gib: float = 4.0
    decode_kv_gib: float = 2.0
    read_timeout_s: float = 300.0
    bytes_per_s: float = 50e6
    arbiter: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """The addresses of the engines, and what each printed when it was ready."""

    prefill: str
    decodes: tuple[str, ...]
    ready: tuple[dict[str, Any], ...]


class Setup(Protocol):
    """Where processes run, and with what options."""

    kind: str

    def start(self, node: str, command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        """Starts a command on the node `prefill` or `decode`."""

    def options(self, role: str, number: int, agent: str) -> dict[str, Any]:
        """Returns the options of the engine `number` (0 is the prefill engine) of this role."""

    def end(self) -> None:
        """Ends all processes, and waits until they have gone."""


@dataclass
class OnLink:
    """vLLM engines on two hosts: SmolLM2-135M in float32."""

    pair: Pair
    sizes: Sizes
    kind: str = "vllm"
    model: str = field(default_factory=model_directory)

    def start(self, node: str, command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        host = self._host(node)
        env = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE, "VLLM_HOST_IP": str(host.address)}
        with log.open("wb") as opened:
            return host.start(command, opened, _environment(env))

    def options(self, role: str, number: int, agent: str) -> dict[str, Any]:
        cores = _cores(1 + self.sizes.decodes)[number]
        return engine_options(role, str(self._host(role).address), self.model, self.sizes, cores, agent)

    def end(self) -> None:
        for host in (self.pair.prefill, self.pair.decode):
            _kill(host.processes())

    def _host(self, node: str) -> Host:
        return self.pair.prefill if node == "prefill" else self.pair.decode


@dataclass
class OneMachine:
    """Sim engines on this machine; none computes."""

    sizes: Sizes
    kind: str = "sim"
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, node: str, command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        with log.open("wb") as opened:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=opened,
                cwd=ROOT,
                env=_environment({}),
            )
        self.started.append(process)
        return process

    def options(self, role: str, number: int, agent: str) -> dict[str, Any]:
        return sim_options(role, self.sizes, agent)

    def end(self) -> None:
        _kill([psutil.Process(process.pid) for process in self.started if process.poll() is None])
        for process in self.started:
            process.wait(END_S)
        self.started.clear()


@contextlib.contextmanager
def running(
    setup: Setup, folder: Path, policy: str, sizes: Sizes, say: Callable[[str], None]
) -> Iterator[Running]:
    """Runs engines and agent for the time of a block, and yields when all are ready.

    `policy` is a name in AGENTS, or UNSCHEDULED: then there is no agent, and every read is posted at once.
    Raises StartError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = ["prefill-0", *(f"decode-{n}" for n in range(sizes.decodes))]
    begun_s = time.monotonic()
    try:
        agent = (
            ""
            if policy == UNSCHEDULED
            else _agent(setup, folder, {**AGENTS[policy], "arbiter": sizes.arbiter})
        )
        started = []
        for number, name in enumerate(names):
            role = name.partition("-")[0]
            command = [sys.executable, "-m", "actors.engine.host", "--kind", setup.kind, "--role", role]
            command += ["--id", name, "--listen", f"unix:{folder}/{name}.sock"]
            command += ["--config", json.dumps(setup.options(role, number, agent))]
            started.append(setup.start(role, command, folder / f"{name}.log"))
        ready = [
            _wait_line(folder / f"{name}.log", "ready ", process)
            for name, process in zip(names, started, strict=True)
        ]
        say(f"{policy}: {len(names)} engines are ready after {time.monotonic() - begun_s:.0f} s")
        addresses = [f"unix:{folder}/{name}.sock" for name in names]
        yield Running(addresses[0], tuple(addresses[1:]), tuple(json.loads(line) for line in ready))
    finally:
        setup.end()


def engine_options(
    role: str, address: str, model: str, sizes: Sizes, cores: Sequence[int], agent: str = ""
) -> dict[str, Any]:
    """Returns the options of a vLLM engine on the host that is named as its role. Only a decode engine submits reads
    to the agent.
    """
    prefill = role == "prefill"
    return {
        "model": model,
        "dtype": "float32",
        "slots": sizes.slots,
        "max_model_len": sizes.max_model_len,
        "kv_space_gib": sizes.prefill_kv_gib if prefill else sizes.decode_kv_gib,
        "lease_s": sizes.lease_s,
        "side_channel_host": address,
        "cores": list(cores),
        "connector_args": {
            "flow_node": role,
            "flow_agent": "" if prefill else agent,
            # a queue behind slow reads is what is measured here, and no fault
            "read_timeout_s": sizes.read_timeout_s,
        },
        # a cached prompt would not be read; only the prefill engine keeps prompts
        "engine_args": {"enable_prefix_caching": prefill},
    }


def sim_options(role: str, sizes: Sizes, agent: str = "") -> dict[str, Any]:
    """Returns the options of a sim engine: steps of a millisecond, and one link from the prefill engine to all."""
    link = {"bandwidth_bytes_per_s": sizes.bytes_per_s, "latency_s": 1e-3}
    return {
        "profile": "tick_1ms",
        "slots": sizes.slots,
        "max_model_len": sizes.max_model_len,
        "lease_s": float(sizes.lease_s),
        "pull_timeout_s": sizes.read_timeout_s,
        "links": {"decode-*": link} if role == "prefill" else {},
        "flow_node": role,
        "flow_agent": "" if role == "prefill" else agent,
    }


def _cores(engines: int) -> list[tuple[int, ...]]:
    """Returns each engine's cores. On two cores the prefill engine has one, and all decode engines have the other."""
    cores = usable_cores()
    if len(cores) > 2 or len(cores) == 1:
        return list(divide_cores(cores, engines))
    return [(cores[0],), *([(cores[1],)] * (engines - 1))]


def _agent(setup: Setup, folder: Path, config: Mapping[str, Any]) -> str:
    """Starts the flow agent of the decode engines' node, where all reads are submitted, and returns its address.

    It orders both ports of every read; the prefill engine only lends, and submits nothing.
    """
    address, log = f"unix:{folder}/agent.sock", folder / "agent.log"
    command = [sys.executable, "-m", "actors.flow.host", "--node", "decode", "--knows", "prefill"]
    command += ["--listen", address, "--config", json.dumps(config)]
    _wait_line(log, "ready ", setup.start("decode", command, log))
    return address


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VLLM_"))}
    ours = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "SLUICE_WIRE_SECRET": SECRET}
    return {**env, **ours, **more}


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kills processes and waits until they have gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, END_S)
    if alive:
        raise StartError(f"processes do not end: {alive}")


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
