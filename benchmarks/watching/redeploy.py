"""Deploys a Serve config file over the one that runs, so that only the deployments that differ start or end.

    python -m benchmarks.watching.redeploy --address HOST:PORT --config FILE --port PORT --http-port PORT

It joins the Ray of a running `app.serve` for a moment, and does what that program does at its start. Replicas whose
part of the file is the same stay.
"""

import argparse
import sys
from collections.abc import Sequence

from app.serve import load


def main(argv: Sequence[str] | None = None) -> int:
    """Deploys the file and returns 0 when everything in it runs."""
    parser = argparse.ArgumentParser(prog="benchmarks.watching.redeploy", description=__doc__)
    parser.add_argument("--address", required=True, help="of Ray's control process")
    parser.add_argument("--config", required=True)
    parser.add_argument("--port", type=int, required=True, help="that of the ingress")
    parser.add_argument("--http-port", type=int, required=True, help="that of Serve")
    args = parser.parse_args(argv)
    application = load(args.config, args.port, args.http_port)["applications"][0]
    import ray
    from ray import serve

    from app.graph import build

    ray.init(address=args.address, log_to_driver=False, namespace="serve")
    serve.run(
        build(application["args"]),
        name=application["name"],
        route_prefix=application["route_prefix"],
        external_scaler_enabled=True,
    )
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
