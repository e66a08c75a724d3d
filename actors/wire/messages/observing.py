"""Messages to and from an observer: a process that watches the fleet and serves no request (`app.dashboard`).

An observer is a peer of the router as an ingress is: it gets `Fleet` and `FleetStatus`, and may ask (`Admin`). It
owns no attempts, and is not counted among the ingresses. It listens at addresses of its own, which the router passes
on to the ingresses in `Fleet`. Each ingress connects there and pushes what it knows once a second. What an observer
does not read in time is dropped, so no request waits for one.
"""

from typing import Literal

from actors.telemetry.facts import Answered
from actors.wire.messages.base import Part, Wire


class ObserverInfo(Part, frozen=True):
    """An observer and the addresses at which it listens for ingresses (`unix:/path`, `tcp:host:port`)."""

    id: str
    addresses: tuple[str, ...]


class Observing(Wire, frozen=True):
    """Observer -> router, after each connect: ingresses reach the sender at `addresses`."""

    addresses: tuple[str, ...]


class PathSeen(Part, frozen=True):
    """The network between two nodes that have engines, as the router knows it; None: it does not know.

    `learnt_bytes_per_s` was estimated from transfers, and `configured_bytes_per_s` is the bandwidth of the pair's tier.
    """

    source: str
    target: str
    tier: int | None
    learnt_bytes_per_s: float | None
    configured_bytes_per_s: float | None


class PathsSeen(Wire, frozen=True):
    """Router -> observer, every few seconds: the network between the nodes over which KV may move."""

    paths: list[PathSeen]


class Figures(Part, frozen=True):
    """One metric of an ingress, with all its series as (values of the labels, numbers).

    A counter and a gauge have one number. A histogram has the sum of what was observed, and then the number of
    observations in each bucket, of which the last has no upper bound; the others have their upper bounds in `bounds`.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    series: list[tuple[tuple[str, ...], tuple[float, ...]]]


class Note(Part, frozen=True):
    """Something that happened at an ingress and that a person may want to see: a retry or a migration of a request.

    `engine` is the engine that failed, or None.
    """

    kind: Literal["retry", "migration"]
    ago_s: float
    text: str
    engine: str | None = None


class IngressObserved(Wire, frozen=True):
    """Ingress -> observer, once a second: what it counts, and what has happened since the last such message.

    `detail` says why no request can be served, and is None if one can. `now_s` is the present time on the clock of the
    `requests`. Of the requests that began in one period, only the first ones are kept; `dropped` counts requests and
    notes that had no room. `stages` are the attempts under way by their stage.
    """

    now_s: float
    model: str
    detail: str | None
    router_connected: bool
    decides_here: bool
    stages: dict[str, int]
    figures: list[Figures]
    requests: list[Answered]
    notes: list[Note]
    dropped: int = 0
