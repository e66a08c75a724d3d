"""Short runs of `make chaos`: faults by a seed on sim engines, with Ray and without; nothing is lost, wrong or left."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.__main__ import run_once
from benchmarks.chaos.results import is_bad
from benchmarks.chaos.scaling import DUTIES
from benchmarks.chaos.schedule import BARE, LENDING
from benchmarks.chaos.setups import Setup, sim_setup

pytestmark = [pytest.mark.live, pytest.mark.chaos, pytest.mark.timeout(900)]

MINUTES = 1.0
LEAST_FAULTS = 4
"""A third of what an idle machine of two cores manages under Ray."""


def run(setup: Setup, logs: Path) -> dict[str, Any]:
    result = run_once(setup, 7, MINUTES, "pytest", logs)
    if is_bad(result):
        print(json.dumps(result, indent=1))  # an assertion's message is cut
    assert not is_bad(result), {
        name: result[name] for name in ("failed", "wrong", "leaks", "unended", "apart", "details", "faults")
    }
    assert len(result["faults"]) >= LEAST_FAULTS
    assert result["requests"] >= 20
    assert result["right"] + sum(result["apart"].values()) >= result["requests"]
    return result


@pytest.mark.parametrize(
    "bare", [pytest.param(True, id="bare"), pytest.param(False, id="ray", marks=pytest.mark.nightly)]
)
def test_faults_by_a_seed_lose_nothing(tmp_path: Path, bare: bool) -> None:
    # a run waits for its streams in the end: those of minutes are left to one of these
    long_share = 0.0 if bare else 0.12
    setup = sim_setup(clients=12, every_s=3.0, bare=bare, long_share=long_share)
    run(setup, tmp_path / "logs")


@pytest.mark.nightly
def test_faults_while_an_autoscaler_changes_the_fleet_lose_nothing(tmp_path: Path) -> None:
    setup = sim_setup(clients=12, every_s=3.0, scaling=True, long_share=0.0)
    # the autoscaler, what carries its orders out, and engines in every part; a minute is too short for the others
    parts = ("autoscaler", "router", "controller", *DUTIES)
    kinds = [k for k in setup.kinds if k.part in parts or k.name in ("kill decode", "kill prefill")]
    result = run(dataclasses.replace(setup, kinds=kinds), tmp_path / "logs")
    assert any(reached_s is not None for _, _, _, reached_s, _ in result["orders"])
    assert any(name.split()[1] in ("autoscaler", *DUTIES) for _, name, *_ in result["faults"])


@pytest.mark.nightly
def test_partitions_and_lacks_of_memory_lose_nothing(tmp_path: Path) -> None:
    setup = sim_setup(clients=12, every_s=3.0, bare=True, long_share=0.0)
    run(dataclasses.replace(setup, kinds=BARE), tmp_path / "logs")


def test_faults_of_flow_agents_lose_nothing(tmp_path: Path) -> None:
    setup = sim_setup(clients=12, every_s=3.0, bare=True, flow=True, long_share=0.0)
    # what schedules reads is harmed, and engines whose reads are under way; a minute is too short for the others
    kinds = [kind for kind in setup.kinds if kind.part in ("agent", "coordinator")]
    kinds += [kind for kind in setup.kinds if kind.action in ("cut", "expire", "swap")]
    kinds += [kind for kind in setup.kinds if kind.name in ("kill decode", "kill prefill")]
    result = run(dataclasses.replace(setup, kinds=kinds), tmp_path / "logs")
    assert any(name.endswith("agent") for _, name, *_ in result["faults"])


@pytest.mark.nightly
def test_lenders_and_borrowers_that_are_harmed_in_the_middle_of_a_loan_lose_nothing(tmp_path: Path) -> None:
    setup = sim_setup(clients=12, every_s=2.0, bare=True, flow=True, lend=True, long_share=0.0)
    result = run(dataclasses.replace(setup, kinds=LENDING), tmp_path / "logs")
    assert any(name.endswith("lender") for _, name, *_ in result["faults"])
    # some prefixes were lost with their lenders, and their prompts computed
    assert result["loans"]["failed"] + result["loans"]["recomputed"] > 0
