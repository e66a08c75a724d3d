"""The environment in which a peer is installed: one of its own in the project's cache, never the project's.

A peer is a program of others; its dependencies must not decide the versions of ours, nor ours of its. The environment
is made once, by the machine's ordinary pip settings, and found again by a stamp that is written last.

    python -m benchmarks.peers.environment    makes it and prints where the program is, or says why it cannot be had
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from app.models import cache_root

NAME = "vllm-router"
VERSION = "0.1.17"
STAMP = "installed.json"


class PeerError(RuntimeError):
    """The error of a peer that cannot be installed here; the message says what the installer said."""


def folder() -> Path:
    """Returns the folder of the peer's environment, which need not exist."""
    return cache_root() / "peers" / f"{NAME}-{VERSION}"


def installed() -> Path | None:
    """Returns the peer's program, or None if it has not been installed whole."""
    program = folder() / "bin" / NAME
    return program if (folder() / STAMP).exists() and program.exists() else None


def install() -> Path:
    """Returns the peer's program, and installs it first if necessary (some 10 seconds). Raises PeerError."""
    found = installed()
    if found is not None:
        return found
    where = folder()
    shutil.rmtree(where, ignore_errors=True)
    python = where / "bin" / "python"
    run(sys.executable, "-m", "venv", str(where))
    run(str(python), "-m", "pip", "install", "--quiet", "--no-input", f"{NAME}=={VERSION}")
    run(str(where / "bin" / NAME), "--help")
    listed = run(str(python), "-m", "pip", "list", "--format", "json")
    versions = {one["name"]: one["version"] for one in json.loads(listed)}
    (where / STAMP).write_text(json.dumps(versions, sort_keys=True))
    return where / "bin" / NAME


def main() -> int:
    """Installs the peer. Returns 1 if it cannot be installed here."""
    try:
        print(install())
    except PeerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def versions() -> dict[str, str]:
    """Returns the versions of all packages in the peer's environment. Raises FileNotFoundError before `install`."""
    found: dict[str, str] = json.loads((folder() / STAMP).read_text("utf-8"))
    return found


def run(*argv: str, peer: str = f"{NAME} {VERSION}") -> str:
    """Runs a command of the installation of `peer`, and returns what it printed. Raises PeerError."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-1000:]
        raise PeerError(f"{peer} cannot be installed here: {' '.join(argv[1:])} failed:\n{said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
