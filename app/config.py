"""The one configuration of a Sluice application: the `args` of a Serve config file, parsed once, refused when wrong.

Every component keeps its own config dataclass beside its code (`DispatchConfig`, `IngressConfig`, one for each kind of
engine). This file joins them, adds what only the deployment knows (how many replicas, where), and turns errors into
sentences that name the key and what is allowed.
"""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from actors.engine.registry import ENGINES
from actors.flow.config import AgentConfig
from actors.options import ConfigError, from_options, problem_line
from actors.router.forecasts import PredictorConfig
from actors.router.journal import JournalConfig
from actors.router.network.feed import NetworkConfig
from actors.router.network.file import read_network_file
from actors.wire.channel import Identity
from actors.wire.environment import secret_of_environment
from actors.wire.frames import PeerKind
from actors.wire.sockets import port_range
from actors.wire.tls import VARIABLE, WireTls
from app.groups import AutoscalerConfig, EngineGroupConfig, ScalingConfig, Strict, TopologyConfig
from app.profile.file import load_heatmap
from policies.admission.registry import DEFAULT as ADMIT
from policies.admission.registry import admission_policy
from policies.dispatch.dispatcher import DispatchConfig
from policies.fairness.registry import DEFAULT as FAIR
from policies.fairness.registry import fairness_policy
from policies.flow.mfs import SWEPT
from policies.routing.base import check_overcommit
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.routing.registry import decode_policy, prefill_policy

SIM_MODEL = "sim"
"""`model.path` of applications without a real model, which have sim engines only; their tokens are words."""


class ModelConfig(Strict):
    """The model that is served. `path` is a built-in name, a local Hugging Face directory, or a hub name."""

    path: str = "smollm2-135m-instruct"
    name: str | None = Field(None, description="name in the API; default: the last part of `path`")

    @property
    def served_name(self) -> str:
        return self.name or self.path.rstrip("/").rsplit("/", 1)[-1]


class PolicyChoice(Strict):
    """A policy by its registered name, with its parameters.

    `heatmap` (pd_heatmap, combined) may be the name of a shipped heatmap or of a file, relative to the configuration's
    folder, which `sluice profile heatmap` wrote.
    """

    name: str
    params: dict[str, Any] = Field(default_factory=dict)

    @field_validator("params")
    @classmethod
    def _read_heatmap(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Replaces a heatmap's name by the heatmap, so that the router's node needs no file."""
        name = params.get("heatmap")
        if not isinstance(name, str):
            return params
        folder = (info.context or {}).get("folder") or Path.cwd()
        return {**params, "heatmap": load_heatmap(name, folder)}


class RouterConfig(Strict):
    """The router's policies and settings.

    `dispatch` holds fields of `DispatchConfig`, `predictor` of `PredictorConfig`, `network` of `NetworkConfig`,
    `journal` of `JournalConfig`, `regimes` of `RegimeThresholds`, and `role_switch` of `RoleSwitchConfig`.
    """

    # the pair with the least largest regret over five situations, untuned: `python -m benchmarks run defaults`
    prefill: PolicyChoice = PolicyChoice(name="join_shortest_queue")
    decode: PolicyChoice = PolicyChoice(name="composition")
    admission: PolicyChoice = PolicyChoice(name=ADMIT)
    fairness: PolicyChoice = PolicyChoice(name=FAIR)
    dispatch: dict[str, Any] = Field(default_factory=dict)
    engine_grace_s: Annotated[float, Field(ge=0)] = 2.0
    predictor: dict[str, Any] = Field(default_factory=dict)
    network: dict[str, Any] = Field(default_factory=dict)
    journal: dict[str, Any] = Field(default_factory=dict)
    regimes: dict[str, Any] = Field(default_factory=dict)
    role_switch: dict[str, Any] = Field(default_factory=dict)
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources, to pin it to nodes"
    )

    def network_config(self) -> NetworkConfig:
        return from_options(NetworkConfig, self.network, "router.network")

    def predictor_config(self) -> PredictorConfig:
        return from_options(PredictorConfig, self.predictor, "router.predictor")

    def journal_config(self) -> JournalConfig:
        return from_options(JournalConfig, self.journal, "router.journal")

    def regime_thresholds(self) -> RegimeThresholds:
        return from_options(RegimeThresholds, self.regimes, "router.regimes")

    def role_switch_config(self) -> RoleSwitchConfig:
        return from_options(RoleSwitchConfig, self.role_switch, "router.role_switch")

    def dispatch_config(self) -> DispatchConfig:
        return from_options(DispatchConfig, self.dispatch, "router.dispatch")


CORES_FOR_TWO_INGRESSES = 4
"""Cores of a machine from which on two ingress replicas are the default.

ASSUMPTION: on fewer cores a second process takes more from the engines than its readiness to take over is worth.
"""

METRICS_PORT_OFFSET = 1000
"""Default distance of the first metrics port above the public port: 9000 for 8000."""


def url_here(host: str, port: int, secure: bool) -> str:
    """Returns the URL by which a process of the same machine reaches a listener on `host`, with TLS if `secure`."""
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class IngressGroupConfig(Strict):
    """The ingress replicas, which serve the public API.

    All replicas of a node listen on the one `port`, and each of them on a metrics port of its own: `metrics_port` plus
    its number on the node. With `port` 0 the ingress has no listener of its own, and only Serve's port answers.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    replicas: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="default: 2 on machines with 4 cores or more, else 1"
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="first metrics port; default: 1000 above `port`; 0 leaves them out"
    )
    tls_cert: str | None = None
    tls_key: str | None = None
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources, to pin it to nodes"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="fields of app.ingress' IngressConfig")

    @property
    def url(self) -> str:
        """The URL of the ingress for a process of the same machine."""
        return url_here(self.host, self.port, self.tls_cert is not None)

    def resolved(self, cores: int) -> "IngressGroupConfig":
        """Returns the same settings with a number wherever they leave it to the machine, which has `cores` cores."""
        replicas = self.replicas or (2 if cores >= CORES_FOR_TWO_INGRESSES else 1)
        first = self.metrics_port
        if first is None:
            above = self.port + METRICS_PORT_OFFSET
            below = self.port - METRICS_PORT_OFFSET
            first = 0 if not self.port else above if above + replicas <= 65536 else below
        return self.model_copy(update={"replicas": replicas, "metrics_port": first})


