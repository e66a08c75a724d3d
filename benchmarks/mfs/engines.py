"""The processes of a run: prefill engines, decode engines, and the flow agent where reads are scheduled.

`OnLink` has vLLM engines on the two hosts of `link`: one prefill engine, and decode engines whose reads are all that
moves (MFS stage 3).

`OneMachine` has sim engines on this machine, with the flows of all stages. Each lies on nodes of its own. The first
prefill engine, on two nodes, is the hot sender: it holds the head of every prompt and computes in no time. Over its two
links it lends prefixes to the other prefill engines (stage 1), exchanges activations between its nodes (stage 2), and
sends KV to the decode engines (stage 3). The other prefill engines compute, and have links of their own.
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
from benchmarks.hosts.network import TMP_PATH, Host
from benchmarks.live.targets import model_directory
from benchmarks.mfs.link import DEVICE, Pair
from benchmarks.mfs.workload import BLOCK_TOKENS, Kind, Workload
from policies.engine_model.timing import PROFILES
from policies.flow.mfs import SWEPT

UNSCHEDULED = "unscheduled"
SECRET = "a secret of the benchmark's"
AGENTS: Mapping[str, Mapping[str, Any]] = {
    "edf": {"policy": "edf"},
    "mfs": {"policy": "mfs"},
    "mfs-swept": {"policy": "mfs", "params": dict(SWEPT)},
    "mfs-gated": {"policy": "mfs", "params": dict(SWEPT)},
    "fair": {"policy": "fair"},
    "sjf": {"policy": "sjf"},
    "karuna": {"policy": "karuna"},
}
"""The configuration of the flow agent by the names of the command line. `mfs` has the thresholds that MFS prints (U =
0.5, E = 4): a read is at the highest level as soon as it needs an eighth of the link, which here all do from the start.
`mfs-swept` has those that are shipped: Q_1 is 1, so a read comes there only when it needs all of it, and there are two
levels. `mfs-gated` is the same, but collectives wait for permits, too (`GATED`).
"""
GATED = frozenset({"mfs-gated"})
"""The policies under which collectives wait for permits. Under the others they move at once, as those of vLLM do, which
nobody can hold; sim engines alone can hold them.
"""
START_S = 600.0
END_S = 60.0

SIM_BLOCK_TOKENS = 16
"""Tokens of a block of a sim engine. Prefixes are whole blocks of vLLM's size, and so of this one."""

LAYER_GROUPS = 4
COLLECTIVE_SHARE = 0.25
"""Bytes that a prompt token's activations take in all collectives of its prefill, as a share of its KV. ASSUMPTION: a
model whose collectives move less than its KV; with more of them the sender's links carry little else."""

COMPUTE_SHARE = 2.0
"""Time in which a sim engine computes a prompt token, as a multiple of that in which its KV is read over an idle link.
ASSUMPTION: prefixes are lent because that is faster than to compute them, which it is by this factor with nobody else
at the lender's link."""

STEP_BASE_S = 0.010
"""Time of a step of a sim engine that computes prompts, beside their tokens. ASSUMPTION."""

STAGES_STALL_S = 240.0
"""Silence of a sim engine's steps that counts as a stall, of which half is the longest hold of a flow within a step: a
prefix may wait for longer than by default behind the deadlines of others, and that is what is measured."""


