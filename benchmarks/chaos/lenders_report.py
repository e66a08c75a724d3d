"""The figures of `benchmarks.chaos.lenders`: what became of loans whose lender was harmed."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.chaos.loans import RESULTS
from benchmarks.experiments.base import Row

UNDISTURBED = "undisturbed loans: longest from the moment of the faults to the first token"


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a result."""
    faults = whole["faults"]
    yield Row("loans harmed", None, float(len(faults)))
    for name, bad in (
        ("without a right answer", [one for one in faults if not one["right"]]),
        ("after which something was left", [one for one in faults if one["left"]]),
        (
            "that were tried again or counted otherwise than once",
            [one for one in faults if not counted_once(one)],
        ),
    ):
        yield Row(f"of them {name}", None, float(len(bad)), aim="0", met=not bad)
    read = [one for one in faults if one["moved"] is not None]
    yield Row("of them while the prefix was read", None, float(len(read)))
    if read:
        least, most = (100.0 * bound(one["moved"] for one in read) for bound in (min, max))
        yield Row("share of the prefix that had come at the fault: least", None, least, "%")
        yield Row("share of the prefix that had come at the fault: most", None, most, "%")
    for kind in dict.fromkeys(sorted(one["kind"] for one in faults)):
        yield from _kind(kind, [one for one in faults if one["kind"] == kind])
    undisturbed = [one["undisturbed_s"] for one in faults if one["undisturbed_s"] is not None]
    if undisturbed:
        yield Row(UNDISTURBED, None, max(undisturbed), "s")


def _kind(kind: str, faults: list[Mapping[str, Any]]) -> Iterator[Row]:
    for how in RESULTS:
        if number := sum(one["loans"].get(how, 0) for one in faults):
            yield Row(f"{kind}: loans {how}", None, float(number))
    came = [one["moved_in_all"] for one in faults if one["moved"] is not None]
    if came:
        yield Row(f"{kind}: share of the prefix that came in all, most", None, 100.0 * max(came), "%")
    for key, what in (("prompt_s", "the whole prompt's KV"), ("recovery_s", "the first token")):
        known = [one[key] for one in faults if one[key] is not None]
        if known:
            yield Row(f"{kind}: longest from the fault to {what}", None, max(known), "s")
    yield Row(f"{kind}: later loans of no use", None, float(sum(one["useless"] for one in faults)))
    strayed = float(sum(one["strayed"] for one in faults))
    yield Row(f"{kind}: later prompts of the lender that another engine computed", None, strayed)


def counted_once(fault: Mapping[str, Any]) -> bool:
    """Whether a request had one attempt, whose loan is counted once."""
    return not fault["attempts"] and sum(fault["loans"].values()) == 1
