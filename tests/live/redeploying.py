"""Deploys Serve config files one after the other on a Ray of its own, as `serve deploy` does.

    python -m tests.live.redeploying HTTP_PORT FILE ...

`serve deploy` sends the file to Ray's dashboard, which calls the method of Serve's controller that is called here. For
each file, prints one line of JSON: the process ids of every deployment's replicas once all of them run.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from typing import Any

import yaml

TIMEOUT_S = 180.0


def replicas(client: Any, wanted: int) -> dict[str, list[int]]:
    """Process ids by deployment, once the application runs with `wanted` replicas and nothing stops any more."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        application = client.get_serve_details()["applications"]["sluice"]
        found = {name: one["replicas"] for name, one in application["deployments"].items()}
        every = [replica for one in found.values() for replica in one]
        if (
            application["status"] == "RUNNING"
            and len(every) == wanted
            and all(r["state"] == "RUNNING" for r in every)
        ):
            return {name: sorted(replica["pid"] for replica in one) for name, one in found.items()}
        if application["status"] == "DEPLOY_FAILED":
            raise RuntimeError(application["message"])
        time.sleep(0.2)
    raise TimeoutError(f"not running after {TIMEOUT_S} s: {application}")


def main(http_port: int, files: list[str]) -> None:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from app.config import parse

    with tempfile.TemporaryDirectory(prefix="sluice-ray-") as folder:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            namespace="serve",
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            object_store_memory=128 * 2**20,
        )
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": http_port})
            client = _get_global_client()
            for file in files:
                with open(file) as text:
                    schema = yaml.safe_load(text)
                schema["http_options"]["port"] = http_port
                config = parse(schema["applications"][0]["args"])
                # Ray waits for a minute, which a busy machine exceeds: `replicas` goes on waiting
                with contextlib.suppress(TimeoutError):
                    client.deploy_apps(ServeDeploySchema.model_validate(schema), _blocking=True)
                wanted = 1 + (config.ingress.replicas or 1) + sum(group.replicas for group in config.engines)
                print(json.dumps(replicas(client, wanted)), flush=True)
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
