"""Same seed, byte-identical event log, whatever the hash seed; and the log replays to the same decisions."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import EngineSpec, Forecasting, SimConfig
from benchmarks.sim.network.clusters import netkv_cluster, netkv_instances, prefill_and_decode
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.profiles import load
from benchmarks.workloads.record import WorkloadRequest
from policies.journal.replay import replay
from policies.state.views import Role
from predictors.memorise import Memorised
from predictors.protocol import Predictor

ROOT = Path(__file__).parents[3]


def survival(lengths: Mapping[str, int]) -> Predictor:
    return Memorised()


def config(decode: str, seed: int = 3) -> SimConfig:
    """NetKV's cluster, small blocks, predictor on, prefix caches on: everything that has a random draw in it."""
    profile = load("netkv_llama3_70b_tp4_h100")
    prefill, others = prefill_and_decode(netkv_instances(netkv_cluster(64)))
    return SimConfig(
        (
            EngineSpec("p", Role.PREFILL, len(prefill), profile, nodes=tuple(i.node for i in prefill)),
            EngineSpec(
                "d",
                Role.DECODE,
                len(others),
                profile,
                slots=4,
                nodes=tuple(i.node for i in others),
                transfer_flows=4,
            ),
        ),
        prefill=("power_of_two", {}),
        decode=(decode, {}),
        network=Fabric(netkv_cluster(64)),
        forecasts=Forecasting(survival),
        seed=seed,
    )


def workload() -> list[WorkloadRequest]:
    return [
        WorkloadRequest(
            f"r{i}",
            0.05 * i,
            640 + 64 * (i * 7 % 40),
            20 + i * 13 % 150,
            tuple(1000 * (i % 9) + b for b in range(10)),
            64,
            client=f"c{i % 3}",
            prompt_key=f"k{i % 9}",
        )
        for i in range(150)
    ]


def log_of(decode: str, seed: int = 3) -> str:
    lines: list[str] = []
    simulate(config(decode, seed), workload(), journal=lines.append)
    return "".join(lines)


@pytest.mark.parametrize("decode", [pytest.param("composition", marks=pytest.mark.nightly), "power_of_two"])
def test_same_log_in_processes_of_different_hash_seed(decode: str) -> None:
    code = (
        "import hashlib, importlib.util as u\n"
        f"spec = u.spec_from_file_location('d', {str(Path(__file__))!r})\n"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module)\n"
        f"print(hashlib.sha256(module.log_of({decode!r}).encode()).hexdigest())"
    )
    digests = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert digests == {hashlib.sha256(log_of(decode).encode()).hexdigest()}


def test_another_seed_is_another_run() -> None:
    assert log_of("netkv", 3) != log_of("netkv", 4)


@pytest.mark.parametrize("decode", ["composition", "netkv", "balance_route_h"])
def test_a_simulated_log_replays_to_the_same_decisions(decode: str) -> None:
    steps = list(replay(log_of(decode).splitlines()))
    decided = [line for step in steps for line in step.recorded if '"action"' in line]
    assert len(decided) >= 2 * 150  # a prefill and a decode worker for each
    assert [step.replayed for step in steps] == [step.recorded for step in steps]
