"""Makes vLLM's core hang before it loads the model, where SLUICE_TEST_HANGING_CORE is set.

Python runs this file at the start of every process that has its folder in PYTHONPATH.
"""

import importlib.abc
import importlib.util
import os
import sys
import threading
from types import ModuleType
from typing import Any, NoReturn

MODULE = "vllm.v1.engine.core"


class Hanging(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the module as it is, and then replaces the method that makes the core."""

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

        def hang_here(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
            threading.Event().wait()
            raise AssertionError("nobody sets the event")

        core: Any = module.EngineCore
        core.__init__ = hang_here


if os.environ.get("SLUICE_TEST_HANGING_CORE"):
    sys.meta_path.insert(0, Hanging())
