"""The benchmark of permits from agents in its short form: reads end by permits, a lone one after its chunks."""

import pytest

from benchmarks.permits import agents


def test_reads_are_permitted_by_one_agent_and_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "SETTLE_S", 0.1)
    monkeypatch.setattr(agents, "CHUNKS", 5)
    made = list(agents.rows(calls=2))
    assert [row.n for row in made] == [2] * 5
    # five chunks of 10 ms one after another
    assert all(row.p50_us >= 50_000 for row in made[2:])
    assert {row.name.partition(" ")[0] for row in made} == {"read", "lone"}
