"""The registry maps the name of each scaling policy to its class. One policy decides at a time."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from policies.journal.codec import decoder, encoder
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.params import BadParameter
from policies.scaling.base import Limits, ScalingPolicy
from policies.scaling.capacity import Margins
from policies.scaling.forecast import Forecast
from policies.scaling.joint import Joint, JointState
from policies.scaling.rivals.demand_rate import DemandRate, DemandRateState
from policies.scaling.rivals.fixed import Fixed, FixedState
from policies.scaling.rivals.latency_ratio import LatencyRatio, LatencyRatioState
from policies.scaling.rivals.ongoing import Ongoing, OngoingState
from policies.scaling.rivals.regime_rule import RegimeRule, RegimeState
from policies.scaling.sleep import MaySleep, Sleep, SleepState, awake_limits

SCALING: dict[str, tuple[type[Any], type[Any]]] = {
    "joint": (Joint, JointState),
    "fixed": (Fixed, FixedState),
    "ongoing": (Ongoing, OngoingState),
    "latency_ratio": (LatencyRatio, LatencyRatioState),
    "demand_rate": (DemandRate, DemandRateState),
    "regime_rule": (RegimeRule, RegimeState),
}
"""The policy's class and the class of its state, by name."""

_PARTS = {
    "sleep": Sleep,
    "limits": Limits,
    "forecast": Forecast,
    "margins": Margins,
    "thresholds": RegimeThresholds,
}


def make(name: str, params: Mapping[str, Any]) -> ScalingPolicy:
    """Returns the policy `name` with these parameters; the parts (`limits`, `forecast`, and so on) are mappings. With
    the part `sleep`, which any policy may have, its fleet may sleep (`policies.scaling.sleep`).

    Raises BadParameter for an unknown name, an unknown parameter or a value out of range.
    """
    if name not in SCALING:
        raise BadParameter(f"no scaling policy is called {name!r}; there are: {', '.join(SCALING)}")
    kind = SCALING[name][0]
    known = {f.name for f in dataclasses.fields(kind)} | {"sleep"}
    made: dict[str, Any] = {}
    for key, value in params.items():
        if key not in known:
            raise BadParameter(
                f"scaling policy {name}: unknown parameter {key!r}; known are {', '.join(sorted(known))}"
            )
        part = _PARTS.get(key)
        if part is None:
            made[key] = value
            continue
        if not isinstance(value, Mapping):
            raise BadParameter(f"scaling policy {name}: {key} is {value!r}: give a mapping of its parameters")
        inside = {f.name for f in dataclasses.fields(part)}
        strange = sorted(set(value) - inside)
        if strange:
            raise BadParameter(
                f"scaling policy {name}: {key} has no parameter {strange[0]!r}; it has {', '.join(sorted(inside))}"
            )
        made[key] = part(**value)
    sleep: Sleep | None = made.pop("sleep", None)
    if sleep is None:
        return cast(ScalingPolicy, kind(**made))
    made["limits"] = awake_limits(made.get("limits", Limits()), sleep)
    return MaySleep(kind(**made), sleep)


def params_of(policy: ScalingPolicy) -> dict[str, Any]:
    """Returns all parameters of a policy as plain data, from which `make` makes it again."""
    if isinstance(policy, MaySleep):
        return params_of(policy.policy) | {"sleep": dataclasses.asdict(policy.sleep)}
    return dataclasses.asdict(cast(Any, policy))


def encoded_state(policy: ScalingPolicy, state: Any) -> Any:
    """Returns a state of the policy as plain data (`policies.journal.codec`)."""
    if isinstance(policy, MaySleep):
        inner = encoded_state(policy.policy, state.inner)
        return {"inner": inner, "asleep": state.asleep, "idle_since_s": state.idle_since_s}
    kind: Any = SCALING[policy.name][1]
    encode = encoder(kind)
    assert encode is not None
    return encode(state)


def decoded_state(policy: ScalingPolicy, plain: Any) -> Any:
    """Returns the state of the policy that `encoded_state` has encoded. Raises CodecError, KeyError or TypeError."""
    if isinstance(policy, MaySleep):
        inner = decoded_state(policy.policy, plain["inner"])
        return SleepState(inner, plain["asleep"], plain["idle_since_s"])
    kind: Any = SCALING[policy.name][1]
    decode = decoder(kind)
    assert decode is not None
    return decode(plain)
