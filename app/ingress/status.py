"""The answer to `/sluice/status`: the fleet as this replica and the router's last report know it."""

import os
from collections import Counter
from typing import Any

from app.fleet.status import quarantined_by_engine, shown_engine, shown_flow, shown_load, shown_sleep
from app.ingress.connections import IngressConnections
from app.ingress.open_requests import OpenRequests
from app.ingress.tenants.gate import Gate
from policies.request.stage import Stage


def status_of(
    connections: IngressConnections,
    requests: OpenRequests,
    transport: str,
    metrics_port: int | None,
    gate: Gate | None,
) -> dict[str, Any]:
    """Returns the JSON object that the SDK reads. A figure that nobody has reported yet is null."""
    infos, report = connections.engines(), connections.fleet_status
    statuses = {status.engine_id: status for status in report.statuses} if report else {}
    held = quarantined_by_engine(report.quarantined if report and not connections.decides_here() else ())
    fleet = connections.fleet
    policy = {"prefill": fleet.prefill_policy, "decode": fleet.decode_policy} if fleet else None
    here_decides = connections.decides_here()
    standby = connections.standby()
    here = {stage.value: 0 for stage in Stage if stage is not Stage.DONE}
    loans = Counter[tuple[str, str]]()
    for request in connections.live.values():
        here[request.stage.value] += 1
        if request.lender is not None and request.route is not None:
            loans[request.lender, request.route.engine_id] += 1
    return {
        "ready": not requests.draining and connections.ready() is None,
        "detail": connections.ready(),
        "model": connections.config.served_names[0],
        "transport": transport,
        **({"sleep": shown_sleep(standby)} if standby is not None and standby.wake_limit_s else {}),
        "router": {
            "connected": connections.router_connected(),
            "policy": policy,
            "fallback": connections.decides_here(),
        },
        **({"api_keys": gate.status()} if gate is not None else {}),
        "load": shown_load(report.load) if report and report.load and not here_decides else None,
        "engines": [shown_engine(info, statuses.get(info.id), held.get(info.id, [])) for info in infos],
        **({"flow": shown_flow(report.flows)} if report and report.flows and not here_decides else {}),
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
            "loans": [
                {"lender": lender, "borrower": borrower, "prompts": prompts}
                for (lender, borrower), prompts in sorted(loans.items())
            ],
        },
    }
