"""The two distributions of this checkout: what their wheels hold, requirements, pins, entry points."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

packaging_requirements = pytest.importorskip("packaging.requirements")
Requirement = packaging_requirements.Requirement

ROOT = Path(__file__).resolve().parent.parent
SERVER = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SDK = tomllib.loads((ROOT / "sluice" / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {
    "server": SERVER["dependencies"],
    "sdk": SDK["dependencies"],
    **SERVER["optional-dependencies"],
}
# Asked for by vllm-cpu and left out of the extra `cpu`; scripts/nodeps-cpu.txt says why.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "xgrammar"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    lines = [line.split("#")[0].split(";")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return {canonical(name): version for name, version in (line.split("==") for line in lines if line)}


def requirements(lines: list[str]) -> dict[str, list]:
    """Canonical name -> the requirements on it that hold on this machine."""
    found: dict[str, list] = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.setdefault(canonical(requirement.name), []).append(requirement)
    return found


def python_files(*packages: str) -> set[str]:
    """Paths of the packages' tracked Python files."""
    return tracked(*(f"{package}/*.py" for package in packages))


def tracked(*patterns: str) -> set[str]:
    """Paths of the tracked files that fit the patterns."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listed.stdout.splitlines())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Both wheels by distribution, built from a copy of the tracked files: a build leaves folders in its source."""
    pytest.importorskip("setuptools")
    pytest.importorskip("pip")
    place = tmp_path_factory.mktemp("wheels")
    copy = ["git", "checkout-index", "--all", f"--prefix={place}/source/"]
    subprocess.run(copy, cwd=ROOT, check=True, timeout=60)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    build += ["--wheel-dir", str(place), str(place / "source"), str(place / "source" / "sluice")]
    done = subprocess.run(build, cwd=place, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {path.name.split("-")[0]: zipfile.ZipFile(path) for path in place.glob("*.whl")}


def code_of(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if name.endswith(".py")}


def metadata_of(wheel: zipfile.ZipFile) -> "dict[str, str]":
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return dict(Parser().parsestr(wheel.read(name).decode()))


def test_the_sdk_wheel_holds_the_package_sluice_and_nothing_else(wheels: dict[str, zipfile.ZipFile]) -> None:
    assert code_of(wheels["sluice"]) == python_files("sluice")
    tops = {name.split("/")[0] for name in wheels["sluice"].namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sluice"}
    assert "sluice/py.typed" in wheels["sluice"].namelist()


def test_the_server_wheel_holds_every_package_but_the_sdk(wheels: dict[str, zipfile.ZipFile]) -> None:
    ours = python_files("app", "actors", "policies", "predictors", "benchmarks")
    assert code_of(wheels["sluice_server"]) == ours
    page = {name for name in wheels["sluice_server"].namelist() if name.startswith("app/dashboard/static/")}
    assert page == tracked("app/dashboard/static")
    data = {name for name in wheels["sluice_server"].namelist() if name.endswith(".json")}
    assert "app/profile/heatmaps/vllm-cpu_smollm2.json" in data
    assert not any(name.startswith("benchmarks/results/") for name in data)


def test_the_sdk_wheel_alone_runs_its_command_and_names_the_server_where_it_is_needed(
    wheels: dict[str, zipfile.ZipFile], tmp_path: Path
) -> None:
    """Python without the module `site` does not see editable installations: the server cannot be imported."""
    import httpx

    wheels["sluice"].extractall(tmp_path)
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(httpx.__file__).parents[1]}", "PATH": ""}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-m", "sluice.cli", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )

    version = run("--version")
    assert (version.returncode, version.stdout) == (0, f"sluice {metadata_of(wheels['sluice'])['Version']}\n")
    refused = run("serve")
    assert refused.returncode == 7
    assert "`sluice serve`" in refused.stderr
    assert "sluice-server" in refused.stderr


def test_both_distributions_have_the_version_of_the_sdk(wheels: dict[str, zipfile.ZipFile]) -> None:
    from sluice import __version__

    assert {name: metadata_of(wheel)["Version"] for name, wheel in wheels.items()} == {
        "sluice": __version__,
        "sluice_server": __version__,
    }


def test_both_wheels_carry_the_licence(wheels: dict[str, zipfile.ZipFile]) -> None:
    for wheel in wheels.values():
        [path] = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert wheel.read(path) == (ROOT / "LICENSE").read_bytes()


def test_the_sdk_needs_httpx_and_pydantic_only() -> None:
    assert set(requirements(SDK["dependencies"])) == {"httpx", "pydantic"}


def test_cpu_extra_lists_what_the_cpu_engine_asks_for() -> None:
    try:
        asked = requirements(importlib.metadata.requires("vllm-cpu") or [])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed (`make setup`)")
    listed = requirements(REQUIREMENTS["cpu"] + REQUIREMENTS["server"])
    assert set(asked) - LEFT_OUT - set(listed) == set()


def test_pins_satisfy_what_the_cpu_engine_asks_for() -> None:
    try:
        asked = requirements(importlib.metadata.requires("vllm-cpu") or [])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed (`make setup`)")
    pinned = {**pins("constraints.txt"), **pins("scripts/nodeps-cpu.txt")}
    unmet = {
        str(requirement): pinned.get(name)
        for name, wanted in asked.items()
        for requirement in wanted
        # its setuptools and +cpu pins are build details: setuptools is not imported, torch's version is the same
        if name not in {"setuptools", "torch"} | (LEFT_OUT - {"xgrammar"})
        and (name not in pinned or pinned[name] not in requirement.specifier)
    }
    assert unmet == {}


@pytest.mark.parametrize("part", ["server", "sdk", "cpu", "dev"])
def test_every_listed_requirement_is_pinned_and_allowed(part: str) -> None:
    pinned = pins("constraints.txt")
    wrong = {
        str(requirement): pinned.get(name)
        for name, wanted in requirements(REQUIREMENTS[part]).items()
        for requirement in wanted
        if name not in pinned or pinned[name] not in requirement.specifier
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "file", ["constraints.txt", "constraints-cuda.txt", "pyproject.toml", "sluice/pyproject.toml", "Makefile"]
)
def test_no_file_names_a_host_or_a_local_build(file: str) -> None:
    text = (ROOT / file).read_text()
    assert re.findall(r"https?://|file:/|==\S*\+\w+|--index|--find-links", text) == []


ENTRY_POINTS = [
    ("sluice", "console_scripts", SDK["scripts"]),
    *(("sluice-server", group, table) for group, table in SERVER["entry-points"].items()),
]


@pytest.mark.parametrize(("distribution", "group", "table"), ENTRY_POINTS, ids=[e[1] for e in ENTRY_POINTS])
def test_entry_points_are_installed_and_load(distribution: str, group: str, table: dict[str, str]) -> None:
    installed = importlib.metadata.distribution(distribution).entry_points.select(group=group)
    assert {entry.name: entry.value for entry in installed} == table
    for entry in installed:
        loaded = entry.load()
        if group == "sluice.commands":
            assert callable(loaded.configure)
            assert callable(loaded.run)
            assert (loaded.name, bool(loaded.help)) == (entry.name, True)
        else:
            assert callable(loaded)


def test_the_command_lists_every_subcommand_of_the_server() -> None:
    from sluice.cli import plugins

    assert set(plugins.KNOWN) == set(SERVER["entry-points"]["sluice.commands"])
