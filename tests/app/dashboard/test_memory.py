"""All that the dashboard keeps is bounded and small, with 64 engines under load for longer than it remembers.

Its imports are bounded, too.
"""

import gc
import subprocess
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import msgspec
import pytest

from actors.wire.frames import DECODER, ENCODER
from app.dashboard.feed import MOST_EVENTS, Feed
from app.dashboard.ingresses import WINDOW_S
from app.dashboard.requests import REMEMBERED, SHOWN
from app.dashboard.rings import KEEP
from app.dashboard.stream import KEEP_BYTES, KEEP_S, Stream
from tests.app.dashboard.parts import (
    SLO,
    answered,
    engine,
    fleet,
    moved,
    observed,
    report,
    requests_total,
    status,
)

T = 1_700_000_000.0
PREFILL, DECODE = 24, 40
PER_S = 8
"""Requests that end in a second: more in all than are remembered."""


def received(message: Any) -> Any:
    """A message as it comes over the wire, with strings and numbers of its own."""
    (came,) = DECODER.decode(ENCODER.encode([message]))
    return came


def held_bytes(*roots: object) -> int:
    """The bytes of all objects that can be reached from these, but for classes, functions and modules."""
    seen: set[int] = set()
    stack, total = list(roots), 0
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, type | FunctionType | BuiltinFunctionType | ModuleType):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        # the garbage collector does not look into structs that it need not free
        own = one.__struct_fields__ if isinstance(one, msgspec.Struct) else ()
        stack += [*gc.get_referents(one), *(getattr(one, name) for name in own)]
    return total


class Busy:
    """A dashboard of 64 engines that learns something new each second."""

    def __init__(self) -> None:
        self.feed = Feed(SLO)
        self.stream = Stream(self.feed.snapshot)
        self.engines = [f"prefill-{n}" for n in range(PREFILL)] + [f"decode-{n}" for n in range(DECODE)]
        self.second = 0
        self.feed.router_up(T)
        infos = [
            engine(name, name.partition("-")[0], node=f"node-{n % 16}") for n, name in enumerate(self.engines)
        ]
        self.feed.fleet_is(received(fleet(*infos)))

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second += 1
            self._second(self.second)

    def _second(self, second: int) -> None:
        at_s = T + second
        busy = [
            report(name, (n + second) % 8, decode_tokens=100.0 * second + n, transfer_bytes=1e6 * second)
            for n, name in enumerate(self.engines)
        ]
        self.feed.status_is(received(status(*busy)), at_s)
        ended = [
            answered(
                f"{second}-{n}", float(second), trace_id=f"{second:032x}", shown_id=f"req-{second:016x}{n}"
            )
            for n in range(PER_S)
        ]
        figures = [requests_total(PER_S * second), *moved(PER_S * second, 3e6 * PER_S * second)]
        self.feed.observed("ingress-0", received(observed(float(second), *figures, requests=ended)), at_s)
        self.stream.add(self.feed.tick(at_s))


@pytest.fixture(scope="module")
def full() -> Busy:
    busy = Busy()
    busy.run(KEEP + KEEP_S)
    return busy


def test_every_list_has_a_bound(full: Busy) -> None:
    feed, stream = full.feed, full.stream
    snapshot = feed.snapshot()
    assert {len(values) for values in snapshot["series"].values()} == {KEEP}
    assert len(feed.requests._known) == REMEMBERED
    # the client's id and one attempt
    assert len(feed.requests._names) == 2 * REMEMBERED
    assert [len(snapshot["requests"][name]) for name in ("latest", "worst")] == [SHOWN, SHOWN]
    assert len(snapshot["events"]) <= MOST_EVENTS
    assert len(feed.requests._new) == 0
    for window in (feed.ingresses._ended, feed._transfers._timed):
        assert len(window) <= PER_S * (WINDOW_S + 1)
    assert len(stream._deltas) <= KEEP_S
    assert sum(len(data) for _, data in stream._deltas) == stream._kept_bytes <= KEEP_BYTES


def test_what_is_kept_of_64_engines_is_small_and_does_not_grow(full: Busy) -> None:
    before = held_bytes(full.feed, full.stream)
    assert before < 7_500_000
    full.run(120)
    assert held_bytes(full.feed, full.stream) < 1.02 * before


def test_a_request_is_found_as_it_was_told_until_it_is_the_oldest(full: Busy) -> None:
    feed = full.feed
    latest = feed.requests.latest()[0]
    assert feed.requests.find(latest["id"]) == feed.requests.find(latest["attempts"][0]) == latest
    gone = f"req-{full.second - REMEMBERED // PER_S:016x}{PER_S - 1}"
    assert feed.requests.find(gone) is None
    assert feed.requests.find(f"req-{full.second - REMEMBERED // PER_S + 1:016x}0") is not None


def test_its_process_loads_nothing_that_it_does_not_need() -> None:
    """Ray Serve loads OpenTelemetry's SDK and numpy itself where they are installed; here is what would come on top."""
    unwanted = {
        "numba", "numpy", "pandas", "scipy", "sklearn", "lightgbm", "torch", "vllm", "transformers", "yaml",
        "predictors", "policies.dispatch", "policies.journal", "policies.routing.registry", "policies.scaling.registry",
        "actors.engine", "actors.flow", "actors.router", "actors.telemetry.export", "app.config", "app.groups",
        "app.ingress", "app.prewarmed", "app.replicas", "sluice", "benchmarks",
    }  # fmt: skip
    code = (
        "import sys, ray; before = set(sys.modules); import app.dashboard.replica;"
        f"print(sorted({unwanted} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
