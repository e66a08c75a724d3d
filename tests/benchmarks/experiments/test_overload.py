"""The experiment `overload` at a small size: the finding that it is about, and that its runs replay."""

from typing import Any

import pytest

from benchmarks.experiments import overload
from benchmarks.sim.cluster import simulate
from policies.admission.registry import DEFAULT, OPEN
from policies.journal.replay import replay

SHORT = {"warmup_s": 20.0, "measure_s": 20.0, "params": {}}


def config(cell: str, admission: str, load: float) -> dict[str, Any]:
    return {**overload.CELLS[cell], **SHORT, "cell": cell, "admission": admission, "load": load}


@pytest.mark.parametrize(("cell", "load"), [("decode", 2.0), ("prefill", 2.0), ("tokens", 1.25)])
def test_goodput_falls_without_admission_and_stays_with_it(cell: str, load: float) -> None:
    ours, none = (
        overload.run_one(config(cell, name, load), 1)["goodput_per_s"] or 0.0 for name in (DEFAULT, OPEN)
    )
    assert ours > 0.75 * overload.capacity_per_s(config(cell, "open", load)) and none < 0.5 * ours


def test_the_journal_of_an_overload_replays_to_the_same_judgements() -> None:
    setup = config("decode", DEFAULT, 5.0) | {"warmup_s": 0.0, "measure_s": 15.0}
    lines: list[str] = []
    simulate(overload.sim_config(setup, 3), overload.work(setup, 3), lines.append)
    text = "".join(lines)
    assert '"admission":{"name":"by_wait"' in text.partition("\n")[0]
    for reason in ("ttft_objective", "late"):
        assert f'"reason":"{reason}"' in text
    steps = list(replay(text.splitlines()))
    assert all(step.equal for step in steps)


def test_capacity_is_that_of_the_tightest_resource() -> None:
    # 3 / (0.005 + 1,000 * 0.269 ms) = 10.9/s of prefill against 64 slots / (400 tokens * 31.2 ms) = 5.1/s of decode
    step_s = 0.0233 + 32 * (2e-5 + 1200 * 1.9e-7)
    assert overload.capacity_per_s(config("decode", "open", 1.0)) == pytest.approx(64 / (400 * step_s))
    assert overload.capacity_per_s(config("prefill", "open", 1.0)) == pytest.approx(2 / (0.005 + 0.807))
    # a token may take 40 ms: 69 sequences of 1,100 tokens on each of two workers, 200 tokens each
    most = (0.04 - 0.0233) / (2e-5 + 1100 * 1.9e-7)
    assert overload.capacity_per_s(config("tokens", "open", 1.0)) == pytest.approx(2 * most / (200 * 0.04))
