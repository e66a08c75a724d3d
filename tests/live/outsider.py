"""Somebody else at the Ray of a running app: reads Serve's replicas, and sets numbers of them.

    python -m tests.live.outsider RAY_ADDRESS

Each line of standard input is an order, and each answer is one line of JSON: `replicas DEPLOYMENT` is answered with
[{"id", "pid", "state"}], and `scale DEPLOYMENT NUMBER` with null.
"""

import json
import os
import sys
from typing import Any


def main(address: str) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.serve._private.common import DeploymentID
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    ray.init(address=address, namespace=SERVE_NAMESPACE, log_to_driver=False, _node_ip_address="127.0.0.1")
    for line in sys.stdin:
        what, deployment, *number = line.split()
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        answer: Any = None
        if what == "scale":
            own = DeploymentID(name=deployment, app_name="sluice")
            ray.get(controller.update_deployment_replicas.remote(own, int(number[0])), timeout=60)
        else:
            details = ray.get(controller.get_serve_instance_details.remote(), timeout=60)
            found = details["applications"]["sluice"]["deployments"][deployment]["replicas"]
            answer = [{"id": r["replica_id"], "pid": r.get("pid"), "state": str(r["state"])} for r in found]
        print(json.dumps(answer), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
