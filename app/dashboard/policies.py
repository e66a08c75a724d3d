"""The policies, limits and settings of scaling that rule now, as router and autoscaler tell them, and in words what has
changed in them.

A change is seen whoever made it: a page, the SDK, a command, an experiment, or a router that has started anew with what
its configuration says.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from app.dashboard.changes import STAGES
from app.dashboard.engines import Happened

MOST_VALUE, MOST_TEXT = 40, 400
"""Most characters of one parameter's value, and of the text of a change; a heatmap has many thousands."""
BY_HAND = "by hand"
"""The name of the rule by which an administrator's numbers hold in place of a scaling policy's."""

_LIMITS = ("step", "budget")
"""The limits of a scaling policy that no group has; the others are the bounds of groups, which are told by group."""


class Rule(NamedTuple):
    """The rule of one part of the application: the name of a policy ("": the part has limits only) and its parameters.
    Where another name takes its place, only the `told` ones are shown beside it.
    """

    name: str
    params: Mapping[str, Any]
    told: Mapping[str, Any]


class Policies:
    """The rule of each part, as it was told last."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def router(self, answer: Mapping[str, Any]) -> list[Happened]:
        """Takes in the router's answer about its policies, and returns an event for each part that has changed."""
        return self._changed(dict(_of_router(answer)))

    def autoscaler(self, answer: Mapping[str, Any]) -> list[Happened]:
        """Takes in the autoscaler's answer about its state, and returns an event for each part that has changed."""
        return self._changed(dict(_of_autoscaler(answer)))

    def _changed(self, rules: Mapping[str, Rule]) -> list[Happened]:
        """Returns the events. A part that was never told before has not changed."""
        texts = [_words(part, self._rules.get(part, rule), rule) for part, rule in rules.items()]
        self._rules |= rules
        return [Happened("policy", text) for text in texts if text is not None]


def _of_router(answer: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    """Yields what rules at the router by part. KV transfers have no policy without agents, which may come later."""
    available = answer.get("available") or {}
    for stage in STAGES:
        policy = answer.get(stage)
        if policy is None:
            continue
        default = _flat(available.get(stage, {}).get(policy["name"], {}).get("params", {}))
        params = _flat(policy["params"])
        told = {key: value for key, value in params.items() if key not in default or default[key] != value}
        yield f"{stage} policy", Rule(policy["name"], params, told)
    if answer.get("dispatch"):
        yield "dispatch", Rule("", _flat(answer["dispatch"]), {})


def _of_autoscaler(answer: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    """Yields what rules the numbers of engines, and the bounds of each group."""
    groups, policy = answer.get("groups") or (), answer.get("policy")
    if answer.get("mode") == "manual":
        counts = {group["name"]: group["wanted"] for group in groups}
        yield "scaling", Rule(BY_HAND, counts, counts)
    elif policy is not None:
        limits = policy["params"].get("limits") or {}
        own = {"limits": {name: limits[name] for name in _LIMITS if name in limits}}
        yield "scaling", Rule(policy["name"], _flat({**policy["params"], **own}), {})
    for group in groups:
        bounds = {
            "min": group["min"], "max": group["max"], "warm": group["keeps_warm"], "warm_max": group["warm_max"],
        }  # fmt: skip
        yield f"bounds of {group['name']}", Rule("", bounds, {})


def _flat(params: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns nested parameters by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def _words(part: str, was: Rule, now: Rule) -> str | None:
    """Returns a change in words, with parameters before and after; None where nothing has changed."""
    if was.name != now.name:
        return _cut(f"{part}: {_named(was)} -> {_named(now)}")
    changes = [
        _change(name, was.params, value)
        for name, value in now.params.items()
        if name not in was.params or was.params[name] != value
    ]
    if not changes:
        return None
    told = ", ".join(changes)
    return _cut(f"{part}: {now.name} ({told})" if now.name else f"{part}: {told}")


def _named(rule: Rule) -> str:
    told = ", ".join(f"{name} {_value(value)}" for name, value in rule.told.items())
    return f"{rule.name} ({told})" if told else rule.name


def _change(name: str, was: Mapping[str, Any], value: Any) -> str:
    now = _value(value)
    return f"{name} {_value(was[name])} -> {now}" if name in was else f"{name} {now}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= MOST_VALUE else f"of {len(text)} characters"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
