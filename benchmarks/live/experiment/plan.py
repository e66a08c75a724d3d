"""The file of an experiment: a load, a timeline of actions, arms that are compared, repeats.

    name: burst
    load:
      classes: {interactive: {prompt_tokens: 128, output_tokens: 32, ttft_slo_ms: 200}}
      phases: [{name: calm, for_s: 20, rate_per_s: 10}, {name: burst, for_s: 20, rate_per_s: 60}]
    actions: [{at_s: 30, policy: {decode: round_robin}}]

`read` turns the text into a `Plan` or raises PlanError with a line for each problem. Nothing here talks to a server.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.plain_yaml import PlainLoader

MOST_TEXT_BYTES = 64 * 1024
"""Longest file. ASSUMPTION: the longest plan that a person writes has a few kilobytes."""
MOST_REQUESTS = 200_000
"""Most requests of a run: their records stay in memory until it ends (about 1 kB each)."""

ClassName = Literal["interactive", "standard", "batch"]
Role = Literal["prefill", "decode", "colocated"]
Tokens = Annotated[int, Field(ge=1, le=131_072)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
Positive = Annotated[float, Field(gt=0)]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,39}")


def _named(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            "a name has at most 40 letters (A to Z), digits, spaces and . _ + -, and begins with a letter or a digit"
        )
    return name


Name = Annotated[str, AfterValidator(_named)]


class PlanError(ValueError):
    """A file that cannot be run. `problems` has a sentence for each thing that is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a run: requests a second in any phase, seconds and bytes in all. Engines are killed only with
    `may_kill`, and files of the machine are read only with `may_read`.
    """

    rate_per_s: float = 200.0
    duration_s: float = 900.0
    disk_bytes: int = 256 << 20
    may_kill: bool = False
    may_read: bool = True


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Spread(_Strict):
    """A lognormal length with this mean and coefficient of variation; greater ones become `cap`."""

    mean: Annotated[float, Field(ge=1, le=131_072)]
    cv: Annotated[float, Field(gt=0, le=10)] = 1.0
    cap: Tokens = 8_192


class ClassLoad(_Strict):
    """The requests of a class: their `share` among the classes, lengths in tokens, and objectives.

    The first `shared_tokens` of a prompt are one of `prefixes` fixed beginnings, which engines can keep.
    """

    share: Annotated[float, Field(ge=0)] = 1.0
    prompt_tokens: Tokens | Spread = 128
    output_tokens: Tokens | Spread = 32
    ttft_slo_ms: Positive | None = None
    tpot_slo_ms: Positive | None = None
    shared_tokens: Annotated[int, Field(ge=0, le=131_072)] = 0
    prefixes: Annotated[int, Field(ge=1, le=100_000)] = 1


def _one_class() -> dict[ClassName, ClassLoad]:
    return {"standard": ClassLoad()}


class Phase(_Strict):
    """A part of the load: its length and rate, and what of the classes is different in it."""

    name: Name
    for_s: Annotated[float, Field(gt=0, le=86_400)]
    rate_per_s: Annotated[float, Field(ge=0, le=100_000)]
    classes: dict[ClassName, dict[str, Any]] = Field(default_factory=dict)


class Trace(_Strict):
    """A published or shipped trace by `name` (`python -m benchmarks list`), or a `file` of one, cut to a window.

    Longer prompts and outputs than `max_prompt_tokens` and `max_output_tokens` are left out.
    """

    name: str | None = None
    file: str | None = None
    for_s: Annotated[float, Field(gt=0, le=86_400)]
    rate_per_s: Annotated[float, Field(gt=0, le=100_000)]
    start_s: Seconds = 0.0
    max_prompt_tokens: Tokens = 4_096
    max_output_tokens: Tokens = 1_024

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.file is None):
            raise ValueError("give either name or file")
        return self


class Load(_Strict):
    """The requests. `cv` is the coefficient of variation of the gaps between them: 1 is Poisson, 0 is even.

    A trace brings its own times and lengths, and takes objectives from the first of `classes`. Repeat r draws with
    `seed` + r, in every arm alike. After its last request a trial waits `patience_s` for answers.
    """

    seed: Annotated[int, Field(ge=0, le=2**31)] = 1
    cv: Annotated[float, Field(ge=0, le=20)] = 1.0
    classes: dict[ClassName, ClassLoad] = Field(default_factory=_one_class)
    phases: tuple[Phase, ...] = ()
    trace: Trace | None = None
    patience_s: Annotated[float, Field(ge=0, le=600)] = 30.0

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if bool(self.phases) == (self.trace is not None):
            raise ValueError("give either phases or a trace")
        if not self.classes:
            raise ValueError("give at least one of the classes interactive, standard and batch")
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names):
            raise ValueError(f"two phases share a name: {', '.join(names)}")
        for phase in self.phases:
            classes = self.classes_of(phase)
            if not sum(one.share for one in classes.values()) > 0:
                raise ValueError(f"phase {phase.name}: no class has a share above 0")
        return self

    @property
    def duration_s(self) -> float:
        """The time in which requests are sent."""
        return self.trace.for_s if self.trace is not None else sum(phase.for_s for phase in self.phases)

    @property
    def peak_per_s(self) -> float:
        """The highest mean rate of a phase."""
        if self.trace is not None:
            return self.trace.rate_per_s
        return max(phase.rate_per_s for phase in self.phases)

    def classes_of(self, phase: Phase) -> dict[str, ClassLoad]:
        """Returns the classes in a phase. Raises ValueError for a change that no class can have."""
        found: dict[str, ClassLoad] = {str(name): one for name, one in self.classes.items()}
        for name, change in phase.classes.items():
            base = found.get(name, ClassLoad()).model_dump(exclude_defaults=True)
            try:
                found[name] = ClassLoad.model_validate({**base, **change})
            except ValidationError as error:
                raise ValueError(
                    "; ".join(f"phase {phase.name}: classes.{name}.{line}" for line in lines_of(error))
                ) from None
        return found

    def windows(self) -> list[tuple[str, float, float, float]]:
        """Returns the phases as (name, start, end, rate), in seconds from the start of the load."""
        if self.trace is not None:
            return [("trace", 0.0, self.trace.for_s, self.trace.rate_per_s)]
        ends = list(itertools.accumulate(phase.for_s for phase in self.phases))
        return [(p.name, end - p.for_s, end, p.rate_per_s) for p, end in zip(self.phases, ends, strict=True)]


class Policies(_Strict):
    """A change of the router's policies, as `sluice policy set` makes it: names, or names with parameters. `STAGES` are
    the policies beside the dispatcher's limits.
    """

    STAGES: ClassVar[tuple[str, ...]] = ("prefill", "decode", "admission", "fairness", "flow")

    prefill: str | dict[str, Any] | None = None
    decode: str | dict[str, Any] | None = None
    admission: str | dict[str, Any] | None = None
    fairness: str | dict[str, Any] | None = None
    flow: str | dict[str, Any] | None = None
    dispatch: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.body():
            raise ValueError(f"give {', '.join(self.STAGES)} or dispatch")
        for stage in self.STAGES:
            choice = getattr(self, stage)
            if isinstance(choice, dict) and not (
                isinstance(choice.get("name"), str) and set(choice) <= {"name", "params"}
            ):
                raise ValueError(f"{stage}: give a policy's name, or name and params")
        return self

    def body(self) -> dict[str, Any]:
        """Returns the change as the server takes it."""
        return self.model_dump(exclude_none=True)


class RoleChange(_Strict):
    """An engine, by id or by the name of its group, and the role that it is to have."""

    engine: str
    role: Role


_KINDS = ("policy", "scale", "role", "drain", "activate", "kill")
Counts = Annotated[dict[str, Annotated[int, Field(ge=0, le=4096)]], Field(min_length=1)]


class Action(_Strict):
    """One thing that is done to the application, `at_s` seconds after the load began.

    Engines are named by id or by group; of a group the first one is meant that the action can do something to.
    """

    at_s: Seconds
    policy: Policies | None = None
    scale: Counts | Literal["auto"] | None = None
    role: RoleChange | None = None
    drain: str | None = None
    activate: str | None = None
    kill: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_KINDS)}")
        return self

    @property
    def kind(self) -> str:
        """The name of what is done."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def what(self) -> str:
        """The action in words."""
        if self.policy is not None:
            return f"policy: {shown(self.policy.body())}"
        if self.scale is not None:
            return f"scale: {self.scale if isinstance(self.scale, str) else shown(self.scale)}"
        if self.role is not None:
            return f"role of {self.role.engine}: {self.role.role}"
        return f"{self.kind} {getattr(self, self.kind)}"


