"""Measures the router's journal: the recording of an event, the later writing of its lines, and a replay."""

import random
from functools import partial

from actors.router.journal import JournalConfig, RouterJournal
from benchmarks.decisions.measure import Timing, timed
from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher
from policies.journal.lines import outcome_lines, record_text
from policies.journal.replay import outcome
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Request, Role

PREFILLS, DECODES = 4, 16


def journal(requests: int, seed: int) -> list[Timing]:
    """Measures the journal with `requests` requests of some five events each, on 20 engines.

    The prefill policy goes by load, and the decode policy is NetKV.
    """
    events = _traffic(requests, random.Random(seed))
    dispatcher = _dispatcher()
    handled = [(event, dispatcher.handle(event)) for event in events]
    ring = RouterJournal(JournalConfig(), _dispatcher(), "")
    again = _dispatcher()

    def lines(n: int, event: ev.Event, actions: list[Action]) -> str:
        return record_text(n, event, outcome_lines(actions))

    size = sum(len(lines(n, *pair)) for n, pair in enumerate(handled)) / len(handled)
    return [
        timed("journal: record (hot path)", (partial(ring.record, *pair) for pair in handled)),
        timed(
            "journal: lines of a record (later)",
            (partial(lines, n, *pair) for n, pair in enumerate(handled)),
            note=f"mean {size:.0f} bytes",
        ),
        timed("journal: handle + lines (replay)", (partial(outcome, again, event) for event in events)),
    ]


def _dispatcher() -> Dispatcher:
    return Dispatcher(DispatchConfig(), prefill_policy("load_aware"), decode_policy("netkv"))


def _traffic(requests: int, rng: random.Random) -> list[ev.Event]:
    events: list[ev.Event] = []
    for i in range(PREFILLS + DECODES):
        role = Role.PREFILL if i < PREFILLS else Role.DECODE
        events.append(ev.EngineUp(0.0, f"w{i:02d}", role, "g", f"n{i}", 64, 1_000_000))
    tokens: dict[str, int] = {}
    for i in range(requests):
        now_s, attempt_id = i / 100, f"4c1c70913da6{i:08x}-{i:x}"
        if i % 10 == 0:
            events += [ev.EngineStatus(now_s, f"w{k:02d}", 8, 0, 0) for k in range(PREFILLS + DECODES)]
        request = Request(attempt_id, now_s, rng.randint(10, 2000), 128, deadline_s=now_s + 600)
        events += [ev.Arrived(now_s, request), ev.PrefillDone(now_s, attempt_id, now_s + 30, 2**20, 0)]
        events.append(ev.Admitted(now_s, attempt_id))
        tokens[attempt_id] = 0
        if i % 2:
            tokens = {attempt_id: count + 3 for attempt_id, count in tokens.items()}
            events.append(ev.ProgressedMany(now_s, tuple(tokens.items())))
        if len(tokens) > 40:
            first = next(iter(tokens))
            events.append(ev.Closed(now_s, first, "finished", tokens.pop(first)))
    return events
