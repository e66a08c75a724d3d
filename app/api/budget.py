"""Bounds on a single request: the candidates of a step, the size of grammars and lists, and what an echo repeats.

Each of these costs an engine or the ingress time or memory that other requests then lack. The bounds are far above what
OpenAI's own API takes, where that has a bound.
"""

import math
from typing import Any

from app.api.errors import bad_request
from app.api.grammar_cost import check_grammar

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
    objects: list[dict[str, Any]] = []
    level = [value]
    while level:
        depth += 1
        values += len(level)
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
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
    ):
        if found > most:
            raise bad_request(f"'{param}' has {found} {what}; at most {most}.", param, "request_too_costly")
    # only now, because each character of a pattern takes a look
    check_grammar(objects, depth, param)
    return VALUE_BYTES * values + CHAR_BYTES * chars
