"""The environments of the peers, apart from the project's own: a peer's dependencies change nothing that is measured.

An environment is made once under the cache folder (`app.models.cache_root`) by `python -m venv` and pip, which takes
half a minute. It counts as made when its stamp names the versions that were installed.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.models import cache_root
from benchmarks.live.servers import ServerError

STAMP = "installed.txt"


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution on PyPI at one version, and the command that it installs."""

    name: str
    version: str
    executable: str

    @property
    def folder(self) -> Path:
        """The folder of its environment; whether it is there is another matter."""
        return cache_root() / "peers" / f"{self.name}-{self.version}"


VLLM_ROUTER = Package("vllm-router", "0.1.17", "vllm-router")
"""The router of the vLLM project, in Rust; https://github.com/vllm-project/router."""


def made(package: Package, say: Callable[[str], object]) -> Path:
    """Returns the path of the package's command, after making its environment if there is none. Raises ServerError."""
    executable, stamp = package.folder / "bin" / package.executable, package.folder / STAMP
    if stamp.exists() and executable.exists():
        return executable
    say(f"{package.name} {package.version}: making its environment")
    package.folder.parent.mkdir(parents=True, exist_ok=True)
    python = str(package.folder / "bin" / "python")
    _run([sys.executable, "-m", "venv", "--clear", str(package.folder)])
    _run([python, "-m", "pip", "install", "--no-input", "--quiet", f"{package.name}=={package.version}"])
    if not executable.exists():
        raise ServerError(f"{package.name} {package.version} has no command {package.executable}")
    stamp.write_text(_run([python, "-m", "pip", "freeze"]))
    return executable


def versions(package: Package) -> list[str]:
    """Returns the distributions in the environment, each as name==version. Raises FileNotFoundError without one."""
    return (package.folder / STAMP).read_text().split()


def _run(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServerError(f"{' '.join(argv[1:])} ended with {done.returncode}:\n{done.stderr[-1000:]}")
    return done.stdout
