"""The cost of the character classes of a regular expression to the engine that compiles it.

For each place of a class, xgrammar walks through the vocabulary's tokens that begin in it. A token is walked on from
all places that what was read before may be at, so a place costs more where repeats of classes follow one another, of
which each may end at any character: `[a-z]{1,9}[a-z]{1,9}`. Equal patterns cost as much again.

    run      classes that follow one another, without a character between them that must be there
    price    of a run: the sum of its classes' weights, each as often as it is repeated, times 1 + ways; and `LOOP`
             times the weights of those that are repeated without end, from which tokens are walked to their end
    ways     0 in a run with one repeat at most, else its places, at most 20; or the parts that may be missing in it,
             if there are several and more

A count beyond `SPELLED` is not spelled out but read at each step. In a run with ways its part counts `SPELLED` times,
in another one once.

A character that must be there ends a run. None must be there in a group of alternatives, nor in one in which all parts
with such characters may be missing: such a group is one run with what stands beside it. Where a part with such a
character may be missing, what follows it follows the heavier one of the part's end and of what comes before it.

The figures are estimates: at least half of what was measured, and up to a hundred times as much for many `.*` in a row.
A vocabulary larger than that of the measurement costs more. The steps of an engine are not in them: with `.{1,200}`
each takes 20 ms.
"""

import re
from dataclasses import dataclass, field, replace

MAX_CLASS_COST = 40_000
"""Largest sum of the prices of all patterns of a schema, in units of 0.1 ms. With xgrammar 0.2.8 and 49,152 tokens
1,000 times `.` take 4.6 s, 1,000 times `[a-z]` 0.9 s, `.?` 100 times and `.{1,50}` six times more than 14 s, and
`[a-z]{1,9}` 20 times 3.4 s, in one of the few threads that all schemas of the engine share; the pattern of an e-mail
address with counts takes 0.2 s (CPU time of `compile_grammar` on the development machine).
"""
MOST_WAYS = 20
LOOP = 7
SPELLED = 128
_WIDE, _WORD, _CLASS, _DIGITS = 50, 14, 10, 1
"""Weights of a place, in units of 0.1 ms: of a class of nearly all characters, of those of words, of another class, and
of digits."""
_MOST = 10**15
"""The largest figure that is distinguished from larger ones."""

_TOKEN = re.compile(
    # characters that stand for themselves, but the one before a repeat
    r"(?P<text>(?:[^\\\[(){*+?.|^$]|\{(?!\d+(?:,\d*)?\}))+(?![*+?{]))"
    r"|\((?:\?(?::|P?<\w+>|<?[=!]))?"
    r"|\{(?P<low>\d+)(?P<range>,(?P<high>\d*))?\}"
    r"|\\."
    # what opens and is not closed goes to the end, so that no character is looked at twice
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]?"
    r"|.",
    re.DOTALL,
)
_MOST_TOKENS = 100_000
"""Tokens of a pattern that are looked at; one with more costs `_MOST`. ASSUMPTION: none that people use has more."""
_ESCAPED = {
    "w": _WORD,
    "d": _DIGITS,
    "s": _DIGITS,
    "W": _WIDE,
    "D": _WIDE,
    "S": _WIDE,
    "p": _WIDE,
    "P": _WIDE,
}
_DIGIT_CLASSES = ("[0-9]", r"[\d]")


@dataclass(slots=True)
class _Run:
    """Classes that follow one another: their weights, what comes to them where there are ways, the weights of endless
    ones, their places, and how many parts are repeated or may be missing.
    """

    weight: int = 0
    spelled: int = 0
    loops: int = 0
    places: int = 0
    repeats: int = 0
    optional: int = 0

    def join(self, other: "_Run") -> None:
        self.weight = min(_MOST, self.weight + other.weight)
        self.spelled = min(_MOST, self.spelled + other.spelled)
        self.loops = min(_MOST, self.loops + other.loops)
        self.places = min(_MOST, self.places + other.places)
        self.repeats = min(_MOST, self.repeats + other.repeats)
        self.optional = min(_MOST, self.optional + other.optional)

    def cover(self, other: "_Run") -> None:
        """Takes the larger figures of both."""
        self.weight, self.loops = max(self.weight, other.weight), max(self.loops, other.loops)
        self.spelled = max(self.spelled, other.spelled)
        self.places, self.repeats = max(self.places, other.places), max(self.repeats, other.repeats)
        self.optional = max(self.optional, other.optional)

    def multiply(self, times: int) -> None:
        spelled = min(times, SPELLED)
        if times > SPELLED:
            self.spelled, times = self.weight + self.spelled, 1
        self.spelled = min(_MOST, self.spelled * spelled)
        self.weight = min(_MOST, self.weight * times)
        self.loops = min(_MOST, self.loops * times)
        self.places = min(_MOST, self.places * spelled)
        self.repeats = min(_MOST, self.repeats * spelled)
        self.optional = min(_MOST, self.optional * spelled)

    @property
    def price(self) -> int:
        ways = min(MOST_WAYS, self.places) if self.repeats > 1 else 0
        if self.optional > 1:
            ways = max(ways, self.optional)
        weight = self.weight + (self.spelled if ways else 0)
        return min(_MOST, weight * (1 + ways) + LOOP * self.loops)


