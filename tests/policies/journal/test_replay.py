"""Tests that a journal of any history replays to the same lines, and that an incomplete one is refused and its line
named.
"""

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.dispatch.dispatcher import DispatchConfig, Dispatcher, RoutePrefill
from policies.journal.lines import JournalError, JournalWriter, parse_action
from policies.journal.replay import TornJournal, replay
from policies.routing.base import PolicyError
from policies.routing.registry import DECODE, PREFILL, decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Request, Role
from tests.policies.random_events import HOPELESS, Life, recorded

ROOT = Path(__file__).parents[3]


def history(seed: int, events: int, prefill: str = "random", decode: str = "power_of_two") -> list[str]:
    """Returns the journal lines of a random history of about `events` events."""
    config = DispatchConfig(seed=seed, max_queue=8, queue_timeout_s=2.0)
    dispatcher = Dispatcher(config, prefill_policy(prefill), decode_policy(decode))
    return recorded(dispatcher, Life(random.Random(seed)), events)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(PREFILL)), st.sampled_from(sorted(DECODE)))
def test_a_random_history_replays_to_the_same_lines(seed: int, prefill: str, decode: str) -> None:
    steps = list(replay(history(seed, 150, prefill, decode)))
    assert all(step.equal for step in steps)
    assert sum(len(step.recorded) for step in steps) > 0


def test_the_histories_hold_what_can_go_wrong() -> None:
    text = "\n".join("\n".join(history(seed, 400)) for seed in range(16, 32))
    for needed in (
        '"error":"StaleEvent"',
        '"error":"PolicyError"',
        '"error":"BadParameter"',
        '"error":"ValueError"',
        '"action":"RouteDecode"',
        '"action":"Reject"',
        '"reason":"tie_drawn"',
        '"reason":"lease_rescue"',
        '"event":"LeaseRenewed"',
        '"deadline_s":"inf"',
        '"event":"PoliciesChanged"',
        '"event":"AttemptFailed"',
        '"reason":"probe"',
        '"reason":"late"',
        '"verdict":"refuse"',
        '"turn":{"tenant":"acme"',
    ):
        assert needed in text, needed


def test_what_was_decided_before_a_policy_error_stands_and_is_logged() -> None:
    lines: list[str] = []
    # 2 % of 4000 KV tokens are 80, so a prefill worker holds one prompt at a time
    config = DispatchConfig(kv_high_water=0.02)
    dispatcher = Dispatcher(config, prefill_policy("random"), decode_policy("netkv"))
    writer = JournalWriter(lambda text: lines.extend(text.splitlines()), dispatcher, "test")
    request = Request("r1", 10.0, 64, 8)
    for event in (
        ev.EngineUp(10.0, "p", Role.PREFILL, "a", "n0", 4, 4000),
        ev.EngineUp(10.0, "d", Role.DECODE, "a", "n1", 4, 4000),
        ev.EngineStatus(10.0, "p", 0, 0, 0),
        ev.EngineStatus(10.0, "d", 0, 0, 0),
        ev.OracleRefreshed(10.0, HOPELESS),
        ev.Arrived(10.0, request),
        ev.Arrived(10.1, dataclasses.replace(request, attempt_id="r2")),
    ):
        writer.record(event, dispatcher.handle(event))
    failing: list[ev.Event] = [
        ev.PrefillDone(10.2, "r1", 40.0, 2**20, 0),
        ev.PoliciesChanged(10.3, dispatch={"kv_high_water": 0.9}),  # r2 is routed, then r1 is tried again
    ]
    for failure in failing:
        with pytest.raises(PolicyError, match=r"policy netkv: cost of d is inf") as raised:
            dispatcher.handle(failure)
        writer.record(failure, raised.value.decided, raised.value)
    first, second = list(replay(lines))[-2:]
    error = '{"error":"PolicyError","message":"policy netkv: cost of d is inf"}'
    assert first.recorded == first.replayed == (error,)
    assert second.recorded == second.replayed
    action = parse_action(second.recorded[0])
    assert isinstance(action, RoutePrefill) and (action.attempt_id, action.decision.worker) == ("r2", "p")
    assert second.recorded[1] == error


def test_another_process_with_other_hashes_decides_the_same(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(line + "\n" for line in history(3, 1500, "pd_heatmap", "composition")))
    program = (
        "import sys; from policies.journal.replay import replay\n"
        "print(sum(not step.equal for step in replay(open(sys.argv[1]))))"
    )
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_another_seed_does_not_replay() -> None:
    lines = history(1, 300)
    lines[0] = lines[0].replace('"seed":1', '"seed":2')
    assert not all(step.equal for step in replay(lines))


def test_several_files_of_one_log_are_one_log() -> None:
    lines = history(5, 200)
    cut = next(i for i, line in enumerate(lines) if line.startswith('{"n":120,'))
    second_header = lines[0].replace('"first":0', '"first":120')
    steps = list(replay([*lines[:cut], second_header, *lines[cut:]]))
    assert len(steps) == 200 + 17 and all(step.equal for step in steps)
    with pytest.raises(JournalError, match="begins at event 120: give its earlier files"):
        list(replay([second_header, *lines[cut:]]))


def test_a_gap_is_refused_by_line() -> None:
    lines = [line for line in history(5, 60) if not line.startswith('{"n":9,')]
    with pytest.raises(JournalError, match=r"line \d+: event 10 where 9 should come|an event was expected"):
        list(replay(lines))


def test_a_torn_end_is_told_after_everything_before_it() -> None:
    text = "".join(line + "\n" for line in history(5, 60))
    for cut in (5, 40, 200):
        seen = 0
        with pytest.raises(TornJournal):
            for step in replay(text[: len(text) - cut].splitlines()):
                assert step.equal
                seen += 1
        assert seen > 20


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the journal is empty"),
        (['{"journal":99}'], "line 1: the format is 99, this version reads 5"),
        # it names parameters of policies that there are no more
        (['{"journal":4}'], "line 1: the format is 4, this version reads 5: use the version that wrote it"),
        (["x"], "line 1: no JSON"),
    ],
)
def test_what_is_no_journal_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(JournalError, match=message):
        list(replay(lines))


def test_an_unknown_event_is_refused_by_name() -> None:
    lines = history(5, 5)
    lines[1] = lines[1].replace('"event":"EngineUp"', '"event":"EngineGrown"')
    with pytest.raises(JournalError, match="line 2: event 'EngineGrown' is not known; there are EngineUp"):
        list(replay(lines))


def test_a_journal_begins_before_the_first_event() -> None:
    dispatcher = Dispatcher(DispatchConfig(), prefill_policy("random"), decode_policy("random"))
    dispatcher.handle(next(Life(random.Random(0)).start()))
    with pytest.raises(ValueError, match="before the dispatcher's first event"):
        JournalWriter(print, dispatcher, "test")
