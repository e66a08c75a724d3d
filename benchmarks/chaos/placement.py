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
    # Ray's public state API (`ray.util.state`) needs Ray's dashboard, which the application does not start
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]  # compiled

    # as `ray.init` does before it connects to a cluster
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
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
