"""docs/policies.md is the page that the classes give; every parameter says what it means; every example can be used."""

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.flow.registry import FLOW
from policies.routing.params import BadParameter, Flag, Number, OneOf, Whole, ranges
from policies.routing.registry import DECODE, PREFILL, decode_policy, prefill_policy

REPO = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(REPO / "scripts" / "document_policies.py"))
KINDS: dict[str, Any] = PREFILL | DECODE | FLOW


def test_the_page_is_the_one_that_the_classes_give() -> None:
    written = (REPO / "docs" / "policies.md").read_text()
    assert written == SCRIPT["page"](), "run python scripts/document_policies.py"


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_parameter_has_a_range_and_a_meaning(name: str) -> None:
    kind = KINDS[name]
    parameters = {field.name for field in dataclasses.fields(kind) if field.init} - {"name"}
    assert parameters - {"heatmap"} <= ranges(kind).keys()
    meanings = SCRIPT["meanings_of"](kind)
    for parameter in parameters:
        assert meanings[parameter].endswith("."), parameter


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_registered_name_is_the_policys_own(name: str) -> None:
    assert KINDS[name]().name == name


def test_the_examples_of_the_page_make_policies() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", SCRIPT["page"](), re.DOTALL)
    seen = set()
    for example in examples:
        router = yaml.safe_load(example).get("router", {})
        for stage, make in (("prefill", prefill_policy), ("decode", decode_policy)):
            if stage in router:
                seen.add((stage, make(router[stage]["name"], router[stage].get("params")).name))
    assert seen >= {("prefill", name) for name in PREFILL} | {("decode", name) for name in DECODE}


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "words"),
    [
        (Number(low=0.0), (0, 1.5), (-1, float("nan"), float("inf"), True, "1", None), "a number >= 0"),
        (Number(above=0.0, high=1.0), (1e-9, 1), (0.0, 1.1), "a number > 0 and <= 1"),
        (Number(), (-5,), (float("-inf"),), "a number finite"),
        (Whole(1, 3), (1, 3), (0, 4, 2.0, True), "a whole number 1..3"),
        (OneOf(("a", "b")), ("a",), ("c", 1), "one of a, b"),
        (Flag(), (True, False), (0, 1, None), "true or false"),
    ],
)
def test_ranges(allowed: Any, good: tuple[Any, ...], bad: tuple[Any, ...], words: str) -> None:
    assert [value for value in good if not allowed.allows(value)] == []
    assert [value for value in bad if allowed.allows(value)] == []
    assert str(allowed) == words


def test_none_is_allowed_only_where_the_annotation_says_so() -> None:
    assert decode_policy("balance_route_h", {"beta": None})
    with pytest.raises(BadParameter, match="policy balance_route_h: gamma is None"):
        decode_policy("balance_route_h", {"gamma": None})
