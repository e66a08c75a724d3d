"""The Serve application graph, built from one validated config: `import_path: app.graph:build` in a Serve config file.

    Router (1)  <-  engine groups (n replicas each)  <-  Ingress (1 or more)
                <-  Autoscaler (1, with scaling.enabled)  <-
                <-  Dashboard (1, unless dashboard.port is 0)  <-

The arrows are handles, used for the router's address only. Every deployment keeps Serve's life cycle (placement,
health, restart, drain); none of them serves requests through a handle.

A deployment is bound to its own part of the configuration, and its version is a hash of that part: `serve deploy` of a
changed file restarts the deployments whose part changed, and no other.
"""

import hashlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from ray import serve
from ray.serve._private.config import DeploymentConfig

from actors.engine.cores import usable_cores
from actors.options import from_options
from app.config import AppConfig, parse
from app.dashboard.replica import DashboardReplica, Target
from app.dashboard.store import RunsConfig
from app.flow_agent import FlowShare
from app.groups import EngineGroupConfig
from app.ingress.config import check_options
from app.ingress.replica import IngressReplica
from app.prewarmed.keeper import PrewarmedShare, share_of
from app.replicas import (
    DRAIN_S,
    AutoscalerReplica,
    CoreShare,
    EngineReplica,
    RouterReplica,
    Stay,
    deployment_of,
)

# `CLOSE_S` (5 s) of `actors.engine.server` for connections, then `SHUTDOWN_S` (10 s) of vLLM, and 5 s for the rest
END_S = 20.0
"""Seconds that a replica has to end after its drain, before Serve kills it."""
HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 30.0
"""Seconds to wait for the answer to a health probe; Serve replaces a replica after three missed probes in a row.

A dead process, and an engine that says it is dead, are replaced at once; the probes find a process that hangs. On an
overloaded machine every process seems to hang for some seconds, hence 30.
"""


def build(args: Mapping[str, Any]) -> serve.Application:
    """Returns the application of a Serve config's `args`. Raises ConfigError naming each wrong key."""
    config = parse(args)
    check_options(config.ingress.options)
    dashboard = config.dashboard.resolved(config.ingress)
    runs = from_options(RunsConfig, dashboard.experiments, "dashboard.experiments")
    router = _application(
        RouterReplica,
        "Router",
        (config.router, config.wire),
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": config.router.resources},
    )
    engines, first = [], 0
    for group in config.engines:
        cores = CoreShare(first, config.engines_on_cores) if group.shares_cores else None
        first += config.most_replicas(group) if group.shares_cores else 0
        flow = FlowShare(config.flow, config.named_nodes) if config.flow.enabled else None
        prewarmed = _prewarmed(config, group)
        own, stay = (config.model, group.engine, cores, config.wire, flow, prewarmed), _stay(config, group)
        engines.append(
            _application(
                EngineReplica,
                deployment_of(group.name),
                (*own, stay),
                router,
                # how many begin active matters to replicas that start, and restarts none that runs
                versioned=(*own, stay._replace(active=None)),
                num_replicas=config.first_replicas(group),
                drain_s=group.drain_s,
                **_placement(group, None if prewarmed is None else prewarmed.python(config.wire)),
            )
        )
    if config.scaling.enabled:
        engines.append(
            _application(
                AutoscalerReplica,
                "Autoscaler",
                (config.autoscaler, config.wire, _keys(config)),
                router,
                num_replicas=1,
                ray_actor_options={"num_cpus": 0, "resources": config.router.resources},
            )
        )
    if dashboard.port:
        options = config.ingress.options
        engines.append(
            _application(
                DashboardReplica,
                "Dashboard",
                (
                    dashboard,
                    runs,
                    config.model.served_name,
                    options.get("class_slo", {}),
                    Target(config.ingress.port, config.ingress.url, config.ingress.tls_cert),
                    tuple(options.get("admin_keys", ())),
                    config.wire,
                ),
                router,
                num_replicas=1,
                drain_s=0.0,
                ray_actor_options={"num_cpus": 0, "resources": dashboard.resources},
            )
        )
    ingress = config.ingress.resolved(len(usable_cores()))
    expects_prefill = any(group.role == "prefill" and group.replicas for group in config.engines)
    read = (config.model, ingress, expects_prefill, config.wire)
    return _application(
        IngressReplica,
        "Ingress",
        (*read, config.router.admission.name),
        router,
        *engines,
        # replicas that start know the admission policy, and none that runs is restarted for it
        versioned=read,
        num_replicas=ingress.replicas,
        drain_s=float(config.ingress.options.get("drain_s", DRAIN_S)),
        # The ingress bounds its requests itself and answers 429; a queue in Serve's proxy would hide that.
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0, "resources": ingress.resources},
    )


