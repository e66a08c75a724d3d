"""Says in which form the code of the hot path runs: as the sources are, or compiled (scripts/compiled)."""

from importlib.machinery import ExtensionFileLoader
from types import ModuleType


def code_form(module: ModuleType) -> str:
    """Returns `compiled` or `pure Python`. All modules that could be compiled have the same form as this one."""
    spec = module.__spec__
    return "compiled" if spec is not None and isinstance(spec.loader, ExtensionFileLoader) else "pure Python"
