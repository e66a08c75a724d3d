"""Starts vLLM's AsyncLLM for a VllmEngineConfig, and measures how long each phase of the start takes.

The phases, in order, are `imports` (vLLM in the owner), `config`, `core_spawn` (until the worker process exists),
`worker_imports`, `weights` (the model; on GPUs without an explicit KV size vLLM's profiling run, too), `kv_cache` (its
blocks, and their registration with NIXL), `core_ready` (the rest until the core answers) and `warm_up`. They are
measured in seconds; the ends of the four in the middle are times that the worker reports. The start takes a minute and
blocks, so it runs in a thread of its own. That thread lives as long as the engine, because the kernel's parent-death
signal (`plugin`) is bound to the thread that started the children.
"""

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from actors.engine.logs import handlers_kept
from actors.engine.vllm import plugin
from actors.engine.vllm.config import (
    CONNECTOR_MODULE,
    DEFAULT_ENVIRONMENT,
    LANDING,
    LANDING_OF,
    LOAD_FORMAT,
    SCHEDULERS,
    TRACED,
    UNSET,
    Device,
    VllmEngineConfig,
    check_device,
    check_engine_args,
    engine_args,
    environment,
    resolve_device,
)
from actors.engine.vllm.connector.acquaintance import Peer, packed
from actors.engine.vllm.early_core import LATE, EarlyCore, core_modules, platform_environment, taking
from actors.engine.vllm.front import made_beside_its_core
from actors.engine.vllm.gpus import gpu_models
from actors.engine.vllm.stats import Hello, Ledger, stat_logger
from actors.engine.weights.ahead import read_ahead
from actors.engine.weights.exchange import ExchangeConfig, WeightsExchange
from actors.engine.weights.reader import FlowSettings
from actors.telemetry.environment import traces_endpoint
from actors.wire.environment import identity_of_environment
from actors.wire.messages import KV_EVENTS, EngineInfo

log = logging.getLogger(__name__)


# The range of ports from which the kernel chooses for a program that asks for any port.
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _LAST_PORT = 20_000, 60_000
_HELD: list[socket.socket] = []  # held while this process lives

GRAMMARS = "xgrammar"
"""vLLM's backend for grammars that it tries first by default. It knows all forms of `response_format`."""


