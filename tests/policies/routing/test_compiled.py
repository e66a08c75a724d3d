"""Compiled functions: types by annotation, also where nothing can be written; loaded by who decides, not by imports."""

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from policies.routing.compiled import Floats, Integers, compiled, part


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
