"""What an administrator may ask: the routing policies, a change of them, and why a request was routed as it was.

The server wants an admin key for it (SLUICE_ADMIN_KEY here), unless it runs on this machine without any key configured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pydantic import Field

from .core import Call, Settings
from .types import Result


class Policy(Result):
    """A routing policy: its registered name, all its parameters, and its formula in their names."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    formula: str = ""


class Available(Result):
    """The policies that there are, by name, with their default parameters."""

    prefill: dict[str, Policy] = Field(default_factory=dict)
    decode: dict[str, Policy] = Field(default_factory=dict)


class Policies(Result):
    """The policies in use, and the dispatcher's limits (`dispatch`)."""

    prefill: Policy
    decode: Policy
    dispatch: dict[str, Any] = Field(default_factory=dict)
    available: Available = Field(default_factory=Available)


class Ranked(Result):
    """One candidate with its cost (the least is the best) and the terms that the cost is made of."""

    worker: str
    cost: float
    terms: dict[str, float] = Field(default_factory=dict)


class Choice(Result):
    """The chosen worker, the ranking (best first), and why it was this one."""

    worker: str
    reason: str
    ranking: list[Ranked] = Field(default_factory=list)


class Decision(Result):
    """One step of a request's way. `action`: RoutePrefill, RouteDecode or Reject; `at_s` in seconds since 1970.

    `decision` and `policy` belong to the first two, `status` and `reject_reason` to the last. `waited_s`: in the
    queue before a prefill, in the pool before a decode.
    """

    attempt_id: str
    action: str
    at_s: float
    decision: Choice | None = None
    policy: Policy | None = None
    waited_s: float | None = None
    colocated: bool = False
    degraded: bool = False
    status: int | None = None
    reject_reason: str | None = Field(None, alias="reason")
    retry_after_s: float | None = None


class Explanation(Result):
    """All decisions made for a request, oldest first; attempts and prompts of one request have a `attempt_id` each."""

    id: str
    decisions: list[Decision] = Field(default_factory=list)


def policy_call(settings: Settings) -> Call:
    """GET the policies."""
    return Call("GET", "/sluice/admin/policy", headers=_key(settings))


def set_policy_call(
    settings: Settings,
    prefill: str | None,
    decode: str | None,
    prefill_params: Mapping[str, Any] | None,
    decode_params: Mapping[str, Any] | None,
    dispatch: Mapping[str, Any] | None,
) -> Call:
    """PUT a change of policies. Raises ValueError for parameters without a policy, or no change at all."""
    body: dict[str, Any] = {}
    for stage, name, params in (("prefill", prefill, prefill_params), ("decode", decode, decode_params)):
        if name is not None:
            body[stage] = {"name": name, "params": dict(params or {})}
        elif params:
            raise ValueError(
                f"{stage}_params need {stage}=NAME: parameters that are not given take their defaults"
            )
    if dispatch:
        body["dispatch"] = dict(dispatch)
    if not body:
        raise ValueError("nothing to change: give prefill, decode or dispatch")
    return Call("PUT", "/sluice/admin/policy", body=json.dumps(body).encode(), headers=_key(settings))


def explain_call(settings: Settings, request_id: str) -> Call:
    """GET the decisions of a request."""
    return Call("GET", f"/sluice/admin/explain/{quote(request_id, safe='')}", headers=_key(settings))


def _key(settings: Settings) -> dict[str, str]:
    return {} if settings.admin_key is None else {"authorization": f"Bearer {settings.admin_key}"}
