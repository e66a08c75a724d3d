"""The registry of engine kinds: what deployments hand over, what users may set, and that nothing heavy is imported."""

import dataclasses
import subprocess
import sys

import pytest

from actors.engine.registry import ENGINES, engine_config
from actors.options import ConfigError

FACTS = {"engine_id": "p-1", "role": "prefill", "model": "org/model", "served_name": "small"}


@pytest.mark.parametrize("kind", ENGINES)
def test_every_kind_has_the_fields_that_a_deployment_fills(kind: str) -> None:
    made = engine_config(kind, FACTS, {"slots": 7})
    fields = {f.name for f in dataclasses.fields(made)}
    assert fields >= {"engine_id", "role", "model", "slots"}
    assert (made.engine_id, made.role, made.slots) == ("p-1", "prefill", 7)


def test_options_beat_defaults_and_what_a_kind_does_not_know_is_left_out() -> None:
    defaults = {"cores": (0, 1), "side_channel_host": "10.0.0.1"}
    made = engine_config("vllm", FACTS, {"cores": [3]}, defaults=defaults)
    assert (made.cores, made.side_channel_host, made.served_name) == ((3,), "10.0.0.1", "small")
    assert not hasattr(engine_config("sim", FACTS, {}, defaults=defaults), "cores")


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("vlm", {}, "'vlm' is no kind of engine; choose one of vllm, sim"),
        ("sim", {"slot": 1}, "there.slot: no such option; allowed are"),
        ("sim", {"slots": "many"}, "there.slots: "),
        ("sim", {"slots": 0}, "slots is 0"),
        ("vllm", {"engine_id": "mine"}, "there.engine_id: set by the deployment"),
    ],
)
def test_what_is_wrong_is_refused_by_name(kind: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_config(kind, FACTS, options, "there")


def test_the_registry_and_the_configuration_import_no_engine() -> None:
    code = (
        "import sys, app.config; from actors.engine.registry import ENGINES; "
        "print([m for m in ('vllm', 'torch', 'nixl', 'ray', 'actors.engine.vllm.engine') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
