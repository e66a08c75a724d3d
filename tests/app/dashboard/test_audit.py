"""The audit log is appended to, rotated, read again, and refuses what it cannot write."""

import os
import stat
from pathlib import Path

import orjson
import pytest

from app.dashboard.audit import Audit, Change
from app.dashboard.refusal import Refusal


def change(number: int, target: str = "policy", **more: object) -> Change:
    facts = {"before": {"n": number - 1}, "after": {"n": number}, "done": True} | more
    return Change(f"c{number}", float(number), "key 1 from x", "words", "set_policy", target, {}, **facts)  # type: ignore[arg-type]


def test_a_change_is_there_after_a_restart_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "d")
    one = change(1, done=False)
    audit.begin(one)
    assert audit.changes() == []
    one.done = True
    audit.end(one)
    again = Audit(tmp_path / "d")
    again.open()
    assert again.changes() == [one]
    assert stat.S_IMODE((tmp_path / "d" / "audit.jsonl").stat().st_mode) == 0o600
    lines = (tmp_path / "d" / "audit.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["done"] for line in lines] == [False, True]


def test_only_the_latest_change_of_a_thing_can_be_undone(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    first, other, second = change(1), change(2, "engine e"), change(3)
    for one in (first, other, second):
        audit.begin(one)
    assert audit.latest("policy") is second
    undoing = change(4, undoes="c3")
    audit.begin(undoing)
    assert (second.undone, audit.latest("policy"), audit.latest("engine e")) == (True, first, other)
    again = Audit(tmp_path)
    again.open()
    assert again.latest("policy") == first


def test_the_log_is_rotated_and_its_last_changes_stay(tmp_path: Path) -> None:
    audit = Audit(tmp_path, max_bytes=2000, files=3)
    for number in range(100):
        audit.begin(change(number))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    again = Audit(tmp_path, max_bytes=2000, files=3)
    again.open()
    assert [one.id for one in again.changes()][:5] == ["c99", "c98", "c97", "c96", "c95"]


def test_a_line_that_was_cut_off_swallows_no_other(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.begin(change(1))
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"id": "torn", "at"')
    audit.begin(change(2))
    again = Audit(tmp_path)
    again.open()
    assert [one.id for one in again.changes()] == ["c2", "c1"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_refuses_the_change_in_words(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "audit.jsonl")
    with pytest.raises(Refusal, match="nothing was changed") as refused:
        Audit(tmp_path).begin(change(1))
    assert refused.value.status == 503
    assert "No space left on device" in str(refused.value)
