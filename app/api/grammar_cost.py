"""Bounds on what a schema, or a form of a structural tag, costs the engine that makes a grammar of it.

xgrammar reads a schema in the event loop of an engine and compiles it in a thread that others wait for, and a grammar
that can read a text in many ways slows every step of the engine's core. The bounds are on what was found to take long.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.api.class_cost import MAX_CLASS_COST, class_cost
from app.api.errors import bad_request

MAX_COUNTED_SQUARES = 40_000
"""Most squares of numbers of properties, over the objects of a schema that count theirs (`minProperties` or
`maxProperties`). xgrammar 0.2.8 makes rules of each pair of them, in the event loop of the engine: 0.1 s for 200
properties, 5 s and 1 GB for 1,000 (CPU time of `Grammar.from_json_schema` on the development machine).
"""
MAX_NESTED_REPEATS = 10_000
"""Largest product of counted repeats of which one is inside the other, as in `(a{1,100}){1,100}`. xgrammar 0.2.8 keeps
all ways to read what has come, in every step of the engine's core: 4 ms for a character at this product, and no end for
`((a{1,100}){1,100}){1,100}` (CPU time of `accept_string` and `fill_next_token_bitmask` after 100 characters). A name
of a host with 127 parts of 63 characters would pass, but for its classes (`app.api.class_cost`).
"""
MAX_REPEAT_SQUARES = 2_000_000
"""Largest sum of the squares of counted repeats in the patterns of a schema, each as often as repeats around it say,
and of the squares of the number of optional parts of each pattern. xgrammar 0.2.8 takes 0.2 to 0.4 s for `(ab){1,2000}`
and 8 s for `(ab){1,8000}`, in the event loop of the engine, and 0.5 s for `a?` 2,000 times and 2.5 s for 4,000 times
(CPU time of `Grammar.from_json_schema` and of `compile_grammar` on the development machine). A length is better bounded
by `minLength` and `maxLength`, which take no time.
"""
CHEAP_COUNT = 100_000
"""Counts from which on xgrammar 0.2.8 reads a pattern in another way, in no time (`a{1,100000}`)."""
MAX_RANGE_DIGITS = 5_000
"""Most digits of `minimum`, `maximum` and their exclusive forms in a schema: some 800 ranges of three digits. xgrammar
0.2.8 spells ranges out: it reads 400 of integers of 18 digits, which have 14,400, in 0.4 s in the event loop of the
engine, and compiles them in 0.5 s in a thread of its core (CPU time on the development machine).
"""
MAX_LENGTHS = 40
"""Most different values of `maxLength` in a schema, each with its `minLength`. xgrammar 0.2.8 compiles 40 in 1.2 to
2.1 s and 100 in 10 s, in one of the few threads that all schemas of the engine share; equal ones count once (CPU time
on the development machine).
"""
MAX_OPEN_GROUPS = 256
"""Most groups of a pattern inside one another. xgrammar 0.2.8 reads them by recursion: 20,000 pass, and 50,000 end the
engine with a segmentation fault.
"""
MAX_REFERENCE_LEVELS = 10_000
"""Most levels of a schema whose references are followed: its levels, as often as it has different `$ref`. xgrammar
0.2.8 reads them by recursion: a chain of 4,000 arrays passes, and one of 8,000 ends the engine with a segmentation
fault.
"""


def check_grammar(objects: Sequence[dict[str, Any]], depth: int, param: str) -> None:
    """Raises `ApiError` 400 if an engine would take too long for a schema, or die of it. `objects` are all objects in
    it, and `depth` the number of its levels.
    """
    digits = squares = steps = deepest = classes = 0
    lengths: set[tuple[int, int]] = set()
    references: set[str] = set()
    counted: list[int] = []
    around: list[int] = []
    for one in objects:
        squares += _counted(one) ** 2
        digits += _digits(one)
        shortest, longest = one.get("minLength"), one.get("maxLength")
        if isinstance(longest, int):
            lengths.add((shortest if isinstance(shortest, int) else 0, longest))
        if isinstance(reference := one.get("$ref"), str):
            references.add(reference)
        if isinstance(grammar := one.get("grammar"), str):
            counted += _repeats_of_grammar(grammar, param)
        if (count := _repeats_of_form(one)) > 1:
            around.append(count)
    # which of these is inside which is not known
    together = counted + around
    nested = _product(together) if len(together) > 1 else 1
    outside = _product(around)
    for one in objects:
        # quotes keep the texts of a schema apart, but not those of a form
        outer = outside if one.get("type") == "regex" else 1
        for pattern in _patterns(one):
            repeats = repeats_of(pattern, outer)
            nested, steps = max(nested, repeats.nested), steps + repeats.squares
            deepest = max(deepest, repeats.open_groups)
            if max(classes - MAX_CLASS_COST, steps - MAX_REPEAT_SQUARES, deepest - MAX_OPEN_GROUPS) <= 0:
                classes += class_cost(pattern, outer)
    for found, most, what in (
        (nested, MAX_NESTED_REPEATS, "repeats inside one another"),
        (steps, MAX_REPEAT_SQUARES, "squares of repeats in patterns"),
        (deepest, MAX_OPEN_GROUPS, "groups inside one another"),
        (classes, MAX_CLASS_COST, "tenths of a millisecond for the character classes of its patterns"),
        (depth * len(references), MAX_REFERENCE_LEVELS, "levels with its references"),
        (digits, MAX_RANGE_DIGITS, "digits in minimum and maximum"),
        (len(lengths), MAX_LENGTHS, "different lengths in maxLength"),
        (squares, MAX_COUNTED_SQUARES, "pairs of properties in objects with minProperties or maxProperties"),
    ):
        if found > most:
            raise bad_request(f"'{param}' has {found} {what}; at most {most}.", param, "request_too_costly")


def _counted(schema: dict[str, Any]) -> int:
    """Returns the number of properties of a schema that counts them; 0 for any other."""
    properties = schema.get("properties")
    counts = isinstance(properties, dict) and ("minProperties" in schema or "maxProperties" in schema)
    return len(properties) if counts else 0  # type: ignore[arg-type]  # a dict


def _digits(schema: dict[str, Any]) -> int:
    """Returns the digits of the range of a number, as they are written out: 1e300 has 301."""
    digits = 0
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        end = schema.get(name)
        if isinstance(end, float):
            digits += len(f"{end:f}")
        elif isinstance(end, int):
            # Python refuses to write out some integers, which have more than 64 bits and are refused below
            digits += end.bit_length() * 3 // 10 + 1
    return digits


_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_INTERRUPTED = re.compile(r"\{\d*(?:,\d*)?#")
"""The beginning of a count that a comment interrupts, in a grammar without its spaces."""
# what opens and is not closed goes to the end, so that no character is looked at twice; engines refuse it
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_MOST_COUNTED = 10**15
"""The largest count that is distinguished from larger ones."""


class Repeats(NamedTuple):
    """The repeats of a regular expression. `nested` is the largest product of counted repeats of which one is inside
    the other, 1 if none is. `squares` is the sum of the squares of counted repeats, and of the number of optional
    parts, each as often as the repeats around it say (`MAX_REPEAT_SQUARES`). At most `open_groups` are open at once.
    """

    nested: int
    squares: int
    open_groups: int


@dataclass(slots=True)
class _Part:
    """A part of a pattern: a group with what is in it, or an atom with its repeats. `product` is the largest product of
    counted repeats inside one another, `squares` the sum of their squares, and `optional` the number of optional parts.
    """

    product: int = 1
    squares: int = 0
    optional: int = 0

    def repeat(self, count: int) -> None:
        """Repeats the part up to `count` times."""
        self.product = _product((self.product, count))
        self.squares = _product((self.squares, count)) + (count**2 if 1 < count < CHEAP_COUNT else 0)
        self.optional = _product((self.optional, count))

    def add(self, part: "_Part") -> None:
        """Adds a part that stands inside this one."""
        self.product = max(self.product, part.product)
        self.squares += part.squares
        self.optional += part.optional


def repeats_of(pattern: str, outside: int = 1) -> Repeats:
    """Returns the repeats of a regular expression. A repeat without an upper count has its lower one. The whole
    expression is repeated `outside` times.
    """
    # the groups that are open, and what stands before the next repeat, which is not added yet
    open_groups, last = [_Part()], _Part()
    worst, deepest, at = 1, 0, 0
    while at < len(pattern):
        counts = _COUNT.match(pattern, at)
        if counts is not None:
            count = _number(counts[2] or counts[1])
            if last.product > 1 and count > 1:
                worst = max(worst, _product((last.product, count)))
            last.repeat(count)
            at = counts.end()
            continue
        atom = _ATOM.match(pattern, at)
        assert atom is not None
        at = atom.end()
        if atom[0] in "*+?":
            last.optional += 1
            continue
        open_groups[-1].add(last)
        last = _Part()
        if atom[0] == "(":
            open_groups.append(_Part())
            deepest = max(deepest, len(open_groups) - 1)
            if deepest > MAX_OPEN_GROUPS:
                # it is refused, whatever follows
                break
        elif atom[0] == ")" and len(open_groups) > 1:
            last = open_groups.pop()
    for group in reversed(open_groups):
        group.add(last)
        last = group
    if last.product > 1 and outside > 1:
        worst = max(worst, _product((last.product, outside)))
    return Repeats(worst, last.squares + last.optional**2, deepest)


def _number(digits: str) -> int:
    """Returns the number of digits of any length, 1 at least; of more than ten the first ten, which are enough."""
    return max(1, int(digits.lstrip("0")[:10] or "0"))


def _product(counts: Iterable[int]) -> int:
    """Returns a product, or `_MOST_COUNTED` for a larger one: a text of half a million characters holds a number that
    takes long to multiply, and that Python does not print.
    """
    product = 1
    for count in counts:
        product = min(product * count, _MOST_COUNTED)
    return product


def _patterns(schema: dict[str, Any]) -> list[str]:
    """Returns the regular expressions of a schema or of a form of a structural tag."""
    by_pattern = schema.get("patternProperties")
    found = list(by_pattern) if isinstance(by_pattern, dict) else []
    pattern = schema.get("pattern")
    return [*found, pattern] if isinstance(pattern, str) else found


def _repeats_of_form(form: dict[str, Any]) -> int:
    """Returns the count of a form of a structural tag that repeats another one; 1 for any other."""
    if form.get("type") != "repeat":
        return 1
    return next((one for one in (form.get("max"), form.get("min")) if isinstance(one, int) and one > 0), 1)


def _repeats_of_grammar(grammar: str, param: str) -> list[int]:
    """Returns the counts above 1 of the repeats in a grammar. Raises `ApiError` 400 where a comment is in a count."""
    # xgrammar takes spaces, ends of lines and comments between all parts of a count
    dense = "".join(grammar.split())
    if _INTERRUPTED.search(dense):
        raise bad_request(
            f"'{param}' has a grammar with '#' in braces: write {{1,9}}.", param, "invalid_value"
        )
    counts = [_number(upper or lower) for lower, upper in _COUNT.findall(dense)]
    return [count for count in counts if count > 1]
