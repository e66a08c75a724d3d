"""The way of an attempt is put together from what each process saw: nothing is counted twice, and nothing is lost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.telemetry.times import Hop, Stamps, hops

INGRESS = Stamps(
    "in",
    "ingress",
    "here",
    {
        "arrived": 10.0,
        "parsed": 10.001,
        "tokenised": 10.003,
        "submitted": 10.004,
        "routed": 10.008,
        "pooled": 10.020,
        "decode_routed": 10.026,
        "first": 10.040,
        "written": 10.041,
    },
)
ROUTER = Stamps(
    "r",
    "router",
    "here",
    {
        "received": 10.005,
        "begun": 10.006,
        "decided": 10.007,
        "reported": 10.021,
        "decode_begun": 10.024,
        "decode_decided": 10.025,
    },
)
PREFILL = Stamps(
    "p", "prefill", "here", {"received": 10.010, "admitted": 10.012, "computed": 10.017, "sent": 10.018}
)
DECODE = Stamps(
    "d",
    "decode",
    "here",
    {"received": 10.028, "reading": 10.029, "admitted": 10.032, "step": 10.034, "first": 10.038},
)

WAY_MS = [
    ("parse", "in", "work", 1),
    ("tokenise", "in", "work", 2),
    ("submit", "in", "work", 1),
    ("to the router", "r", "wire", 1),
    ("queue", "r", "wait", 1),
    ("decide prefill", "r", "work", 1),
    ("from the router", "in", "wire", 1),
    ("to the prefill engine", "p", "wire", 2),
    ("wait for a slot", "p", "wait", 2),
    ("prefill", "p", "work", 5),
    ("report", "p", "work", 1),
    ("from the prefill engine", "in", "wire", 2),
    ("to the router", "r", "wire", 1),
    ("pool", "r", "wait", 3),
    ("decide decode", "r", "work", 1),
    ("from the router", "in", "wire", 1),
    ("to the decode engine", "d", "wire", 2),
    ("wait for a slot", "d", "wait", 1),
    ("transfer", "d", "work", 3),
    ("wait for a step", "d", "wait", 2),
    ("step", "d", "work", 4),
    ("from the decode engine", "in", "wire", 2),
    ("write", "in", "work", 1),
]
"""Each hop with its milliseconds: the differences of the moments above, which are 41 in all."""


def shown(way: list[Hop]) -> list[tuple[str, str, str, int]]:
    return [(one.name, one.process, one.kind, round(1e3 * (one.until_s - one.since_s))) for one in way]


def test_each_hop_lasts_from_one_moment_to_the_next() -> None:
    way = hops([INGRESS, ROUTER, PREFILL, DECODE])
    assert shown(way) == WAY_MS
    assert way[0].since_s == 0.0 and way[-1].until_s == pytest.approx(0.041)
    assert [one.until_s for one in way[:-1]] == [one.since_s for one in way[1:]]


def test_a_colocated_attempt_reads_nothing() -> None:
    decode = DECODE._replace(at_s={"received": 10.010, "admitted": 10.012, "step": 10.034, "first": 10.038})
    at_s = {name: s for name, s in INGRESS.at_s.items() if name not in ("pooled", "decode_routed")}
    router = ROUTER._replace(at_s={"received": 10.005, "begun": 10.006, "decided": 10.007})
    way = shown(hops([INGRESS._replace(at_s=at_s), router, decode]))
    assert way[7:] == [
        ("to the decode engine", "d", "wire", 2),
        ("wait for a slot", "d", "wait", 2),
        ("wait for a step", "d", "wait", 22),
        ("step", "d", "work", 4),
        ("from the decode engine", "in", "wire", 2),
        ("write", "in", "work", 1),
    ]


def test_the_clock_of_another_machine_is_moved_between_the_messages_to_it_and_from_it() -> None:
    """The engine's clock is 500 s ahead. The ingress sent the prompt at 8 ms and heard of it at 20 ms. The engine had
    it for 8 ms, so the other 4 ms are halved: it came at 10 ms and its end was sent at 18 ms, as it really was.
    """
    away = {name: at_s + 500.0 for name, at_s in PREFILL.at_s.items()}
    ahead = {name: at_s - 3.0 for name, at_s in ROUTER.at_s.items()}
    elsewhere = [PREFILL._replace(clock="away", at_s=away), ROUTER._replace(clock="far", at_s=ahead)]
    assert shown(hops([INGRESS, DECODE, *elsewhere])) == WAY_MS


def test_an_unknown_clock_is_nobody_elses() -> None:
    away = PREFILL._replace(clock="", at_s={name: at_s + 500.0 for name, at_s in PREFILL.at_s.items()})
    assert shown(hops([INGRESS._replace(clock=""), away]))[3] == ("from the router", "in", "wire", 4)
    assert hops([INGRESS._replace(clock=""), away])[-1].until_s == pytest.approx(0.041)


def test_without_the_ingress_there_is_no_way() -> None:
    assert hops([ROUTER, PREFILL, DECODE]) == []


@given(st.data())
def test_whatever_is_missing_the_hops_follow_one_another(data: st.DataObject) -> None:
    told = []
    for one in (ROUTER, PREFILL, DECODE, INGRESS):
        kept = data.draw(st.sets(st.sampled_from(sorted(one.at_s))), one.side)
        if one is INGRESS:
            kept |= {"arrived", "written"}
        clock = data.draw(st.sampled_from(["here", "away"]), "clock") if one is not INGRESS else "here"
        told.append(one._replace(clock=clock, at_s={name: one.at_s[name] for name in kept}))
    way = hops(told)
    assert way[0].since_s == 0.0 and way[-1].until_s == pytest.approx(0.041)
    for before, after in itertools.pairwise(way):
        assert before.until_s == after.since_s <= after.until_s
