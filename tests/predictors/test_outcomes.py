"""The outcome log: what is written is read, damage is named, size is bounded, prompts stay out."""

import json
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.outcomes import OutcomeLog, from_json, log_files, read_log, to_json
from predictors.protocol import Arrival, FinishReason, Outcome, Sampling, TextSignals

FULL = Outcome(
    Arrival(
        "r1",
        1.5,
        10,
        99,
        Sampling(0.7, 0.9, 40, 1, 2, True),
        "batch",
        "m",
        "c",
        "s",
        3,
        "p",
        "t",
        1.7e9,
        TextSignals(1, 2, 3, 4, 5, None),
    ),
    42,
    9.25,
    FinishReason.LENGTH,
)


def outcome(i):
    return Outcome(Arrival(f"r{i}", float(i), 10), i, i + 1.0)


@settings(deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.floats(0, 1e10),
    st.none() | st.text(max_size=20),
    st.none() | st.integers(1, 10**5),
    st.sampled_from(FinishReason),
)
def test_round_trip(tokens, at_s, client, max_tokens, reason):
    one = Outcome(Arrival("r", at_s, 5, max_tokens=max_tokens, client=client), tokens, at_s, reason)
    for each in (one, FULL):
        assert from_json(json.loads(json.dumps(to_json(each)))) == each


def test_written_and_read_in_order(tmp_path):
    with OutcomeLog(tmp_path / "log") as log:
        for i in range(5):
            log.append(outcome(i))
        assert len(read_log(tmp_path / "log").outcomes) == 5  # readable while it is written
    with OutcomeLog(tmp_path / "log") as log:
        log.append(outcome(5))
    contents = read_log(tmp_path / "log")
    assert [o.output_tokens for o in contents.outcomes] == [0, 1, 2, 3, 4, 5]
    assert contents.damage == ()
    assert [o.output_tokens for o in read_log(tmp_path / "log", newest=2).outcomes] == [4, 5]


def test_rotation_bounds_files_and_bytes(tmp_path):
    with OutcomeLog(tmp_path, max_file_bytes=1_000, max_files=3) as log:
        for i in range(200):
            log.append(outcome(i))
    files = log_files(tmp_path)
    assert len(files) == 3
    assert sum(f.stat().st_size for f in files) <= 3_000
    read = [o.output_tokens for o in read_log(tmp_path).outcomes]
    assert read == list(range(200 - len(read), 200))


def test_a_line_that_finds_no_room_leaves_no_part_of_itself(tmp_path):
    with OutcomeLog(tmp_path) as log:
        log.append(outcome(0))
        (file,) = log_files(tmp_path)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # the kernel takes a part of the line, or none
        for room in (10, 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, hard))
            try:
                with pytest.raises(OSError):
                    log.append(outcome(1))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.append(outcome(2))
    contents = read_log(tmp_path)
    assert [o.output_tokens for o in contents.outcomes] == [0, 2]
    assert contents.damage == ()


def test_damage_is_named_and_the_rest_is_read(tmp_path):
    with OutcomeLog(tmp_path) as log:
        for i in range(3):
            log.append(outcome(i))
    path = log_files(tmp_path)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b'{"v":1,"arrival":{"request_id":"x"}}\n'
    path.write_bytes(b"".join(lines)[:-20])  # the last line torn
    contents = read_log(tmp_path)
    assert [o.output_tokens for o in contents.outcomes] == [0]
    assert [(d.file, d.line) for d in contents.damage] == [(path, 2), (path, 3)]


def test_after_a_crash_nothing_is_appended_to_the_torn_line(tmp_path):
    with OutcomeLog(tmp_path) as log:
        log.append(outcome(0))
    path = log_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-5])
    with OutcomeLog(tmp_path) as log:
        log.append(outcome(1))
    contents = read_log(tmp_path)
    assert [o.output_tokens for o in contents.outcomes] == [1]
    assert len(contents.damage) == 1


@pytest.mark.parametrize("keep", [False, True])
def test_prompt_text_is_kept_only_if_asked(tmp_path, keep):
    with OutcomeLog(tmp_path, keep_text=keep) as log:
        log.append(outcome(0), prompt="my secret")
    assert (b"my secret" in log_files(tmp_path)[0].read_bytes()) == keep
    assert len(read_log(tmp_path).outcomes) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"output_tokens": -1},
        {"output_tokens": 1.5},
        {"finish_s": float("nan")},
        {"reason": "bored"},
    ],
)
def test_foreign_rows_are_refused(change):
    with pytest.raises(ValueError):
        from_json({**to_json(FULL), **change})


def test_no_log_and_no_room(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such outcome log"):
        read_log(tmp_path / "none")
    with pytest.raises(ValueError, match="holds nothing"):
        OutcomeLog(tmp_path, max_files=0)