DASHBOARD_PORT_OFFSET = 2
"""Default distance of the dashboard's port above the public port: 8002 for 8000, beside Serve's own port 8001."""


class DashboardConfig(Strict):
    """The dashboard (`app.dashboard`): a page to watch and to change things from, on a port of its own; 0 turns it off.

    A key is always needed. `viewer_keys` may look (SLUICE_VIEWER_KEYS in its environment adds to them), and
    `admin_keys`, or else SLUICE_ADMIN_KEYS, may change things, too; so may the keys of the ingress. Where none are
    configured, it makes one at its start, as the ingress does (`app.admin_key`). A browser reaches it by an address,
    as localhost, or by one of the names in `hosts`. A login lasts for `session_s`. Audit log and runs lie in `folder`.
    `experiments` are fields of `app.dashboard.store.RunsConfig`.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="default: 2 above the ingress's `port`; 0: no dashboard"
    )
    tls_cert: str | None = Field(None, description="default: that of the ingress")
    tls_key: str | None = Field(None, description="default: that of the ingress")
    viewer_keys: tuple[Annotated[str, Field(min_length=8)], ...] = Field((), repr=False)
    admin_keys: tuple[Annotated[str, Field(min_length=8)], ...] = Field((), repr=False)
    hosts: tuple[str, ...] = ()
    session_s: Annotated[float, Field(gt=0)] = 43_200.0
    folder: str | None = Field(
        None, description="default: a folder of this user and port, with other temporary files"
    )
    experiments: dict[str, Any] = Field(default_factory=dict)
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources, to pin it to nodes"
    )

    @property
    def url(self) -> str:
        """The URL of the dashboard for a process of the same machine, once its settings are `resolved`."""
        return url_here(self.host, self.port or 0, self.tls_cert is not None)

    def check(self, ingress: IngressGroupConfig) -> None:
        """Raises ValueError for settings that do not go together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("dashboard: tls_cert and tls_key belong together")
        if self.port and self.port == ingress.port:
            raise ValueError(f"dashboard: port {self.port} is that of the ingress: choose another, or 0")

    def resolved(self, ingress: IngressGroupConfig) -> "DashboardConfig":
        """Returns the same settings with those of the ingress wherever they follow it."""
        port = self.port
        if port is None:
            above = ingress.port + DASHBOARD_PORT_OFFSET
            port = 0 if not ingress.port else above if above < 65536 else ingress.port - DASHBOARD_PORT_OFFSET
        found: dict[str, Any] = {"port": port}
        if self.tls_cert is None and self.tls_key is None:
            found |= {"tls_cert": ingress.tls_cert, "tls_key": ingress.tls_key}
        return self.model_copy(update=found)


