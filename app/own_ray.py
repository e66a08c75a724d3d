"""The Ray of `make serve`: a cluster of one node on 127.0.0.1 that belongs to this process, watched and mended.

Ray's control process (GCS) keeps its state on disk here. When it dies it is started again with that state, before the
other processes miss it: they leave after a minute without it. Engines, router and ingress go on meanwhile, since no
request passes through Ray. A cluster whose raylet has died cannot be mended, because the raylet is the parent of every
replica: what is left of it is ended, and this program starts over in the same process.
"""

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

START_ATTEMPTS = 3
WATCH_PERIOD_S = 0.5
GCS_ATTEMPTS = 3
GCS_START_S = 30.0
"""Seconds in which a GCS that is started again must take connections; Ray gives itself as long at its start.

The processes of Ray wait 60 s for it (`gcs_rpc_server_reconnect_timeout_s`).
"""
END_TIMEOUT_S = 20.0
"""Seconds that the processes of a broken cluster get to end by themselves before they are killed.

ASSUMPTION: workers notice a dead raylet within seconds; an engine's own processes need a few more.
"""
STORAGE_PATH = "RAY_gcs_storage_path"
"""Environment variable in which Ray finds the folder of the GCS's state."""
RESTARTS = "SLUICE_SERVE_RESTARTS"
"""Environment variable with the number of times that this program has started over."""


class OwnRay:
    """A Ray cluster that this process starts, mends and ends. `say` prints what happens.

    Nothing is mended once `stop` is set.
    """

    def __init__(self, say: Callable[[str], None], stop: threading.Event) -> None:
        self._say, self._stop = say, stop
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-ray-")
        self._gcs_folder = os.path.join(self._folder.name, "gcs")
        self._watch: threading.Thread | None = None
        self._unwatched = threading.Event()
        self.broken = False

    def start(self) -> None:
        """Starts the cluster and connects this process to it. Raises what Ray raises at the last attempt."""
        # Ray's embedded database needs no server beside Ray, unlike Redis.
        os.environ |= {"RAY_gcs_storage": "rocksdb", STORAGE_PATH: self._gcs_folder}
        import ray

        for attempt in range(START_ATTEMPTS):
            try:
                with _fewer_processes():
                    ray.init(
                        address="local",
                        include_dashboard=False,
                        log_to_driver=False,
                        namespace="serve",
                        _temp_dir=self._folder.name,
                        _node_ip_address="127.0.0.1",
                        object_store_memory=256 * 2**20,
                    )
                break
            except Exception as error:
                # Ray gives its GCS and its raylet 30 s each, which is too little on an overloaded machine.
                ray.shutdown()
                # what this attempt has started lives on, and its GCS would keep the database from the next one's
                self._end_members()
                if attempt == START_ATTEMPTS - 1 or "timed out" not in str(error).lower():
                    raise
                self._say("Ray did not start within 30 s; trying again")
        # A thread, because the main thread may wait for an answer that a broken cluster does not give.
        self._watch = threading.Thread(target=self._watching, name="watch of Ray", daemon=True)
        self._watch.start()

    def unwatch(self) -> None:
        """Waits until nothing is watched any more, which follows `stop`; a mend that has begun is completed first."""
        if self._watch is not None:
            self._unwatched.wait()

    def remove(self) -> None:
        """Removes the cluster's files."""
        self._folder.cleanup()

    def _watching(self) -> None:
        try:
            while not self._stop.wait(WATCH_PERIOD_S):
                if self._mend():
                    continue
                self.broken = True
                self._abandon()
                if not self._stop.is_set():
                    self._start_over()
        except Exception as error:
            self._say(f"Ray is not watched any more: {error!r}")
        self._unwatched.set()
        # The kernel ends a process of Ray's with the thread that started it, and the GCS may be this thread's.
        threading.Event().wait()

    def _mend(self) -> bool:
        """Starts the GCS again if it has died. Returns False if this cluster cannot be mended."""
        node = _node()
        dead = {name for name, _ in node.dead_processes()}
        if "raylet" in dead:
            self._say("Ray's raylet has died, and with it every replica")
            return False
        if "gcs_server" not in dead:
            return True
        self._say("Ray's GCS has died; serving goes on while it is started again with its state")
        began_s = time.monotonic()
        for _ in range(GCS_ATTEMPTS):
            try:
                node.kill_gcs_server(check_alive=False)
                node.start_gcs_server()
            except Exception as error:
                self._say(f"the GCS does not start: {error}")
                continue
            if self._takes_connections(node):
                self._say(
                    f"Ray's GCS is back after {time.monotonic() - began_s:.1f} s; no replica was restarted"
                )
                return True
        self._say("Ray's GCS cannot be started again")
        return False

    def _takes_connections(self, node: Any) -> bool:
        host, _, port = node.gcs_address.rpartition(":")
        deadline_s = time.monotonic() + GCS_START_S
        while time.monotonic() < deadline_s:
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
            except OSError:
                if any(name == "gcs_server" for name, _ in node.dead_processes()):
                    return False
                time.sleep(0.05)
            else:
                return True
        return False

    def _abandon(self) -> None:
        """Ends every process of a cluster that cannot be mended, by process id, and removes its files."""
        self._say("ending what is left of this Ray")
        _node().kill_all_processes(check_alive=False, allow_graceful=False)
        psutil.wait_procs(list(self._members()), timeout=END_TIMEOUT_S)
        self._end_members()
        self.remove()

    def _end_members(self) -> None:
        """Kills what there is of this cluster, by process id."""
        left = list(self._members())
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=END_TIMEOUT_S)

    def _members(self) -> Iterator[psutil.Process]:
        """Yields this cluster's processes, also those whose parents have died: all inherit the name of its folder."""
        for process in psutil.process_iter():
            try:
                folder = process.environ().get(STORAGE_PATH)
            except psutil.Error:  # ended, or another user's
                continue
            if folder == self._gcs_folder and process.pid != os.getpid():
                yield process

    def _start_over(self) -> None:
        """Replaces this program by a fresh start of the same command line, in the same process."""
        self._say("starting over")
        os.environ[RESTARTS] = str(restarts() + 1)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextmanager
def _fewer_processes() -> Iterator[None]:
    """Lets a Ray that starts meanwhile do without three processes, which cost seconds: the autoscaler of nodes, which
    has no node to add here, the forwarder of logs to this process, which `log_to_driver` turns off, and the server of
    Ray's dashboard, which `include_dashboard` leaves without a dashboard.
    """
    from ray._private import node

    class Lean(node.Node):
        def start_monitor(self) -> None:
            pass

        def start_log_monitor(self) -> None:
            pass

        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

    whole = node.Node
    node.Node = Lean
    try:
        yield
    finally:
        node.Node = whole


def restarts() -> int:
    """Returns how often this program has started over."""
    return int(os.environ.get(RESTARTS, "0"))


def _node() -> Any:
    from ray._private import worker

    return worker._global_node
