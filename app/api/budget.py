"""Bounds on a single request: the candidates of a step, the size of grammars and lists, and what an echo repeats.

Each of these costs an engine or the ingress time or memory that other requests then lack. The bounds are far above what
OpenAI's own API takes, where that has a bound.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from app.api.errors import bad_request

MAX_CANDIDATES = 8192
"""Most candidates of a step: prompts x n x (1 + logprobs). An engine turns each of them into text, in the loop that
serves all its streams. 128 choices with 20 alternatives have 2,688.
"""
MAX_SCHEMA_VALUES = 32_768
"""Most values in a schema, names not counted. OpenAI takes 5,000 properties ("Structured outputs", 2025), which have
some 20,000."""
MAX_SCHEMA_DEPTH = 64
"""Deepest nesting of a schema. OpenAI takes 10 levels of objects, each of which nests two to three levels of JSON."""
MAX_SCHEMA_CHARS = 2**19
"""Most characters of the texts and names in a schema. OpenAI takes 120,000 in names and constants."""
MAX_COUNTED_SQUARES = 40_000
"""Most squares of numbers of properties, over the objects of a schema that count theirs (`minProperties` or
`maxProperties`). xgrammar 0.2.8 makes rules of each pair of them, in the event loop of the engine: 0.1 s for 200
properties, 5 s and 1 GB for 1,000 (CPU time of `Grammar.from_json_schema` on the development machine).
"""
MAX_NESTED_REPEATS = 10_000
"""Largest product of counted repeats of which one is inside the other, as in `(a{1,100}){1,100}`. xgrammar 0.2.8 keeps
all ways to read what has come, in every step of the engine's core: 4 ms for a character at this product, and no end for
`((a{1,100}){1,100}){1,100}` (CPU time of `accept_string` and `fill_next_token_bitmask` after 100 characters). Names of
hosts have 127 parts of 63 characters at most.
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
MAX_TOOLS = 1024
"""Most tools. OpenAI takes 128."""
MAX_TOOLS_VALUES = 65_536
"""Most values in all tools together. ASSUMPTION: 50 tools of agents have some 10,000."""
MAX_TOOLS_CHARS = 2**21
"""Most characters in all tools together. ASSUMPTION: descriptions of tools have some 1,000 characters each."""
MAX_TEMPLATE_VALUES = 10_000
"""Most values in `chat_template_kwargs`. ASSUMPTION: templates read a few."""
MAX_TEMPLATE_CHARS = 2**20
MAX_STOP_CHARS = 4096
"""Longest stop text in characters; an engine looks for each in every piece of output. ASSUMPTION: nobody stops at a
page."""
MAX_STOP_IDS = 1024
MAX_HELD_BACK_IDS = 100
"""Most `stop_token_ids` of a request with `min_tokens`. vLLM's model runner V2 has room for 128 tokens that may not
come before that, the ends of sequence of the model among them, and dies of one more (`MAX_NUM_STOP_TOKEN_IDS` in
`vllm/v1/worker/gpu/sample/logit_bias.py` of vLLM 0.32).
"""
MAX_BIASES = 1024
"""Most entries of `logit_bias`. vLLM's model runner V2 has room for 1,024, and dies of one more
(`MAX_NUM_LOGIT_BIAS_TOKENS` in the same file).
"""
MAX_OPTION_BYTES = 2**26
"""Most bytes of options over all sequences: an engine gets the options with each prompt, and reads a schema again for
each choice. ASSUMPTION: a schema of 50 properties counts some 36 kB, and 1,024 sequences with it 37 MB.
"""
VALUE_BYTES = 160
"""Memory of a value in a request's options with its name, beside its text. Source: `tracemalloc` found 159 bytes for a
value in 15,000 named objects with a text each, and less in other forms."""
CHAR_BYTES = 4
"""Most memory of a character of a text: CPython takes as much for each if one is beyond U+FFFF (PEP 393)."""
MAX_ECHO_CHARS = 2**25
"""Most characters of prompts that an answer repeats, over all its choices."""
MAX_ECHO_CANDIDATES = 2**22
"""Most candidates of prompts' tokens in one answer: tokens x (1 + logprobs). Each takes some 0.2 kB of memory, so they
take 0.8 GB. A prompt of 1 M tokens with one alternative each has 2 M.
"""


def check_candidates(prompts: int, n: int, logprobs: int | None) -> None:
    """Raises `ApiError` 400 if all choices together have too many candidates at each step."""
    if logprobs is not None and prompts * n * (1 + logprobs) > MAX_CANDIDATES:
        message = f"prompts x n x (1 + logprobs) is {prompts * n * (1 + logprobs)}; at most {MAX_CANDIDATES}."
        raise bad_request(message, "logprobs", "request_too_costly")


