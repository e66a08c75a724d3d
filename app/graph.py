"""The Serve application graph, built from one validated config: `import_path: app.graph:build` in a Serve config file.

    Router (1)  <-  engine groups (n replicas each)  <-  Ingress (n)

The arrows are handles, used for the router's address only. Every deployment keeps Serve's life cycle (placement,
health, restart, drain); none of them serves requests through a handle.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve

from app.config import AppConfig, EngineGroupConfig, parse
from app.ingress.replica import IngressReplica
from app.replicas import DRAIN_S, EngineReplica, RouterReplica

HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 30.0
"""Serve replaces a replica after three probes in a row that got no answer in this time. A dead process, or an engine
that says it is dead, is replaced at once; this is for one that hangs, and on an overloaded machine all seem to.
"""


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of a Serve config's `args`. Raises ConfigError naming each wrong key."""
    config = parse(args)
    router = _deployment(RouterReplica, "Router", num_replicas=1, ray_actor_options={"num_cpus": 0}).bind(
        config
    )
    engines, core = [], 0
    for group in config.engines:
        options: dict[str, Any] = {
            "num_replicas": group.replicas,
            "ray_actor_options": _actor_options(config, group),
        }
        deployment = _deployment(EngineReplica, _name(group), **options)
        engines.append(deployment.bind(config, group, core, router))
        core += group.replicas if group.kind == "vllm" else 0
    ingress = _deployment(
        IngressReplica,
        "Ingress",
        num_replicas=config.ingress.replicas,
        max_ongoing_requests=100_000,  # the ingress itself bounds and answers 429; a queue of Serve would hide it
        ray_actor_options={"num_cpus": 0, "resources": config.ingress.resources},
    )
    return ingress.bind(config, router, *engines)


def _deployment(cls: type, name: str, **options: Any) -> Any:
    return serve.deployment(
        name=name,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_S + 5.0,
        graceful_shutdown_wait_loop_s=0.5,
        **options,
    )(cls)


def _name(group: EngineGroupConfig) -> str:
    return "".join(part.capitalize() for part in group.name.split("-")) + "Engine"


def _actor_options(config: AppConfig, group: EngineGroupConfig) -> dict[str, Any]:
    """Ray's resources of one replica. CPU engines share the node's cores: `actors.engine.cores` divides them, Ray only
    has to place all of them, so each asks for little."""
    options: dict[str, Any] = {"num_cpus": 0.1 if group.num_cpus is None else group.num_cpus}
    if group.num_gpus:
        options["num_gpus"] = group.num_gpus
    if group.resources:
        options["resources"] = group.resources
    if group.env:
        options["runtime_env"] = {"env_vars": group.env}
    return options