@dataclass(slots=True)
class _Part:
    """A part of a pattern: the run at its beginning, that at its end if a character that must be there comes between
    them, and the price of those within. `whole` is the run that it would be without such characters.
    """

    head: _Run = field(default_factory=_Run)
    within: int = 0
    tail: _Run | None = None
    whole: _Run = field(default_factory=_Run)
    is_group: bool = False
    branches: bool = False
    may_miss: bool = False
    is_firm: bool = False

    def add(self, part: "_Part") -> None:
        """Adds the part that follows."""
        self.whole.join(part.whole)
        before = self.head if self.tail is None else self.tail
        missing = replace(before)
        before.join(part.head)
        if part.tail is None:
            return
        if self.tail is not None:
            self.within = min(_MOST, self.within + self.tail.price)
        self.within = min(_MOST, self.within + part.within)
        self.tail = replace(part.tail)
        if part.may_miss:
            self.tail.cover(missing)
            self.tail.optional += 1
        else:
            self.is_firm = True

    def end(self) -> None:
        """Ends a group: it is one run if no character must be there."""
        if self.branches or not self.is_firm:
            self.melt()

    def melt(self) -> None:
        """Makes one run of all."""
        self.head, self.within, self.tail = replace(self.whole), 0, None

    def repeat(self, low: int, high: int | None) -> None:
        """Repeats the part; `high` None sets no end."""
        if low == 0 and self.whole.places and self.tail is not None:
            self.may_miss = True
        elif low == 0:
            self.melt()
        times = max(1, low if high is None else high)
        again = times - 1 if high is not None else times
        if self.tail is not None:
            between = replace(self.tail)
            between.join(self.head)
            self.within = min(_MOST, self.within * times + between.price * again)
        for run in (self.head, self.whole) if self.tail is None else (self.whole,):
            if run.places:
                self._repeat_run(run, times, again)
                run.optional += low == 0
                if high is None and not self.is_group:
                    run.loops = run.weight

    def _repeat_run(self, run: _Run, times: int, again: int) -> None:
        """Repeats a run. What is repeated within it is so each time; it is one repeat itself otherwise."""
        inner = run.repeats
        run.multiply(times)
        if not inner:
            run.repeats = 1
        elif again and times == 1:
            run.repeats = 2 * inner

    @property
    def price(self) -> int:
        return min(_MOST, self.head.price + self.within + (0 if self.tail is None else self.tail.price))


def class_cost(pattern: str, outside: int = 1) -> int:
    """Returns the price of a regular expression that is repeated up to `outside` times, in units of 0.1 ms. Of one that
    is too long or too dear it may be `_MOST`.
    """
    groups, last, repeated = [_Part(is_group=True)], _Part(), True
    least = 0
    for number, token in enumerate(_TOKEN.finditer(pattern)):
        if number == _MOST_TOKENS or least > MAX_CLASS_COST:
            return _MOST
        text = token[0]
        if text in ("*", "+", "?") or token["low"] is not None:
            # a question mark behind a repeat makes it lazy
            if not (repeated and text == "?"):
                last.repeat(*_counts(token))
            repeated = True
            continue
        groups[-1].add(last)
        last, repeated = _Part(), False
        if text[0] == "(":
            groups.append(_Part(is_group=True))
        elif text == ")" and len(groups) > 1:
            last = groups.pop()
            last.end()
        elif text == "|":
            groups[-1].branches = True
        elif text not in ("^", "$", ")"):
            last = _atom(text)
            least += last.head.weight
    for group in reversed(groups[1:]):
        group.add(last)
        group.end()
        last = group
    whole = groups[0]
    whole.add(last)
    if whole.branches:
        whole.melt()
    if outside > 1:
        whole.end()
        whole.repeat(1, outside)
    return whole.price


def _counts(token: re.Match[str]) -> tuple[int, int | None]:
    if token["low"] is None:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token[0]]
    low = _number(token["low"])
    if token["range"] is None:
        return low, low
    return low, _number(token["high"]) if token["high"] else None


def _number(digits: str) -> int:
    """Returns a number of any length; of one with more than ten digits the first ten, which are enough."""
    return int(digits.lstrip("0")[:10] or "0")


def _atom(text: str) -> _Part:
    """Returns the part of a class, or of characters that stand for themselves."""
    if text == ".":
        weight = _WIDE
    elif text[0] == "\\":
        weight = _ESCAPED.get(text[1:], 0)
    elif text[0] == "[":
        weight = _weight_of_class(text)
    else:
        weight = 0
    if not weight:
        return _Part(tail=_Run())
    return _Part(head=_Run(weight, places=1), whole=_Run(weight, places=1))


def _weight_of_class(text: str) -> int:
    if text in _DIGIT_CLASSES:
        return _DIGITS
    wide = text.startswith("[^") or any(
        f"\\{name}" in text for name, weight in _ESCAPED.items() if weight == _WIDE
    )
    return _WIDE if wide else _CLASS
