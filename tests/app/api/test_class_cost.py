"""The price of classes of patterns, beside what xgrammar took to compile them, and patterns that people use."""

import pytest

from app.api.class_cost import MAX_CLASS_COST, SPELLED, class_cost
from app.api.grammar_cost import check_grammar

# seconds of `compile_grammar` of xgrammar 0.2.8 on the development machine, at 49,152 tokens; 14 and 25 stand for more
MEASURED = [
    ("." * 500, 2.23), ("." * 1000, 4.61), ("[a-z]" * 1000, 0.91), ("[a-z]" * 5000, 4.6), (r"\w" * 1000, 1.35),
    (r"\S" * 500, 0.72), (".+" * 50, 3.05), (".+" * 200, 10.0), (".*" * 200, 2.3), (".?" * 20, 0.58), (".?" * 40, 3.5),
    (".?" * 100, 25.0), ("[a-z]+" * 200, 1.45), (r"\w+ " * 200, 1.55), (".+ " * 200, 3.35), (".{1,9}" * 20, 14.0),
    ("[a-z]{1,9}" * 20, 3.38), ("[a-z]{1,9}" * 40, 7.4), ("[a-z]{1,9}" * 100, 19.5), (".{1,50}" * 3, 4.9),
    ("[a-z]?" * 60, 2.1), ("[a-z]?" * 400, 25.0), ("(.|x)" * 500, 2.3), ("([a-z]{1,9}){1,40}", 7.77),
    ("(..){1,100}", 1.06), (".{1,127}.{1,127}", 4.29), (".{1,200}.{1,200}", 14.0), (".{1,64}", 0.36),
    (r"([a-z0-9]{1,63}\.){1,126}[a-z]{2,63}", 14.0), ("[A-Z][a-z]{1,50}( [A-Z][a-z]{1,50})*", 0.17),
    (r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}\.[A-Za-z]{2,24}", 0.19), ("[a-z]{1,9}e" * 20, 0.28),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "took_s"), MEASURED, ids=[pattern[:40] for pattern, _ in MEASURED])
def test_what_takes_long_is_dear_and_what_takes_no_time_is_cheap(pattern: str, took_s: float) -> None:
    price = class_cost(pattern)
    assert price >= took_s * 5_000 or took_s < 0.5
    assert price > MAX_CLASS_COST or took_s <= 5.0
    if took_s < 0.5:
        assert price < MAX_CLASS_COST / 8


@pytest.mark.parametrize(
    "pattern",
    [
        # a character that need not be there keeps nothing apart
        "([a-z]{1,9}|-)" * 40,
        "([a-z]{1,9}-?)" * 40,
        "([a-z]{1,9}-*)" * 40,
        "([a-z]{1,9}(-x)?)" * 40,
        "(([a-z]{1,9})-{0,2})" * 40,
        # nor does one within a group what comes before and behind it
        "([a-z]{1,9}([a-z]{1,9}-))" * 100,
        "([a-z]{1,9}-)?" * 100,
        # groups change nothing
        "((((" + "[a-z]{1,9}" * 40 + "))))",
        "(?:[a-z]{1,9})" * 40,
        "(?P<x>[a-z]{1,9})" * 40,
        # classes by other names
        r"[^\s]{1,9}" * 40,
        r"[\s\S]{1,9}" * 40,
        r"\D{1,9}" * 40,
        # lazy repeats
        "[a-z]{1,9}?" * 40,
        # groups that are never closed
        "(" * 40 + "[a-z]{1,9}" * 40,
    ],
)
def test_nothing_hides_repeats_that_follow_one_another(pattern: str) -> None:
    assert class_cost(pattern) > MAX_CLASS_COST


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
        r"(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$",
        "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-5][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$",
        r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})$",
        r"^https?://[\w.-]+(:\d+)?(/[\w./%-]*)?(\?[\w=&%-]*)?(#\w*)?$",
        r"^(https?|ftp)://[^\s/$.?#].[^\s]*$",
        r"^\+?[0-9]{1,3}[-. ]?\(?[0-9]{1,4}\)?[-. ]?[0-9]{1,4}[-. ]?[0-9]{1,9}$",
        "^[^,]+(,[^,]+)*$",
        "^[a-z0-9]+(?:-[a-z0-9]+)*$",
        "^#?([a-fA-F0-9]{6}|[a-fA-F0-9]{3})$",
        r"^[\s\S]{1,400}$",
        "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)?$",
        "^([0-9A-F]{2}:){5}[0-9A-F]{2}$",
        r"^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}$",
        "^(cus|sub|inv)_[A-Za-z0-9]{14,24}$",
    ],
)
def test_a_schema_may_have_ten_of_each_pattern_that_people_use(pattern: str) -> None:
    check_grammar([{"type": "string", "pattern": pattern}] * 10, 3, "x")


def test_figures() -> None:
    assert class_cost("") == class_cost("abc") == class_cost("(a|b)*") == 0
    assert class_cost("[a-z]") == 10
    assert class_cost(r"\d{4}[0-9]") == 5
    # one repeat has one way
    assert class_cost("[a-z]{1,9}") == 90
    assert class_cost("[a-z]{1,9}[a-z]") == 100
    assert class_cost("[a-z]{1,9}-[a-z]{1,9}") == 180
    # two have the ways of their 18 places
    assert class_cost("[a-z]{1,9}[a-z]{1,9}") == 180 * 19
    assert class_cost("[a-z]+") == 10 + 7 * 10
    assert class_cost(f".{{1,{SPELLED}}}") == 50 * SPELLED
    assert class_cost(f".{{1,{SPELLED + 1}}}") == 50
    # more than 20 places
    assert class_cost(".{1,999}.{1,999}") == (2 * 50 + 2 * 50 * SPELLED) * 21
    assert class_cost("[a-z]{1,9}", 2) == class_cost("([a-z]{1,9}){2}")


@pytest.mark.parametrize(
    "text", ["[", "[\\", "{", "{1", "{1,", "\\", "(a", "()", "a*", ".", "|", "{1,9}", "a{1,9}"]
)
def test_no_character_is_looked_at_again_and_again(text: str) -> None:
    """The test would take an hour if some were."""
    assert class_cost(text * (2**19 // len(text))) >= 0
