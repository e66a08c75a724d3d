"""The answer to `/sluice/status`: the fleet as this replica and the router's last report know it."""

import os
from typing import Any

import msgspec

from actors.wire.messages import EngineInfo, FleetLoad, FlowAgentStatus, Quarantined, Standby, Status
from app.ingress.connections import IngressConnections
from app.ingress.open_requests import OpenRequests
from policies.request.stage import Stage


def status_of(
    connections: IngressConnections, requests: OpenRequests, transport: str, metrics_port: int | None
) -> dict[str, Any]:
    """Returns the JSON object that the SDK reads. A figure that nobody has reported yet is null."""
    infos, report = connections.engines(), connections.fleet_status
    statuses = {status.engine_id: status for status in report.statuses} if report else {}
    held: dict[str, list[Quarantined]] = {}
    for quarantined in report.quarantined if report and not connections.decides_here() else []:
        held.setdefault(quarantined.engine_id, []).append(quarantined)
    fleet = connections.fleet
    policy = {"prefill": fleet.prefill_policy, "decode": fleet.decode_policy} if fleet else None
    here_decides = connections.decides_here()
    standby = connections.standby()
    here = {stage.value: 0 for stage in Stage if stage is not Stage.DONE}
    for request in connections.live.values():
        here[request.stage.value] += 1
    return {
        "ready": not requests.draining and connections.ready() is None,
        "detail": connections.ready(),
        "model": connections.config.served_names[0],
        "transport": transport,
        **({"sleep": _sleep(standby)} if standby is not None and standby.wake_limit_s else {}),
        "router": {
            "connected": connections.router_connected(),
            "policy": policy,
            "fallback": connections.decides_here(),
        },
        "load": _load(report.load) if report and report.load and not here_decides else None,
        "engines": [_engine(info, statuses.get(info.id), held.get(info.id, [])) for info in infos],
        **({"flow": _flow(report.flows)} if report and report.flows and not here_decides else {}),
        "requests": {
            "in_flight": report.in_flight if report and not here_decides else len(connections.live),
            "queued": report.queued if report and not here_decides else here["queued"],
            "pool": report.pool if report and not here_decides else here["pooled"],
        },
        "leases": report.leases if report and not here_decides else here["pooled"] + here["transferring"],
        "replica": {
            "id": connections.config.replica_id,
            "pid": os.getpid(),
            "metrics_port": metrics_port,
            "in_flight": len(requests),
            "stages": here,
        },
    }


def _sleep(standby: Standby) -> dict[str, Any]:
    """Returns the phase of engines that may sleep, and why they do not wake."""
    return {
        "phase": standby.phase,
        "wake_limit_s": standby.wake_limit_s,
        "reason": standby.reason or None,
    }


def _load(load: FleetLoad) -> dict[str, Any]:
    scores = {"prefill": load.prefill, "decode": load.decode}
    shown = {role: None if score is None else round(score, 4) for role, score in scores.items()}
    return {"regime": load.regime, **shown, "idle": list(load.idle)}


def _flow(agents: tuple[FlowAgentStatus, ...]) -> dict[str, Any]:
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


def _engine(info: EngineInfo, status: Status | None, held: list[Quarantined]) -> dict[str, Any]:
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
