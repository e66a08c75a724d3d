"""The commands that single targets of the Makefile run."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def runs(target: str, arguments: str) -> list[str]:
    """The commands of benchmarks that `make TARGET ARGS=ARGUMENTS` would run, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "ARGS")}
    made = subprocess.run(
        ["make", "--dry-run", target, f"ARGS={arguments}"],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return [
        line.partition(" -m ")[2].strip() for line in made.stdout.splitlines() if " -m benchmarks." in line
    ]


@pytest.mark.parametrize(
    ("arguments", "commands"),
    [
        ("", ["benchmarks.live.overhead", "benchmarks.peers", "benchmarks.peers.real"]),
        (
            "--quick",
            [
                f"{name} --quick"
                for name in ("benchmarks.live.overhead", "benchmarks.peers", "benchmarks.peers.real")
            ],
        ),
        # only --quick means the same to all three
        ("--seed 3", ["benchmarks.live.overhead --seed 3", "benchmarks.peers", "benchmarks.peers.real"]),
        ("--only sim", ["benchmarks.live.overhead --only sim"]),
    ],
)
def test_overhead_is_measured_with_the_peers(arguments: str, commands: list[str]) -> None:
    assert runs("bench-overhead", arguments) == commands