class Arm(_Strict):
    """The settings of an arm, made before each of its trials: policies, numbers of engines, or nothing."""

    policy: Policies | None = None
    scale: Counts | Literal["auto"] | None = None


class Plan(_Strict):
    """The whole file. Each arm is tried `repeats` times; with the order `abba` every other round runs backwards."""

    name: Name
    summary: Annotated[str, Field(max_length=400)] = ""
    load: Load
    actions: tuple[Action, ...] = Field((), max_length=200)
    arms: dict[Name, Arm] = Field(default_factory=dict, max_length=6)
    repeats: Annotated[int, Field(ge=1, le=20)] = 1
    order: Literal["abba", "in_turn"] = "abba"
    pause_s: Annotated[float, Field(ge=0, le=600)] = 3.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        late = [a.at_s for a in self.actions if a.at_s > self.load.duration_s]
        if late:
            raise ValueError(
                f"actions: one is at {late[0]:g} s, after the end of the load at {self.load.duration_s:g} s"
            )
        return self

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials in their order: (arm, repeat). Without arms there is one, without a name."""
        arms = list(self.arms) or [""]
        rounds = []
        for repeat in range(self.repeats):
            backwards = self.order == "abba" and repeat % 2 == 1
            rounds += [Trial(arm, repeat) for arm in (arms[::-1] if backwards else arms)]
        return tuple(rounds)

    @property
    def duration_s(self) -> float:
        """The time of all trials with the pauses between them, without what answers need at the ends."""
        n = len(self.trials)
        return n * self.load.duration_s + (n - 1) * self.pause_s

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of everything that the file changes."""
        of_arms = {kind for arm in self.arms.values() for kind in ("policy", "scale") if getattr(arm, kind)}
        return frozenset(of_arms | {action.kind for action in self.actions})


