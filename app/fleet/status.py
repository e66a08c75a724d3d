"""Engines, load and flows as `/sluice/status` shows them: plain data that the SDK reads."""

from collections.abc import Iterable
from typing import Any

import msgspec

from actors.wire.messages import EngineInfo, FleetLoad, FlowAgentStatus, Quarantined, Standby, Status


def quarantined_by_engine(quarantined: Iterable[Quarantined]) -> dict[str, list[Quarantined]]:
    """Returns the quarantined workers by their engine's id."""
    held: dict[str, list[Quarantined]] = {}
    for one in quarantined:
        held.setdefault(one.engine_id, []).append(one)
    return held


def shown_sleep(standby: Standby) -> dict[str, Any]:
    """Returns the phase of engines that may sleep, and why they do not wake."""
    return {
        "phase": standby.phase,
        "wake_limit_s": standby.wake_limit_s,
        "reason": standby.reason or None,
    }


def shown_load(load: FleetLoad) -> dict[str, Any]:
    """Returns the load regime, the mean load score of each role, and the idle workers."""
    scores = {"prefill": load.prefill, "decode": load.decode}
    shown = {role: None if score is None else round(score, 4) for role, score in scores.items()}
    return {"regime": load.regime, **shown, "idle": list(load.idle)}


def shown_flow(agents: tuple[FlowAgentStatus, ...]) -> dict[str, Any]:
    """Returns the flow agents, and the sums of what they hold and have granted."""
    return {
        "policy": agents[0].policy,
        "held": sum(agent.held for agent in agents),
        "granted": sum(agent.granted for agent in agents),
        "agents": [
            {
                **msgspec.structs.asdict(agent),
                "unscheduled_share": round(agent.unscheduled_share, 4),
                "bytes_per_s": {port: round(value) for port, value in agent.bytes_per_s.items()},
            }
            for agent in agents
        ],
    }


def shown_engine(info: EngineInfo, status: Status | None, held: list[Quarantined]) -> dict[str, Any]:
    """Returns one engine with its last `status` and its quarantined workers (`held`); what is not known is null."""
    return {
        "id": info.id,
        "role": info.role,
        "kind": info.kind,
        "state": info.state,
        "duty": info.duty,
        "group": info.group,
        "node": info.node,
        "slots": info.slots,
        "kv_blocks_total": info.kv_blocks,
        "running": status.running if status else None,
        "waiting": status.waiting if status else None,
        "kv_blocks_used": status.kv_blocks_used if status else None,
        "kv_usage": status.kv_usage if status else None,
        "leases": status.leases if status else None,
        "quarantine": [
            {
                "rank": one.rank,
                "reason": one.reason,
                "for_s": round(one.for_s, 3),
                "probe_in_s": round(one.probe_in_s, 3),
                "probing": one.probing,
                "failure_rate": round(one.failure_rate, 4),
                "times": one.times,
            }
            for one in held
        ],
    }
