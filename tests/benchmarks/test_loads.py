"""Loads read back from a journal, by hand."""

from pathlib import Path

from benchmarks.loads import Window, look
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.journal.lines import JournalWriter
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Request, Role


def journal(folder: Path) -> None:
    """One prefill and two decode engines; a request of 300 tokens, then one of 100, each to the emptier engine."""
    dispatcher = Dispatcher(
        DispatchConfig(), prefill_policy("round_robin"), decode_policy("join_shortest_queue")
    )
    with (folder / "journal-a-00000.jsonl").open("w") as file:
        log = JournalWriter(file.write, dispatcher, "test")
        roles = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
        up = [ev.EngineUp(0.0, name, role, "g", "n", 8, 10_000) for name, role in roles.items()]
        told = [ev.EngineStatus(0.0, name, 0, 0, 0) for name in roles]
        flow: list[ev.Event] = [*up, *told]
        for attempt_id, tokens, at_s in (("a", 300, 1.0), ("b", 100, 2.0)):
            flow += [
                ev.Arrived(at_s, Request(attempt_id, at_s, tokens, 16)),
                ev.PrefillDone(at_s, attempt_id, 60.0, 1, 0),
            ]
            flow += [ev.Admitted(at_s, attempt_id), ev.Tick(at_s + 0.5)]
        flow += [ev.Closed(2.6, "b", "finished", 7), ev.Tick(2.8)]
        for event in flow:
            log.record(event, dispatcher.handle(event))


def test_loads_at_the_ticks_of_each_window(tmp_path: Path) -> None:
    journal(tmp_path)
    seen, differ = look(tmp_path, [Window("first", 1.0, 2.0), Window("second", 2.0, 3.0)])
    assert differ == 0
    assert seen["first"].imbalance == [300]  # 300 - 0
    assert seen["second"].imbalance == [200, 300]  # 300 - 100, and 300 - 0 once b is over
    assert (seen["first"].tokens, seen["second"].tokens) == (0, 7)
    assert seen["second"].mean_load == [200.0, 150.0]


def test_waits_in_the_pool_and_forecast_departures_of_each_window(tmp_path: Path) -> None:
    """One decode engine with one slot: the second request waits from 1.5 to 4.0, when the first one ends."""
    dispatcher = Dispatcher(
        DispatchConfig(overcommit_slots=0),
        prefill_policy("round_robin"),
        decode_policy("join_shortest_queue"),
    )
    flow: list[ev.Event] = [
        ev.EngineUp(0.0, "p", Role.PREFILL, "g", "n", 8, 10_000),
        ev.EngineUp(0.0, "d", Role.DECODE, "g", "n", 1, 10_000),
        *[ev.EngineStatus(at_s, name, 0, 0, 0) for at_s in (0.0, 2.0, 4.0) for name in ("p", "d")],
        *[ev.Arrived(1.0, Request(name, 1.0, 100, 16)) for name in ("a", "b")],
        *[ev.PrefillDone(1.5, name, 60.0, 1, 0) for name in ("a", "b")],
        ev.Admitted(1.6, "a"),
        ev.ForecastMade(2.0, "a", 1, None),
        ev.ForecastMade(2.5, "a", 1, 7.0),
        ev.Closed(4.0, "a", "finished", 7),
    ]
    flow.sort(key=lambda event: event.now_s)
    with (tmp_path / "journal-a-00000.jsonl").open("w") as file:
        log = JournalWriter(file.write, dispatcher, "test")
        for event in flow:
            log.record(event, dispatcher.handle(event))
    seen, differ = look(tmp_path, [Window("first", 1.0, 3.0), Window("second", 3.0, 5.0)])
    assert differ == 0
    assert (seen["first"].waits_s, seen["second"].waits_s) == ([0.0], [2.5])
    assert (seen["first"].departures, seen["second"].departures) == (1, 0)


def test_a_changed_decision_is_counted(tmp_path: Path) -> None:
    journal(tmp_path)
    file = tmp_path / "journal-a-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"RouteDecode"' in line)
    lines[at] = lines[at].replace('"waited_s":0.0', '"waited_s":0.5')
    file.write_text("".join(lines))
    assert look(tmp_path, [])[1] == 1
