"""Bounds on a single request: the candidates of a step, the size of grammars and lists, and what an echo repeats.

Each of these costs an engine or the ingress time or memory that other requests then lack. The bounds are far above what
OpenAI's own API takes, where that has a bound.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

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
    values = chars = depth = squares = 0
    objects: list[dict[str, Any]] = []
    level = [value]
    while level:
        depth += 1
        values += len(level)
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                squares += _counted(one) ** 2
                objects.append(one)
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
        (squares, MAX_COUNTED_SQUARES, "pairs of properties in objects with minProperties or maxProperties"),
    ):
        if found > most:
            raise bad_request(f"'{param}' has {found} {what}; at most {most}.", param, "request_too_costly")
    # only now, because each character of a pattern takes a look
    _check_repeats(objects, param)
    return VALUE_BYTES * values + CHAR_BYTES * chars


def _check_repeats(objects: list[dict[str, Any]], param: str) -> None:
    """Raises `ApiError` 400 if repeats in schemas, or in forms of a structural tag, are too many inside one another."""
    grammars = [text for one in objects if isinstance(text := one.get("grammar"), str)]
    counted = [count for text in grammars for count in _repeats_of_grammar(text, param)]
    around = [count for one in objects if (count := _repeats_of_form(one)) > 1]
    # which of these is inside which is not known
    together = counted + around
    nested = _product(together) if len(together) > 1 else 1
    outside = _product(around)
    for one in objects:
        # quotes keep the texts of a schema apart, but not those of a form
        outer = outside if one.get("type") == "regex" else 1
        nested = max([nested, *(nested_repeats(pattern, outer) for pattern in _patterns(one))])
    if nested > MAX_NESTED_REPEATS:
        message = f"'{param}' has {nested} repeats inside one another; at most {MAX_NESTED_REPEATS}."
        raise bad_request(message, param, "request_too_costly")


def _counted(schema: dict[str, Any]) -> int:
    """Returns the number of properties of a schema that counts them; 0 for any other."""
    properties = schema.get("properties")
    counts = isinstance(properties, dict) and ("minProperties" in schema or "maxProperties" in schema)
    return len(properties) if counts else 0  # type: ignore[arg-type]  # a dict


_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_INTERRUPTED = re.compile(r"\{\d*(?:,\d*)?#")
"""The beginning of a count that a comment interrupts, in a grammar without its spaces."""
# what opens and is not closed goes to the end, so that no character is looked at twice; engines refuse it
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_MOST_COUNTED = 10**15
"""The largest product of counts that is distinguished from larger ones."""


def nested_repeats(pattern: str, outside: int = 1) -> int:
    """Returns the largest product of counted repeats of a regular expression of which one is inside the other; 1 if
    none is. A repeat without an upper count has its lower one. The whole expression is repeated `outside` times.
    """
    # of the groups that are open: the largest product inside
    inside = [1]
    last = worst = 1
    at = 0
    while at < len(pattern):
        counts = _COUNT.match(pattern, at)
        if counts is not None:
            count = _number(counts[2] or counts[1])
            if last > 1 and count > 1:
                worst = max(worst, _product((last, count)))
            last = _product((last, count))
            inside[-1] = max(inside[-1], last)
            at = counts.end()
            continue
        atom = _ATOM.match(pattern, at)
        assert atom is not None
        at = atom.end()
        if atom[0] == "(":
            inside.append(1)
        elif atom[0] == ")" and len(inside) > 1:
            last = inside.pop()
            inside[-1] = max(inside[-1], last)
        elif atom[0] not in "*+?":
            last = 1
    most = max(inside)
    return max(worst, _product((most, outside))) if most > 1 and outside > 1 else worst


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
