"""Faults in vLLM's core, which environment variables turn on.

- SLUICE_TEST_BROKEN_GRAMMAR: grammars that contain this word do not compile. The check of a request in the engine's own
  process passes, and the compilation in the core fails: for a real schema that takes a fault of a grammar library.
- SLUICE_TEST_HANGING_CORE: the core hangs before it loads the model.

Python runs this file at the start of every process that has its folder in PYTHONPATH.
"""

import importlib.abc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

WORD = os.environ.get("SLUICE_TEST_BROKEN_GRAMMAR", "")


class Faulty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the module `name` as it is, and then changes it by `harm`."""

    def __init__(self, name: str, harm: Callable[[Any], None]) -> None:
        self._name, self._harm = name, harm

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        self._loader: Any = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._harm(module)


def break_grammars(module: Any) -> None:
    backend = module.XgrammarBackend
    compile_grammar = backend.compile_grammar

    def breaking(self: Any, kind: Any, grammar: str, *args: Any, **kwargs: Any) -> Any:
        if WORD in grammar:
            raise RuntimeError(f"a grammar with {WORD} does not compile here")
        return compile_grammar(self, kind, grammar, *args, **kwargs)

    backend.compile_grammar = breaking


def hang(module: Any) -> None:
    def hang_here(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        threading.Event().wait()
        raise AssertionError("nobody sets the event")

    module.EngineCore.__init__ = hang_here


if WORD:
    sys.meta_path.insert(0, Faulty("vllm.v1.structured_output.backend_xgrammar", break_grammars))
if os.environ.get("SLUICE_TEST_HANGING_CORE"):
    sys.meta_path.insert(0, Faulty("vllm.v1.engine.core", hang))
