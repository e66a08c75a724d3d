"""The order in which the sides on real engines are measured."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.live.kept import Parts
from benchmarks.peers.real import __main__ as real
from benchmarks.peers.real.sides import COLOCATED, RAY, ROUTER, SIDES, SLUICE, VLLM


def test_the_sides_of_a_comparison_follow_one_another_and_alternate() -> None:
    setup = real.Setup(4, tuple(SIDES))
    assert [list(real.round_of(setup, number)) for number in range(3)] == [
        [SLUICE, ROUTER, RAY, COLOCATED, VLLM],
        [ROUTER, SLUICE, RAY, VLLM, COLOCATED],
        [RAY, SLUICE, ROUTER, COLOCATED, VLLM],
    ]
    chosen = real.Setup(2, (VLLM, SLUICE))
    assert [list(real.round_of(chosen, number)) for number in range(2)] == [[SLUICE, VLLM]] * 2


def test_every_side_is_measured_in_every_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(setup: Any, peers: Any, number: int, side: str, folder: Path, say: Any) -> dict[str, Any]:
        return {"round": number, "side": side, "rows": []}

    monkeypatch.setattr(real, "measured", measured)
    monkeypatch.setattr("benchmarks.live.kept.code_digest", lambda paths: "c")
    kept = Parts("real", {"code_of": [], "code": "c"}, {}, tmp_path)
    setup, peers = real.Setup(2, (COLOCATED, VLLM)), real.Peers(None, None, "/m")
    found = [(one["round"], one["side"]) for one in real.run(setup, peers, kept, lambda _: None)]
    assert found == [(0, COLOCATED), (0, VLLM), (1, VLLM), (1, COLOCATED)]
