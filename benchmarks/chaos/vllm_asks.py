"""The requests of the vLLM engines' clients: a fixed set at temperature 0, whose undisturbed answers are taken first.

Engines that compute the same sums in another order may choose another token where two are almost equally likely. An
answer is wrong only if it differs from the undisturbed one at a token whose two best logprobs there were more than
`NEAR_TIE` apart.
"""

import asyncio
import dataclasses
import random
from typing import Any

from benchmarks.chaos.answers import Answer, Said
from benchmarks.chaos.asks import Ask
from benchmarks.chaos.http import connect, post_bytes

NEAR_TIE = 0.01
"""Nats between the two best tokens that count as a tie, in float32."""

TOKEN_S = 0.08
"""ASSUMPTION: seconds of a token while a few requests share two cores; only the wait of whole answers is read by it."""

TIMEOUT_S = 300.0
LONG = 3
"""Long answers among the fixed ones; taking them costs as long as a run of chaos should wait."""
LONG_TOKENS = 900
"""Tokens of a long answer, which lasts for 72 s by `TOKEN_S`."""

_TOPICS = (
    "the tides of the sea", "how bread is baked", "why leaves turn yellow", "the history of the bicycle",
    "what a river carries", "the stars of the southern sky", "how a clock keeps time", "the work of bees",
)  # fmt: skip
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {"name": "person", "description": "stores a person", "parameters": _SCHEMA},
}


def fixed_asks() -> list[Ask]:
    """Returns the fixed set: completions and chats, short and of more than a minute, two choices, stop strings, schemas
    and tools.

    vLLM refuses several choices at temperature 0. Where only the likeliest token may be drawn, the answer is the same.
    """
    found = []
    for number, topic in enumerate(_TOPICS):
        chat = {"messages": [{"role": "user", "content": f"Tell me about {topic}."}]}
        text = {"prompt": f"{' '.join(_TOPICS[: number % 4])} A long text about {topic}: "}
        found += [
            _ask(f"chat {number}", chat, 24 + 8 * number),
            _ask(f"text {number}", text, 40 + 12 * number),
            _ask(f"stop {number}", text, 80, stop=[" and", "\n\n"]),
            _ask(f"n {number}", text, 48, n=2, temperature=1.0, top_k=1),
            _ask(f"schema {number}", chat, 60, response_format=_format()),
            _ask(f"tool {number}", chat, 80, tools=[_TOOL], tool_choice=_choice()),
        ]
        if number < LONG:
            found.append(_ask(f"long {number}", text, LONG_TOKENS, ignore_eos=True))
    return found


def _format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA, "strict": True}}


def _choice() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "person"}}


def _ask(key: str, prompt: dict[str, Any], max_tokens: int, **more: Any) -> Ask:
    chat = "messages" in prompt
    body = {**prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Ask(path, body, max_tokens * TOKEN_S, key.partition(" ")[0], key=key)


def drawn(asks: list[Ask], rng: random.Random, long_share: float) -> Ask:
    """Draws one of the fixed requests, streamed or whole, some with logprobs."""
    long = rng.random() < long_share
    ask = rng.choice([ask for ask in asks if (ask.form == "long") == long])
    body = {**ask.body, "stream": long or rng.random() < 0.7}
    if rng.random() < 0.3 and "tools" not in body:
        body |= _logprobs(ask)
    return dataclasses.replace(ask, body=body)


def _logprobs(ask: Ask) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 2} if "chat" in ask.path else {"logprobs": 2}


class References:
    """The undisturbed answers, by key."""

    def __init__(self) -> None:
        self._said: dict[str, dict[int, Said]] = {}

    async def take(self, port: int, asks: list[Ask], at_once: int = 4) -> None:
        """Asks for every answer once, with logprobs. Raises RuntimeError for one that fails."""
        gate = asyncio.Semaphore(at_once)

        async def one(ask: Ask) -> None:
            async with gate:
                body = ask.body if "tools" in ask.body else {**ask.body, **_logprobs(ask)}
                answer = Answer(stream=False)
                connection = await connect(port, 10.0)
                async with asyncio.timeout(TIMEOUT_S):
                    await connection.ask(post_bytes(ask.path, body), answer.feed, answer.head)
                connection.drop()
                answer.end()
                if answer.status != 200:
                    raise RuntimeError(f"{ask.key}: {answer.status} {answer.error}: {answer.message}")
                self._said[ask.key] = answer.choices

        await asyncio.gather(*map(one, asks))

    def judge(self, ask: Ask, answer: Answer) -> tuple[str, str] | None:
        """Returns None for a right answer, or ("wrong" or "near tie", why)."""
        if ask.stream and not answer.done:
            return "wrong", "no [DONE]"
        want = self._said[ask.key]
        if set(answer.choices) != set(want):
            return "wrong", f"choices {sorted(answer.choices)}, not {sorted(want)}"
        verdicts = [verdict for i in want if (verdict := compare(answer.choices[i], want[i])) is not None]
        return next((v for v in verdicts if v[0] == "wrong"), verdicts[0] if verdicts else None)


def compare(said: Said, want: Said) -> tuple[str, str] | None:
    """Compares a choice with the undisturbed one."""
    if said.calls != want.calls:
        # Tool calls carry no logprobs, so that a tie cannot be told from an error.
        return "wrong", f"tool calls {said.calls}, not {want.calls}"
    if (said.text, said.finish) == (want.text, want.finish):
        return None
    at = next((i for i, (a, b) in enumerate(zip(said.text, want.text, strict=False)) if a != b), None)
    if at is None:
        at = min(len(said.text), len(want.text))
    token, starts = _token_at(want, at)
    # A token that begins with the other one's text differs only where the next one begins.
    margins = [
        margin for margin in want.margins[token - (starts and token > 0) : token + 1] if margin is not None
    ]
    margin = min(margins, default=None)
    where = f"at character {at}, token {token} of {len(want.tokens)}, margin {margin}: "
    where += f"{said.text[at : at + 40]!r} ({said.finish}), not {want.text[at : at + 40]!r} ({want.finish})"
    return ("near tie" if margin is not None and margin <= NEAR_TIE else "wrong"), where


def _token_at(want: Said, at: int) -> tuple[int, bool]:
    """Returns the number of the token that holds character `at` of the text (or the number of tokens), and whether the
    token starts there.
    """
    end = 0
    for number, token in enumerate(want.tokens):
        end += len(token)
        if at < end:
            return number, at == end - len(token)
    return len(want.tokens), at == end
