"""The import arrows: which package may import which, no circles, and what the pure packages load.

`make lint` checks the arrows between packages and between their rooms by import-linter (pyproject.toml lists them).
These tests read the sources themselves, down to single modules, and start fresh interpreters to see what importing
loads.
"""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"sluice", "predictors", "policies", "actors", "app", "benchmarks"}
ENGINES = {"ray", "vllm", "torch", "nixl"}
LOOPS = {"asyncio", "uvloop", "threading", "socket", "multiprocessing", "concurrent"}
CLOCKS = {"time", "datetime"}
WEB = {"httpx", "fastapi", "starlette", "uvicorn", "httptools", "requests", "aiohttp"}

# package -> top-level modules that nothing in it may import, wherever the statement stands
FORBIDDEN = {
    "predictors": (OURS - {"predictors"}) | ENGINES | WEB | {"asyncio"},
    "policies": (OURS - {"policies", "predictors"}) | ENGINES | LOOPS | CLOCKS | WEB | {"logging"},
    "actors": {"app", "sluice", "benchmarks"},
    "app": {"sluice", "benchmarks"},
    "sluice": (OURS - {"sluice"}) | ENGINES | {"numpy", "msgspec", "uvloop", "yaml", "fastapi", "openai"},
    "benchmarks/sim": ENGINES | {"actors", "app"},
    "benchmarks/workloads": ENGINES | {"actors", "app"},
    "benchmarks/whatif": ENGINES | {"actors", "app"},
    "benchmarks/live": ENGINES | {"actors", "app", "policies"},
}
SHARED = {"benchmarks/live": {"app.dashboard.store"}}
"""Modules that are allowed all the same: an experiment's folder is written by its command and read by the dashboard."""
SDK_NEEDS = {"httpx", "pydantic", "pydantic_core", "typing_extensions"}  # the last two come with pydantic


def imported(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every absolute import statement in `source`, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def modules_imported(module: str, file: Path, known: Set[str]) -> set[str]:
    """The modules among `known` that `module`, whose source is `file`, imports: at any depth, for types too."""
    package = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import name` imports the module package.name where there is one.
            members = {f"{base}.{alias.name}" for alias in node.names}
            found |= members & known or {base}
    return (found & known) - {module}


def circle_in(root: Path, packages: Set[str]) -> list[str]:
    """Modules that import one another in a circle, the first of them again at the end; empty if there is none."""
    files = {}
    for package in packages:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph = {module: modules_imported(module, file, files.keys()) for module, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def violations(source: str, forbidden: set[str]) -> list[tuple[int, str]]:
    return [(line, module) for line, module in imported(source) if module.split(".")[0] in forbidden]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules_of(package: str) -> list[str]:
    """Dotted names of all modules of a package, `__main__` left out."""
    names = []
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_no_import_against_the_arrows(package: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for line, module in violations(file.read_text(), FORBIDDEN[package])
        if module not in SHARED.get(package, ())
    ]
    assert found == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circle_in(ROOT, OURS) == []


@pytest.mark.parametrize(
    ("a", "b", "circle"),
    [
        ("from p.b import f", "import p.a", True),
        ("from p import b", "def f():\n    from . import a", True),
        ("from .b import f", "if TYPE_CHECKING:\n    from .a import T", True),
        ("from .b import f", "import os", False),
        ("from p.b import f", "from p import something", False),
    ],
)
def test_a_circle_is_found_however_it_is_written(tmp_path: Path, a: str, b: str, circle: bool) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").touch()
    (tmp_path / "p" / "a.py").write_text(a)
    (tmp_path / "p" / "b.py").write_text(b)
    assert sorted(set(circle_in(tmp_path, {"p"}))) == (["p.a", "p.b"] if circle else [])


def test_sdk_imports_the_standard_library_httpx_and_pydantic_only() -> None:
    allowed = SDK_NEEDS | {"sluice"} | sys.stdlib_module_names
    found = [
        f"{file.name}:{line} imports {module}"
        for file in (ROOT / "sluice").rglob("*.py")
        for line, module in imported(file.read_text())
        if module.split(".")[0] not in allowed
    ]
    assert found == []


def test_policies_draw_from_the_injected_generator_only() -> None:
    """`random.Random` as a type is fine; random.random(), choice(), ... would be hidden, unseeded state."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} uses random.{node.attr}"
        for file in (ROOT / "policies").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
        and node.attr != "Random"
    ]
    assert found == []


def test_deploy_holds_no_python() -> None:
    assert list((ROOT / "deploy").rglob("*.py")) == []


def test_importing_policies_loads_no_ray_engine_or_event_loop() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {modules_of('policies')}: importlib.import_module(name)\n"
        "print(sorted({'ray', 'vllm', 'torch', 'nixl', 'asyncio', 'sklearn', 'lightgbm'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_importing_predictors_loads_no_ray_engine_or_learner() -> None:
    """The learners are heavy (lightgbm, sklearn) and needed only where a model is fitted or loaded."""
    code = "import sys, predictors; print(sorted({'ray', 'vllm', 'torch', 'sklearn', 'lightgbm'} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_importing_the_sdk_loads_nothing_of_the_server() -> None:
    unwanted = (OURS - {"sluice"}) | ENGINES | {"numpy", "fastapi", "msgspec", "yaml"}
    assert run_python(f"import sys, sluice; print(sorted({unwanted} & set(sys.modules)))") == "[]"


def test_every_package_can_be_found() -> None:
    assert {name for name in OURS if importlib.util.find_spec(name) is None} == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ray", [(1, "ray")]),
        ("import numpy, ray.serve as s", [(1, "ray.serve")]),
        ("from ray.util import metrics", [(1, "ray.util")]),
        ("def f():\n    import ray\n", [(2, "ray")]),
        ("if TYPE_CHECKING:\n    from ray import serve\n", [(2, "ray")]),
        ("from .ray import x\nfrom array import array\nimport rays", []),
    ],
)
def test_the_reader_of_imports_sees_every_form(source: str, expected: list[tuple[int, str]]) -> None:
    assert violations(source, {"ray"}) == expected
