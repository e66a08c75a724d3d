"""Prints the number of placement groups that a Ray cluster has, by the address of its control process (GCS).

    python -m benchmarks.chaos.placement HOST:PORT

It reads the cluster's table of them as a client of the GCS, and does not join the cluster. Ray keeps the rows of groups
that are removed; these do not count.
"""

import re
import sys

import psutil


def main() -> None:
    """Runs the command."""
    # part of Ray's own state API (`ray.util.state`), which needs Ray's dashboard
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    state._initialize_global_state(
        GcsClientOptions.create(sys.argv[1], None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
    )
    table = state.placement_group_table()
    print(sum(group["state"] != "REMOVED" for group in table.values()))


def gcs_of(root_pid: int) -> str | None:
    """Returns the address of the control process of the Ray below a process, from the command line of its raylet."""
    for process in psutil.Process(root_pid).children(recursive=True):
        try:
            found = re.search(r"--gcs-address=(\S+)", " ".join(process.cmdline()))
        except psutil.Error:
            continue
        if found:
            return found[1]
    return None


if __name__ == "__main__":
    main()
