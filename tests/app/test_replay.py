"""`sluice replay`: what it says of a whole journal, a changed one, a torn one and one without its start."""

from pathlib import Path

import pytest

from actors.router.journal import JournalConfig, RouterJournal
from app.replay import main
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.views import Request, Role

Captured = pytest.CaptureFixture[str]


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Some files of one log: 2 + 60 * 3 events, 60 decisions."""
    dispatcher = Dispatcher(DispatchConfig(seed=7), prefill_policy("random"), decode_policy("random"))
    config = JournalConfig(folder=str(tmp_path), max_bytes=24_000)
    journal = RouterJournal(config, dispatcher, "test")
    events: list[ev.Event] = [ev.EngineUp(0.0, f"c{i}", Role.COLOCATED, "g", "n", 4, 4096) for i in range(2)]
    for i in range(60):
        events += [ev.EngineStatus(float(i), f"c{i % 2}", 0, 0, 0)]
        events += [
            ev.Arrived(float(i), Request(f"r{i}", float(i), 8, 8)),
            ev.Closed(float(i), f"r{i}", "finished"),
        ]
    for event in events:
        journal.record(event, dispatcher.handle(event))
    await journal.stop()
    return tmp_path


def test_a_whole_log_is_equal(folder: Path, capsys: Captured) -> None:
    assert len(list(folder.iterdir())) > 1
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "182 events, 60 actions, 0 refused or failed, 0 different" in out


def test_a_difference_is_shown_and_is_a_failure(folder: Path, capsys: Captured) -> None:
    first = sorted(folder.iterdir())[0]
    first.write_text(first.read_text().replace('"seed":7', '"seed":8', 1))
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert ": Arrived(" in out
    assert '  recorded  {"action":"RoutePrefill","attempt_id":' in out and "  replayed  {" in out
    assert " 0 different" not in out


def test_a_torn_end_is_told_and_no_failure(folder: Path, capsys: Captured) -> None:
    last = sorted(folder.iterdir())[-1]
    last.write_text(last.read_text()[:-20])
    assert main([str(folder)]) == 0
    assert "181 events" in (out := capsys.readouterr().out) and "its writer was killed" in out


def test_a_log_without_its_start_is_refused(folder: Path, capsys: Captured) -> None:
    first = sorted(folder.iterdir())[0]
    first.unlink()
    assert main([str(folder)]) == 2
    assert "give its earlier files too" in capsys.readouterr().err
    assert main([str(first)]) == 2


def test_a_path_without_a_journal_is_refused_by_name(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert main([str(tmp_path / "missing")]) == 2
    err = capsys.readouterr().err
    for what in ("empty: no journal in it", "missing: no such file or folder"):
        assert what in err


# ------------------------------------------------------------------------------------------------------------- scaling


@pytest.fixture
def scaling_folder(tmp_path: Path) -> Path:
    """A journal of 200 steps of a policy in several files, of which the first are deleted."""
    from actors.scaling.journal import ScalingJournal, ScalingJournalConfig
    from policies.scaling.registry import make
    from tests.policies.scaling.fixtures import engines, seen

    policy = make("joint", {"limits": {"prefill_max": 9, "decode_max": 9, "warm_max": 2, "budget": 14}})
    config = ScalingJournalConfig(str(tmp_path), max_bytes=40_000, files=3)
    journal = ScalingJournal(config, "test")
    state = policy.initial()
    for i in range(200):
        observation = seen(3.0 + 7.0 * (i % 9), engines(3, 4, warm=1), i, queued=i % 5, missed=i % 3)
        step = policy.step(observation, state)
        journal.write(policy, state, observation, step)
        state = step.state
    journal.close()
    return tmp_path


def test_plans_are_decided_again_from_any_file_on(scaling_folder: Path, capsys: Captured) -> None:
    files = sorted(scaling_folder.iterdir())
    assert len(files) == 3 and not files[0].name.endswith("-00000.jsonl")
    assert main([str(scaling_folder)]) == 0
    out = capsys.readouterr().out
    assert " steps of scaling, " in out and out.endswith(" 0 different\n")
    files[-1].write_text(files[-1].read_text()[:-20])
    assert main([str(files[-1])]) == 0
    assert "its writer was killed" in capsys.readouterr().out


def test_another_plan_is_shown_and_is_a_failure(scaling_folder: Path, capsys: Captured) -> None:
    file = sorted(scaling_folder.iterdir())[-1]
    header, *lines = file.read_text().splitlines()
    lines[0] = lines[0].replace('"plan":{"serving":{"prefill":', '"plan":{"serving":{"prefill":1', 1)
    file.write_text("\n".join([header, *lines]) + "\n")
    assert main([str(file)]) == 1
    out = capsys.readouterr().out
    assert "  recorded  Plan(" in out and "  replayed  Plan(" in out
