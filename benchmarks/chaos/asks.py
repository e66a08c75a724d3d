"""The requests of the sim engines' clients, and the one right answer to each, which is computed by a pure function."""

import random
from dataclasses import dataclass, field
from typing import Any

from app.ingress.tokenizer import WordCodec
from benchmarks.chaos.answers import Answer
from policies.engine_model import text

STEP_S = 0.03
"""Seconds of one step of the sim decode engines; a stream of a minute has 2,000 tokens then."""

WORDS = ("river", "stone", "cloud", "seven", "walks", "under", "mountain", "quietly", "orange", "letters")
LONGEST_PROMPT, LONGEST_TAIL = 2_000, 200
"""Most words of a prompt, and of what follows the head that it shares."""
TURN_WORDS = 1_000
"""Words that each turn of a conversation adds. ASSUMPTION: to compute them takes longer than an engine needs to begin
to lend them.
"""
TALKS, TURNS = 4, 4
"""Conversations at a time, and the turns of each. ASSUMPTION: the last one and its output fit into an engine."""
TALK_SHARE = 0.8
"""Share of the prompts that are a turn of a conversation, where prefixes are lent."""
CHATS = 0.4
"""Share of the prompts, or of the conversations, that are chats."""

MAX_TOKENS_OF_WHOLE = 600
LONG_TOKENS = (1_000, 3_000)
"""Bounds of the tokens of a long stream, which lasts for 30 to 90 s: half of them for more than a minute."""
_codec = WordCodec()


@dataclass(frozen=True, slots=True)
class Expected:
    """The right content of one choice; `tokens` and `logprobs` are None if they were not asked for."""

    text: str
    finish: str
    tokens: list[str] | None = None
    logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its `path` and `body`, the seconds that its output takes undisturbed, and its form in a word.

    `key` names the reference of its answer, for engines whose answers are not computed but were taken before.
    """

    path: str
    body: dict[str, Any]
    output_s: float
    form: str
    expected: tuple[Expected, ...] = ()
    key: str = ""
    poison: bool = field(default=False)

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: the head of its prompt, which begins with that of the turn before. All turns are
    chats or none is, because a chat begins with words of its own.
    """

    head: str
    chat: bool
    number: int = 1


