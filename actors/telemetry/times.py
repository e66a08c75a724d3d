"""The way of one attempt, hop by hop: each process says when it did what, and `hops` makes the waterfall of it.

Only requests whose client asked for it (header `x-sluice-times`) and those whose trace is sampled are followed. Their
messages carry `trace`, by which router and engines know them; of others nothing is noted.

    arrived - parsed - tokenised - submitted                    ingress
      received - begun - decided                                router: queue, choice of the prefill engine
        received - admitted - computed - sent                   prefill engine
      pooled                                                    ingress
      reported - begun - decided                                router: pool, choice of the decode engine
        received - reading - admitted - step - first            decode engine
      first - written                                           ingress

Times are those of the machine's monotonic clock, which all processes of one machine share. Those of another machine are
moved to the middle between the messages to it and from it, as NTP does: sums of hops stay true, and the way there and
the way back count as equally long.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from policies.request.life import Times

Side = Literal["ingress", "router", "prefill", "decode"]
Kind = Literal["work", "wait", "wire"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _clock_id() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


CLOCK = _clock_id()
"""The name of this machine's monotonic clock: processes that have the same name read the same clock. "" is unknown."""


class Stamps(NamedTuple):
    """The moments `at_s` of one attempt at one process, by name, in seconds of the clock named `clock`."""

    process: str
    side: Side
    clock: str
    at_s: dict[str, float]


class Hop(NamedTuple):
    """One part of an attempt's way at or to a process. Times are seconds since the request's arrival.

    A "work" hop is computing, a "wait" hop a queue, and a "wire" hop lies between two processes: sockets, and the
    event loops at both ends, which have other work before it.
    """

    name: str
    process: str
    kind: Kind
    since_s: float
    until_s: float


class _Point(NamedTuple):
    """A moment on the way, and the name and kind of the hop that ends there."""

    side: Side
    moment: str
    name: str
    kind: Kind


_WAY: tuple[_Point, ...] = (
    _Point("ingress", "arrived", "", "work"),
    _Point("ingress", "parsed", "parse", "work"),
    _Point("ingress", "tokenised", "tokenise", "work"),
    _Point("ingress", "submitted", "submit", "work"),
    _Point("router", "received", "to the router", "wire"),
    _Point("router", "begun", "queue", "wait"),
    _Point("router", "decided", "decide prefill", "work"),
    _Point("ingress", "routed", "from the router", "wire"),
    _Point("prefill", "received", "to the prefill engine", "wire"),
    _Point("prefill", "admitted", "wait for a slot", "wait"),
    _Point("prefill", "computed", "prefill", "work"),
    _Point("prefill", "sent", "report", "work"),
    _Point("ingress", "pooled", "from the prefill engine", "wire"),
    _Point("router", "reported", "to the router", "wire"),
    _Point("router", "decode_begun", "pool", "wait"),
    _Point("router", "decode_decided", "decide decode", "work"),
    _Point("ingress", "decode_routed", "from the router", "wire"),
    _Point("decode", "received", "to the decode engine", "wire"),
    _Point("decode", "reading", "wait for a slot", "wait"),
    _Point("decode", "admitted", "transfer", "work"),
    _Point("decode", "step", "wait for a step", "wait"),
    _Point("decode", "first", "step", "work"),
    _Point("ingress", "first", "from the decode engine", "wire"),
    _Point("ingress", "written", "write", "work"),
)

_WINDOW: dict[Side, tuple[tuple[str, str], ...]] = {
    "router": (("submitted", "routed"), ("pooled", "decode_routed")),
    "prefill": (("routed", "pooled"),),
    "decode": (("decode_routed", "first"), ("routed", "first")),
}
"""Moments at the ingress between which a process did its part: its message left, and the answer came."""


def at_ingress(process: str, arrived_s: float, noted: Mapping[str, float], times: Times) -> Stamps:
    """Returns an attempt's moments at its ingress: those of its stages, and what the ingress `noted` of the request."""
    reached = {
        "submitted": times.submitted_s,
        "routed": times.routed_s,
        "pooled": times.pooled_s,
        "decode_routed": times.decode_routed_s,
        "first": times.attempt_first_s,
    }
    at_s = {"arrived": arrived_s, **noted}
    return Stamps(process, "ingress", CLOCK, at_s | {name: s for name, s in reached.items() if s is not None})


def hops(told: Sequence[Stamps]) -> list[Hop]:
    """Returns the way of an attempt from its stamps, those of the ingress among them, as far as it came.

    Hops follow one another without gaps. A moment that nobody told joins the hop before it and the one behind it, which
    then has the later one's name. The list is empty without the ingress's own stamps.
    """
    own = next((one for one in told if one.side == "ingress"), None)
    if own is None or "arrived" not in own.at_s:
        return []
    moments = {("ingress", name): at_s for name, at_s in own.at_s.items()}
    processes = {"ingress": own.process}
    for one in told:
        if one.side != "ingress":
            processes[one.side] = one.process
            moments |= {(one.side, name): at_s for name, at_s in _placed(one, own).items()}
    is_read = ("decode", "reading") in moments
    start_s = last_s = own.at_s["arrived"]
    found: list[Hop] = []
    for point in _WAY[1:]:
        at_s = moments.get((point.side, point.moment))
        if at_s is None:
            continue
        at_s = max(at_s, last_s)
        name, kind = point.name, point.kind
        if point.moment == "admitted" and point.side == "decode" and not is_read:
            # without a transfer, admission ends the wait
            name, kind = "wait for a slot", "wait"
        found.append(Hop(name, processes[point.side], kind, last_s - start_s, at_s - start_s))
        last_s = at_s
    return found


def _placed(one: Stamps, own: Stamps) -> Mapping[str, float]:
    """Returns the moments of a process on the clock of the ingress."""
    if one.clock == own.clock and one.clock:
        return one.at_s
    placed: dict[str, float] = {}
    first, second = _split(one)
    for part, windows in ((first, _WINDOW[one.side]), (second, _WINDOW[one.side][1:])):
        ends = [(own.at_s[a], own.at_s[b]) for a, b in windows if a in own.at_s and b in own.at_s]
        if part and ends:
            middle_s = (min(part.values()) + max(part.values())) / 2
            shift_s = sum(ends[0]) / 2 - middle_s
            placed |= {name: at_s + shift_s for name, at_s in part.items()}
    return placed


def _split(one: Stamps) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the moments of a process by its parts: a router has two in an attempt, and an engine one."""
    if one.side != "router":
        return one.at_s, {}
    later = ("reported", "decode_begun", "decode_decided")
    first = {name: at_s for name, at_s in one.at_s.items() if name not in later}
    return first, {name: at_s for name, at_s in one.at_s.items() if name in later}


def now_s() -> float:
    """Returns the present moment for `Stamps.at_s`."""
    return time.monotonic()
