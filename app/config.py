"""The one configuration of a Sluice application: the `args` of a Serve config file, parsed once, refused when wrong.

Every component keeps its own config dataclass beside its code (`DispatchConfig`, `IngressConfig`, one for each kind of
engine). This file joins them, adds what only the deployment knows (how many replicas, where), and turns errors into
sentences that name the key and what is allowed.
"""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from actors.engine.registry import ENGINES, engine_config, engine_kind
from actors.flow.config import AgentConfig
from actors.options import ConfigError, from_options, problem_line
from actors.router.forecasts import PredictorConfig
from actors.router.journal import JournalConfig
from actors.router.network.feed import NetworkConfig
from actors.router.network.file import read_network_file
from actors.wire.sockets import port_range
from app.profile.file import load_heatmap
from policies.dispatch.dispatcher import DispatchConfig
from policies.routing.base import check_overcommit
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.routing.registry import decode_policy, prefill_policy

SIM_MODEL = "sim"
"""`model.path` of applications without a real model, which have sim engines only; their tokens are words."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Strict):
    """The model that is served. `path` is a built-in name, a local Hugging Face directory, or a hub name."""

    path: str = "smollm2-135m-instruct"
    name: str | None = Field(None, description="name in the API; default: the last part of `path`")

    @property
    def served_name(self) -> str:
        return self.name or self.path.rstrip("/").rsplit("/", 1)[-1]


class TopologyConfig(_Strict):
    """The place of a group's engines in the network.

    With `node`, the engines count as being on one node of this name, so that groups on one machine can stand for
    several nodes. Without it they count as being where Ray placed them.
    """

    node: str | None = None
    rack: str | None = None
    pod: str | None = None

    def labels(self) -> dict[str, str]:
        """Returns rack and pod as labels of the engine's node."""
        found = {"sluice.io/rack": self.rack, "sluice.io/pod": self.pod}
        return {name: value for name, value in found.items() if value}


class EngineConfig(_Strict):
    """The settings of one engine that its own process needs.

    `kind` is a name of `actors.engine.registry.ENGINES`, and `options` are fields of that kind's config dataclass.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
    role: Literal["prefill", "decode", "colocated"]
    kind: str = "vllm"
    topology: TopologyConfig = TopologyConfig()
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        engine_kind(kind)
        return kind

    def engine_config(self, engine_id: str, model: str, served_name: str, **defaults: Any) -> Any:
        """Returns the config of one engine of this kind. Raises ConfigError.

        `model` is its directory or name, and `defaults` hold where the options say nothing.
        """
        facts = {"engine_id": engine_id, "role": self.role, "model": model, "served_name": served_name}
        return engine_config(self.kind, facts, self.options, f"engines.{self.name}.options", defaults)


class EngineGroupConfig(EngineConfig):
    """A group of equal engines, with what Ray needs to place them."""

    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    num_cpus: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Ray CPUs that a replica reserves; default 0.1"
    )
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources, to pin to nodes"
    )
    env: dict[str, str] = Field(default_factory=dict, description="environment of the replica process")

    @property
    def engine(self) -> EngineConfig:
        """The settings that a replica is started with, which do not include the number and the place of replicas."""
        return EngineConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})

    @property
    def shares_cores(self) -> bool:
        """Whether these engines compute on CPU cores, which all such engines of a node divide among them."""
        return ENGINES[self.kind].uses_cores and not self.num_gpus


class PolicyChoice(_Strict):
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


class RouterConfig(_Strict):
    """The router's policies and settings.

    `dispatch` holds fields of `DispatchConfig`, `predictor` of `PredictorConfig`, `network` of `NetworkConfig`,
    `journal` of `JournalConfig`, `regimes` of `RegimeThresholds`, and `role_switch` of `RoleSwitchConfig`.
    """

    # the pair with the least largest regret over five situations, untuned: `python -m benchmarks run defaults`
    prefill: PolicyChoice = PolicyChoice(name="join_shortest_queue")
    decode: PolicyChoice = PolicyChoice(name="composition")
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


class IngressGroupConfig(_Strict):
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

    def resolved(self, cores: int) -> "IngressGroupConfig":
        """Returns the same settings with a number wherever they leave it to the machine, which has `cores` cores."""
        replicas = self.replicas or (2 if cores >= CORES_FOR_TWO_INGRESSES else 1)
        first = self.metrics_port
        if first is None:
            above = self.port + METRICS_PORT_OFFSET
            below = self.port - METRICS_PORT_OFFSET
            first = 0 if not self.port else above if above + replicas <= 65536 else below
        return self.model_copy(update={"replicas": replicas, "metrics_port": first})


class WireConfig(_Strict):
    """The internal sockets.

    They are unix sockets inside a node and, with `interface`, TCP on that address. TCP needs a secret.
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
    socket_dir: str | None = Field(
        None, description="where unix sockets live; default: a private temporary directory"
    )

    def secret(self) -> bytes | None:
        """Returns the shared secret from this process's environment, or None."""
        value = os.environ.get(self.secret_env, "")
        return value.encode() or None


class FlowConfig(_Strict):
    """Scheduling of KV transfers. `enabled` starts an agent on each node that has engines; `policy` orders the flows,
    and `options` holds further fields of `AgentConfig`.
    """

    enabled: bool = False
    policy: PolicyChoice = PolicyChoice(name="mfs")
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


class AppConfig(_Strict):
    """The whole configuration. Making one raises ValidationError or ConfigError; `parse` gives one readable message."""

    model: ModelConfig = ModelConfig()
    engines: Annotated[list[EngineGroupConfig], Field(min_length=1)]
    router: RouterConfig = RouterConfig()
    ingress: IngressGroupConfig = IngressGroupConfig()
    wire: WireConfig = WireConfig()
    flow: FlowConfig = FlowConfig()

    @property
    def named_nodes(self) -> tuple[str, ...]:
        """The names that groups give to the nodes of their engines, each once."""
        return tuple(sorted({group.topology.node for group in self.engines if group.topology.node}))

    @property
    def engines_on_cores(self) -> int:
        """Number of engines that compute on CPU cores; on one machine they divide its cores."""
        return sum(group.replicas for group in self.engines if group.shares_cores)

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
        self.router.role_switch_config()
        last_port = (self.ingress.metrics_port or 0) + (self.ingress.replicas or 1) - 1
        if last_port > 65535:
            raise ValueError(
                f"ingress: metrics_port: the last replica's would be {last_port}; 65535 is the highest"
            )
        if (self.ingress.tls_cert is None) != (self.ingress.tls_key is None):
            raise ValueError("ingress: tls_cert and tls_key belong together")
        if self.wire.interface not in (None, "auto"):
            ipaddress.ip_network(str(self.wire.interface))
        first, last = port_range(self.wire.ports)
        if not first <= last <= 65535:
            raise ValueError(f"wire.ports is {self.wire.ports}: write first-last, at most 65535")
        return self


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
