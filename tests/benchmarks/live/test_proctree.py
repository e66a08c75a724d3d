"""Names of processes, and the arithmetic over snapshots; one snapshot of a real tree."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from benchmarks.live.proctree import (
    Memory,
    Usage,
    cpu_by_role,
    memory_by_role,
    name_of,
    role_of,
    snapshot,
    total,
)

INGRESS = ["ray::ServeReplica:sluice:Ingress"]
PREFILL = ["ray::ServeReplica:sluice:PrefillEngine"]
LAUNCHER = ["python", "-m", "app.serve", "--config", "deploy/sim.yaml"]
TRACKER = ["python", "-c", "from multiprocessing.resource_tracker import main;main(3)"]


@pytest.mark.parametrize(
    ("cmdline", "name"),
    [
        (INGRESS, "ingress"),
        (["ray::ServeReplica:sluice:Router.addresses"], "router"),
        (PREFILL, "prefill"),
        (["ray::AgentActor.wanted"], "flow agent"),
        (["ray::ServeReplica:sluice:FlowAgentActor"], "flow agent"),
        (["ray::ServeReplica:sluice:DecodeEngine"], "decode"),
        (["ray::ServeReplica:sluice:DecodeFarEngine"], "decode"),
        (["ray::ServeReplica:sluice:ColocatedEngine"], "colocated"),
        (["ray::ServeReplica:other:Thing"], "replica Thing"),
        (["ray::ServeController.listen_for_change"], "serve controller"),
        (["ray::ProxyActor"], "serve proxy"),
        (["/x/ray/core/src/ray/raylet/raylet", "--raylet_socket_name=y"], "raylet"),
        (["/x/ray/core/src/ray/gcs/gcs_server", "--log_dir=z"], "gcs"),
        (["ray::IDLE"], "ray idle worker"),
        (["VLLM::EngineCore"], "core"),
        (["VLLM::Worker"], "worker"),
        (LAUNCHER, "launcher"),
        (["python", "-m", "vllm.entrypoints.openai.api_server"], "api server"),
        (["python", "-m", "benchmarks.live.bare", "--port", "1"], "listener"),
        (["vllm::router"], "vllm-router"),
        (["python", "-m", "benchmarks.peers.source", "decode", "--port", "1"], "decode source"),
        (["python", "-m", "benchmarks.peers.launch", "--program", "/x/vllm-router"], "launcher"),
        (["python", "-m", "benchmarks.peers.real.servers", "--program", "/x/vllm-router"], "launcher"),
        (
            [
                "python",
                "-m",
                "benchmarks.peers.real.beside",
                *("python", "-m", "vllm.entrypoints.openai.api_server"),
            ],
            "launcher",
        ),
        (["sleep", "10"], None),
        ([], None),
    ],
)
def test_names(cmdline: Sequence[str], name: str | None) -> None:
    assert name_of(cmdline) == name


@pytest.mark.parametrize(
    ("lineage", "role"),
    [
        ([INGRESS, ["raylet/raylet"], LAUNCHER], "ingress"),
        ([["VLLM::Worker"], ["VLLM::EngineCore"], PREFILL, ["raylet/raylet"]], "prefill/worker"),
        ([["VLLM::EngineCore"], PREFILL], "prefill/core"),
        ([TRACKER, PREFILL], "prefill/resource tracker"),
        ([["python", "x.py"], LAUNCHER], "launcher/python child"),
        ([["python", "x.py"]], "python child"),
    ],
)
def test_helpers_are_named_after_their_owner(lineage: list[Sequence[str]], role: str) -> None:
    assert role_of(lineage) == role


def test_cpu_between_two_snapshots() -> None:
    before = [Usage(1, "ingress", 1.0, 0, 0), Usage(2, "decode", 5.0, 0, 0), Usage(9, "gone", 3.0, 0, 0)]
    after = [Usage(1, "ingress", 1.5, 0, 0), Usage(2, "decode", 7.0, 0, 0), Usage(3, "decode", 0.25, 0, 0)]
    assert cpu_by_role(before, after) == {"decode": 2.25, "ingress": 0.5}
    assert list(cpu_by_role(before, after)) == ["decode", "ingress"]


def test_memory() -> None:
    table = memory_by_role([Usage(1, "a", 0, 10, 4), Usage(2, "b", 0, 30, 20), Usage(3, "a", 0, 5, 3)])
    assert table == {"b": Memory(1, 30, 20), "a": Memory(2, 15, 7)}
    assert list(table) == ["b", "a"]
    assert total(table) == Memory(3, 45, 27)


def test_snapshot_finds_children_and_their_cpu() -> None:
    code = "import sys\nwhile sum(range(10000)) and not __import__('select').select([sys.stdin], [], [], 0)[0]: pass"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        seen: list[Usage] = []
        while not seen or seen[-1].cpu_s < 0.05:  # it computes until its input closes
            seen = [usage for usage in snapshot(os.getpid()) if usage.pid == child.pid]
        assert seen[0].rss_bytes > 1 << 20
        assert 0 < seen[0].pss_bytes <= seen[0].rss_bytes
    finally:
        child.communicate(b"x", timeout=20)
    assert all(usage.pid != child.pid for usage in snapshot(os.getpid()))