def check_stops(stops: list[str] | None, ids: list[int] | None, min_tokens: int | None) -> int:
    """Returns the bytes that stops take. Raises `ApiError` 400 for stops that are too long or too many; the number of
    texts is checked by the schema.
    """
    if stops is not None and max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise bad_request(f"'stop': a text has {MAX_STOP_CHARS} characters at most.", "stop", "invalid_value")
    if ids is not None and len(ids) > MAX_STOP_IDS:
        message = f"'stop_token_ids' has {len(ids)} ids; at most {MAX_STOP_IDS}."
        raise bad_request(message, "stop_token_ids", "invalid_value")
    if ids is not None and min_tokens and len(set(ids)) > MAX_HELD_BACK_IDS:
        message = f"'stop_token_ids' has {len(set(ids))} ids; at most {MAX_HELD_BACK_IDS} with 'min_tokens'."
        raise bad_request(message, "stop_token_ids", "invalid_value")
    texts, numbers = stops or (), ids or ()
    return VALUE_BYTES * (len(texts) + len(numbers)) + CHAR_BYTES * sum(map(len, texts))


def check_biases(biases: dict[str, float]) -> int:
    """Returns the bytes that biases take. Raises `ApiError` 400 for too many."""
    if len(biases) > MAX_BIASES:
        message = f"'logit_bias' has {len(biases)} entries; at most {MAX_BIASES}."
        raise bad_request(message, "logit_bias", "invalid_value")
    return VALUE_BYTES * len(biases)


def check_options(n_bytes: int, sequences: int) -> None:
    """Raises `ApiError` 400 if the options of a request are too large for its number of sequences."""
    if n_bytes * sequences > MAX_OPTION_BYTES:
        message = (
            f"The options (schemas, tools, lists) take {n_bytes} bytes for each of {sequences} sequences "
            f"(prompts x n); at most {MAX_OPTION_BYTES} together. Send several requests, or smaller options."
        )
        raise bad_request(message, "n", "request_too_costly")


def check_schema(schema: dict[str, Any], param: str) -> int:
    """Returns the bytes that a schema takes. Raises `ApiError` 400 for one from which an engine would build a grammar
    for too long.
    """
    return _check(schema, param, MAX_SCHEMA_VALUES, MAX_SCHEMA_CHARS)


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raises `ApiError` 400 for too many or too large tools."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"'tools' has {len(tools)} tools; at most {MAX_TOOLS}.", "tools", "invalid_value")
    _check(tools, "tools", MAX_TOOLS_VALUES, MAX_TOOLS_CHARS)


def check_template(variables: dict[str, Any]) -> None:
    """Raises `ApiError` 400 for variables of a chat template that are too large."""
    _check(variables, "chat_template_kwargs", MAX_TEMPLATE_VALUES, MAX_TEMPLATE_CHARS)


def check_echo(chars: int, tokens: int, n: int, logprobs: int | None) -> None:
    """Raises `ApiError` 400 if an answer would repeat too much of its prompts, which have these numbers of characters
    and tokens together.
    """
    if chars * n > MAX_ECHO_CHARS:
        message = f"'echo' would repeat {chars * n} characters; at most {MAX_ECHO_CHARS}."
        raise bad_request(message, "echo", "request_too_costly")
    if logprobs is not None and tokens * (1 + logprobs) > MAX_ECHO_CANDIDATES:
        asked = tokens * (1 + logprobs)
        message = (
            f"'echo' with 'logprobs' asks for {asked} candidates of tokens; at most {MAX_ECHO_CANDIDATES}."
        )
        raise bad_request(message, "logprobs", "request_too_costly")


def _check(value: Any, param: str, most_values: int, most_chars: int) -> int:
    values = chars = depth = 0
    cost = _GrammarCost()
    level = [value]
    while level:
        depth += 1
        values += len(level)
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                cost.add(one)
                chars += sum(map(len, one))
                below.extend(one.values())
            elif isinstance(one, list):
                below.extend(one)
            elif isinstance(one, str):
                chars += len(one)
            elif isinstance(one, int) and not -(2**63) <= one < 2**64:
                # neither msgpack nor an engine has such a number
                message = f"'{param}' has an integer of more than 64 bits."
                raise bad_request(message, param, "invalid_value")
            elif isinstance(one, float) and not math.isfinite(one):
                # the parser takes NaN and 1e999, which no JSON of ours could pass on
                raise bad_request(f"'{param}' has a number that is not finite.", param, "invalid_value")
        level = below
    for found, most, what in (
        (values, most_values, "values"),
        (chars, most_chars, "characters"),
        (depth, MAX_SCHEMA_DEPTH, "levels"),
        *cost.bounds(),
    ):
        if found > most:
            raise bad_request(f"'{param}' has {found} {what}; at most {most}.", param, "request_too_costly")
    return VALUE_BYTES * values + CHAR_BYTES * chars


