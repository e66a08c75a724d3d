"""Sets numbers of replicas past the autoscaler, as somebody else who reaches Serve's controller may.

    python -m tests.live.outside ADDRESS

ADDRESS is that of the control process of the application's Ray. The program prints `ready` once it has joined that Ray.
Then each line of its input, `DEPLOYMENT NUMBER`, is one call, after which it prints `done`.
"""

import sys

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE


def main(address: str) -> None:
    ray.init(address=address, log_to_driver=False, namespace=SERVE_NAMESPACE)
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    print("ready", flush=True)
    for line in sys.stdin:
        deployment, number = line.split()
        changed = controller.update_deployment_replicas.remote(
            DeploymentID(deployment, "sluice"), int(number)
        )
        ray.get(changed)
        print("done", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
