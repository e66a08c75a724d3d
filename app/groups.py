"""Engine groups in the configuration, with what Ray needs to place them, and how many replicas they may have."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from actors.engine.registry import ENGINES, engine_config, engine_kind
from actors.options import from_options
from actors.scaling.bounds import MOST, excluded
from actors.scaling.fleet import Group
from actors.scaling.journal import ScalingJournalConfig
from actors.scaling.waits import START_LIMIT_S, TIMES_LONGEST
from app.strict import Strict
from policies.scaling.base import ScalingPolicy
from policies.scaling.registry import make
from policies.scaling.sleep import Sleep
from policies.state.views import Role


class TopologyConfig(Strict):
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


class EngineConfig(Strict):
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


SLEEP = Sleep()
"""The defaults of a sleep."""
CPUS = 0.1
"""Ray CPUs that a replica reserves by default."""
DRAIN_MARGIN_S = 5.0
"""Time above its lease that a group's replicas have to end by default, so that no leased KV is lost by a stop."""


class GroupScalingConfig(Strict):
    """How many replicas a group may have while `scaling.enabled`, and how long one that stops has.

    `replicas` of a group serve and `warm` more wait ready when the application is deployed. The group keeps between
    `min` and `max` replicas, warm ones among them. With a `min` of 0 it has none while the application sleeps
    (`ScalingConfig.sleep_after_s`). The policy may keep up to `warm_max` warm. The resources of `spare`
    further replicas stay asked for at the cluster's own autoscaler, so that nodes stand ready.

    A replica that stops has `drain_s` for its running work and its leases, whether or not scaling is enabled; what is
    left then goes on elsewhere, where it can.
    """

    min: Annotated[int, Field(ge=0, le=MOST)] = 1
    max: Annotated[int, Field(ge=1, le=MOST)] | None = Field(None, description="default: replicas and warm")
    warm: Annotated[int, Field(ge=0, le=MOST)] = 0
    warm_max: Annotated[int, Field(ge=0, le=MOST)] | None = Field(None, description="default: warm")
    spare: Annotated[int, Field(ge=0, le=MOST)] = 0
    drain_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        None, description="default: 5 s above the lease of the group's engines"
    )


