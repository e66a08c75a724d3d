"""Compiles the modules of `[tool.sluice] compiled` in pyproject.toml by mypyc into the environment that runs this.

    python -m scripts.compiled.build [--current | --note]

`make setup` calls it. Where it cannot compile, pure Python runs, and a note says in one sentence why and what to do.
Nothing happens if all is as it was compiled last. After a call with SLUICE_PURE=1 pure Python runs until a call without
it. Compiled modules are kept by the digest of all that decides them, so a checkout that goes back to a former state
finds them again. `scripts/compiled/finder.py` says when they are used.
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.checkout import imported
from scripts.compiled import finder

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
INSTALLED = "_sluice_compiled"
"""The folder in site-packages with the finder, the manifest and the compiled modules."""
KEPT = 3
"""Compiled states that are kept. ASSUMPTION: two branches, and one more."""
NOTE = "note.txt"
LOG = "log.txt"
ADVICE = "Debian, Ubuntu: apt-get install gcc python3-dev; then run `make setup` again"


def modules(root: Path = ROOT) -> list[str]:
    """Returns the names of the modules that are to be compiled."""
    return list(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["sluice"]["compiled"])


def compiler() -> str | None:
    """Returns the program that compiles C: that of CC, else the one that compiled Python, else cc, gcc or clang."""
    asked = os.environ.get("CC")
    usual = [asked] if asked else [sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang"]
    return next((one for one in usual if shutil.which(shlex.split(one)[0])), None)


def missing() -> str | None:
    """Returns what keeps this machine from compiling, in words, or None."""
    if compiler() is None:
        return "no C compiler was found"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of Python (Python.h) were not found"
    return None


def recipe(names: Sequence[str]) -> str:
    """Returns a digest of everything but the sources that decides what is compiled."""
    parts = [*names, finder.LIBRARY, str(sysconfig.get_config_var("EXT_SUFFIX")), _COMPILE]
    for package in ("mypy", "setuptools"):
        try:
            parts.append(version(package))
        except PackageNotFoundError:
            parts.append("")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def sources_of(names: Sequence[str], root: Path = ROOT) -> dict[str, str]:
    """Returns the SHA-256 digests of the modules' sources and of all that they import, by path."""
    files = {file for name in names for file in imported(name, root)}
    return {file: hashlib.sha256((root / file).read_bytes()).hexdigest() for file in sorted(files)}


class Place:
    """The folder in an environment's site-packages, and the `.pth` file beside it."""

    def __init__(self, site: Path) -> None:
        self.folder = site / INSTALLED
        self._hook = site / f"{INSTALLED}.pth"

    def manifest(self) -> dict[str, Any]:
        """Returns what was compiled last; empty if nothing was."""
        try:
            found = json.loads((self.folder / finder.MANIFEST).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def note(self) -> str:
        """Returns why pure Python runs; empty where it does not."""
        try:
            return (self.folder / NOTE).read_text()
        except OSError:
            return ""

    def is_current(self, made_by: str, root: Path = ROOT) -> bool:
        """Returns whether what is in use was made by this recipe from the present sources, or failed on them."""
        manifest = self.manifest()
        same = manifest.get("recipe") == made_by and finder.changed(root, manifest["sources"]) is None
        return (
            same and self._hook.exists() and ("at" not in manifest or (self.folder / manifest["at"]).is_dir())
        )

    def take_away(self, note: str) -> None:
        """Has no process use compiled modules from now on, and leaves a note why."""
        self._hook.unlink(missing_ok=True)
        self._write(NOTE, note)

    def put(self, manifest: dict[str, Any], note: str) -> None:
        """Installs the finder with a manifest; the files that it names must be here already."""
        self._write(NOTE, note)
        self._write("__init__.py", Path(finder.__file__).read_text())
        self._write(finder.MANIFEST, json.dumps(manifest, indent=1))
        self._hook.write_text(f"import {INSTALLED}; {INSTALLED}.install()\n")
        states = sorted((one for one in self.folder.iterdir() if one.is_dir()), key=_age, reverse=True)
        for old in [one for one in states if one.name not in ("__pycache__", manifest.get("at"))][KEPT - 1 :]:
            shutil.rmtree(old, ignore_errors=True)

    def _write(self, name: str, text: str) -> None:
        """Writes a file that processes may be reading at this moment."""
        self.folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.folder / name)


def _age(folder: Path) -> float:
    return folder.stat().st_mtime


def update(place: Place, names: Sequence[str], root: Path = ROOT) -> None:
    """Brings an environment up to date with the sources at `root`."""
    if finder.pure_wanted():
        place.take_away(f"pure Python runs, because {finder.PURE} asks for it")
        return
    made_by = recipe(names)
    if place.is_current(made_by, root):
        return
    sources = sources_of(names, root)
    at = hashlib.sha256(f"{made_by}{sorted(sources.items())}".encode()).hexdigest()[:16]
    manifest = {"recipe": made_by, "sources": sources, "modules": list(names)}
    made = (place.folder / at).is_dir()
    if not made and (lack := missing()) is not None:
        place.take_away(f"{lack}, so pure Python runs, which needs more CPU time for each request ({ADVICE})")
        return
    if not made and not _compiled(place.folder, at, names, root):
        log = place.folder / LOG
        note = (
            f"compiling failed, so pure Python runs, which needs more CPU time for each request (see {log})"
        )
        place.put({**manifest, "modules": []}, note)
        return
    (place.folder / at).touch()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    place.put({**manifest, "at": at, "suffix": suffix}, "")


def _compiled(folder: Path, at: str, names: Sequence[str], root: Path) -> bool:
    """Compiles the modules into `folder / at` in a process of its own, and returns whether that worked. Its output is
    kept in `log.txt`.
    """
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sluice-compile-") as scratch:
        command = [sys.executable, "-c", _COMPILE, scratch, finder.LIBRARY.removesuffix("__mypyc")]
        files = [f"{name.replace('.', '/')}.py" for name in names]
        environment = {**os.environ, "CC": compiler() or "cc"}
        with open(folder / LOG, "w") as log:
            done = subprocess.run(
                [*command, *files],
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        made = Path(scratch, "lib")
        if done.returncode or not list(made.glob(f"{finder.LIBRARY}*")):
            return False
        with contextlib.suppress(OSError):
            shutil.rmtree(folder / f"{at}.part")
        shutil.copytree(made, folder / f"{at}.part")
        os.replace(folder / f"{at}.part", folder / at)
    return True


_COMPILE = """
import os, sys
from mypyc.build import mypycify
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

scratch, group, *files = sys.argv[1:]
modules = mypycify(["--follow-imports=silent", *files], multi_file=True, group_name=group, target_dir=scratch + "/c")
command = build_ext(Distribution({"name": group, "ext_modules": modules}))
command.build_lib, command.build_temp = scratch + "/lib", scratch + "/objects"
command.parallel = min(4, len(os.sched_getaffinity(0)))
command.ensure_finalized()
command.run()
"""
"""The program of the process that compiles. mypyc ends its process where the types do not fit."""


def main() -> int:
    """Does what the command line says: compiles, or (`--current`) tells by the exit status whether there is nothing to
    do, or (`--note`) prints why pure Python runs.
    """
    place, names = Place(SITE), modules()
    if "--note" in sys.argv:
        print(place.note())
    elif "--current" in sys.argv:
        return int(finder.pure_wanted() or not place.is_current(recipe(names)))
    else:
        update(place, names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
