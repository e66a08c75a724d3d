"""Tests that the dispatcher tries waiting requests only when something may have changed, and yet decides like one that
always tries.
"""

import copy
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies.dispatch.dispatcher
from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher, RouteDecode
from policies.request.terms import Mode, Terms
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Health, Request, Role

ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE, "c0": Role.COLOCATED}
NAMES = sorted(ROLES)
KINDS = [
    "arrive",
    "arrive",
    "done",
    "done",
    "renew",
    "admit",
    "tokens",
    "many",
    "forecast",
    "close",
    "status",
    "tick",
    "down",
    "up",
    "drain",
    "warm",
    "oracle",
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS), st.integers(0, 9), st.integers(1, 400), st.sampled_from([0.0, 0.1, 1.0])
    ),
    max_size=120,
)


class Eager(Dispatcher):
    """A dispatcher that tries everything after every event."""

    def _queue_wakes(self, event: ev.Event, freed_workers: set[str]) -> bool:
        return True

    def _pool_wakes(self, freed_workers: set[str], now_s: float) -> bool:
        return True


def event_of(what: str, n: int, tokens: int, now_s: float) -> ev.Event:
    attempt_id, name = f"r{n}", NAMES[n % len(NAMES)]
    up = ev.EngineUp(now_s, name, ROLES[name], "g", "n", 2, 1000)
    request = Request(
        attempt_id,
        now_s,
        tokens,
        8,
        slots=1 + n % 2,
        terms=Terms(
            priority=n % 3,
            ttft_slo_s={3: 1.5, 4: 4.0}.get(n),
            local=n == 7,
            mode=Mode.COLOCATED if n == 8 else None,
        ),
        avoid=("d0", "p1") if n == 5 else (),
        deadline_s=now_s + 20 if n == 6 else float("inf"),
    )
    events: dict[str, ev.Event] = {
        "arrive": ev.Arrived(now_s, request),
        "done": ev.PrefillDone(now_s, attempt_id, now_s + 12, 1, 0),
        "renew": ev.LeaseRenewed(now_s, attempt_id, now_s + tokens / 20),
        "admit": ev.Admitted(now_s, attempt_id),
        "tokens": ev.Progressed(now_s, attempt_id, tokens),
        "many": ev.ProgressedMany(now_s, tuple((f"r{i}", tokens) for i in range(n))),
        "forecast": ev.ForecastMade(now_s, attempt_id, tokens, float(n)),
        "close": ev.Closed(now_s, attempt_id, "finished"),
        "status": ev.EngineStatus(now_s, name, 1, 0, 3 * tokens),
        "tick": ev.Tick(now_s),
        "down": ev.EngineDown(now_s, name),
        "up": up,
        "drain": dataclasses.replace(up, health=Health.DRAINING),
        "warm": dataclasses.replace(up, health=Health.WARM),
        "oracle": ev.OracleRefreshed(now_s, None),
    }
    return events[what]


def started(kind: type[Dispatcher], decode: str, **config: float | None) -> Dispatcher:
    settings_: dict[str, float | None] = {"status_stale_s": 5.0, "starvation_s": 3.0, "max_queue": 6} | config
    d = kind(DispatchConfig(**settings_), prefill_policy("join_shortest_queue"), decode_policy(decode))  # type: ignore[arg-type]
    for name in NAMES:
        d.handle(event_of("up", NAMES.index(name), 1, 0.0))
        d.handle(ev.EngineStatus(0.0, name, 0, 0, 0))
    return d


def feed(d: Dispatcher, event: ev.Event) -> list[Action] | str:
    try:
        return d.handle(event)
    except ev.StaleEvent as stale:
        return str(stale)


@pytest.mark.pure
@settings(max_examples=250, deadline=None)
@given(
    STEPS,
    st.sampled_from(["join_shortest_queue", "balance_route_0", "composition", "netkv"]),
    st.sampled_from([None, 3.0]),
)
def test_it_decides_what_an_eager_one_decides(steps, decode: str, starvation_s: float | None) -> None:  # type: ignore[no-untyped-def]
    lazy = started(Dispatcher, decode, starvation_s=starvation_s)
    eager = started(Eager, decode, starvation_s=starvation_s)
    now_s = 0.0
    for what, n, tokens, later_s in steps:
        now_s += later_s
        event = event_of(what, n, tokens, now_s)
        assert feed(lazy, event) == feed(eager, event)


