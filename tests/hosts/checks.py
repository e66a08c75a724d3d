"""Checks of all tests on hosts: hosts can be made here, work goes on, texts are right, nothing is left."""

import pytest

from benchmarks.hosts.network import why_not
from tests.hosts.cluster import HostsApp
from tests.hosts.load import Load, undisturbed
from tests.hosts.rayless import RaylessApp

_REASON = why_not()
needs_hosts = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

WAIT_S = 8.0
"""Longest wait for a token that a host without an answer may cause, in time for which the clients ran.

It consists of up to 4 s until a link counts as silent, 2 s until the answer goes on elsewhere (6 s are the aim), and
2 s for a slow machine. Without heartbeats a stream waits for as long as the host is away, and then for TCP's next
repetition.
"""


def grow(app: HostsApp | RaylessApp, streams: Load, by: int, what: str) -> None:
    """Waits until `by` more requests, all begun from now on, were answered well."""
    began_s = streams.clock.now_s
    app.wait(lambda _: streams.done_since(began_s) >= by, f"{by} answers {what}")


def streams_on_both(app: HostsApp | RaylessApp) -> None:
    """Waits until every decode engine runs a stream."""
    app.wait(lambda s: all(e["running"] for e in s["engines"] if e["role"] == "decode"), "streams everywhere")


def wait_back(app: HostsApp | RaylessApp, engines: set[str]) -> None:
    """Waits until these engines are ready again: the same processes, not replacements."""
    app.wait(lambda _: app.ready_engines() >= engines, f"{engines} again")


def check_streams(app: HostsApp | RaylessApp, streams: Load, what: str, tokens: int) -> None:
    """No stream failed or waited for long, every text is whole, and in the end nothing is held anywhere."""
    print(f"{what}: {len(streams.answers)} streams, the longest wait {streams.longest_wait_s():.2f} s")
    assert not streams.failed(), streams.failed()[:3]
    assert streams.longest_wait_s() < WAIT_S
    check_texts(app, streams, tokens)
    app.wait_idle()


def check_texts(app: HostsApp | RaylessApp, streams: Load, tokens: int) -> None:
    """Every answer is the one that an undisturbed application gives: no token is lost, doubled or another's."""
    wanted = undisturbed(app.url, [a.prompt for a in streams.answers], tokens)
    wrong = [a for a in streams.answers if a.text != wanted[a.prompt]]
    assert not wrong, (wrong[:2], [wanted[a.prompt] for a in wrong[:2]])
