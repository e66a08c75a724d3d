"""Sets a number of replicas past the autoscaler, as somebody else who reaches Serve's controller may.

    python -m tests.live.outside ADDRESS DEPLOYMENT NUMBER

ADDRESS is that of the control process of the application's Ray.
"""

import sys

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE


def main(address: str, deployment: str, number: int) -> None:
    ray.init(address=address, log_to_driver=False, namespace=SERVE_NAMESPACE)
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, "sluice"), number))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
