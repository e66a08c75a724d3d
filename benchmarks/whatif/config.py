"""The YAML configuration that `sluice simulate` reads.

It is validated once, here: unknown keys and impossible values are refused with their path. The simulator's own
dataclasses check their values again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from benchmarks.plain_yaml import PlainLoader
from benchmarks.sim import profiles
from benchmarks.sim.network.topology import TopologyConfig
from benchmarks.whatif.scaling import Scaling
from benchmarks.workloads.catalog import WORKLOADS
from policies.admission.registry import DEFAULT as ADMIT
from policies.admission.registry import admission_policy
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.leases import MAX_LEASE_S
from policies.engine_model.timing import TimingProfile
from policies.fairness.registry import DEFAULT as FAIR
from policies.fairness.registry import fairness_policy
from policies.routing.registry import UnknownPolicy, decode_policy, prefill_policy

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class WhatIfError(ValueError):
    """The error of a configuration that cannot be simulated; the message names the file and the key."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Timing(_Strict):
    """The timing of an engine, written out: the fields of `policies.engine_model.timing.TimingProfile`."""

    source: str = "written in the configuration"
    prefill_base_s: Annotated[float, Field(ge=0)]
    prefill_per_token_s: Annotated[float, Field(ge=0)]
    decode_base_s: Annotated[float, Field(ge=0)]
    decode_per_seq_s: Annotated[float, Field(ge=0)]
    decode_per_kv_token_s: Annotated[float, Field(ge=0)]
    kv_bytes_per_token: Annotated[int, Field(ge=0)]
    transfer_bandwidth_bytes_per_s: Positive
    transfer_latency_s: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self.profile()
        return self

    def profile(self) -> TimingProfile:
        """Returns the profile. Raises ValueError for an impossible one."""
        return TimingProfile(**self.model_dump())


class EngineGroup(_Strict):
    """A group of equal engines, as in `benchmarks.sim.config.EngineSpec`.

    `profile` names a shipped timing profile or a file, or has the timing itself. On a network each engine takes `gpus`
    GPUs of one node. Groups are placed in the order in which they are listed, node by node, unless `nodes` names a node
    for each engine.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,30}$")]
    role: Literal["prefill", "decode", "colocated"]
    count: Annotated[int, Field(ge=1, le=4096)]
    profile: str | Timing
    gpus: Count = 1
    nodes: tuple[str, ...] = ()
    slots: Count = 256
    kv_blocks: Count = 32_768
    block_size_tokens: Count = 16
    prefill_budget_tokens: Count = 8_192
    chunked_prefill: bool = True
    prefix_cache: bool = True
    lease_s: Positive = 30.0
    max_lease_s: Positive = MAX_LEASE_S
    barrier: str = ""
    transfer_flows: Count = 1

    def timing(self) -> TimingProfile:
        """Returns the group's timing profile. Raises ProfileError for a file that cannot be used."""
        return profiles.load(self.profile) if isinstance(self.profile, str) else self.profile.profile()