class WireConfig(Strict):
    """The internal sockets.

    They are unix sockets inside a node and, with `interface`, TCP on that address. TCP needs a secret, and is encrypted
    where there are certificates.
    """

    interface: str | None = Field(
        None,
        description="network (10.1.0.0/16) in which each node has one address, or 'auto' for Ray's address",
    )
    ports: Annotated[str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$")] = Field(
        "0",
        description="TCP ports to listen on, `first-last`; 0: any port that the kernel gives",
        coerce_numbers_to_str=True,
    )
    secret_env: str = Field(
        "SLUICE_WIRE_SECRET", description="environment variable that holds the shared secret"
    )
    tls: str | None = Field(
        None,
        description="folder with tls.crt, tls.key and ca.crt, by which connections over TCP are encrypted and both ends"
        " proved; default: that of the environment variable SLUICE_WIRE_TLS, and without it no TLS",
    )
    socket_dir: str | None = Field(
        None, description="where unix sockets live; default: a private temporary directory"
    )

    @field_validator("interface")
    @classmethod
    def _is_network(cls, interface: str | None) -> str | None:
        if interface not in (None, "auto"):
            try:
                ipaddress.ip_network(str(interface))
            except ValueError as error:
                raise ValueError(f"{error}; give a network, such as 10.1.0.0/16, or auto") from None
        return interface

    def secret(self) -> bytes | None:
        """Returns the shared secret from this process's environment, or None."""
        return secret_of_environment(self.secret_env)

    def tls_folder(self) -> str | None:
        """Returns the folder of the certificates, or None without TLS."""
        return self.tls or os.environ.get(VARIABLE) or None

    def identity(self, kind: PeerKind, name: str, generation: int = 0) -> Identity:
        """Returns the identity of this process on the wire. Raises OSError for certificates that cannot be used."""
        folder = self.tls_folder()
        tls = None if folder is None else WireTls(Path(folder))
        return Identity(kind, name, self.secret(), generation, tls=tls)


class FlowConfig(Strict):
    """Scheduling of KV transfers. `enabled` starts an agent on each node that has engines; `policy` orders the flows,
    and `options` holds further fields of `AgentConfig`.
    """

    enabled: bool = False
    policy: PolicyChoice = PolicyChoice(name="mfs", params=dict(SWEPT))
    options: dict[str, Any] = Field(default_factory=dict, description="fields of actors.flow's AgentConfig")

    def agent_config(self) -> AgentConfig:
        """Returns the configuration of every agent. Raises ConfigError or ValueError."""
        taken = sorted({"policy", "params"} & set(self.options))
        if taken:
            raise ConfigError(f"flow.options.{taken[0]}: choose the policy with flow.policy")
        policy = {"policy": self.policy.name, "params": self.policy.params}
        made = from_options(AgentConfig, {**self.options, **policy}, "flow.options")
        assert isinstance(made, AgentConfig)
        return made


