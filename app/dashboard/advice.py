"""Warnings in words: what is wrong with the fleet now, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.dashboard.rings import Value

LEAST_ATTAINMENT = 0.9
"""Share of a class's objectives below which it is warned of. ASSUMPTION: service is worth a look when one in ten is
missed."""
MOST_KV = 0.95
"""Mean share of KV in use from which engines count as full."""
IDLE_LEASES_S = 60.0
"""Time after which leases without any request count as lost: that of two leases."""


@dataclass(slots=True)
class State:
    """The figures on which the warnings depend. Rates are per second; a figure that nobody knows is None."""

    connected: bool
    ingresses: int
    fallback: int
    detail: str | None
    engines: Mapping[str, Mapping[str, Any]]
    attainment: Mapping[str, Value] = field(default_factory=dict)
    errors_per_s: Value = None
    refused_per_s: Value = None
    transfer_failures_per_s: Value = None
    kv_usage: Value = None
    idle_leases_s: float = 0.0


def warnings(state: State) -> list[dict[str, str]]:
    """Returns the warnings of this state, errors first. Each has a level, a text, and what to do."""
    found: list[dict[str, str]] = []

    def warn(level: str, text: str, do: str) -> None:
        found.append({"level": level, "text": text, "do": do})

    if not state.ingresses:
        warn(
            "error",
            "No ingress reports to this dashboard.",
            "See whether the deployment Ingress runs (serve status).",
        )
    elif state.detail is not None:
        warn(
            "error",
            f"No request can be served: {state.detail}.",
            "See the states of engines below, and their logs.",
        )
    if not state.connected:
        warn(
            "error",
            "The router is not connected: figures of engines stand still.",
            "Serve starts it anew; if it does not come within a minute, read the log of the deployment Router.",
        )
    elif state.fallback:
        warn(
            "warn",
            f"{state.fallback} of {state.ingresses} ingresses decide alone, without the router.",
            "They go back to it as soon as it knows their engines; read the log of the deployment Ingress if not.",
        )
    _engines(state, warn)
    for name, share in sorted(state.attainment.items()):
        if share is not None and share < LEAST_ATTAINMENT:
            text = f"Only {share:.0%} of class {name} meet their objectives."
            warn("warn", text, "Add engines of the busier role, or choose another policy (Control).")
    _rates(state, warn)
    if state.kv_usage is not None and state.kv_usage > MOST_KV:
        text = f"KV memory is full: {state.kv_usage:.0%} in use on average."
        warn("warn", text, "Add decode engines, or give each more KV memory (kv_space_gib).")
    if state.idle_leases_s > IDLE_LEASES_S:
        text = "KV is held under leases although no request runs."
        warn(
            "warn",
            text,
            "It is freed when the leases end; if it stays, report it with the logs of the engines.",
        )
    found.sort(key=lambda one: one["level"] != "error")
    return found


def _engines(state: State, warn: Any) -> None:
    by_state: dict[str, list[str]] = {}
    for engine, one in state.engines.items():
        by_state.setdefault(one["state"], []).append(engine)
        if one["quarantine"]:
            by_state.setdefault("held", []).append(engine)
    if names := by_state.get("held"):
        warn(
            "warn",
            f"{_some(names)} {_is(names)} in quarantine, because of failures or slowness.",
            "They are tried again by themselves; the engine's log and its card say why.",
        )
    if names := by_state.get("stalled"):
        text = f"{_some(names)} {_is(names)} stalled: work is there and no step ends."
        warn(
            "error",
            text,
            "Their requests go elsewhere; read the engine's log, restart the replica if it stays.",
        )
    if names := by_state.get("down"):
        warn(
            "error",
            f"{_some(names)} {_is(names)} down.",
            "Serve replaces them; the log says what ended them.",
        )


def _rates(state: State, warn: Any) -> None:
    if state.errors_per_s:
        text = f"{state.errors_per_s:.2g} requests/s are refused or fail (429 and 5xx)."
        warn("warn", text, "docs/operations.md says what each code means; see Requests for examples.")
    if state.refused_per_s:
        text = f"The router rejects {state.refused_per_s:.2g} requests/s."
        warn("warn", text, "The queue is full, or waits are too long: add engines, or lower the load.")
    if state.transfer_failures_per_s:
        text = f"{state.transfer_failures_per_s:.2g} KV transfers/s fail; their prompts are computed again."
        warn("warn", text, "See the logs of the decode engines; look at the network between their nodes.")


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return (
        f"Engine {shown}"
        if len(names) == 1
        else f"{len(names)} engines ({shown}{', ...' if len(names) > 3 else ''})"
    )


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
