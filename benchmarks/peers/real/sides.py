"""The sides of the comparison on real engines, and the commands that serve them.

`sluice`     Sluice, 1P1D
`router`     vllm-router between two servers of vLLM's own
`ray`        Ray Serve LLM's P/D application (`ray.serve.llm.build_pd_openai_app`)
`colocated`  Sluice with one engine, which does both
`vllm`       vLLM's own server with the same engine, beside an idle Ray (`benchmarks.peers.real.beside`)

Each of the first three has one prefill and one decode engine of the installed vLLM with the same options, each on a
core of its own (or half of the cores), and moves KV over NIXL. The engines of the other two have all cores and no
connector. What else a side needs shares these cores, as does the client.

The engines of the other sides are tuned as Sluice's are, so that what is compared is what stands around them. On shared
cores three habits of vLLM cost a server most of its throughput: its processes spin while they wait for one another,
NIXL's progress threads spin, and the thread that computes is moved to the machine's last core. Sluice's plugin
(`plugin.NAP_ENV`) and a connector (`benchmarks.peers.real.connector`) correct them in all engines.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from actors.engine.vllm.config import DEFAULT_ENVIRONMENT, Device
from actors.engine.vllm.plugin import NAP_ENV
from benchmarks.live import targets
from benchmarks.live.servers import Command, free_ports, python
from benchmarks.live.targets import EngineOptions, sluice_vllm

SLUICE, ROUTER, RAY = "sluice", "router", "ray"
COLOCATED, VLLM = "colocated", "vllm"

SIDES: Mapping[str, str] = {
    SLUICE: "Sluice",
    ROUTER: "vllm-router, two vLLM servers",
    RAY: "Ray Serve LLM",
    COLOCATED: "Sluice, one engine",
    VLLM: "vLLM's own server beside an idle Ray",
}
"""The name of each side in reports."""

OPTIONS = EngineOptions(max_model_len=2048, slots=16, kv_space_gib=1, dtype="float32")
ONE_OPTIONS = replace(OPTIONS, slots=32)
"""The options of an engine that is the only one of its side, and so serves as many requests at once as two."""
START_S = 420.0


def cores() -> tuple[str, str]:
    """Returns the cores of the prefill and of the decode engine, as vLLM takes them; Sluice divides them alike."""
    own = sorted(os.sched_getaffinity(0))
    half = max(1, len(own) // 2)
    first, second = own[:half], own[half:] or own[:half]
    return ",".join(map(str, first)), ",".join(map(str, second))


def engine_environment(options: EngineOptions, bound: str) -> dict[str, str]:
    """Returns the environment of an engine of another side: what Sluice's engines have, too. On a CPU it computes on
    the cores `bound`.
    """
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", **targets.server_environment(options, bound)}
    if options.device == "cuda":
        return {**env, **DEFAULT_ENVIRONMENT["cuda"]}
    return env | {"VLLM_SSM_CONV_STATE_LAYOUT": "DS", NAP_ENV: "1"}


def kv_transfer(role: str, device: Device = "cpu") -> dict[str, str]:
    """Returns vLLM's KVTransferConfig of an engine, whose KV lies in the memory of its device. Only engines on CPUs
    need the connector that corrects vLLM's.
    """
    corrected = {"kv_connector_module_path": "benchmarks.peers.real.connector"} if device == "cpu" else {}
    return {"kv_connector": "NixlConnector", **corrected, "kv_role": role, "kv_buffer_device": device}


def server_argv(options: EngineOptions, model: str, port: int, role: str) -> list[str]:
    """Returns the command line of vLLM's own server with a KV connector."""
    argv = targets.server_argv(options, model, port)
    return [*argv, "--kv-transfer-config", json.dumps(kv_transfer(role, options.device))]


def sluice(folder: Path) -> Command:
    """Returns the command of Sluice, whose Serve configuration is written into `folder`."""
    return sluice_vllm(folder, OPTIONS, disaggregated=True)


def router(program: Path, model: str, options: EngineOptions = OPTIONS) -> Command:
    """Returns the command of vllm-router with its two servers, whose engines have `options`."""
    port, prefill_port, decode_port, metrics_port, *channels = free_ports(6)
    argv = python("-m", "benchmarks.peers.real.servers", "--program", str(program), "--model", model)
    argv += ["--options", json.dumps(asdict(options))]
    argv += ["--port", str(port), "--prefill-port", str(prefill_port), "--decode-port", str(decode_port)]
    argv += ["--metrics-port", str(metrics_port), "--side-channels", *map(str, channels)]
    others = (prefill_port, decode_port, metrics_port)
    return Command(SIDES[ROUTER], argv, port, "/health", others, timeout_s=START_S)


def ray(interpreter: Path, model: str) -> Command:
    """Returns the command of Ray Serve LLM, which runs in the environment of `interpreter`."""
    port, *channels = free_ports(3)
    argv = [str(interpreter), "-m", "benchmarks.peers.real.ray_llm", "--port", str(port), "--model", model]
    argv += ["--options", json.dumps(asdict(OPTIONS)), "--side-channels", *map(str, channels)]
    # the path answers once the application is there, which comes after its engines
    return Command(SIDES[RAY], argv, port, "/v1/models", timeout_s=START_S)


def colocated(folder: Path) -> Command:
    """Returns the command of Sluice with one engine, whose Serve configuration is written into `folder`."""
    return replace(sluice_vllm(folder, ONE_OPTIONS, disaggregated=False), name=SIDES[COLOCATED])


def vllm(model: str) -> Command:
    """Returns the command of vLLM's own server and an idle Ray."""
    server = targets.bare_engine(ONE_OPTIONS, model)
    argv = python("-m", "benchmarks.peers.real.beside", *server.argv)
    return replace(server, name=SIDES[VLLM], argv=argv, env={**server.env, NAP_ENV: "1"})


def prepare_ray() -> None:
    """Sets what Ray reads from the environment when it is imported and starts, as Sluice's own Ray has it."""
    # loopback only, and the priority that Sluice's Ray has
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray gives its processes 30 s, too little for a machine that is busy with something else
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")


def command_of(
    side: str, folder: Path, model: str, program: Path | None, interpreter: Path | None
) -> Command:
    """Returns the command of a side. Raises ValueError for a peer that is not installed."""
    if side == SLUICE:
        return sluice(folder)
    if side == COLOCATED:
        return colocated(folder)
    if side == VLLM:
        return vllm(model)
    if side == ROUTER and program is not None:
        return router(program, model)
    if side == RAY and interpreter is not None:
        return ray(interpreter, model)
    raise ValueError(f"the side {side} needs its peer to be installed")
