"""Finds the figures in a document, and whether each of them is cited or given.

A figure is a number with a unit of measurement (`12 ms`, `8 %`, `2.4x`), a count of a total (`18 of 20`), or a number
of thousands (`4,775`). A document cites a results file with a mark behind the number,

    11.6 <!-- ours: experiments/balance_route_table1.json | recurring-long: imbalance of JSQ over br_h oracle -->

where `paper`, `half_width` or `difference` may take the place of `ours`. A number that nobody has measured, such as a
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
_MARK = re.compile(rf"({_NUMBER})\D{{0,24}}?<!-- (ours|paper|half_width|difference): (\S+) \| (.+?) -->")
_ANY_MARK = re.compile(r"<!-- (?:ours|paper|half_width|difference): ")
_GIVEN = re.compile(r"<!-- given: (.+?) -->")
_ANY_COMMENT = re.compile(r"<!--.*?-->")
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Cited:
    """A number in a document and the figure that it cites: `part` of the row `name` of the results file `file`."""

    line: int
    shown: str
    part: str
    file: str
    name: str


def cited(text: str) -> list[Cited]:
    """Returns the cited numbers of a document, in its order."""
    return [
        Cited(number, *mark.groups())
        for number, line in enumerate(text.splitlines(), 1)
        for mark in _MARK.finditer(line)
    ]


def malformed(text: str) -> Iterator[int]:
    """Yields the number of each line with a mark that has no number before it, or that names no file and figure."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(_ANY_MARK.findall(line)) != len(_MARK.findall(line)):
            yield number


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
    """Returns whether the number `text` is `value` rounded to the decimals of `text`, which may leave out the sign."""
    plain = text.replace(",", "").replace("−", "-")
    decimals = len(plain.partition(".")[2])
    rounded = round(value, decimals)
    return math.isclose(float(plain), rounded) or (
        plain[0].isdigit() and math.isclose(float(plain), abs(rounded))
    )