@dataclass(slots=True)
class _GrammarCost:
    """The parts of a schema, or of a form of a structural tag, for which an engine takes long."""

    nested: int = 1
    steps: int = 0
    digits: int = 0
    squares: int = 0
    counted: list[int] = field(default_factory=lambda: [1])
    lengths: set[tuple[int, int]] = field(default_factory=set)

    def add(self, schema: dict[str, Any]) -> None:
        """Adds one object of the schema, without those in it."""
        self.squares += _counted(schema) ** 2
        self.digits += _digits(schema)
        self.counted += _repeats(schema)
        shortest, longest = schema.get("minLength"), schema.get("maxLength")
        if isinstance(longest, int):
            self.lengths.add((shortest if isinstance(shortest, int) else 0, longest))
        for pattern in _patterns(schema):
            repeats = repeats_of(pattern)
            self.nested, self.steps = max(self.nested, repeats.nested), self.steps + repeats.squares

    def bounds(self) -> list[tuple[int, int, str]]:
        """Returns what was found, the bound of each, and its name."""
        nested = self.nested
        if len(self.counted) > 2:
            # which of them is inside which is not known
            nested = max(nested, math.prod(self.counted))
        return [
            (nested, MAX_NESTED_REPEATS, "repeats inside one another"),
            (self.steps, MAX_REPEAT_SQUARES, "squares of repeats in patterns"),
            (self.digits, MAX_RANGE_DIGITS, "digits in minimum and maximum"),
            (len(self.lengths), MAX_LENGTHS, "different lengths in maxLength"),
            (
                self.squares,
                MAX_COUNTED_SQUARES,
                "pairs of properties in objects with minProperties or maxProperties",
            ),
        ]


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


_COUNT = re.compile(r"\{(\d{1,18})(?:,(\d{0,18}))?\}")
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class Repeats(NamedTuple):
    """The repeats of a regular expression. `nested` is the largest product of counted repeats of which one is inside
    the other, 1 if none is. `squares` is the sum of the squares of counted repeats, and of the number of optional
    parts, each as often as the repeats around it say (`MAX_REPEAT_SQUARES`).
    """

    nested: int
    squares: int


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
        self.product *= count
        self.squares = self.squares * count + (count**2 if 1 < count < CHEAP_COUNT else 0)
        self.optional *= count

    def add(self, part: "_Part") -> None:
        """Adds a part that stands inside this one."""
        self.product = max(self.product, part.product)
        self.squares += part.squares
        self.optional += part.optional


def repeats_of(pattern: str) -> Repeats:
    """Returns the repeats of a regular expression. A repeat without an upper count has its lower one."""
    # the groups that are open, and what stands before the next repeat, which is not added yet
    open_groups, last = [_Part()], _Part()
    worst, at = 1, 0
    while at < len(pattern):
        counts = _COUNT.match(pattern, at)
        if counts is not None:
            count = max(1, int(counts[2] or counts[1]))
            if last.product > 1 and count > 1:
                worst = max(worst, last.product * count)
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
        elif atom[0] == ")" and len(open_groups) > 1:
            last = open_groups.pop()
    for group in reversed(open_groups):
        group.add(last)
        last = group
    return Repeats(worst, last.squares + last.optional**2)


def _patterns(schema: dict[str, Any]) -> list[str]:
    """Returns the regular expressions of a schema or of a form of a structural tag, and one that is none."""
    by_pattern = schema.get("patternProperties")
    found = ["", *by_pattern] if isinstance(by_pattern, dict) else [""]
    pattern = schema.get("pattern")
    return [*found, pattern] if isinstance(pattern, str) else found


def _repeats(form: dict[str, Any]) -> list[int]:
    """Returns the counts above 1 of the repeats in a form of a structural tag: of itself, or of its grammar."""
    grammar = form.get("grammar")
    counts = [int(one[1] or one[0]) for one in _COUNT.findall(grammar)] if isinstance(grammar, str) else []
    if form.get("type") == "repeat":
        counts += [one for one in (form.get("max"), form.get("min")) if isinstance(one, int) and one > 0][:1]
    return [count for count in counts if count > 1]