class EngineGroupConfig(EngineConfig):
    """A group of equal engines, with what Ray needs to place them.

    With `placement_group_bundles`, each replica gets a placement group of its own with these resources, of which the
    first bundle holds the replica.
    """

    replicas: Annotated[int, Field(ge=0, le=MOST)] = 1
    num_cpus: Annotated[float, Field(ge=0)] | None = Field(
        None, description=f"Ray CPUs that a replica reserves; default {CPUS:g}"
    )
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources, to pin to nodes"
    )
    env: dict[str, str] = Field(default_factory=dict, description="environment of the replica process")
    placement_group_bundles: list[dict[str, float]] | None = None
    placement_group_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    scaling: GroupScalingConfig = GroupScalingConfig()

    @property
    def cpus(self) -> float:
        """The Ray CPUs of one replica. By default they are few, so that Ray can place all engines of a node: those that
        compute on CPUs share its cores, which `actors.engine.cores` divides.
        """
        return CPUS if self.num_cpus is None else self.num_cpus

    @property
    def lease_s(self) -> float:
        """Time for which these engines keep a finished prefill's KV: that of the options, or the kind's default."""
        defaults = {f.name: f.default for f in dataclasses.fields(ENGINES[self.kind].config)}
        return float(self.options.get("lease_s", defaults["lease_s"]))

    @property
    def drain_s(self) -> float:
        """Time in seconds that a replica has to end its running work."""
        given = self.scaling.drain_s
        return self.lease_s + DRAIN_MARGIN_S if given is None else given

    @property
    def most(self) -> int:
        """The most replicas that the group may have while it is scaled."""
        return self.scaling.max or self.replicas + self.scaling.warm

    @property
    def warm_most(self) -> int:
        """The most replicas of the group that may wait warm."""
        return self.scaling.warm if self.scaling.warm_max is None else self.scaling.warm_max

    def check(self) -> None:
        """Raises ValueError for a drain time, a number of GPUs or a placement group that cannot be used, or not with
        these options. Ray, Serve and vLLM refuse most of these, too, but only when they place or start a replica, and
        name no key of this configuration.
        """
        if self.drain_s <= self.lease_s:
            raise ValueError(
                f"engines.{self.name}.scaling.drain_s is {self.drain_s:g}: it must be above the lease of its engines,"
                f" {self.lease_s:g} s, so that no leased KV is lost"
            )
        if self.num_gpus > 1 and not self.num_gpus.is_integer():
            raise ValueError(
                f"engines.{self.name}.num_gpus is {self.num_gpus:g}: Ray shares out parts of a single GPU only, so"
                " above 1 it must be a whole number"
            )
        bundles = self.placement_group_bundles
        if bundles is not None and not (bundles and all(any(bundle.values()) for bundle in bundles)):
            raise ValueError(
                f"engines.{self.name}.placement_group_bundles: give at least one bundle, each with a resource above 0"
            )
        if bundles is not None:
            needed = {"CPU": self.cpus, "GPU": self.num_gpus, **self.resources}
            short = {name: least for name, least in needed.items() if bundles[0].get(name, 0.0) < least}
            if short:
                raise ValueError(
                    f"engines.{self.name}.placement_group_bundles: the first bundle holds the replica, so it must have"
                    f" at least {', '.join(f'{name}: {least:g}' for name, least in short.items())} (num_cpus, num_gpus"
                    " and resources of the group)"
                )
        try:
            self._placed_options()
        except ValueError as error:
            raise ValueError(f"engines.{self.name}.{error}") from None

    def check_scaling(self) -> None:
        """Raises ValueError for bounds of an autoscaled group that exclude one another."""
        where, own, least = f"engines.{self.name}", self.scaling, self.scaling.min
        if not self.replicas:
            raise ValueError(f"{where}.replicas is 0: Serve deploys no group without replicas; begin with 1")
        if not least <= self.replicas:
            raise ValueError(f"{where}.replicas is {self.replicas}: it must be at least scaling.min, {least}")
        if self.replicas + own.warm > self.most:
            raise ValueError(
                f"{where}.scaling.max is {self.most}: it must be at least replicas and warm,"
                f" {self.replicas} + {own.warm}"
            )
        why = excluded(f"{where}.scaling", least, self.most, own.warm, self.warm_most)
        if why is not None:
            raise ValueError(why)

    @property
    def engine(self) -> EngineConfig:
        """The settings that a replica is started with, which do not include the number and the place of replicas. Its
        options say what follows from the place, such as the device. Raises ValueError where `check` does.
        """
        given = {name: getattr(self, name) for name in EngineConfig.model_fields}
        return EngineConfig(**{**given, "options": self._placed_options()})

    @property
    def bundle_gpus(self) -> tuple[float, ...]:
        """The GPUs of each bundle of a replica's placement group; none without one."""
        return tuple(bundle.get("GPU", 0.0) for bundle in self.placement_group_bundles or ())

    def _placed_options(self) -> dict[str, Any]:
        place = ENGINES[self.kind].place
        return self.options if place is None else place(self.options, self.num_gpus, self.bundle_gpus)

    @property
    def prewarms(self) -> bool:
        """Whether processes can be pre-warmed for these engines: those of one core process that imports early."""
        able = self.options.get("data_parallel_size", 1) == 1
        return ENGINES[self.kind].prewarm is not None and able

    @property
    def shares_cores(self) -> bool:
        """Whether these engines compute on CPU cores, which all such engines of a node divide among them."""
        return ENGINES[self.kind].uses_cores and not self.num_gpus and not any(self.bundle_gpus)


