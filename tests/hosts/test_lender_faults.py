"""A lender that is killed while a vLLM engine reads its prefix, in the short form of the benchmark.

Three engines lie on two hosts, with the shaped link between them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from benchmarks.mfs import link
from tests.live.vllm_app import cpu_only

_REASON = link.why_not()
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    cpu_only("its engines, and the link between them, are those of the benchmark on CPUs"),
]


def test_a_lender_that_is_killed_in_the_middle_of_a_read_costs_the_prefix_only(tmp_path: Path) -> None:
    """The borrower computes the prompt in the same attempt, gives the undisturbed answer, and keeps nothing. The next
    life of the lender lends to it again.
    """
    options = ["--rounds", "1", "--only", "killed", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos.lenders", *options], capture_output=True, text=True, cwd=ROOT
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    (fault,) = json.loads((tmp_path / "lenders.json").read_text())["faults"]
    assert (fault["kind"], fault["loans"], fault["attempts"]) == ("killed", {"recomputed": 1}, 0)
    assert (fault["right"], fault["left"]) == (True, "")
    # some of the prefix had come, and never the whole of it
    assert 0.0 < fault["moved"] <= fault["moved_in_all"] < 1.0
    assert fault["undisturbed_s"] is not None
