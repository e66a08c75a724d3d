"""The state of the sources that a result comes from: commit, and digest of the code."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit(root: Path = ROOT) -> str:
    """Short hash of the checkout at `root`, with `+` when files differ from it; `unknown` outside a checkout."""
    head = _git(root, "rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def code_digest(paths: Iterable[str]) -> str:
    """Digest of all Python files under `paths` (relative to the checkout; a file or a folder), by name and content."""
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
