"""The experiment `fairness` at a small size: what it is about, its shares, and that its runs replay."""

from typing import Any

import pytest

from benchmarks.experiments import fairness
from benchmarks.sim.cluster import simulate
from policies.journal.replay import replay


def config(
    mix: str, policy: str, load: float = 2.0, cell: str = "decode", seconds: float = 40.0
) -> dict[str, Any]:
    return {
        **fairness.CELLS[cell], "cell": cell, "mix": mix, "load": load, "admission": "open", "params": {},
        "fairness": policy, "warmup_s": 20.0, "measure_s": seconds,
    }  # fmt: skip


@pytest.mark.parametrize("cell", ["decode", "prefill"])
def test_a_greedy_tenant_takes_the_shares_of_others_without_vtc_and_not_with_it(cell: str) -> None:
    none, ours = (fairness.run_one(config("greedy", name, cell=cell), 1) for name in ("none", "vtc"))
    parts = [[one[f"part_of_share/{tenant}"] or 0.0 for tenant in fairness.MODEST] for one in (none, ours)]
    # it offers four fifths of all, and they offer what the half of their shares is
    assert sum(parts[0]) / 3 < 0.75 and min(parts[1]) > 0.85
    assert (ours["served_tokens_per_s"] or 0.0) > 0.95 * (none["served_tokens_per_s"] or 0.0)


def test_fair_shares_are_filled_up_by_weight() -> None:
    # 100 in all; "ant" wants only 5, so 95 are left for weights 1, 2 and 1, of which "ox" wants no more than 10
    shares = fairness.fair_shares(100.0, {"ant": 5.0, "bee": 90.0, "cat": 90.0, "ox": 10.0})
    assert shares == {"ant": 5.0, "ox": 10.0, "bee": pytest.approx(85 / 3), "cat": pytest.approx(170 / 3)}


def test_offers_add_up_to_the_load() -> None:
    offered = fairness.offers(config("greedy", "vtc", load=2.0))
    # half of 1/5 and of 2/5 of the capacity, of twice the capacity
    assert offered == {"ant": 0.05, "bee": 0.05, "cat": 0.1, "ox": pytest.approx(0.8)}
    assert sum(fairness.offers(config("all", "vtc")).values()) == 1.0


def test_the_journal_replays_to_the_same_turns() -> None:
    setup = config("greedy", "vtc", load=5.0, seconds=10.0) | {"admission": "by_wait"}
    lines: list[str] = []
    simulate(fairness.sim_config(setup, 3), fairness.work(setup, 3), lines.append)
    text = "".join(lines)
    assert '"fairness":{"name":"vtc"' in text.partition("\n")[0] and '"turn":{"tenant":"ox"' in text
    assert all(step.equal for step in replay(text.splitlines()))
