"""The page's files: libraries as published, nothing that the security policy forbids, a bound on their size."""

import fnmatch
import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STATIC = ROOT / "app" / "dashboard" / "static"
VENDOR = STATIC / "vendor"
OURS = sorted(p for p in STATIC.rglob("*") if p.is_file() and VENDOR not in p.parents)
MOST_BYTES = 250_000


def test_all_that_a_browser_loads_stays_small() -> None:
    loaded = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix != ".LICENSE"]
    size = sum(path.stat().st_size for path in loaded)
    assert size <= MOST_BYTES


def test_the_libraries_are_those_that_were_published() -> None:
    listed = json.loads((VENDOR / "vendor.json").read_text())
    files = {one["file"]: one["sha256"] for package in listed for one in package["files"]}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["vendor.json"]
    assert found == files
    for package in listed:
        assert package["version"] and package["licence"]
        assert any(one["file"].endswith(".LICENSE") for one in package["files"]), package["package"]


def test_the_script_that_vendors_names_the_versions_that_are_here() -> None:
    script = (ROOT / "scripts" / "vendor.sh").read_text()
    listed = json.loads((VENDOR / "vendor.json").read_text())
    assert sorted(f"{one['package']}@{one['version']}" for one in listed) == sorted(
        re.findall(r'^    "(\S+@\S+) ', script, re.MULTILINE)
    )


def test_every_file_is_package_data() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    left_out = [
        str(path.relative_to(STATIC))
        for path in STATIC.rglob("*")
        if path.is_file() and not any(fnmatch.fnmatch(path.name, glob) for glob in globs)
    ]
    assert left_out == []


def test_the_page_has_no_inline_script_and_no_inline_style() -> None:
    text = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))


# Text of the server becomes part of the page as text only, and no text becomes code.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc"
    r"|\beval\(|new Function|setAttribute\(\"style"
)


@pytest.mark.parametrize("path", [p for p in OURS if p.suffix == ".js"], ids=lambda p: p.name)
def test_no_script_makes_markup_or_code_of_text(path: Path) -> None:
    assert FORBIDDEN.findall(path.read_text()) == []


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.name)
def test_no_file_names_another_host(path: Path) -> None:
    addresses = re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]\S*", path.read_text())
    assert [one for one in addresses if "www.w3.org/2000/svg" not in one] == []


def test_modules_import_only_what_is_there() -> None:
    """A browser finds a missing module only when it loads the page, and a missing name only then, too."""
    for path in (p for p in OURS if p.suffix == ".js"):
        for names, target in re.findall(r"(?:import|export) \{([^}]*)\} from \"([^\"]+)\"", path.read_text()):
            source = (path.parent / target).resolve()
            assert source.is_file(), f"{path.name}: {target}"
            if source.parent == VENDOR:
                continue
            text = source.read_text()
            given = set(re.findall(r"export (?:async )?(?:function|const|class) (\w+)", text))
            for listed in re.findall(r"export \{([^}]*)\}", text):
                given |= {name.strip() for name in listed.split(",")}
            wanted = {name.strip() for name in names.split(",") if name.strip()}
            assert wanted <= given, f"{path.name} wants {wanted - given} of {target}"
