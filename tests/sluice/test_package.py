"""The cost of importing the package."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sluice

ROOT = Path(sluice.__file__).parents[1]

LOADED = """
import importlib.metadata, json, sys
before = set(sys.modules)
import {module}
tops = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
tops = {{name for name in tops if not name.startswith("_sysconfigdata")}}  # the standard library's, named per platform
print(json.dumps(sorted(tops)))
"""

NEEDS = {
    "sluice",
    # httpx and what it needs
    *("httpx", "httpcore", "h11", "anyio", "idna", "certifi", "sniffio"),
    # what httpx uses where it is installed
    *(
        "h2",
        "hpack",
        "hyperframe",
        "brotli",
        "brotlicffi",
        "_brotli",
        "zstandard",
        "socksio",
        "rich",
        "click",
        "pygments",
    ),
    # pydantic and what it needs
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"),
}


@pytest.mark.parametrize("module", ["sluice", "sluice.cli"])
def test_importing_loads_httpx_and_pydantic_only(module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    loaded = set(json.loads(run.stdout.splitlines()[-1]))
    assert loaded >= {"sluice", "httpx", "pydantic"}
    assert loaded - NEEDS == set()


def test_all_names_exist() -> None:
    assert [name for name in sluice.__all__ if not hasattr(sluice, name)] == []
    assert len(sluice.__all__) == len(set(sluice.__all__))


def test_what_is_not_the_api_says_so_by_its_name() -> None:
    """`sluice` itself is the API, with further result types in `sluice.types`, the dashboard's client in
    `sluice.admin`, and the command in `sluice.cli`.
    """
    modules = {info.name for info in pkgutil.iter_modules(sluice.__path__)}
    assert {name for name in modules if not name.startswith("_")} == {"admin", "cli", "types"}


def test_the_package_says_it_is_typed() -> None:
    assert (ROOT / "sluice" / "py.typed").exists()
