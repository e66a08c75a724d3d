"""Compiled and pure Python decide alike: the journals of the same random histories are equal, byte for byte.

A journal line holds worker, ranking, terms to the last digit, reason and waits of a decision, or the message of a
failure. Each form runs in an interpreter of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.code_form import code_form
from actors.wire import channel
from policies.journal.replay import replay
from policies.routing.registry import DECODE, PREFILL
from tests.policies.journal.test_replay import history

ROOT = Path(__file__).resolve().parents[2]
EVENTS = 250


def lines() -> list[str]:
    """Returns the journals of histories, one after the other, in which each policy of the registries decides."""
    pairs = zip(sorted(PREFILL) * 2, sorted(DECODE) * 2, strict=False)
    return [line for seed, (p, d) in enumerate(pairs) for line in history(seed, EVENTS, p, d)]


def written_by(form: str) -> tuple[str, list[str]]:
    """Returns the form in which an interpreter runs that is asked for this one, and the lines that it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.test_compiled"],
        cwd=ROOT,
        env={**os.environ, "SLUICE_PURE": "1" if form == "pure Python" else ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    first, *written = done.stdout.splitlines()
    return first, written


@pytest.mark.skipif(
    code_form(channel) != "compiled", reason="pure Python runs here (SLUICE_PURE, or no compiler)"
)
def test_both_forms_write_the_same_journals() -> None:
    form, compiled = written_by("compiled")
    other, pure = written_by("pure Python")
    assert (form, other) == ("compiled", "pure Python")
    assert len(compiled) > EVENTS * max(len(PREFILL), len(DECODE))
    assert compiled == pure


@pytest.mark.skipif(
    code_form(channel) != "compiled", reason="pure Python runs here (SLUICE_PURE, or no compiler)"
)
@pytest.mark.nightly
def test_a_journal_of_pure_python_replays_equal_in_the_compiled_form() -> None:
    _, pure = written_by("pure Python")
    starts = [n for n, line in enumerate(pure) if line.startswith('{"journal"')]
    first = pure[: starts[1]]
    assert len(first) > EVENTS
    assert all(step.equal for step in replay(first))


if __name__ == "__main__":
    print(code_form(channel))
    print("\n".join(lines()))
