"""A measurement of the simulator's speed: `python -m benchmarks.sim.speed [--traces DIR]`.

It simulates the Mooncake conversation trace at 6.09 requests/s on NetKV's 64-GPU cluster under NetKV-Full, with the
network and the trace's own prefixes (hash_ids). It runs the first eighth, quarter and half of the trace, then all of
it. The simulator is fast enough while the whole trace takes at most 60 s of one core and 2 GiB, and while the cost of
an event does not grow with the trace. The table that it prints is kept nowhere.
"""

import argparse
import os
import resource
import time
from collections.abc import Sequence

from benchmarks.experiments import netkv_common as netkv
from benchmarks.sim.cluster import simulate


def measure(requests: int) -> tuple[float, int, float]:
    """Simulates the trace's first `requests`.

    Returns (CPU seconds, kernel events, peak memory of this process so far in MiB).
    """
    config = netkv.config("conversation", "NetKV-Full", whole=True)
    work = netkv.requests(config, 0)[:requests]
    begin_s = time.process_time()
    result = simulate(netkv.sim_config(config, 0), work)
    spent_s = time.process_time() - begin_s
    return spent_s, result.kernel_events, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", help="folder of the published traces (default: SLUICE_TRACES)")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="of the largest run (default: all of the trace)"
    )
    args = parser.parse_args(argv)
    if args.traces:
        os.environ["SLUICE_TRACES"] = args.traces
    config = netkv.config("conversation", "NetKV-Full", whole=True)
    rows = len(netkv.requests(config, 0))
    most = rows if args.requests is None else min(args.requests, rows)
    print(f"requests   CPU s    events   us/event   peak MiB   ({config['trace']})")
    for requests in (most // 8, most // 4, most // 2, most):
        spent_s, events, peak_mib = measure(requests)
        print(
            f"{requests:8d} {spent_s:7.1f} {events:9d} {1e6 * spent_s / events:10.1f} {peak_mib:10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
