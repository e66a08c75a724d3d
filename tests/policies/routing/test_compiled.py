"""Compiled functions: types by annotation, a cache that knows all their files, and the same bits as plain Python."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from policies.routing.compiled import Floats, Integers, compiled, part

ROOT = Path(__file__).parents[3]


class Line(NamedTuple):
    slope: float
    offsets: Floats


@part
def on_line(line: Line, i: int, x: int) -> float:
    return line.slope * x + line.offsets[i]


def fill(line: Line, xs: Integers, out: Floats) -> None:
    for i in range(len(xs)):
        out[i] = on_line(line, i, xs[i])


def check() -> None:
    out = np.empty(3)
    compiled(fill)(Line(0.1, np.array([1.0, 2.0, 4.0])), np.array([3, 0, 7]), out)
    # no fused multiply-add: each rounded as Python does
    assert out.tolist() == [0.1 * 3 + 1.0, 2.0, 0.1 * 7 + 4.0]


def test_a_function_gets_its_annotated_types_and_pythons_rounding() -> None:
    check()


def test_an_installation_that_cannot_be_written_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        __import__("numba").njit("void()", cache=True)(lambda: None)
    check()


def test_other_types_are_refused_when_it_is_called() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        compiled(fill)(Line(0.1, np.empty(3)), np.empty(3), np.empty(3))  # type: ignore[arg-type]


def test_policies_load_compiled_code_when_they_are_told_to_prepare_not_before() -> None:
    program = (
        "import sys; from policies.routing import registry; import policies.dispatch.dispatcher;"
        "assert 'numba' not in sys.modules;"
        "registry.prepare();"
        "assert {f'policies.routing.{n}.kernel' for n in ('balance', 'composition')} <= sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.nightly
def test_cached_code_is_made_again_when_the_file_of_a_part_has_changed(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(
        "from parts import outer\nfrom policies.routing.compiled import compiled\n"
        "@compiled\ndef answer(x: float) -> float:\n    return outer(x)\n"
    )
    (tmp_path / "parts.py").write_text(
        "from inner import factor\nfrom policies.routing.compiled import part\n"
        "@part\ndef outer(x: float) -> float:\n    return factor() * x\n"
    )
    program = "import kernel; print(kernel.answer(2.0), sum(kernel.answer.stats.cache_hits.values()))"
    answers = []
    # the last is a file that the kernel's own does not name
    for factor in (3, 3, 5):
        (tmp_path / "inner.py").write_text(
            f"from policies.routing.compiled import part\n@part\ndef factor() -> float:\n    return {factor}.0\n"
        )
        paths = os.pathsep.join([str(tmp_path), str(ROOT)])
        made = subprocess.run(
            [sys.executable, "-B", "-c", program],
            env={**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        answers.append(made.stdout.split())
    assert answers == [["6.0", "0"], ["6.0", "1"], ["10.0", "0"]]


ROUNDS = """
import hashlib, random
from benchmarks.decisions.inputs import round_input
from policies.routing.registry import decode_policy
from tests.policies.routing.composition.test_round import Fleet
digest = hashlib.sha256()
for name, params in {
    "balance_route_0": {}, "balance_route_h": {"ageing_s": 300.0, "slack": 0.1, "refill": True},
    "composition": {}, "static_stack": {"center": 1.0},
}.items():
    for seed in range(20):
        view, feasible = Fleet(seed, 7, 30, 1 + seed % 2, 2, 2, 3, 400, ["both", "pairs", "none"][seed % 3]).build()
        policy = decode_policy(name, {"abundance": [0.0, 2.0, 99.0][seed % 3], "max_wait_s": 1e3, **params})
        digest.update(repr(policy.assign(feasible, view, random.Random(seed))).encode())
    tick = round_input(16, 32, random.Random(1))
    digest.update(repr(decode_policy(name, {}).assign(tick.feasible, tick.snapshot, random.Random(1))).encode())
print(digest.hexdigest())
"""


def digest_of_rounds(**environment: str) -> str:
    made = subprocess.run(
        [sys.executable, "-c", ROUNDS],
        env={**os.environ, **environment},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return made.stdout


def test_rounds_in_plain_python_decide_as_the_compiled_ones_to_the_last_bit() -> None:
    assert digest_of_rounds(NUMBA_DISABLE_JIT="1") == digest_of_rounds()


@pytest.mark.nightly
def test_rounds_in_plain_python_pass_the_same_tests() -> None:
    folders = [f"tests/policies/routing/{room}/test_round.py" for room in ("balance", "composition")]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *folders],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=ROOT,
        check=True,
        timeout=300,
    )
