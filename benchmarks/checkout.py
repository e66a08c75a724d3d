"""Identifies the sources from which a result comes, by their commit and a digest of the code."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit(root: Path = ROOT) -> str:
    """Returns the short commit hash of the checkout at `root`, or `unknown` outside a checkout.

    A `+` follows the hash when files differ from the commit.
    """
    head = _git(root, "rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def code_digest(paths: Iterable[str]) -> str:
    """Returns a digest of the names and contents of all Python files under `paths`.

    The paths are files or folders, relative to the checkout.
    """
    whole = hashlib.sha256()
    for path in sorted(set(paths)):
        root = ROOT / path
        for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            whole.update(file.relative_to(ROOT).as_posix().encode())
            whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()[:16]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
