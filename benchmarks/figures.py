"""Finds the figures in a document, and whether each of them is cited or given.

A figure is a number with a unit of measurement (`12 ms`, `8 %`, `2.4x`), a count of a total (`18 of 20`), or a number
of thousands (`4,775`). A document cites a results file with a mark behind the number,

    11.6 <!-- ours: experiments/balance_route_table1.json | recurring-long: imbalance of JSQ over br_h oracle -->

where `paper`, `half_width` or `difference` may take the place of `ours`. The number must be the figure rounded to the
decimals that are shown, sign and all, and show at least two digits of it unless it is exact. Where the words turn the
sign round ("18.6 % shorter" for -18.6), so does the mark: `-ours`. A number that nobody has measured, such as a
setting, a limit or a part of an example, is given: a mark anywhere in its line names it,

    after 4 s of silence, and 10 s of the handshake <!-- given: 4 s, 10 s -->

Numbers in code, and in blocks that a script writes from code (`<!-- generated: ... -->`), are neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_NUMBER = r"[-+−]?\d[\d,]*(?:\.\d+)?"
_UNITS = (
    "ms|us|µs|s|min|minutes|hours|seconds|%|per cent|x|times|points"
    "|GiB|GB|MiB|MB|kB|KiB|tokens|tokens/s|tok/s|requests/s|/s|imbalance"
)
_FIGURE = re.compile(
    rf"(?<![\w.,:/#-])(?:{_NUMBER}(?: ?(?:{_UNITS})(?![\w/])| of \d+)|\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?(?![\w.,]\d))"
)
_PARTS = "-?(?:ours|paper|half_width|difference)"
_MARK = re.compile(rf"({_NUMBER})\D{{0,24}}?<!-- ({_PARTS}): (\S+) \| (.+?) -->")
_ANY_MARK = re.compile(rf"<!-- {_PARTS}: ")
_GIVEN = re.compile(r"<!-- given: (.+?) -->")
_ANY_COMMENT = re.compile(r"<!--.*?-->")
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Cited:
    """A number in a document and the figure that it cites: `part` of the row `name` of the results file `file`.

    `turned` says that the number has the other sign.
    """

    line: int
    shown: str
    part: str
    file: str
    name: str
    turned: bool = False


def cited(text: str) -> list[Cited]:
    """Returns the cited numbers of a document, in its order."""
    return [
        Cited(number, mark[1], mark[2].removeprefix("-"), mark[3], mark[4], mark[2].startswith("-"))
        for number, line in enumerate(text.splitlines(), 1)
        for mark in _MARK.finditer(line)
    ]


def malformed(text: str) -> Iterator[int]:
    """Yields the number of each line with a mark that has no number before it, or that names no file and figure."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(_ANY_MARK.findall(line)) != len(_MARK.findall(line)):
            yield number


def given(text: str) -> Iterator[str]:
    """Yields each figure that a mark of the document names as given, in its order."""
    for mark in _GIVEN.findall(text):
        yield from mark.split(", ")


def unclosed(text: str) -> Iterator[int]:
    """Yields the number of the line in which code (` ``` `) or a generated block begins that does not end.

    What follows such a line would not be looked at.
    """
    begun: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            begun = {} if begun.pop("```", None) else {**begun, "```": number}
        elif line.startswith("<!-- generated:"):
            if "generated" in begun:
                yield begun["generated"]
            begun["generated"] = number
        elif line.startswith("<!-- end -->"):
            begun.pop("generated", None)
    yield from begun.values()


def unmarked(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, figure) for each figure of a document that is neither cited nor given."""
    fenced = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if line.startswith(("<!-- generated:", "<!-- end -->")):
            generated = not line.startswith("<!-- end")
        if fenced or generated:
            continue
        given = {figure for mark in _GIVEN.findall(line) for figure in mark.split(", ")}
        # a cited number goes with its mark
        plain = _ANY_COMMENT.sub("", _MARK.sub("", line))
        plain = _LINK.sub("]", _CODE.sub("", plain))
        for figure in _FIGURE.finditer(plain):
            if figure.group() not in given:
                yield number, figure.group()


def shows(text: str, value: float) -> bool:
    """Returns whether the number `text` is `value` rounded to the decimals of `text`, with at least two digits of it.

    An exact number may have one digit.
    """
    plain = text.replace(",", "").replace("−", "-")
    shown = float(plain)
    if math.isclose(shown, value, rel_tol=1e-9):
        return True
    digits = len(plain.strip("+-").replace(".", "").lstrip("0"))
    return digits >= 2 and math.isclose(shown, round(value, len(plain.partition(".")[2])))
