"""Identifies the sources from which a result comes, by their commit and a digest of the code."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = ("actors", "app", "benchmarks", "policies", "predictors", "sluice")
"""The packages of this project."""
PRODUCT = ("actors", "app", "policies", "predictors", "sluice")
"""The packages of the application, without its benchmarks."""
DIGEST = "v2"
"""The version of the way in which `code_digest` is computed, with which every digest begins."""

# A run depends on these too: profiles, heatmaps and excerpts of traces lie beside the code.
_SUFFIXES = (".py", ".yaml", ".json", ".xz")
# The libraries that compute in a simulation; their versions are part of an origin.
_LIBRARIES = ("lightgbm", "numba", "numpy", "scikit-learn")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run comes from: the code that ran, and the machine.

    `code` is a digest of the files on which the run depends. `clean` says whether they are those of `commit`. `traces`
    names the files of published traces that the run could read, each with a digest of its content.
    """

    code: str
    commit: str
    clean: bool
    machine: str
    traces: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by name; `traces` only where there are any."""
        return {name: value for name, value in asdict(self).items() if name != "traces" or value}

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Origin:
        """Returns the origin that `as_json` gave. Raises TypeError for anything else."""
        return Origin(**{**stored, "traces": tuple(stored.get("traces", ()))})


def origin_of(paths: Iterable[str], traces: Iterable[str] = ()) -> Origin:
    """Returns the origin of a run that starts now and depends on `paths`, files or folders relative to the checkout."""
    paths = list(paths)
    return Origin(code_digest(paths), head(), is_clean(paths), machine(), tuple(traces))


def depends_on(module: str, folders: Iterable[str], root: Path = ROOT) -> list[str]:
    """Returns the folders and files on which a measurement by `module` depends, ordered by name.

    They are `folders` and all files beyond them that the module imports, directly or not.
    """
    folders = sorted(folders)
    beyond = [file for file in imported(module, root) if not file.startswith(tuple(f"{f}/" for f in folders))]
    return sorted({*folders, *beyond})


def commit(root: Path = ROOT) -> str:
    """Returns the short commit hash of the checkout at `root`, or `unknown` outside a checkout.

    A `+` follows the hash when files differ from the commit.
    """
    at = _git(root, "rev-parse", "--short", "HEAD")
    if at is None:
        return "unknown"
    return at + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def head(root: Path = ROOT) -> str:
    """Returns the short commit hash of the checkout at `root`, or `unknown` outside a checkout."""
    return _git(root, "rev-parse", "--short", "HEAD") or "unknown"


def is_clean(paths: Iterable[str], root: Path = ROOT) -> bool:
    """Returns whether all files below `paths` are those of the commit, with no new file among them.

    Results that are being written, and documents, do not make code unclean.
    """
    return _git(root, "status", "--porcelain", "--untracked-files=all", "--", *sorted(set(paths))) == ""


def machine() -> str:
    """Returns the CPU, its number of cores, and the versions of Python and of the libraries that compute."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES if _installed(name)]
    cores = f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores"
    return f"{cores}; Python {sys.version.split()[0]}; {', '.join(versions)}"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def cpu_model() -> str:
    """Returns the CPU's name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def code_digest(paths: Iterable[str], root: Path = ROOT) -> str:
    """Returns a digest of the names and contents of all code and data files under `paths`.

    The paths are files or folders, relative to the checkout. The digest begins with the version of this computation
    (`DIGEST`), so that digests of two versions cannot be taken for those of two states of the code.
    """
    whole = hashlib.sha256()
    for file in _files(paths, root):
        whole.update(file.relative_to(root).as_posix().encode())
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{DIGEST}:{whole.hexdigest()[:16]}"


def _files(paths: Iterable[str], root: Path) -> list[Path]:
    """Returns the code and data files under `paths`; in a checkout without those that git ignores."""
    paths = sorted(set(paths))
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths)
    if listed is None:
        below = [file for path in paths for file in (root / path, *(root / path).rglob("*"))]
    else:
        below = [root / file for file in listed.splitlines()]
    return sorted({file for file in below if file.suffix in _SUFFIXES and file.is_file()})


@contextmanager
def code_at(commit: str, root: Path = ROOT) -> Iterator[Path | None]:
    """Gives the folder in which this project's packages and configuration files lie as they were at a commit, or None
    if the present commit of the checkout at `root` does not come after that one. The folder is gone after the context.

    A commit that a fresh clone would lack (of a branch that was thrown away, say) is refused although it may be here.
    """
    reached = _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None
    packages = _git(root, "ls-tree", "--name-only", commit, *OURS, "deploy") if reached else None
    if packages is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sluice-code-") as name:
        whole = subprocess.run(
            ["git", "archive", "--format=tar", commit, *packages.split()],
            cwd=root,
            capture_output=True,
            check=True,
        )
        with tarfile.open(fileobj=io.BytesIO(whole.stdout)) as tar:
            # Python has filters from 3.11.4 on, Debian 12's is older; git's names lead nowhere else
            safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(name, **safely)
        yield Path(name)


def no_history(root: Path = ROOT) -> str | None:
    """Returns the reason for which commits cannot be looked up at `root`, or None where they can be."""
    shallow = _git(root, "rev-parse", "--is-shallow-repository")
    if shallow is None:
        return "this is no git checkout"
    return "this is a shallow clone" if shallow == "true" else None


def imported(module: str, root: Path = ROOT) -> list[str]:
    """Returns the files of this project that `module` imports, directly or not, itself included, ordered by name.

    Imports within functions count. A module outside the project gives no files.
    """
    found: dict[str, None] = {}
    todo = [module]
    while todo:
        file = _file_of(todo.pop(), root)
        if file is None or file in found:
            continue
        found[file] = None
        todo += _imports(root / file)
    return sorted(found)


def _file_of(module: str, root: Path) -> str | None:
    path = module.replace(".", "/")
    for file in (f"{path}.py", f"{path}/__init__.py"):
        if module.partition(".")[0] in OURS and (root / file).exists():
            return file
    return None


def _imports(file: Path) -> Sequence[str]:
    """Returns the names that could be modules among all that `file` imports, with the packages around them."""
    return _named_in(file.read_text("utf-8"))


@lru_cache(maxsize=1024)
def _named_in(text: str) -> Sequence[str]:
    named: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            named += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [".".join(name.split(".")[:depth]) for name in named for depth in range(1, name.count(".") + 2)]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
