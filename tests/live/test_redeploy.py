"""A changed configuration restarts the deployments that read what changed, and no other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.live.servers import free_ports
from tests.live.serving import ROOT, config_file

pytestmark = [pytest.mark.live, pytest.mark.nightly]


def changed(folder: Path, number: int, port: int, change: dict[str, Any]) -> str:
    """The path of a copy of deploy/sim.yaml on this port, with `change` in its application's args."""

    def apply(args: dict[str, Any]) -> None:
        args.update({"ingress": {"port": port}, **change})

    (folder / str(number)).mkdir()
    return str(config_file(folder / str(number), "sim.yaml", apply))


@pytest.mark.timeout(600)
def test_a_deployment_restarts_when_its_part_of_the_file_changes(tmp_path: Path) -> None:
    port, http_port = free_ports(2)
    ingress = {"port": port, "options": {"max_body_bytes": 100_000}}
    router = {"decode": {"name": "round_robin"}}
    engines = [
        {"name": "prefill", "role": "prefill", "kind": "sim"},
        {"name": "decode", "role": "decode", "kind": "sim", "replicas": 3},
    ]
    files = [
        changed(tmp_path, number, port, change)
        for number, change in enumerate(
            [
                {},
                {"ingress": ingress},
                {"ingress": ingress, "router": router},
                {"ingress": ingress, "router": router, "engines": engines},
            ]
        )
    ]
    command = [sys.executable, "-m", "tests.live.redeploying", str(http_port), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *later = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert set(first) == {"Router", "Ingress", "PrefillEngine", "DecodeEngine"}
    restarted = []
    for before, after in zip([first, *later], later, strict=False):
        restarted.append({name for name in before if not set(before[name]) <= set(after[name])})
    assert restarted == [{"Ingress"}, {"Router"}, set()]
    assert len(later[-1]["DecodeEngine"]) == 3