class Cluster(_Strict):
    """All engines of the cluster, in groups."""

    engines: Annotated[tuple[EngineGroup, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [e.name for e in self.engines]
        if len(set(names)) != len(names):
            raise ValueError(f"engine groups share a name: {', '.join(names)}")
        return self


class NetworkModel(_Strict):
    """A fat tree. Each scale multiplies the bandwidth of one level's links.

    `background` is the share of every link that others use. The router gets a new oracle of the network every
    `oracle_s` seconds, or never where that is null.
    """

    topology: TopologyConfig
    rack_bandwidth_scale: Positive = 1.0
    core_bandwidth_scale: Positive = 1.0
    background: Annotated[float, Field(ge=0, lt=1)] = 0.0
    oracle_s: Positive | None = 1.0


class PolicyChoice(_Strict):
    """A policy, by its registered name, with its parameters."""

    name: str = "join_shortest_queue"
    params: dict[str, Any] = Field(default_factory=dict)


class Policies(_Strict):
    """The router's configuration: its policies, the options of `DispatchConfig`, and the length predictor.

    `survival` and `exact_match` are fitted on the first 80 % of the workload and go on learning during the run;
    `oracle` knows the true lengths. Forecasts of running requests are made for the `horizon` of the decode policy, and
    for `window_tokens` while that has none.
    """

    prefill: PolicyChoice = PolicyChoice()
    decode: PolicyChoice = PolicyChoice()
    admission: PolicyChoice = PolicyChoice(name=ADMIT)
    fairness: PolicyChoice = PolicyChoice(name=FAIR)
    dispatch: dict[str, Any] = Field(default_factory=dict)
    predictor: Literal["none", "survival", "exact_match", "oracle"] = "none"
    window_tokens: Count = 48

    @field_validator("dispatch")
    @classmethod
    def _dispatch_fields(cls, options: dict[str, Any]) -> dict[str, Any]:
        known = [f.name for f in dataclasses.fields(DispatchConfig) if f.name != "seed"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"no option {unknown[0]!r}; there are {', '.join(known)}")
        try:
            DispatchConfig(**options)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return options

    @model_validator(mode="after")
    def _policies_exist(self) -> Self:
        for stage, make, choice in (
            ("prefill", prefill_policy, self.prefill),
            ("decode", decode_policy, self.decode),
            ("admission", admission_policy, self.admission),
            ("fairness", fairness_policy, self.fairness),
        ):
            try:
                make(choice.name, choice.params)
            except (UnknownPolicy, TypeError, ValueError) as error:
                raise ValueError(f"{stage}: {error}") from error
        return self


class SharingModel(_Strict):
    """Shared beginnings of prompts that replace those of the trace, as in `benchmarks.workloads.prefixes.Sharing`."""

    p_share: Annotated[float, Field(ge=0, le=1)]
    groups: Count = 64
    zipf: Annotated[float, Field(ge=0)] = 1.0
    covered: tuple[float, float] = (0.25, 0.75)
    block_tokens: Count = 512


class Workload(_Strict):
    """The requests, as in `benchmarks.workloads.catalog.WorkloadSpec`; `file` is the path of a trace of your own."""

    name: str | None = None
    file: str | None = None
    requests: Count | None = None
    part: Literal["all", "train", "held_out"] = "all"
    spread_ticks: bool = True
    min_prompt_tokens: Count | None = None
    max_prompt_tokens: Count | None = None
    min_output_tokens: Count | None = None
    max_output_tokens: Count | None = None
    prompt_tokens: Count | None = None
    compression: Positive | None = None
    rate_per_s: Positive | None = None
    start_s: Annotated[float, Field(ge=0)] = 0.0
    end_s: Positive | None = None
    sharing: SharingModel | None = None
    ttft_slo_s: Positive | None = None
    tpot_slo_s: Positive | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.file is None):
            raise ValueError("give either name or file")
        if self.name is not None and self.name not in WORKLOADS:
            raise ValueError(f"no workload is called {self.name!r}; there are {', '.join(WORKLOADS)}")
        if self.compression is not None and self.rate_per_s is not None:
            raise ValueError("give compression or rate_per_s, not both")
        return self


class Run(_Strict):
    """The number of runs, and the part of each that is measured: arrivals in [warmup_s, warmup_s + measure_s)."""

    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    warmup_s: Annotated[float, Field(ge=0)] = 0.0
    measure_s: Positive | None = None


class Variant(_Strict):
    """A variant of the base: values to set, add to or multiply at dotted paths (`cluster.engines.decode.count`)."""

    name: Annotated[str, Field(min_length=1)]
    set: dict[str, Any] = Field(default_factory=dict)
    add: dict[str, float] = Field(default_factory=dict)
    scale: dict[str, float] = Field(default_factory=dict)


class Base(_Strict):
    """The configuration of one simulation: cluster, network, policies, scaling, workload and run.

    Without `scaling` the number of engines and their roles are fixed.
    """

    cluster: Cluster
    network: NetworkModel | None = None
    policies: Policies = Policies()
    scaling: Scaling | None = None
    workload: Workload
    run: Run = Run()


class Question(Base):
    """The whole file: the base and the variants that are compared with it."""

    what_if: tuple[Variant, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = ["base", *(v.name for v in self.what_if)]
        if len(set(names)) != len(names):
            raise ValueError(
                f"what_if: two variants share a name: {', '.join(names)} (`base` is the file itself)"
            )
        return self


def read(path: Path, files_here: bool = False) -> Question:
    """Reads and validates the file at `path`. Profiles and traces in it are relative to its folder.

    With `files_here` they must lie in that folder, and YAML's aliases are refused. Raises WhatIfError.
    """
    try:
        text = path.read_text("utf-8")
        raw = yaml.load(text, PlainLoader if files_here else yaml.SafeLoader)
    except OSError as error:
        raise WhatIfError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise WhatIfError(f"{path}: not YAML: {error}") from error
    except RecursionError:
        raise WhatIfError(f"{path}: nested too deeply") from None
    if not isinstance(raw, Mapping):
        raise WhatIfError(f"{path}: must be a mapping with at least `cluster` and `workload`")
    question = validated(Question, raw, str(path))
    if files_here:
        _all_here(question)
    return validated(Question, raw, str(path), path.parent)


def _all_here(question: Question) -> None:
    """Raises WhatIfError for a file outside the folder of the configuration."""
    named: dict[str, object] = {
        f"cluster.engines.{group.name}.profile": group.profile for group in question.cluster.engines
    }
    named["workload.file"] = question.workload.file or ""
    named["scaling.start"] = "" if question.scaling is None else question.scaling.start
    for key, value in named.items():
        if isinstance(value, str) and (Path(value).name != value or value.startswith(".")) and value:
            raise WhatIfError(f"{key}: {value!r} must be the name of a file beside the configuration")


def validated(kind: type[Any], raw: object, where: str, folder: Path | None = None) -> Any:
    """Returns `raw` as an instance of `kind`. Raises a WhatIfError with one line for each wrong key.

    With `folder`, paths in it that are relative to that folder become paths from the working directory.
    """
    try:
        made = kind.model_validate(raw)
    except ValidationError as error:
        lines = [f"{_dotted(e['loc'])}: {_message(e)}" for e in error.errors()]
        raise WhatIfError("\n".join(f"{where}: {line}" for line in lines)) from error
    return made if folder is None else kind.model_validate(_resolved(made, folder).model_dump())


def _resolved(made: Any, folder: Path) -> Any:
    """Returns `made` with its relative paths resolved against `folder`.

    Profiles are loaded once here, so that a wrong name is refused before anything runs.
    """
    groups = []
    for group in made.cluster.engines:
        if isinstance(group.profile, str) and Path(group.profile).suffix:
            group = group.model_copy(update={"profile": str(folder / group.profile)})
        try:
            group.timing()
        except profiles.ProfileError as error:
            raise WhatIfError(f"cluster.engines.{group.name}.profile: {error}") from error
        groups.append(group)
    scaling = made.scaling
    if scaling is not None and isinstance(scaling.start, str):
        start = str(folder / scaling.start) if Path(scaling.start).suffix else scaling.start
        scaling = scaling.model_copy(update={"start": start})
        try:
            scaling.steps()
        except profiles.ProfileError as error:
            raise WhatIfError(f"scaling.start: {error}") from error
    workload = made.workload
    if workload.file is not None:
        workload = workload.model_copy(update={"file": str(folder / workload.file)})
    cluster = made.cluster.model_copy(update={"engines": tuple(groups)})
    return made.model_copy(update={"cluster": cluster, "workload": workload, "scaling": scaling})


def _dotted(place: tuple[int | str, ...]) -> str:
    return ".".join(map(str, place)) or "the file"


def _message(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "no such key"
    return str(error["msg"]).removeprefix("Value error, ")
