"""The one configuration of a Sluice application: the `args` of a Serve config file, parsed once, refused when wrong.

Every component keeps its own config dataclass beside its code (`DispatchConfig`, `IngressConfig`, one for each kind of
engine). This file joins them, adds what only the deployment knows (how many replicas, where), and turns errors into
sentences that name the key and what is allowed.
"""

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
from actors.wire.sockets import port_range
from app.endpoints import DashboardConfig, IngressGroupConfig, WireConfig
from app.groups import AutoscalerConfig, EngineGroupConfig, ScalingConfig, TopologyConfig
from app.profile.file import load_heatmap
from app.strict import Strict
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
        if {group.role for group in self.engines} == {"decode"}:
            raise ValueError(
                "engines: only decode engines; with scaling.enabled add a group with role prefill or colocated"
            )
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