class Talks:
    """Conversations that go on at the same time, by a seed. Each turn is a prompt of its own, and comes to any engine:
    the one that computes it lacks the head as a rule, while another one has computed it but for the last words.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"talks {seed}")
        self._next = [self._first() for _ in range(TALKS)]

    def turn(self, rng: random.Random) -> Turn:
        """Returns the next turn of one of the conversations. After its last turn another one takes its place."""
        place = rng.randrange(TALKS)
        turn = self._next[place]
        if turn.number == TURNS:
            self._next[place] = self._first()
        else:
            head = f"{turn.head} {_words(self._rng, TURN_WORDS)}"
            self._next[place] = Turn(head, turn.chat, turn.number + 1)
        return turn

    def _first(self) -> Turn:
        return Turn(_words(self._rng, TURN_WORDS), self._rng.random() < CHATS)


def sim_ask(rng: random.Random, long_share: float = 0.12, talks: Talks | None = None) -> Ask:
    """Draws a request: mixed lengths, a share of streams of a minute or more, choices, stop strings, logprobs, chats,
    prompts as text and as ids, whole answers and streams. With `talks` most prompts are their turns.
    """
    turn = talks.turn(rng) if talks is not None and rng.random() < TALK_SHARE else None
    prompt = _prompt(rng, LONGEST_PROMPT) if turn is None else f"{turn.head} {_prompt(rng, LONGEST_TAIL)}"
    max_tokens, length = _max_tokens(rng, long_share)
    body: dict[str, Any] = {"max_tokens": max_tokens, "stream": rng.random() < 0.75}
    if max_tokens > MAX_TOKENS_OF_WHOLE:
        body["stream"] = True
    if rng.random() < 0.5:
        body["seed"] = rng.randrange(1, 2**31)
    if rng.random() < 0.3:
        body["temperature"] = 0
    words = []
    if rng.random() < 0.15:
        body["n"] = rng.choice((2, 2, 3))
        words.append("n")
    if rng.random() < 0.2:
        body["stop"] = _stops(rng)
        words.append("stop")
        if rng.random() < 0.3:
            body["min_tokens"] = rng.randrange(1, max_tokens)
    chat = rng.random() < CHATS
    if turn is not None:
        chat = turn.chat
        words.append("turn")
    if rng.random() < 0.15:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        words.append("logprobs")
    if chat:
        messages = [{"role": "user", "content": prompt}]
        path, body["messages"] = "/v1/chat/completions", messages
        tokens = _codec.encode(_codec.render_chat(messages, None, True, False, {}), False)
    else:
        path, tokens = "/v1/completions", _codec.encode(prompt, True)
        body["prompt"] = tokens if rng.random() < 0.3 else prompt
    form = "+".join((length, "stream" if body["stream"] else "whole", *words))
    expected = tuple(answer_of(tokens, body, choice) for choice in range(body.get("n", 1)))
    return Ask(path, body, max_tokens * STEP_S, form, expected)


def poison_ask(tokens: tuple[int, ...], number: int) -> Ask:
    """Returns a request whose prompt kills the engines that obey faults; it is expected to be refused."""
    body = {"prompt": [*tokens, number % 30_000, 7, 8, 9], "max_tokens": 8, "stream": False}
    return Ask("/v1/completions", body, 8 * STEP_S, "poison", poison=True)


def answer_of(tokens: list[int], body: dict[str, Any], choice: int) -> Expected:
    """Returns the right answer of a choice to a prompt of `tokens`, by the function that defines the engine's text."""
    draw = 0 if body.get("temperature") == 0 else choice
    base = text.text_base(text.prompt_hash(tokens), body.get("seed") or 0, draw)
    stops, least = body.get("stop") or [], body.get("min_tokens", 0)
    matcher = text.StopMatcher(stops) if stops else None
    parts: list[str] = []
    names: list[str] = []
    logprobs: list[float] = []
    finish = "length"
    for i in range(body["max_tokens"]):
        word = text.WORDS[text.token_id(base, i)]
        names.append(word)
        logprobs.append(text.logprob(base, i))
        if matcher is not None and i + 1 >= least:
            word, matched = matcher.push(word)
            if matched is not None:
                parts.append(word)
                finish = "stop"
                break
        parts.append(word)
    if matcher is not None and finish == "length":
        parts.append(matcher.flush())
    wants = body.get("logprobs") is not None
    return Expected("".join(parts), finish, names if wants else None, logprobs if wants else None)


def difference(ask: Ask, answer: Answer) -> str | None:
    """Returns how an answer that ended with success differs from the right one, or None."""
    if set(answer.choices) != set(range(len(ask.expected))):
        return f"choices {sorted(answer.choices)}, not {len(ask.expected)}"
    for index, want in enumerate(ask.expected):
        said = answer.choices[index]
        if said.text != want.text:
            return f"choice {index}: {_where(said.text, want.text)}"
        if said.finish != want.finish:
            return f"choice {index}: finish {said.finish}, not {want.finish}"
        if want.tokens is not None and said.tokens != want.tokens:
            return (
                f"choice {index}: {len(said.tokens)} tokens with logprobs, not {len(want.tokens)}, or others"
            )
        if want.logprobs is not None and said.logprobs != want.logprobs:
            return f"choice {index}: other logprobs"
    if ask.stream and not answer.done:
        return "no [DONE]"
    return None


def _where(said: str, want: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(said, want, strict=False)) if a != b), min(len(said), len(want))
    )
    return f"at character {at}: {said[at : at + 40]!r}, not {want[at : at + 40]!r} ({len(said)} and {len(want)} in all)"


def _prompt(rng: random.Random, most: int) -> str:
    return _words(rng, int(8 * (most / 8) ** rng.random()))


def _words(rng: random.Random, count: int) -> str:
    return f"{rng.randrange(10**9)} " + " ".join(rng.choices(WORDS, k=count))


def _max_tokens(rng: random.Random, long_share: float) -> tuple[int, str]:
    draw = rng.random()
    if draw < long_share:
        return rng.randrange(*LONG_TOKENS), "long"
    if draw < 0.55:
        return rng.randrange(64, 400), "middle"
    return rng.randrange(4, 64), "short"


def _stops(rng: random.Random) -> list[str]:
    """Draws one or two stop strings of two or three words of the engine's text, which cross the seams of tokens."""
    found = []
    for _ in range(rng.choice((1, 2))):
        words = "".join(rng.choices(text.WORDS, k=rng.choice((1, 2, 2))))
        found.append(words[1:] if rng.random() < 0.5 else words)
    return found
