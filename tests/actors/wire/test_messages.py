"""The messages as a whole: a channel can carry each of them, in the encoding that is promised."""

import importlib
import pkgutil
from typing import get_args

import msgspec

from actors.wire import messages as wire

PARTS = {
    "FleetLoad",
    "FlowRecord",
    "Part",
    "Wire",
    "Out",
    "KvChange",
    "EngineInfo",
    "Hints",
    "PromptSignals",
    "Grown",
    "Transfer",
    "Resume",
    "Quarantined",
}
"""The bases and the parts of messages."""


def _defined() -> dict[str, type]:
    """Returns all messages and parts of the package's modules, by name."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(wire.__path__, f"{wire.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and value.__module__ == module.name:
                assert name not in found, f"{name} is defined twice: on the wire they would be one"
                found[name] = value
    return found


def test_every_message_of_the_modules_can_be_carried_and_imported_from_the_package() -> None:
    defined = _defined()
    carried = {kind.__name__ for kind in get_args(wire.Message)}
    assert set(defined) - carried == PARTS
    assert set(wire.__all__) >= set(defined) - {"Part", "Wire"}


def test_a_message_is_an_array_that_begins_with_its_name() -> None:
    raw = msgspec.msgpack.encode(wire.Sent("r", 0.5))
    assert msgspec.msgpack.decode(raw) == ["Sent", "r", 0.5, 0]
    assert msgspec.msgpack.decode(raw, type=wire.Message) == wire.Sent("r", 0.5)


def test_defaults_that_can_be_changed_are_not_shared() -> None:
    one, other = wire.Status("a", 0, 0, 0, 0, 0.0), wire.Status("b", 0, 0, 0, 0, 0.0)
    one.totals["x"] = 1.0
    assert other.totals == {} and one.ranks is not other.ranks