class ScalingConfig(Strict):
    """The autoscaler. With `enabled` it runs beside the router, and `policy` decides within the bounds of the groups.

    Groups with `scaling.min: 0` have no replicas once there has been no request for `sleep_after_s`; the next one wakes
    them, and has failed if none serves after `wake_limit_s`. A replica that has not come to the router within
    `start_limit_s` no longer counts as capacity on its way (`actors.scaling.waits`). On each node that has engines,
    `prewarmed` processes wait for the next start with their imports done (`app.prewarmed`).

    `params` are those of the policy; its bounds (`limits`) come from the groups, but for `limits.step`. All groups
    together have at most `budget` replicas. `journal` holds fields of `ScalingJournalConfig`.
    """

    enabled: bool = False
    policy: str = "joint"
    params: dict[str, Any] = Field(default_factory=dict)
    budget: Annotated[int, Field(ge=1)] | None = Field(
        None, description="default: the sum of the groups' max"
    )
    sleep_after_s: Annotated[float, Field(gt=0)] = SLEEP.idle_s
    wake_limit_s: Annotated[float, Field(gt=0)] = SLEEP.wake_limit_s
    start_limit_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description=f"default: {START_LIMIT_S:g} s, or {TIMES_LONGEST:g} times the longest start if that is longer",
    )
    prewarmed: Annotated[int, Field(ge=0, le=64)] = 0
    journal: dict[str, Any] = Field(default_factory=dict)

    def journal_config(self) -> ScalingJournalConfig:
        made = from_options(ScalingJournalConfig, self.journal, "scaling.journal")
        assert isinstance(made, ScalingJournalConfig)
        return made


class AutoscalerConfig(Strict):
    """All that the autoscaler's process needs: its settings and the groups that it scales."""

    scaling: ScalingConfig
    engines: tuple[EngineGroupConfig, ...]

    def groups(self) -> dict[str, Group]:
        """Returns the groups as the autoscaler knows them, by name."""
        return {
            group.name: Group(
                group.name,
                Role(group.role),
                group.scaling.min,
                group.most,
                group.replicas,
                group.scaling.warm,
                group.drain_s,
                group.warm_most,
            )
            for group in self.engines
        }

    def policy(self, groups: Mapping[str, Group] | None = None) -> ScalingPolicy:
        """Returns the policy, with the bounds of the groups: those of the configuration, or those given instead.
        Raises ValueError that names the key.
        """
        groups = self.groups() if groups is None else groups
        params = dict(self.scaling.params)
        own = params.pop("limits", {})
        if not isinstance(own, Mapping) or set(own) - {"step"}:
            raise ValueError(
                "scaling.params.limits has `step` only: the other bounds are engines[].scaling and scaling.budget"
            )
        if "sleep" in params:
            raise ValueError(
                "scaling.params.sleep: the sleep is set by engines[].scaling.min, scaling.sleep_after_s and"
                " scaling.wake_limit_s"
            )
        bounds: dict[str, int] = {}
        for role in Role:
            own_groups = [group for group in groups.values() if group.role is role]
            bounds[f"{role.value}_min"] = sum(group.least for group in own_groups)
            bounds[f"{role.value}_max"] = sum(group.most for group in own_groups)
        floor = {role.value: bounds[f"{role.value}_min"] for role in Role}
        if any(not floor[group.role.value] for group in groups.values()):
            limits = {"idle_s": self.scaling.sleep_after_s, "wake_limit_s": self.scaling.wake_limit_s}
            params["sleep"] = {**limits, **floor}
        bounds["warm_min"] = sum(group.warm for group in groups.values())
        bounds["warm_max"] = sum(group.warm_most for group in groups.values())
        first = sum(group.deployed for group in groups.values())
        most = sum(group.most for group in groups.values())
        budget = most if self.scaling.budget is None else self.scaling.budget
        if self.scaling.budget is not None and budget < first:
            raise ValueError(
                f"scaling.budget is {budget}: the groups begin with {first} replicas, warm ones included"
            )
        try:
            return make(self.scaling.policy, {**params, "limits": {**own, **bounds, "budget": budget}})
        except ValueError as error:
            raise ValueError(f"scaling: {error}") from None