class StartError(Exception):
    """A process did not start. The message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers and sizes of the engines: `decodes` decode engines, and `others` prefill engines beside the first one. A
    decode engine reads at most `slots` prompts at once.

    Two thirds of `lease_s` are the longest hold of a read. Above the link's capacity a read that cannot be in time
    waits until all others have ended, which is the end of the run. `silent_s` is for how long the agent may be silent
    before held reads go on without it: the engines keep all cores busy, and with an engine's default of 20 ms more than
    half of the reads went on so (make bench-permits sweeps it). `prefill_kv_gib`, `decode_kv_gib` and `read_timeout_s`
    are those of vLLM engines; `bytes_per_s` is the bandwidth of the sim engines' links; `arbiter` has fields of the
    agent's `ArbiterConfig`.
    """

    decodes: int = 2
    others: int = 0
    slots: int = 32
    max_model_len: int = 2_048
    lease_s: int = 300
    silent_s: float = 0.5
    prefill_kv_gib: float = 4.0
    decode_kv_gib: float = 2.0
    read_timeout_s: float = 300.0
    bytes_per_s: float = 50e6
    arbiter: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefills(self) -> tuple[str, ...]:
        """The names of the prefill engines, the sender first."""
        return tuple(f"prefill-{n}" for n in range(1 + self.others))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all engines, prefill engines first."""
        return (*self.prefills, *(f"decode-{n}" for n in range(self.decodes)))


@dataclass(frozen=True, slots=True)
class Running:
    """The addresses of the engines, and that at which the agent looks for a router ("": there is no agent)."""

    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    router: str = ""


class Setup(Protocol):
    """Where processes run, and with what options. `nodes` are the names of the nodes at the agent, and `ports` is how
    many of them are the sender's.
    """

    kind: str
    ports: int

    @property
    def nodes(self) -> tuple[str, ...]: ...

    def start(self, role: str, command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        """Starts a command where the engines of a role are."""

    def options(self, name: str, agent: str, gated: bool) -> dict[str, Any]:
        """Returns the options of the engine of this name, whose collectives, if it has any, wait for permits if they
        are `gated`.
        """

    def sent_share(self, workload: Workload, kind: Kind) -> float:
        """Returns the bytes that a request of a class takes from the sender's links on average, as a share of its
        prompt's KV. Prefixes are lent.
        """

    def end(self) -> None:
        """Ends all processes, and waits until they have gone."""


@dataclass
class OnLink:
    """vLLM engines on two hosts: SmolLM2-135M in float32."""

    pair: Pair
    sizes: Sizes
    kind: str = "vllm"
    ports: int = 1
    model: str = field(default_factory=model_directory)

    @property
    def nodes(self) -> tuple[str, ...]:
        return ("decode", "prefill")

    def start(self, role: str, command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        host = self._host(role)
        # a folder of the host's own: what a killed engine leaves there ends with the host
        env = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE, "VLLM_HOST_IP": str(host.address)}
        env["TMPDIR"] = str(TMP_PATH)
        with log.open("wb") as opened:
            return host.start(command, opened, _environment(env))

    def options(self, name: str, agent: str, gated: bool) -> dict[str, Any]:
        cores = _cores(len(self.sizes.names))[self.sizes.names.index(name)]
        host = self._host(_role(name))
        return engine_options(_role(name), str(host.address), self.model, self.sizes, cores, agent)

    def sent_share(self, workload: Workload, kind: Kind) -> float:
        return 1.0

    def end(self) -> None:
        for host in (self.pair.prefill, self.pair.decode):
            _kill(host.processes())

    def _host(self, role: str) -> Host:
        return self.pair.prefill if role == "prefill" else self.pair.decode


@dataclass
class OneMachine:
    """Sim engines on this machine."""

    sizes: Sizes
    kind: str = "sim"
    ports: int = 2
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def nodes(self) -> tuple[str, ...]:
        return sim_nodes(self.sizes)

    def start(self, role: str, command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
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

    def options(self, name: str, agent: str, gated: bool) -> dict[str, Any]:
        return sim_options(name, self.sizes, agent, gated)

    def sent_share(self, workload: Workload, kind: Kind) -> float:
        prefix = workload.prefix_tokens(kind) / workload.tokens(kind)
        hot = 1.0 + COLLECTIVE_SHARE * (1.0 - prefix)
        return (1.0 - workload.cold_share) * hot + workload.cold_share * prefix

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
    begun_s = time.monotonic()
    router = "" if policy == UNSCHEDULED else f"unix:{folder}/router.sock"
    try:
        agent = _agent(setup, folder, router, {**AGENTS[policy], "arbiter": sizes.arbiter}) if router else ""
        started = []
        for name in sizes.names:
            command = [
                sys.executable,
                "-m",
                "actors.engine.host",
                "--kind",
                setup.kind,
                "--role",
                _role(name),
            ]
            command += ["--id", name, "--listen", _address(folder, name)]
            command += ["--config", json.dumps(setup.options(name, agent, policy in GATED))]
            started.append(setup.start(_role(name), command, folder / f"{name}.log"))
        for name, process in zip(sizes.names, started, strict=True):
            _wait_line(folder / f"{name}.log", "ready ", process)
        say(f"{policy}: {len(started)} engines are ready after {time.monotonic() - begun_s:.0f} s")
        addresses = [_address(folder, name) for name in sizes.names]
        count = len(sizes.prefills)
        yield Running(tuple(addresses[:count]), tuple(addresses[count:]), router)
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
        "block_size_tokens": BLOCK_TOKENS,
        "kv_space_gib": sizes.prefill_kv_gib if prefill else sizes.decode_kv_gib,
        "lease_s": sizes.lease_s,
        "side_channel_host": address,
        "cores": list(cores),
        "flow_node": role,
        "flow_agent": "" if prefill else agent,
        "flow_silent_s": sizes.silent_s,
        # a queue behind slow reads is what is measured here, and no fault
        "connector_args": {"read_timeout_s": sizes.read_timeout_s},
        # a cached prompt would not be read; only the prefill engine keeps prompts
        "engine_args": {"enable_prefix_caching": prefill},
    }


def sim_options(name: str, sizes: Sizes, agent: str = "", gated: bool = False) -> dict[str, Any]:
    """Returns the options of a sim engine: a decode engine's steps take a millisecond, and each node of a prefill
    engine has one link, to all engines. Collectives wait for permits if they are `gated`.
    """
    link = {"bandwidth_bytes_per_s": sizes.bytes_per_s, "latency_s": 1e-3}
    token_bytes = PROFILES["tick_1ms"].kv_bytes_per_token
    options: dict[str, Any] = {
        "profile": "tick_1ms",
        "slots": sizes.slots,
        "max_model_len": sizes.max_model_len,
        "block_size_tokens": SIM_BLOCK_TOKENS,
        "kv_blocks": 65_536,
        "lease_s": float(sizes.lease_s),
        "pull_timeout_s": sizes.read_timeout_s,
        "stall_s": STAGES_STALL_S,
        "timing": {"transfer_bandwidth_bytes_per_s": sizes.bytes_per_s},
        "flow_node": name,
        "flow_agent": agent,
        "flow_silent_s": sizes.silent_s,
    }
    if _role(name) == "prefill":
        hot = name == sizes.prefills[0]
        token_s = 0.0 if hot else COMPUTE_SHARE * token_bytes / sizes.bytes_per_s
        options["timing"] |= {"prefill_base_s": STEP_BASE_S, "prefill_per_token_s": token_s}
        options |= {
            "links": {"*": link},
            "span": {_second_node(name): ""},
            "layer_groups": LAYER_GROUPS,
            # the option counts the bytes of one group
            "collective_bytes_per_token": COLLECTIVE_SHARE * token_bytes / LAYER_GROUPS,
            "collectives_by_permit": gated,
        }
    return options


def sim_nodes(sizes: Sizes) -> tuple[str, ...]:
    """Returns the names of all nodes of the sim engines: one for each engine, and a second one for prefill engines."""
    return (*sizes.names, *(_second_node(name) for name in sizes.prefills))


def _second_node(name: str) -> str:
    return f"{name}-b"


def _role(name: str) -> str:
    return name.partition("-")[0]


def _address(folder: Path, name: str) -> str:
    return f"unix:{folder}/{name}.sock"


def _cores(engines: int) -> list[tuple[int, ...]]:
    """Returns each engine's cores. On two cores the prefill engine has one, and all decode engines have the other."""
    cores = usable_cores()
    if len(cores) > 2 or len(cores) == 1:
        return list(divide_cores(cores, engines))
    return [(cores[0],), *([(cores[1],)] * (engines - 1))]


def _agent(setup: Setup, folder: Path, router: str, config: Mapping[str, Any]) -> str:
    """Starts the flow agent, which reports to `router`, and returns its address.

    All reads are submitted to it, and it orders both ports of each: no other agent has one of them.
    """
    address, log = _address(folder, "agent"), folder / "agent.log"
    node, *others = setup.nodes
    command = [
        sys.executable,
        "-m",
        "actors.flow.host",
        "--node",
        node,
        "--listen",
        address,
        "--router",
        router,
    ]
    for other in others:
        command += ["--knows", other]
    command += ["--config", json.dumps(config)]
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
