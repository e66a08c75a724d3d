"""Makes vLLM's core fail to compile the grammars that contain the word in SLUICE_TEST_BROKEN_GRAMMAR.

Python runs this file at the start of every process that has its folder in PYTHONPATH. The check of a request in the
engine's own process passes, and the compilation in the core fails: for a real schema that takes a fault of a grammar
library.
"""

import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

MODULE = "vllm.v1.structured_output.backend_xgrammar"
WORD = os.environ.get("SLUICE_TEST_BROKEN_GRAMMAR", "")


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the module as it is, and then replaces the method that compiles."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != MODULE:
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
        backend: Any = module.XgrammarBackend
        compile_grammar = backend.compile_grammar

        def breaking(self: Any, kind: Any, grammar: str, *args: Any, **kwargs: Any) -> Any:
            if WORD in grammar:
                raise RuntimeError(f"a grammar with {WORD} does not compile here")
            return compile_grammar(self, kind, grammar, *args, **kwargs)

        backend.compile_grammar = breaking


if WORD:
    sys.meta_path.insert(0, Broken())
