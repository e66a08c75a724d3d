"""An administrator's questions and orders to the autoscaler, in JSON, and the answers.

    {}                                         the state: mode, groups, the last plan with its reasons and orders
    {"counts": {"decode": 3}}                  these numbers of serving replicas rule from now on
    {"mode": "auto"}                           the policy rules again
    {"bounds": {"decode": {"min": 1, "max": 4, "warm": 1, "warm_max": 2}}}
                                               these bounds of groups rule, some or all of the four keys
    {"counts": {..}, "plan": true}             the plan that these counts would make; nothing is changed
    {"bounds": {..}, "plan": true}             the plan that would be made within these bounds; nothing is changed
    {"plan": true}                             the plan of the policy, also while counts rule

Every answer with 200 has the form of `described`. Nothing here does I/O.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from actors.scaling.bounds import BadScale, bounds_of
from actors.scaling.control import Controller, Decision, FleetUnknown
from actors.scaling.fleet import group_of
from policies.journal.codec import CodecError, dumps, loads
from policies.scaling.observation import Duty
from policies.scaling.registry import params_of

log = logging.getLogger("ray.serve.autoscaler")

_KEYS = ("counts", "mode", "bounds", "plan")
_ORDERS = ("counts", "mode", "bounds")
"""The keys that change something, of which an order has one, so that each can be undone."""


def answer(controller: Controller, body: bytes, age_s: float | None) -> tuple[int, bytes, bool]:
    """Returns an HTTP status, the answer, and whether what rules has changed.

    `age_s` is the age of the last observation, None before the first. The answer is {"message"} for any status but 200.
    It never raises, since an error would end the connection to the router and every question with it.
    """
    try:
        return _answer(controller, body, age_s)
    except BadScale as error:
        return 400, _message(f"{error}; nothing was changed"), False
    except FleetUnknown as error:
        return 503, _message(f"{error}; nothing was changed: try again in a few seconds"), False
    except Exception as error:
        # a bug, of a policy perhaps
        log.exception("an administrator's question cannot be answered")
        return 500, _message(f"the autoscaler cannot answer this: {error!r}; its log says more"), False


def _message(text: str) -> bytes:
    return dumps({"message": text}).encode("ascii")


def _answer(controller: Controller, body: bytes, age_s: float | None) -> tuple[int, bytes, bool]:
    asked = _read(body)
    counts, bounds, only_plan = asked.get("counts"), asked.get("bounds"), asked.get("plan", False)
    changed = False
    if only_plan:
        made = controller.preview(counts, bounds)
    else:
        if counts is not None:
            controller.scale(counts)
            changed = True
        elif bounds is not None:
            controller.bound(bounds)
            changed = True
        elif asked.get("mode") == "auto":
            changed = controller.manual is not None
            controller.release()
        made = controller.last
    return 200, dumps(described(controller, made, age_s)).encode("ascii"), changed


def _read(body: bytes) -> Mapping[str, Any]:
    try:
        asked = loads(body.decode()) if body else {}
    except (CodecError, UnicodeDecodeError) as error:
        raise BadScale(f"the order is {error}") from None
    if not isinstance(asked, dict):
        raise BadScale("the order must be a JSON object")
    unknown = sorted(set(asked) - set(_KEYS))
    if unknown:
        raise BadScale(f"{unknown[0]!r} is not known; there are {', '.join(_KEYS)}")
    for key, example in (("counts", "{'decode': 3}"), ("bounds", "{'decode': {'max': 4}}")):
        value = asked.get(key)
        if value is not None and (not isinstance(value, dict) or not value):
            raise BadScale(f"{key} must be an object with at least one group, such as {example}")
    if asked.get("mode", "auto") != "auto":
        raise BadScale(f"mode is {asked['mode']!r}: it must be 'auto'; to set numbers, give counts")
    given = [key for key in _ORDERS if asked.get(key) is not None]
    if len(given) > 1:
        raise BadScale(
            f"{' and '.join(given)} exclude each other: one order at a time, so that each can be undone"
        )
    if not isinstance(asked.get("plan", False), bool):
        raise BadScale("plan must be true or false")
    return asked


def described(controller: Controller, made: Decision | None, age_s: float | None) -> dict[str, Any]:
    """Returns the state of the autoscaler and one decision as plain data."""
    manual = controller.manual
    return {
        "mode": "auto" if manual is None else "manual",
        "by": None if manual is None else manual.by,
        "policy": {"name": controller.policy.name, "params": params_of(controller.policy)},
        "observed_for_s": age_s,
        "phase": controller.phase.phase.value,
        "leads": None if made is None else asdict(made.seen.leads),
        "start_steps": None if controller.start_steps is None else asdict(controller.start_steps),
        "groups": _groups(controller),
        "held": None if made is None else made.held,
        "plan": None if made is None or made.plan is None else _plan(made),
        "reasons": [] if made is None else list(made.reasons),
        "notes": [] if made is None else list(made.orders.notes),
    }


def _plan(made: Decision) -> dict[str, Any]:
    assert made.plan is not None
    plan, orders = made.plan, made.orders
    return {
        "serving": plan.serving._asdict(),
        "warm": plan.warm,
        "moves": [{"way": m.way.value, "engine": m.engine, "role": m.role.value} for m in plan.moves],
        "engines": [
            {"engine": order.engine, "role": order.role.value, "duty": order.duty.value}
            for order in orders.engines
        ],
        "replicas": dict(orders.targets),
    }


def _groups(controller: Controller) -> list[dict[str, Any]]:
    fleet, last, manual = controller.fleet, controller.last, controller.manual
    found = []
    for name, group in controller.groups.items():
        engines = [e for e in last.seen.engines if group_of(e.engine) == name] if last is not None else []
        duties = {duty.value: sum(e.duty is duty for e in engines) for duty in Duty}
        found.append(
            {
                "name": name,
                "role": group.role.value,
                "min": group.least,
                "max": group.most,
                "keeps_warm": group.warm,
                "warm_max": group.warm_most,
                "configured": bounds_of(controller.configured[name]),
                "wanted": None if manual is None else manual.counts[name],
                "replicas": None if fleet is None else fleet.groups[name].target,
                **duties,
                "overdue": sum(group_of(engine) == name for engine in controller.overdue),
            }
        )
    return found
