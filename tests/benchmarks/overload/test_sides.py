"""The sides: their commands, bounds, keys and forms of requests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from app.config import parse
from app.ingress.tenants.key_file import read
from app.ingress.tenants.keys import KeyBook
from benchmarks.overload.load import WEIGHTS
from benchmarks.overload.sides import (
    CAPACITY_PER_S,
    ENGINE,
    ENGINE_UNBOUNDED,
    MOST_AT_DECODE,
    MOST_PROMPT_TOKENS,
    OPEN,
    ROUTER,
    SIDES,
    SIMULATOR,
    SLUICE,
    Forms,
    make_keys,
    most_at_engine,
    target_of,
)
from tests.benchmarks.overload.made import work


def test_the_capacity_is_that_of_the_slots_and_bounds_leave_time_for_the_tightest_objective() -> None:
    # 2 engines x 8 slots, answers of 60 x 40 ms
    assert pytest.approx(16 / 2.4) == CAPACITY_PER_S
    # 0.3 s of prompts of 0.2 ms a token; then (2 - 0.3) / 1.2 s of 3.33 answers a second
    assert MOST_PROMPT_TOKENS == 1500 and MOST_AT_DECODE == 8 + 4
    # 16 slots and 2 / 1.2 s of 6 answers a second
    assert most_at_engine(6.0) == 16 + 10


@pytest.mark.parametrize(("side", "admission"), [(SLUICE, "by_wait"), (OPEN, "open")])
@pytest.mark.parametrize("setup", ["sim", "vllm"])
def test_sluice_is_configured_with_policies_keys_and_objectives(
    setup: str, side: str, admission: str, tmp_path: Path
) -> None:
    made = target_of(setup, side, tmp_path, None, "", None)
    args = yaml.safe_load((tmp_path / "app.yaml").read_text())["applications"][0]["args"]
    config = parse(args)
    assert (config.router.admission.name, config.router.fairness.name) == (admission, "vtc")
    options = config.ingress.options
    assert options["class_slo"]["interactive"] == {"ttft_s": 2.0}
    keys = KeyBook.of(read(Path(options["key_file"]))[0])
    for tenant, secret in made.forms.secrets.items():
        found = keys.find(secret)
        assert found is not None
        assert (found.key.tenant, found.key.weight, found.key.ceiling) == (
            tenant,
            WEIGHTS[tenant],
            "interactive",
        )
    assert set(made.forms.secrets) == set(WEIGHTS)
    assert [engine.role for engine in config.engines] == (
        ["prefill", "decode"] if setup == "sim" else ["colocated"]
    )


def test_only_a_bounded_engine_of_vllm_refuses(tmp_path: Path) -> None:
    bounded = target_of("vllm", ENGINE, tmp_path, None, "model", 3.0).command.argv
    assert bounded[-2:] == ["--max-num-queued-reqs", "21"]
    assert (
        "--max-num-queued-reqs"
        not in target_of("vllm", ENGINE_UNBOUNDED, tmp_path, None, "model", 3.0).command.argv
    )
    with pytest.raises(ValueError, match="capacity"):
        target_of("vllm", ENGINE, tmp_path, None, "model", None)


def test_a_side_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="program"):
        target_of("sim", ROUTER, tmp_path, None, "", None)
    with pytest.raises(ValueError, match="not served"):
        target_of("sim", SIMULATOR, tmp_path, None, "", None)
    assert SIMULATOR in SIDES["sim"] and SIMULATOR not in SIDES["vllm"]


def test_all_sides_are_asked_for_the_same_and_told_what_they_can_use(tmp_path: Path) -> None:
    secrets = make_keys(tmp_path / "keys.json")
    one = work(0.0, "cat", "batch")
    ours, head = Forms("sim", True, secrets).form()(one)
    theirs, none = Forms("source", False, {}).form()(one)
    assert head == [f"authorization: Bearer {secrets['cat']}"] and list(none) == []
    asked, of_rival = json.loads(ours), json.loads(theirs)
    assert asked.pop("priority") == 1
    assert asked == {**of_rival, "model": "sim"}
    assert (asked["max_tokens"], asked["messages"][0]["content"]) == (one.output_tokens, one.text)
    assert (
        json.loads(Forms("m", True, {}).form()(replace(one, request_class="interactive"))[0])["priority"]
        == -1
    )
