"""The sides of the comparison, and the commands that serve them.

`sluice`       Sluice between one prefill and one decode sim engine
`router`       vllm-router between a prefill and a decode source, which serve with uvicorn as vLLM does
`router-lean`  vllm-router between two sources that serve with the bare listener: what the router itself can do
`bare`         a client of a bare source itself, without a router: the floor of this client and machine

A prefill takes no time that counts and KV is there at once, on all sides: what is compared is the way of a request, not
an engine. The streams of all engines step together on the same clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.live.servers import Command, free_ports, python
from benchmarks.live.targets import SimTiming, sim_args, sluice_app
from benchmarks.peers.launch import source_argv

SLUICE, ROUTER, LEAN, BARE = "sluice", "router", "router-lean", "bare"

SIDES: Mapping[str, str] = {
    SLUICE: "Sluice",
    ROUTER: "vllm-router, uvicorn sources",
    LEAN: "vllm-router, bare sources",
    BARE: "bare listener",
}
"""The name of each side in reports."""

HOT: Mapping[str, tuple[str, ...]] = {
    SLUICE: ("ingress", "router"),
    ROUTER: ("vllm-router",),
    LEAN: ("vllm-router",),
    BARE: ("decode source",),
}
"""The processes of each side, by role, that stand between clients and engines."""

MODEL: Mapping[str, str] = {SLUICE: "sim", ROUTER: "source", LEAN: "source", BARE: "bare"}
"""The model that a client names to each side."""

SLOTS = 1024
"""The requests that a sim engine runs at once: more than there are clients in any row, as at a source, which takes
all."""

KV_BLOCKS = 65_536
"""The KV blocks of 16 tokens of a sim engine: a million tokens, more than the requests of any row hold together."""


@dataclass(frozen=True, slots=True)
class Ticks:
    """The timing of the engines of all sides: a decode step of `step_s`, and nothing else that takes time."""

    step_s: float

    def sim(self) -> SimTiming:
        """Returns the timing of a sim engine, which must have a prefill above 0 seconds."""
        return SimTiming(
            prefill_base_s=1e-9,
            decode_base_s=self.step_s,
            transfer_latency_s=0.0,
            transfer_bandwidth_bytes_per_s=1e18,
        )


def sluice(folder: Path, ticks: Ticks) -> Command:
    """Returns the command of Sluice, whose Serve configuration is written into `folder`."""
    return sluice_app(SIDES[SLUICE], folder / f"sluice-{ticks.step_s:g}.yaml", sluice_args(ticks), 120.0)


def sluice_args(ticks: Ticks) -> dict[str, Any]:
    """Returns the arguments of the application on one prefill and one decode sim engine."""
    args = sim_args(ticks.sim(), prefill=1, decode=1)
    for engine in args["engines"]:
        engine["options"] |= {"slots": SLOTS, "kv_blocks": KV_BLOCKS}
    return args


def router(program: Path, ticks: Ticks, side: str) -> Command:
    """Returns the command of vllm-router with its sources; `side` is ROUTER or LEAN."""
    port, prefill_port, decode_port, metrics_port = free_ports(4)
    argv = python("-m", "benchmarks.peers.launch", "--program", str(program), "--port", str(port))
    argv += ["--prefill-port", str(prefill_port), "--decode-port", str(decode_port)]
    argv += ["--metrics-port", str(metrics_port), "--step-s", str(ticks.step_s)]
    argv += ["--server", "bare" if side == LEAN else "uvicorn"]
    others = (prefill_port, decode_port, metrics_port)
    return Command(SIDES[side], argv, port, "/health", others, timeout_s=60.0)


def bare(ticks: Ticks) -> Command:
    """Returns the command of the bare listener, which is a source on the engines' clock."""
    (port,) = free_ports(1)
    return Command(SIDES[BARE], source_argv("decode", port, ticks.step_s, "bare"), port, timeout_s=20.0)


def command_of(side: str, folder: Path, ticks: Ticks, program: Path | None) -> Command:
    """Returns the command of a side. Raises ValueError for a side of vllm-router without its `program`."""
    if side == SLUICE:
        return sluice(folder, ticks)
    if side == BARE:
        return bare(ticks)
    if program is None:
        raise ValueError(f"the side {side} needs the program of vllm-router")
    return router(program, ticks, side)