class PhaseClock:
    """Measures consecutive phases of the start."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.started_at_s = self._last_s = time.time()

    def end(self, name: str, at_s: float | None = None) -> None:
        """Ends the present phase and names it `name`. It ended at `at_s` (Unix time; None: now), and the next phase
        begins then.
        """
        now_s = time.time() if at_s is None else at_s
        self.phases[name] = round(max(0.0, now_s - self._last_s), 3)
        self._last_s = max(self._last_s, now_s)
        log.info("vLLM engine start: %s took %.1f s", name, self.phases[name])


def reserve_ports(host: str, count: int) -> tuple[int, list[socket.socket]]:
    """Reserves `count` consecutive free TCP ports of `host`. Returns the first port, and the sockets that hold the
    ports.

    The sockets are bound with SO_REUSEADDR but never listen. NIXL's side channel can therefore listen on the same
    ports, while the kernel gives them to no other program. The ports lie outside the kernel's own range, from which
    Ray's processes take dozens while an engine starts.

    Raises OSError if 50 tries find none.
    """
    first_given = int(_GIVEN_PORTS.read_text().split()[0]) if _GIVEN_PORTS.exists() else _FIRST_PORT
    last = first_given if first_given > _FIRST_PORT + 1000 else _LAST_PORT
    for _ in range(50):
        port = random.SystemRandom().randrange(_FIRST_PORT, last - count)
        held: list[socket.socket] = []
        try:
            for i in range(count):
                held.append(_hold(host, port + i))
        except OSError:
            for taken in held:
                taken.close()
            continue
        return port, held
    raise OSError(
        f"no {count} consecutive free TCP ports on {host} for NIXL's side channel; set side_channel_port"
    )


def _hold(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Fails if any process has bound the port, also to hold it for another engine.
        probe.bind((host, port))
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held


@handlers_kept()
def launch(
    config: VllmEngineConfig, ledger: Ledger, clock: PhaseClock, weights: WeightsExchange | None = None
) -> Any:
    """Returns a ready AsyncLLM, whose weights come by `weights` if there is one. It blocks, so it must be called
    outside the event loop. Raises vLLM's errors, and ValueError where the installed vLLM cannot compute on the device.
    """
    device = resolve_device(config)
    check_device(device)
    port = config.side_channel_port
    if port is None:
        port, held = reserve_ports(config.side_channel_host, config.data_parallel_size)
        _HELD.extend(held)
    set_environment(config, device, port)
    if weights is not None:
        weights.start()
    if config.preload_weights and not config.weights_sources:
        read_ahead(Path(config.model))
    early = early_core(config, device) if config.overlap_imports or _prepared is not None else None
    try:
        llm = _launched(config, device, ledger, clock, early, weights)
    finally:
        if early is not None:
            early.close()
    # vLLM always adds a Prometheus logger, which costs more per step than all of Sluice's own metrics.
    manager = llm.logger_manager
    assert manager is not None
    manager.stat_loggers = manager.stat_loggers[:1]
    return llm


def exchange_of(config: VllmEngineConfig) -> WeightsExchange | None:
    """Returns the exchange by which the engine reads and lends weights, which `launch` starts; None where both are
    left to disks. A model that is no folder on this node has no files that could be compared.
    """
    if config.weights_from == "disk":
        return None
    flow = FlowSettings(config.flow_agent, config.flow_node or config.side_channel_host, config.flow_silent_s)
    return WeightsExchange(
        identity_of_environment("engine", config.engine_id),
        ExchangeConfig(
            folder=Path(config.model),
            listen=config.weights_listen,
            sources=config.weights_sources,
            flow=flow,
        ),
    )


_prepared: EarlyCore | None = None
"""The process that `prepare` made for the engine that starts in this one."""

OWNER_MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.engine.arg_utils",
    # what making any configuration with our connector imports
    "vllm.compilation.breakable_cudagraph",
    "vllm.model_executor.layers.fusion.quant_activation",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.config",
    "vllm.model_executor.models.utils",
    "vllm.v1.attention.backends.mamba2_attn",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.v1.worker.block_table",
    "vllm.v1.executor.multiproc_executor",
    CONNECTOR_MODULE,
    # what most tokenizers need
    "vllm.renderers.hf",
    "vllm.transformers_utils.chat_templates",
    "actors.engine.vllm.engine",
    "actors.engine.vllm.runner",
    "actors.engine.vllm.tools",
)
"""The modules from which follows nearly all that an engine's owner imports, whatever the model. vLLM imports many of
them only when it makes a configuration; one that is missing is imported, or missed, when the engine starts."""


def prepare(config: VllmEngineConfig) -> EarlyCore:
    """Imports for an engine that is to start in this process later, and for its core, whose process waits until then.
    Nothing depends on the model and the role in `config`, nor on the GPUs that the engine will have. Raises ValueError
    where cores cannot be started early.
    """
    global _prepared
    device = resolve_device(config)
    check_device(device)
    models = gpu_models() if device == "cuda" else ()
    if len(models) > 1:
        # as `vllm.v1.attention.ops.prefix_prefill` does, for the first GPU that it sees
        raise ValueError(
            f"nothing can be pre-warmed on a node with GPUs of several models ({', '.join(models)}), because vLLM's"
            " imports depend on the model, and Ray chooses the GPU after them; set scaling.prewarmed: 0"
        )
    set_environment(config, device, 0)
    _prepared = early_core(config, device)
    if _prepared is None:
        raise ValueError("pre-warmed processes need engines of a single core process")
    with without(plugin.UNNEEDED):
        for module in OWNER_MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    _prepared.wait_imported()
    return _prepared


def set_environment(config: VllmEngineConfig, device: Device, port: int) -> None:
    """Sets the environment variables of the engine's processes, before any of their imports."""
    for name in UNSET:
        os.environ.pop(name, None)
    os.environ.update(environment(config, device, port))
    for name, value in DEFAULT_ENVIRONMENT[device].items():
        os.environ.setdefault(name, value)
    if traces_endpoint() is not None:
        os.environ.update(TRACED)
    os.environ[plugin.NAP_ENV] = "1" if device == "cpu" else ""
    if config.weights_from == "peer":
        os.environ[plugin.LOADER_ENV] = "1"
    else:
        os.environ.pop(plugin.LOADER_ENV, None)