def _application(
    cls: type,
    name: str,
    parts: tuple[Any, ...],
    *handles: serve.Application,
    drain_s: float = DRAIN_S,
    versioned: tuple[Any, ...] | None = None,
    **options: Any,
) -> serve.Application:
    """Returns a deployment that is bound to `parts` of the configuration and to handles of other deployments. Its
    version is a hash of `versioned`, which without it is `parts`.
    """
    deployment = serve.deployment(
        name=name,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=drain_s + END_S,
        graceful_shutdown_wait_loop_s=0.5,
        **options,
    )(cls)
    plain: DeploymentConfig = deployment._deployment_config
    release = importlib.metadata.version("sluice-server")
    version = hashlib.sha256(
        to_json((release, cls.__qualname__, parts if versioned is None else versioned))
    ).hexdigest()
    deployment._deployment_config = _VersionedByItsPart(**{**dict(plain), "version": version})
    return deployment.bind(*parts, *handles)


class _VersionedByItsPart(DeploymentConfig):
    """Serve's settings of a deployment. Their version stays as it was when they were made.

    Serve 2.60 restarts the replicas of a deployment whose version changes. It offers no way to choose versions: on
    `serve deploy` it gives all deployments of an application one version, a hash of the whole `args`. It does so by
    assigning this field when the application has been built (`ray.serve._private.deploy_utils.get_deploy_args`).
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "version":
            super().__setattr__(name, value)


def _stay(config: AppConfig, group: EngineGroupConfig) -> Stay:
    """Returns how a group's replicas begin and end: with an autoscaler, those above `replicas` begin warm."""
    return Stay(group.drain_s, group.replicas if config.scaling.enabled else None)


def _prewarmed(config: AppConfig, group: EngineGroupConfig) -> PrewarmedShare | None:
    """Returns what is pre-warmed for a group's starts; only an autoscaler foresees any."""
    number = config.scaling.prewarmed if config.scaling.enabled else 0
    return share_of(number, config.model, group, config.engines_on_cores or None)


def _keys(config: AppConfig) -> tuple[str, ...]:
    """Returns the keys of all kinds of pre-warmed processes, each once."""
    shares = (_prewarmed(config, group) for group in config.engines)
    return tuple(sorted({share.key for share in shares if share is not None}))


def _placement(group: EngineGroupConfig, python: str | None) -> dict[str, Any]:
    """Returns Serve's options that place one replica, in a placement group of its own if the group has bundles. Its
    process is started with the command `python`, if there is one.
    """
    placed: dict[str, Any] = {"ray_actor_options": _actor_options(group, python)}
    if group.placement_group_bundles is not None:
        placed["placement_group_bundles"] = group.placement_group_bundles
        placed["placement_group_strategy"] = group.placement_group_strategy
    return placed


def _actor_options(group: EngineGroupConfig, python: str | None) -> dict[str, Any]:
    """Returns Ray's options for one replica: its resources, its environment, and the command that starts it."""
    options: dict[str, Any] = {"num_cpus": group.cpus}
    if group.num_gpus:
        options["num_gpus"] = group.num_gpus
    if group.resources:
        options["resources"] = group.resources
    environment: dict[str, Any] = {"env_vars": group.env} if group.env else {}
    if python is not None:
        environment["py_executable"] = python
    if environment:
        options["runtime_env"] = environment
    return options
