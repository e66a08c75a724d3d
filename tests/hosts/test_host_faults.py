"""Faults of one host that are not the network's, and the loss of the host that runs the router.

The worker has the router and an engine of each role; the head has the ingress and an engine of each role. The worker's
Python processes see a wall clock that the tests set (`clock`): the machine's clock stays as it is, and CLOCK_MONOTONIC
is everybody's, because no real clock of this kind ever jumps. Ray's own programs keep the machine's clock.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts.network import TMP_PATH, Host
from sluice import Sluice
from tests.hosts import clock
from tests.hosts.checks import (
    check_streams,
    grow,
    needs_hosts,
    streams_on_both,
    wait_back,
)
from tests.hosts.cluster import ADMIN_KEY, SPARE, Cluster, HostsApp, cluster, replica, small
from tests.hosts.load import load

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1200), needs_hosts]

CLIENTS, TOKENS = 12, 100
CLOCK = TMP_PATH / "clock"
DISK = TMP_PATH / "disk"
DISK_BYTES = 2**20
LIBRARY = TMP_PATH / clock.LIBRARY


def prepare(host: Host) -> Mapping[str, str]:
    """Gives the host a small disk for what the router writes, and its Python processes a clock that can be set."""
    host.run(["mkdir", str(DISK)])
    host.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "disk", str(DISK)])
    if shutil.which("cc") is None:
        return {}
    host.run(clock.compilation(LIBRARY))
    set_clock(host, 0)
    return clock.environment(LIBRARY, CLOCK)


def set_clock(host: Host, offset_s: int) -> None:
    """Sets the wall clock that the host's Python processes see, against the machine's."""
    # a host's files are reached through its first process
    clock.set_offset(Path(f"/proc/{host.pid}/root{CLOCK}"), offset_s)


def routed_away(args: dict[str, Any]) -> None:
    """The small application, whose router keeps a journal and an outcome log on the worker's small disk."""
    small(args)
    args["router"]["journal"] = {"folder": f"{DISK}/journal", "max_bytes": 2**16, "files": 2}
    args["router"]["predictor"] = {"enabled": True, "folder": f"{DISK}/outcomes", "log_file_bytes": 2**16}


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Cluster, HostsApp]]:
    head = {"ingress": 1.0, "prefill": 1.0, "decode": 1.0}
    worker = {"router": 1.0, "prefill": 1.0, "decode": 1.0}
    with cluster(routed_away, head, worker, prepare) as made:
        yield made


@contextlib.contextmanager
def full(host: Host, folder: Path) -> Iterator[None]:
    """Fills the disk of a folder up to its last byte for the time of a block."""
    filler = folder / "filler"
    host.run(["sh", "-c", f"dd if=/dev/zero of={filler} bs=4096 2>/dev/null; test -s {filler}"])
    try:
        yield
    finally:
        host.run(["rm", str(filler)])


@clock.needs_compiler
def test_a_clock_that_jumps_disturbs_nothing(running: tuple[Cluster, HostsApp]) -> None:
    cluster, app = running
    everyone = app.ready_engines()
    for deployment in ("Router", "PrefillEngine", "DecodeEngine"):
        maps = Path(f"/proc/{replica(app, cluster.away, deployment).pid}/maps").read_text()
        assert str(LIBRARY) in maps
        assert f"{CLOCK}\n" in maps
    missing = set()
    with load(app.url, CLIENTS, TOKENS) as streams:
        streams_on_both(app)
        for offset_s in (3600, -3600, 0):
            set_clock(cluster.away, offset_s)
            end_s = time.monotonic() + 5.0
            while time.monotonic() < end_s:
                missing |= everyone - app.ready_engines()
                time.sleep(0.2)
            with Sluice(base_url=app.url, admin_key=ADMIN_KEY) as client:
                answer = client.completions("what time is it", max_tokens=3)
                decided = [d.at_s for d in client.explain(answer.id).decisions]
            # the router counts on from the time at which it began
            assert all(abs(at_s - time.time()) < 600 for at_s in decided), (offset_s, decided)
        grow(app, streams, CLIENTS, "after the jumps")
    assert not missing
    check_streams(app, streams, "clock", TOKENS)


def test_a_full_disk_under_the_routers_logs_stops_no_request(running: tuple[Cluster, HostsApp]) -> None:
    cluster, app = running
    written, errors = (f"sluice_router_journal_{name}_total" for name in ("records_written", "write_errors"))
    before = app.metric(errors)
    with load(app.url, CLIENTS, TOKENS) as streams:
        with full(cluster.away, DISK):
            app.wait(lambda _: app.metric(errors) > before, "a write that fails")
            grow(app, streams, 2 * CLIENTS, "without room for the journal")
        at = app.metric(written)
        app.wait(lambda _: app.metric(written) > at, "the journal to go on")
    check_streams(app, streams, "disk", TOKENS)


def test_a_full_disk_under_rays_temporary_files_stops_no_request(running: tuple[Cluster, HostsApp]) -> None:
    cluster, app = running
    everyone = app.ready_engines()
    with load(app.url, CLIENTS, TOKENS) as streams, full(cluster.away, TMP_PATH):
        streams_on_both(app)
        grow(app, streams, 3 * CLIENTS, "without room for temporary files")
        assert app.ready_engines() == everyone
    check_streams(app, streams, "temporary files", TOKENS)


def test_requests_go_on_while_the_routers_host_cannot_be_reached(
    running: tuple[Cluster, HostsApp],
) -> None:
    cluster, app = running
    there = app.engines_on(cluster.away)
    with load(app.url, CLIENTS, TOKENS) as streams:
        streams_on_both(app)
        cluster.away.link("down")
        grow(app, streams, 2 * CLIENTS, "without the router and half of the engines")
        alone = app.status()["router"]
        cluster.away.link("up")
        app.wait(lambda s: s["router"]["connected"], "the router")
        wait_back(app, there)
        grow(app, streams, CLIENTS, "with the router again")
    assert alone["fallback"]
    check_streams(app, streams, "router's link down", TOKENS)


def test_a_host_that_is_gone_for_good_is_replaced(running: tuple[Cluster, HostsApp]) -> None:
    """The worker loses its power with router and engines; a spare host that joins Ray gets them."""
    cluster, app = running
    lost = app.engines_on(cluster.away)
    with load(app.url, CLIENTS, TOKENS) as streams:
        streams_on_both(app)
        cluster.away.off()
        grow(app, streams, 2 * CLIENTS, "on the one host that is left")
        began_s = time.monotonic()
        cluster.join(f"spare{len(cluster.rays)}", SPARE if cluster.away.address != SPARE else "10.77.0.4")
        try:
            app.wait(
                lambda s: s["router"]["connected"] and len(app.ready_engines() - lost) == 4,
                "router and engines on the spare host",
                timeout_s=420.0,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{cluster.logs()}") from None
        print(f"the spare host serves after {time.monotonic() - began_s:.0f} s")
        grow(app, streams, CLIENTS, "on the spare host, too")
    assert len(app.engines_on(cluster.away)) == 2
    check_streams(app, streams, "host lost", TOKENS)