@pytest.mark.pure
@settings(max_examples=150, deadline=None)
@given(
    STEPS,
    st.sampled_from(["join_shortest_queue", "balance_route_0", "netkv"]),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_with_bounds_nothing_that_fits_stays_once_events_go_on(
    steps,  # type: ignore[no-untyped-def]
    decode: str,
    entries: int,
    admissions: int,
) -> None:
    d = started(Dispatcher, decode, tick_entries=entries, tick_admissions=admissions, starvation_s=1e9)
    now_s = 0.0
    for what, n, tokens, later_s in steps:
        now_s += later_s
        actions = feed(d, event_of(what, n, tokens, now_s))
        if isinstance(actions, list):
            sent = [a for a in actions if isinstance(a, RouteDecode) and a.decision.reason != "lease_rescue"]
            assert len(sent) <= admissions
    for _ in range(60):  # events that only resume a scan
        d.handle(ev.OracleRefreshed(now_s, None))
    unbounded = copy.deepcopy(d)
    unbounded.__class__ = Eager
    unbounded.config = dataclasses.replace(d.config, tick_entries=1000, tick_admissions=1000)
    assert unbounded.handle(ev.OracleRefreshed(now_s, None)) == []


def saturated(looks: list[int], monkeypatch: pytest.MonkeyPatch, pool: int = 20, **config: int) -> Dispatcher:
    """Returns a dispatcher with one decode worker, whose two slots are taken, and `pool` waiting pool entries.

    `looks` gets an item whenever the dispatcher tries the pool from now on.
    """
    d = Dispatcher(
        DispatchConfig(**config), prefill_policy("join_shortest_queue"), decode_policy("join_shortest_queue")
    )
    for name, role, slots in (("p", Role.PREFILL, 100), ("d", Role.DECODE, 2)):
        d.handle(ev.EngineUp(0.0, name, role, "g", "n", slots, 1_000_000))
        d.handle(ev.EngineStatus(0.0, name, 0, 0, 0))
    for i in range(2 + pool):
        d.handle(ev.Arrived(0.0, Request(f"r{i:03d}", 0.0, 100, 8)))
        d.handle(ev.PrefillDone(0.0, f"r{i:03d}", 1000.0, 1, 0))
    assert d.state.pool_size == pool
    real = policies.dispatch.dispatcher.rooms_of

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        looks.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(policies.dispatch.dispatcher, "rooms_of", counted)
    return d


@pytest.mark.pure
def test_what_makes_no_room_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    d = saturated(looks, monkeypatch)
    d.handle(ev.Admitted(1.0, "r000"))
    d.handle(ev.Progressed(1.0, "r000", 5))
    d.handle(ev.ProgressedMany(1.0, (("r000", 6), ("r001", 1))))
    d.handle(ev.ForecastMade(1.0, "r000", 6, 3.0))
    d.handle(ev.OracleRefreshed(1.0, None))
    d.handle(ev.EngineStatus(1.0, "d", 2, 0, 400))
    d.handle(ev.Closed(1.0, "r010", "cancelled"))  # r010 waited in the pool
    assert looks == []
    (action,) = d.handle(ev.Closed(1.0, "r000", "finished"))
    assert (action.attempt_id, bool(looks)) == ("r002", True)


@pytest.mark.pure
def test_a_new_entry_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    d = saturated(looks, monkeypatch)
    d.handle(ev.Arrived(1.0, Request("new", 1.0, 100, 8)))
    seen: list[int] = []
    monkeypatch.setattr(
        policies.dispatch.dispatcher,
        "FeasibleEntries",
        lambda entries, *rest: seen.append(len(entries)) or real(entries, *rest),
    )
    real = policies.dispatch.feasibility.FeasibleEntries
    d.handle(ev.PrefillDone(1.0, "new", 1000.0, 1, 0))
    assert seen == [1]


def test_a_long_pool_is_looked_at_in_parts_and_the_next_event_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d = saturated([], monkeypatch, pool=20, tick_entries=8)
    d.handle(ev.Arrived(1.0, Request("small", 1.0, 10, 8)))
    d.handle(ev.PrefillDone(1.0, "small", 1000.0, 1, 0))
    # a third slot comes, and 50 tokens of KV are free: of 21 entries only the last fits
    assert d.handle(ev.EngineUp(1.0, "d", Role.DECODE, "g", "n", 3, 250)) == []
    assert d.handle(ev.OracleRefreshed(1.0, None)) == []
    assert [a.attempt_id for a in d.handle(ev.OracleRefreshed(1.0, None))] == ["small"]


def test_no_event_sends_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    d = saturated([], monkeypatch, pool=20, tick_admissions=3)
    actions = d.handle(ev.EngineUp(1.0, "d", Role.DECODE, "g", "n", 12, 1_000_000))
    counts = [len(actions)] + [len(d.handle(ev.OracleRefreshed(1.0, None))) for _ in range(4)]
    assert counts == [3, 3, 3, 1, 0]


def test_leases_that_end_together_are_rescued_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    d = saturated([], monkeypatch, pool=20, tick_admissions=8)
    actions = [d.handle(ev.Tick(995.0)), *(d.handle(ev.OracleRefreshed(995.0, None)) for _ in range(3))]
    assert [len(part) for part in actions] == [8, 8, 4, 0]
