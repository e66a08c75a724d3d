"""The commands and configurations of the servers that are compared, and the times of the modelled engine itself.

`bare`     a listener that does nothing but write chunks (benchmarks.live.bare): the floor for this client and machine
`sim`      Sluice on timing-model engines: 1 ms a step, 1 ms a prefill; by the shortest queue, or by default policies
`engine`   vLLM's own OpenAI server, without Sluice
`sluice`   Sluice with the same engine, colocated, on the same cores
`sluice-pd`  Sluice with prefill and decode separated: two engines, which share the cores
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.live.servers import ROOT, Command, ServerError, free_ports, python

MODEL = "smollm2-135m-instruct"
# vLLM's console command looks up a distribution `vllm`, which the CPU wheel is not; this module starts the same server.
API_SERVER = "vllm.entrypoints.openai.api_server"
SIM, SIM_DEFAULTS = "Sluice, sim engines", "Sluice, sim engines, default policies"
"""The names of Sluice on sim engines in reports: by the shortest queue for both tasks, and by its default policies."""
GPU_SHARE = 0.5
"""The part of a GPU that Ray reserves for an engine: two of them share one. It bounds no memory."""


@dataclass(frozen=True, slots=True)
class SimTiming:
    """The timing of the sim engines in seconds and bytes, which replaces values of their profile `tick_1ms`."""

    prefill_base_s: float = 1e-3
    prefill_per_token_s: float = 0.0
    decode_base_s: float = 1e-3
    decode_per_seq_s: float = 0.0
    decode_per_kv_token_s: float = 0.0
    # SmolLM2-135M: layers x (K, V) x KV heads x head_dim x bytes of bfloat16.
    kv_bytes_per_token: int = 30 * 2 * 3 * 64 * 2
    transfer_bandwidth_bytes_per_s: float = 10e9
    transfer_latency_s: float = 1e-4

    def ttft_s(self, prompt_tokens: int) -> float:
        """Returns the seconds to the first token of a request that is alone: prefill, transfer and one decode step."""
        prefill_s = self.prefill_base_s + self.prefill_per_token_s * prompt_tokens
        transfer_s = (
            self.transfer_latency_s
            + prompt_tokens * self.kv_bytes_per_token / self.transfer_bandwidth_bytes_per_s
        )
        return prefill_s + transfer_s + self.step_s()

    def step_s(self) -> float:
        """Returns the seconds of one decode step of a request that is alone."""
        return self.decode_base_s + self.decode_per_seq_s


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of all vLLM engines of one run, which are the same with and without Sluice.

    The fields are options of Sluice's engines; `engine_args` are further arguments of vLLM by their names in Python.
    """

    max_model_len: int = 2048
    slots: int = 32
    kv_space_gib: int = 1
    dtype: str = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    gpu_memory_utilization: float | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def bare() -> Command:
    """Returns the command of the bare listener, which sends a token every millisecond."""
    (port,) = free_ports(1)
    argv = python("-m", "benchmarks.live.bare", "--port", str(port))
    return Command("bare listener", argv, port, timeout_s=20.0)


def sim(
    folder: Path, timing: SimTiming, prefill: int, decode: int, options: Mapping[str, Any] | None = None
) -> Command:
    """Returns the command of Sluice on `prefill` + `decode` sim engines, with these options of the ingress."""
    args = sim_args(timing, prefill, decode)
    if options:
        args["ingress"] = {"options": dict(options)}
    return sluice_app(SIM, folder / "sim.yaml", args, 120.0)


def sim_defaults(folder: Path, timing: SimTiming, prefill: int, decode: int) -> Command:
    """Returns the command of Sluice on the same engines with the policies that it has by default."""
    args = sim_args(timing, prefill, decode)
    del args["router"]
    return sluice_app(SIM_DEFAULTS, folder / "sim-defaults.yaml", args, 120.0)


def sim_args(timing: SimTiming, prefill: int, decode: int) -> dict[str, Any]:
    """Returns the application's arguments of Sluice on `prefill` + `decode` sim engines. It decides as the other
    routers measured beside it do, by the shortest queue.
    """
    changed = {
        name: value for name, value in asdict(timing).items() if name != "kv_bytes_per_token"
    }  # the profile's
    options = {"profile": "tick_1ms", "timing": changed, "slots": 256}
    engines = [
        {"name": "prefill", "role": "prefill", "kind": "sim", "replicas": prefill, "options": options},
        {"name": "decode", "role": "decode", "kind": "sim", "replicas": decode, "options": options},
    ]
    shortest = {"name": "join_shortest_queue"}
    return {
        "model": {"path": "sim", "name": "sim"},
        "engines": engines,
        "router": {"prefill": shortest, "decode": shortest},
    }