def early_core(config: VllmEngineConfig, device: Device) -> EarlyCore | None:
    """Returns a process that imports for the core from now on, or has done so before. None if there are several
    cores. vLLM must spawn its core to take it (`environment`).
    """
    global _prepared
    if config.data_parallel_size != 1:
        return None
    own = os.environ | plugin.children_environment(forked_on(config, device))
    own |= platform_environment(device, own)
    prepared, _prepared = _prepared, None
    if prepared is not None:
        if prepared.fits(own):
            return prepared
        log.info(
            "the pre-warmed process of the core was made for other cores or settings (%s): a new one is started",
            ", ".join(prepared.late(own)),
        )
        prepared.close()
    return EarlyCore(own, core_modules(device), LATE[device])


def forked_on(config: VllmEngineConfig, device: Device) -> tuple[int, ...] | None:
    """Returns the cores of the worker if it is forked from its core; None if it is spawned."""
    one_worker = config.tensor_parallel_size * config.data_parallel_size == 1
    return config.cores if device == "cpu" and one_worker else None


def _launched(
    config: VllmEngineConfig,
    device: Device,
    ledger: Ledger,
    clock: PhaseClock,
    early: EarlyCore | None,
    weights: WeightsExchange | None,
) -> Any:
    """Imports vLLM and returns a ready AsyncLLM, whose core is `early` if that can be, and whose weights come by
    `weights`, if there is one.
    """
    with without(plugin.UNNEEDED):
        import vllm.v1.engine.async_llm  # noqa: F401

    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    # imports never become garbage, and each collection of the start would walk them
    gc.freeze()
    clock.end("imports")
    plugin.claim_children(forked_on(config, device))
    args = engine_args(config, device)
    if weights is not None:
        weights.imported()
        landing = {LANDING: weights.landing.path, LANDING_OF: config.model}
        args |= {"load_format": LOAD_FORMAT, "model_loader_extra_config": landing}
    endpoint = traces_endpoint()
    if endpoint is not None:
        args.setdefault("otlp_traces_endpoint", endpoint)
    check_engine_args(args, frozenset(f.name for f in dataclasses.fields(AsyncEngineArgs)))
    args["kv_transfer_config"] = KVTransferConfig(**args["kv_transfer_config"])
    vllm_config = served_config(args)
    if config.kv_events and vllm_config.cache_config.enable_prefix_caching:
        vllm_config.kv_events_config = kv_events_config(config)
    scheduler = vllm_config.scheduler_config
    # vLLM has chosen one for models that decode by diffusion, which cannot take a request over.
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
    os.environ[plugin.TOKENIZER_ENV] = plugin.tokenizer_of(vllm_config.model_config)
    clock.end("config")
    with spawning_through_plugin(), taking(early):
        return made_beside_its_core(vllm_config, [stat_logger(ledger)])