class AppConfig(Strict):
    """The whole configuration. Making one raises ValidationError or ConfigError; `parse` gives one readable message."""

    model: ModelConfig = ModelConfig()
    engines: Annotated[list[EngineGroupConfig], Field(min_length=1)]
    router: RouterConfig = RouterConfig()
    ingress: IngressGroupConfig = IngressGroupConfig()
    wire: WireConfig = WireConfig()
    flow: FlowConfig = FlowConfig()
    scaling: ScalingConfig = ScalingConfig()
    dashboard: DashboardConfig = DashboardConfig()

    @property
    def dashboard_port(self) -> int:
        """The port of the dashboard, or 0 without one."""
        return self.dashboard.resolved(self.ingress).port or 0

    @property
    def autoscaler(self) -> AutoscalerConfig:
        """The part of the configuration that the autoscaler gets."""
        return AutoscalerConfig(scaling=self.scaling, engines=tuple(self.engines))

    def most_replicas(self, group: EngineGroupConfig) -> int:
        """Returns the most replicas that a group of this application may have."""
        return group.most if self.scaling.enabled else group.replicas

    def first_replicas(self, group: EngineGroupConfig) -> int:
        """Returns the number of replicas with which a group begins."""
        return group.replicas + (group.scaling.warm if self.scaling.enabled else 0)

    @property
    def named_nodes(self) -> tuple[str, ...]:
        """The names that groups give to the nodes of their engines, each once."""
        return tuple(sorted({group.topology.node for group in self.engines if group.topology.node}))

    @property
    def engines_on_cores(self) -> int:
        """Most engines that compute on CPU cores; on one machine they divide its cores."""
        return sum(self.most_replicas(group) for group in self.engines if group.shares_cores)

    @model_validator(mode="after")
    def _consistent(self) -> "AppConfig":
        names = [group.name for group in self.engines]
        if len(set(names)) != len(names):
            raise ValueError(f"engines: the names {names} are not unique")
        roles = {group.role for group in self.engines if group.replicas}
        if roles == {"prefill"}:
            raise ValueError("engines: only prefill engines; add a group with role decode or colocated")
        for group in self.engines:
            if self.model.path == SIM_MODEL and ENGINES[group.kind].loads_model:
                raise ValueError(
                    f"model.path {SIM_MODEL!r} has no weights: {group.kind} engines need a real model"
                )
            group.engine_config(group.name, self.model.path, self.model.served_name)
        prefill_policy(self.router.prefill.name, self.router.prefill.params)
        decode = decode_policy(self.router.decode.name, self.router.decode.params)
        admission_policy(self.router.admission.name, self.router.admission.params)
        fairness_policy(self.router.fairness.name, self.router.fairness.params)
        check_overcommit(decode, self.router.dispatch_config().overcommit_slots_of(decode))
        self.router.predictor_config()
        file = self.router.network_config().file
        # A file that is not here lies on the router's node, which reads it when it starts.
        if file is not None and os.path.exists(file):
            read_network_file(file)
        places: dict[str, TopologyConfig] = {}
        for group in self.engines:
            at = group.topology
            if at.node is not None and places.setdefault(at.node, at) != at:
                raise ValueError(
                    f"engines: {group.name} and another group put node {at.node} into different places"
                )
        self.router.journal_config()
        self.flow.agent_config()
        self.router.regime_thresholds()
        self._check_scaling()
        last_port = (self.ingress.metrics_port or 0) + (self.ingress.replicas or 1) - 1
        if last_port > 65535:
            raise ValueError(
                f"ingress: metrics_port: the last replica's would be {last_port}; 65535 is the highest"
            )
        if (self.ingress.tls_cert is None) != (self.ingress.tls_key is None):
            raise ValueError("ingress: tls_cert and tls_key belong together")
        self.dashboard.check(self.ingress)
        first, last = port_range(self.wire.ports)
        if not first <= last <= 65535:
            raise ValueError(f"wire.ports is {self.wire.ports}: write first-last, at most 65535")
        return self

    def _check_scaling(self) -> None:
        """Raises ValueError for groups that could not be scaled or drained as they are configured."""
        for group in self.engines:
            group.check()
        self.scaling.journal_config()
        lends = self.router.role_switch_config().switch_s > 0
        if not self.scaling.enabled:
            return
        if lends:
            raise ValueError(
                "router.role_switch.switch_s: with scaling.enabled the scaling policy alone decides roles; leave it out"
                " (scaling.policy regime_rule is FlowKV's rule)"
            )
        for group in self.engines:
            group.check_scaling()
        self.autoscaler.policy()


def parse(args: Mapping[str, Any], folder: Path | None = None) -> AppConfig:
    """Returns the validated config of a Serve application's `args`.

    `folder` is where the file lies; further files that it names are relative to it. Without it they are relative to the
    working directory. Raises ConfigError with every problem on a line of its own.
    """
    try:
        return AppConfig.model_validate(dict(args), context={"folder": folder})
    except ValidationError as error:
        lines = [problem_line(problem) for problem in error.errors()]
        raise ConfigError("the configuration cannot be used:\n" + "\n".join(lines)) from None