def sluice_vllm(
    folder: Path, options: EngineOptions, *, disaggregated: bool, model: Mapping[str, str] | None = None
) -> Command:
    """Returns the command of Sluice on one colocated vLLM engine, or on one for prefill and one for decode.

    `model` is the model of the configuration, which by default is the built-in one. An engine on a GPU reserves
    `GPU_SHARE` of it.
    """
    roles = ("prefill", "decode") if disaggregated else ("colocated",)
    share = {"num_gpus": GPU_SHARE} if options.device == "cuda" else {}
    engines = [
        {"name": role, "role": role, "kind": "vllm", **share, "options": asdict(options)} for role in roles
    ]
    args = {"model": dict(model or {"path": MODEL}), "engines": engines}
    name = "Sluice, vLLM 1P1D" if disaggregated else "Sluice, vLLM colocated"
    return sluice_app(name, folder / f"{'pd' if disaggregated else 'colocated'}.yaml", args, 420.0)


def bare_engine(options: EngineOptions, model_dir: str) -> Command:
    """Returns the command of vLLM's own OpenAI server, on all cores of this process like an engine of `sluice_vllm`."""
    (port,) = free_ports(1)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    # as Sluice's engines schedule
    options = replace(options, engine_args={"scheduling_policy": "priority", **options.engine_args})
    argv, env = server_argv(options, model_dir, port), server_environment(options, cores)
    return Command("vLLM's own server", argv, port, env=env, timeout_s=420.0)


def server_argv(options: EngineOptions, model_dir: str, port: int) -> list[str]:
    """Returns the command line of vLLM's own OpenAI server. Like Sluice's engines it is eager on a CPU only."""
    argv = python("-m", API_SERVER, "--model", model_dir, "--served-model-name", MODEL, "--host", "127.0.0.1")
    argv += ["--port", str(port), "--dtype", options.dtype, "--max-model-len", str(options.max_model_len)]
    argv += ["--max-num-seqs", str(options.slots), "--kv-cache-memory-bytes", str(options.kv_space_gib << 30)]
    argv.append("--disable-uvicorn-access-log")
    if options.device == "cpu":
        argv.append("--enforce-eager")
    if options.gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    for name, value in options.engine_args.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    return argv


def server_environment(options: EngineOptions, cores: str) -> dict[str, str]:
    """Returns the environment of vLLM's own server, which is that of Sluice's engines but for what concerns KV. It
    computes on `cores`, as vLLM takes them, where it is on a CPU.
    """
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if options.device == "cuda":
        return env | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return env | {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        # An inherited value would override the argument.
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_space_gib),
        "TORCH_COMPILE_DISABLE": "1",  # as Sluice's eager CPU engines have it
    }


def model_directory() -> str:
    """Returns the local directory of the model, and converts the model first if necessary. Raises ServerError."""
    done = subprocess.run(
        [sys.executable, "-m", "app.models", MODEL], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ServerError(f"python -m app.models {MODEL} failed:\n{done.stderr[-1000:]}")
    return done.stdout.strip().splitlines()[-1]


def sluice_app(name: str, file: Path, args: Mapping[str, Any], timeout_s: float) -> Command:
    """Returns the command of Sluice with the application arguments `args`; writes its Serve configuration to `file`.

    It has one ingress and no dashboard unless `args` say otherwise, so that figures of machines with more and fewer
    cores compare.
    """
    ingress = {"replicas": 1, **args.get("ingress", {})}
    args = {"dashboard": {"port": 0}, **args, "ingress": ingress}
    port, http_port = free_ports(2)
    schema = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": http_port},
        "applications": [
            {"name": "sluice", "route_prefix": "/", "import_path": "app.graph:build", "args": dict(args)}
        ],
    }
    file.write_text(yaml.safe_dump(schema, sort_keys=False))
    argv = python(
        "-m", "app.serve", "--config", str(file), "--port", str(port), "--http-port", str(http_port)
    )
    return Command(name, argv, port, "/health/ready", (http_port,), timeout_s=timeout_s)