@dataclass(frozen=True, slots=True)
class Trial:
    """One sending of the load, in an arm ("": the file has none); `repeat` counts from 0."""

    arm: str
    repeat: int

    @property
    def label(self) -> str:
        """A name for people."""
        return f"{self.arm} {self.repeat + 1}".strip()


def read(text: str, bounds: Bounds) -> Plan:
    """Returns the plan in `text`. Raises PlanError for a text that is none, and for one beyond the bounds."""
    if len(text.encode("utf-8", "replace")) > MOST_TEXT_BYTES:
        raise PlanError(
            [f"the file is longer than {MOST_TEXT_BYTES // 1024} kB: it must be a plan, not data"]
        )
    try:
        raw = yaml.load(text, PlainLoader)
    except yaml.YAMLError as error:
        raise PlanError([f"this is no YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise PlanError(["the file is nested too deeply"]) from None
    except ValueError as error:
        # an impossible date, or a whole number of thousands of digits
        raise PlanError([f"a value cannot be read: {error}"]) from None
    if not isinstance(raw, Mapping):
        raise PlanError(["a plan is a mapping with at least `name` and `load`"])
    try:
        plan = Plan.model_validate(raw)
    except ValidationError as error:
        raise PlanError(lines_of(error)) from None
    problems = beyond(plan, bounds)
    if problems:
        raise PlanError(problems)
    return plan


def beyond(plan: Plan, bounds: Bounds) -> list[str]:
    """Returns a sentence for each bound that the plan does not keep."""
    found = []
    if plan.load.peak_per_s > bounds.rate_per_s:
        found.append(
            f"load: {plan.load.peak_per_s:g} requests/s are above the bound of {bounds.rate_per_s:g} requests/s"
        )
    if plan.duration_s > bounds.duration_s:
        found.append(
            f"the run would take {plan.duration_s:g} s, {len(plan.trials)} times the load of"
            f" {plan.load.duration_s:g} s: the bound is {bounds.duration_s:g} s"
        )
    expected = len(plan.trials) * sum((end - start) * rate for _, start, end, rate in plan.load.windows())
    if expected > MOST_REQUESTS:
        found.append(f"about {expected:,.0f} requests are more than the {MOST_REQUESTS:,} of one run")
    if "kill" in plan.kinds and not bounds.may_kill:
        found.append(
            "actions: kill is not allowed: start the command with --may-kill, or set"
            " dashboard.experiments.may_kill in the server's configuration"
        )
    if plan.load.trace is not None and plan.load.trace.file is not None and not bounds.may_read:
        found.append("load.trace.file: files are read by the command only; give the name of a shipped trace")
    return found


def described(plan: Plan, requests: int) -> dict[str, Any]:
    """Returns what a plan will do, as plain data; `requests` is the number that it sends."""
    return {
        "name": plan.name,
        "summary": plan.summary,
        "duration_s": plan.duration_s,
        "requests": requests,
        "trials": [trial.label for trial in plan.trials],
        "phases": [
            {"name": name, "from_s": start, "to_s": end, "rate_per_s": rate}
            for name, start, end, rate in plan.load.windows()
        ],
        "actions": [{"at_s": action.at_s, "what": action.what} for action in plan.actions],
    }


def lines_of(error: ValidationError) -> list[str]:
    """Returns a line for each problem that pydantic has found: the path and what is allowed."""
    found = []
    for one in error.errors():
        place = ".".join(str(part) for part in one["loc"] if not _is_tag(part)) or "the file"
        message = "no such key" if one["type"] == "extra_forbidden" else str(one["msg"])
        line = f"{place}: {message.removeprefix('Value error, ')}"
        if line not in found:
            found.append(line)
    return found


def shown(value: object) -> str:
    """Returns a setting as people write it."""
    if isinstance(value, Mapping):
        if set(value) <= {"name", "params"} and "name" in value:
            return str(value["name"]) + (f" {shown(value['params'])}" if value.get("params") else "")
        return ", ".join(f"{key} {shown(one)}" for key, one in value.items())
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return str(value)


def _is_tag(part: int | str) -> bool:
    """Returns whether a part of a problem's place names a type of pydantic's instead of a key."""
    return isinstance(part, str) and (
        part in ("int", "str", "Spread", "ClassLoad") or "[" in part or "constrained" in part
    )
