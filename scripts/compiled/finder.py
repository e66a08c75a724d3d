"""Imports the compiled form of modules whose sources are exactly those that were compiled (docs/design.md 8).

`scripts/compiled/build.py` installs this file as `_sluice_compiled/__init__.py` into the environment's site-packages,
beside the compiled modules, and a `.pth` file that calls `install` whenever a Python of the environment starts: so it
works alike in commands, tests, Ray workers and all their children. No source imports it.

Compiled modules lie outside the sources, and `manifest.json` has the digest of every source that the compiler read: of
the modules themselves and of all that they import. Unless the checkout at hand has each of these byte for byte, none of
the compiled modules is used. They know the layout of one another's objects, so all of them are used or none. An edited
source is therefore never ignored: pure Python runs instead, and one line on standard error says so.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARY = "sluice_compiled__mypyc"
"""The module in which mypyc puts the code of all modules; each of these only refers to it."""
PACKAGES = frozenset({"policies", "actors", "app"})
"""The packages that may have compiled modules: for all others nothing is read."""
MANIFEST = "manifest.json"
PURE = "SLUICE_PURE"
"""The environment variable that asks for pure Python, at set-up as at run time, unless it is empty or 0."""


def pure_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the environment asks for pure Python."""
    return environment.get(PURE, "") not in ("", "0")


def changed(root: Path, sources: Mapping[str, str]) -> str | None:
    """Returns the first file below `root` that does not have its SHA-256 digest in `sources`, or None."""
    import hashlib

    for name, digest in sources.items():
        try:
            if hashlib.sha256((root / name).read_bytes()).hexdigest() == digest:
                continue
        except OSError:
            pass
        return name
    return None


class CompiledFinder:
    """Finds compiled modules in `folder`, where `manifest.json` describes them.

    The manifest has `modules`, `sources` (SHA-256 by path), `suffix` (the file ending of extension modules for the
    Python that compiled), and `at`, the folder with the modules. Without a manifest it finds nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest: dict[str, Any] | None = None
        self._found: dict[Path, bool] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a compiled module, or None if the module is not compiled or may not be used."""
        if name == LIBRARY:
            return self._spec(name)
        if name.partition(".")[0] not in PACKAGES or name not in self._read()["modules"] or pure_wanted():
            return None
        plain = PathFinder.find_spec(name, path)
        if plain is None or plain.origin is None:
            return None
        root = Path(plain.origin).parents[name.count(".")]
        if root not in self._found:
            self._found[root] = self._fits(root)
        return self._spec(name) if self._found[root] else None

    def _read(self) -> dict[str, Any]:
        if self._manifest is None:
            try:
                self._manifest = json.loads((self._folder / MANIFEST).read_text())
            except (OSError, ValueError):
                self._manifest = {}
            if self._manifest.get("suffix") not in EXTENSION_SUFFIXES:
                self._manifest = {"modules": (), "sources": {}}
        return self._manifest

    def _fits(self, root: Path) -> bool:
        """Returns whether the sources below `root` are those that were compiled; says so once if they are not."""
        other = changed(root, self._read()["sources"])
        if other is not None:
            print(
                f"sluice: {other} has changed since it was compiled, so pure Python runs; `make setup` compiles again",
                file=sys.stderr,
            )
        return other is None

    def _spec(self, name: str) -> ModuleSpec | None:
        manifest = self._read()
        file = self._folder / str(manifest.get("at")) / f"{name.replace('.', '/')}{manifest.get('suffix')}"
        if not file.exists():
            return None
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))


def install() -> None:
    """Puts the finder before all others."""
    sys.meta_path.insert(0, CompiledFinder(Path(__file__).parent))