def served_config(args: Mapping[str, Any]) -> Any:
    """Returns vLLM's configuration of an engine with these arguments, with the defaults of vLLM's own server.

    Those of an engine that says nothing of its use are 2,048 tokens a step on every GPU, where the server takes 8,192
    on a large one.

    Grammars are built by `GRAMMARS` where the arguments name no backend. An engine of vLLM has one backend for all
    requests, and by default that of the first one: a client could choose one by its schema that refuses the grammars of
    everybody else (`grammar_init` in `vllm/v1/structured_output/__init__.py` of vLLM 0.32).
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    made = AsyncEngineArgs(**args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    if made.structured_outputs_config.backend == "auto":
        made.structured_outputs_config.backend = GRAMMARS
    return made


def remove_kv_sockets(events: Any) -> None:
    """Removes the directory of the sockets of `kv_events_config`, if it is there."""
    shutil.rmtree(os.path.dirname(events.endpoint.removeprefix("ipc://")), ignore_errors=True)


def kv_events_config(config: VllmEngineConfig) -> Any:
    """Returns the configuration of vLLM's publisher, on sockets of this node in a new directory that only this user can
    enter. Its name is not made of the process's id, because an engine that is killed leaves its directory behind, and
    ids come again, in a container from 1 on. It is short, because a unix socket's path has 107 characters at most.

    The word "inproc" in the file names makes vLLM add the data-parallel rank to them; otherwise it would expect a TCP
    port.
    """
    from vllm.config.kv_events import KVEventsConfig

    directory = tempfile.mkdtemp(prefix=f"sluice-kv-{config.engine_id}-")
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{directory}/inproc-events",
        replay_endpoint=f"ipc://{directory}/inproc-replay",
    )


@contextlib.contextmanager
def without(packages: tuple[str, ...]) -> Iterator[None]:
    """Makes `packages` look as if they were not installed, except those that are loaded already."""
    hidden = [package for package in packages if package not in sys.modules]
    for package in hidden:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for package in hidden:
            sys.modules.pop(package, None)


@contextlib.contextmanager
def spawning_through_plugin() -> Iterator[None]:
    """Has the processes that `multiprocessing` spawns in this context run `plugin.in_spawned_child` before anything
    else.
    """
    command_line = spawn.get_command_line

    def extended(**kwargs: Any) -> list[str]:
        command: list[str] = command_line(**kwargs)
        if "-c" in command:  # frozen executables have no -c
            at = command.index("-c") + 1
            command[at] = plugin.spawned_child_code() + command[at]
        return command

    spawn.get_command_line = extended
    try:
        yield
    finally:
        spawn.get_command_line = command_line


def core_phases(clock: PhaseClock, hellos: list[Hello]) -> None:
    """Splits the time of the core's start into phases by the reports of its workers, of which the slowest counts."""
    if hellos:
        clock.end("core_spawn", max(h.born_at_s for h in hellos))
        clock.end("worker_imports", max(h.imported_at_s for h in hellos))
        clock.end("weights", max(h.loaded_at_s for h in hellos))
        clock.end("kv_cache", max(h.registered_at_s for h in hellos))


def kv_peer(running: Any) -> bytes:
    """Returns how other engines reach this one for a handshake, by the configuration with which it runs."""
    parallel = running.parallel_config
    return packed(
        Peer(
            running.kv_transfer_config.engine_id,
            os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"],
            int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
            parallel.tensor_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.pipeline_parallel_size,
        )
    )


async def warm_up(llm: Any) -> None:
    """Runs one short prefill and a few decode steps, so that the first request does not pay for lazy set-up."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import SamplingParams

    vocabulary = llm.model_config.get_vocab_size()
    prompt = tokens_input([i % vocabulary for i in range(1, 33)])
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    async for _ in llm.generate(prompt, params, "warm-up"):
        pass


def describe(config: VllmEngineConfig, llm: Any, hellos: list[Hello]) -> EngineInfo:
    """Returns the running engine's announcement. Raises RuntimeError if its workers run another connector than
    Sluice's.
    """
    if not hellos:
        raise RuntimeError(
            "the vLLM workers did not report; is actors.engine.vllm.connector.connector the one that was loaded?"
        )
    running = llm.vllm_config
    cores = config.data_parallel_size
    features = ["logprobs", "prompt_logprobs", "json_object", "json_schema", "structural_tag", "n"]
    if config.tool_parser:
        features.append("tools")
    if running.kv_events_config is not None:
        features.append(KV_EVENTS)
    return EngineInfo(
        id=config.engine_id,
        role=config.role,
        kind="vllm",
        model=config.name,
        # NIXL checks the block size only at the first handshake, which is too late for a router.
        group=f"{hellos[0].compatibility_hash[:16]}-{running.cache_config.block_size}",
        addresses=(),
        slots=running.scheduler_config.max_num_seqs * cores,
        kv_blocks=running.cache_config.num_gpu_blocks - cores,  # each core has a null block
        block_size_tokens=running.cache_config.block_size,
        max_model_len=running.model_config.max_model_len,
        node=socket.gethostname(),
        pid=os.getpid(),
        lease_s=float(config.lease_s),
        max_lease_s=float(config.max_lease_s),
        features=tuple(features),
        dp_ranks=cores,
        # vLLM runs the ranks in step only for MoE models.
        barrier=cores > 1 and running.model_config.is_moe,
        kv_peer=kv_peer(running) if cores == 1 else b"",
    )
