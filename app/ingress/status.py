"""`/sluice/status`: the fleet as this replica and the router's last report know it."""

from typing import Any

from actors.wire.messages import EngineInfo, Status
from app.ingress.hub import Hub
from app.ingress.job_parts import State
from app.ingress.open_requests import OpenRequests


def status_of(hub: Hub, requests: OpenRequests, transport: str) -> dict[str, Any]:
    """The JSON object that the SDK reads. A figure that nobody has reported yet is null."""
    infos, report = hub.engines(), hub.fleet_status
    statuses = {status.engine_id: status for status in report.statuses} if report else {}
    fleet = hub.fleet
    policy = {"prefill": fleet.prefill_policy, "decode": fleet.decode_policy} if fleet else None
    here = {state.value: 0 for state in State if state is not State.DONE}
    for job in hub.jobs.values():
        here[job.state.value] += 1
    return {
        "ready": not requests.draining and hub.ready() is None,
        "detail": hub.ready(),
        "model": hub.config.served_names[0],
        "transport": transport,
        "router": {
            "connected": hub.router_connected(),
            "policy": policy,
            "fallback": not hub.router_connected(),
        },
        "engines": [_engine(info, statuses.get(info.id)) for info in infos],
        "requests": {
            "in_flight": report.in_flight if report and hub.router_connected() else len(hub.jobs),
            "queued": report.queued if report and hub.router_connected() else here["submitted"],
            "pool": report.pool if report and hub.router_connected() else here["pooled"],
        },
        "leases": report.leases if report and hub.router_connected() else here["pooled"] + here["admitting"],
        "replica": {"id": hub.config.replica_id, "in_flight": len(requests), "jobs": here},
    }


def _engine(info: EngineInfo, status: Status | None) -> dict[str, Any]:
    return {
        "id": info.id,
        "role": info.role,
        "kind": info.kind,
        "state": info.state,
        "group": info.group,
        "node": info.node,
        "slots": info.slots,
        "kv_blocks_total": info.kv_blocks,
        "running": status.running if status else None,
        "waiting": status.waiting if status else None,
        "kv_blocks_used": status.kv_blocks_used if status else None,
        "kv_usage": status.kv_usage if status else None,
        "leases": status.leases if status else None,
    }
