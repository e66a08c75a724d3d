"""The answers of a sim engine: the pieces of each choice, with stop strings, stop tokens and logprobs if the client
asked for them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from actors.engine.sim.params import SimParams
from actors.wire.messages import Out
from policies.engine_model import scheduler, text


class Choice:
    """One choice of a request. If `special` is False, its next piece is a plain word, which `pieces` makes inline."""

    __slots__ = (
        "attempt_id",
        "base",
        "end",
        "index",
        "last",
        "late",
        "matcher",
        "params",
        "prompt",
        "request",
        "special",
        "start",
    )  # fmt: skip

    def __init__(
        self, request: object, attempt_id: str, index: int, base: int, params: SimParams, end: str
    ) -> None:
        """Makes a choice that has no tokens yet. `end` is the finish reason at its last token, unless a stop string
        comes first.
        """
        self.request = request
        self.attempt_id = attempt_id
        self.index = index
        self.base = base
        self.start = text.token_start(base)
        self.params = params
        self.end = end
        self.last = False
        self.matcher = text.StopMatcher(params.stop) if params.stop else None
        self.prompt: Sequence[int] | None = None  # logprobs are due for these
        # Text of earlier tokens that the client of a resumed choice has not got yet.
        self.late = ""
        self.special = self._always_special()

    def _always_special(self) -> bool:
        needs = self.matcher or self.params.stop_token_ids or self.late
        return bool(needs or self.params.logprobs is not None)

    def with_prompt_logprobs(self, tokens: Sequence[int]) -> None:
        """Has the first piece carry the logprobs of the prompt's `tokens`."""
        self.prompt = tokens
        self.special = True

    def resume(self, n_tokens: int, chars: int) -> None:
        """Brings the choice to the state after its first `n_tokens` tokens, of whose text the client has got `chars`
        characters. The rest of that text comes with the next piece.

        Raises ValueError if the text was over by then, or if `chars` is more than such a client can have.
        """
        sent = []
        for i in range(n_tokens):
            words, finish, _ = self._words(i, text.token_id(self.base, i))
            if finish is not None:
                raise ValueError(
                    f"the choice has ended at token {i + 1}, so it cannot go on after {n_tokens}"
                )
            sent.append(words)
        certain = "".join(sent)
        if chars > len(certain):
            raise ValueError(f"{n_tokens} tokens are {len(certain)} characters of text, fewer than {chars}")
        self.late = certain[chars:]
        self.special = self._always_special()

    def ends(self) -> None:
        """Makes the next piece the last one."""
        self.last = self.special = True

    def piece(self, i: int) -> Out:
        """Returns token `i` as it is sent. Its `finish` is not None if the choice is over."""
        token = text.token_id(self.base, i)
        words, finish, reason = self._words(i, token)
        wants = self.params.logprobs
        prompt, self.prompt = self.prompt, None
        late, self.late = self.late, ""
        if prompt is not None or late:
            words = late + words
            self.special = self._always_special()
        return Out(
            self.attempt_id,
            words,
            1,
            self.index,
            finish,
            reason,
            None if wants is None else [token],
            None if wants is None else [self._logprob(i, token, wants)],
            None,
            None if prompt is None else prompt_logprobs(prompt, self.params.prompt_logprobs or 0),
        )

    def _words(self, i: int, token: int) -> tuple[str, str | None, str | int | None]:
        """Returns the text that is certain with token `i`, the finish reason, and what made the text stop."""
        words = text.WORDS[token]
        may_stop = i + 1 >= self.params.min_tokens
        finish = self.end if self.last else None
        reason: str | int | None = None
        if finish == "stop":
            words = ""  # the end-of-text token has no text
        elif may_stop and token in self.params.stop_token_ids:
            words, finish, reason = "", "stop", token
        if self.matcher is not None and may_stop:
            words, matched = self.matcher.push(words)
            if matched is not None:
                finish, reason = "stop", matched
            elif finish is not None:
                words += self.matcher.flush()
        return words, finish, reason

    def _logprob(self, i: int, token: int, k: int) -> tuple[str, int, float, list[Any]]:
        return (text.WORDS[token], token, text.logprob(self.base, i), text.alternatives(self.base, i, k))


def pieces(
    decoded: Iterable[scheduler.Sequence], last: int
) -> tuple[list[Out], list[Choice], list[scheduler.Sequence]]:
    """Returns a piece of each sequence that gained a token, the choices whose first piece this is, and the sequences
    that have ended. `last` is the number of the step that has just ended. This is the engine's hottest loop, so plain
    words are made inline.
    """
    words, stride, mix, mask = text.WORDS, text.TOKEN_STRIDE, text.TOKEN_MIX, text.MASK32
    items: list[Out] = []
    append = items.append
    first: list[Choice] = []
    ended: list[scheduler.Sequence] = []
    for seq in decoded:
        choice: Any = seq.owner
        i = last - seq.offset
        if choice.special:
            out = choice.piece(i)
            append(out)
            if out.finish is not None:
                ended.append(seq)
        else:
            x = (choice.start + i * stride) & mask
            append(Out(choice.attempt_id, words[(x ^ x >> 15) * mix >> 26 & 63], 1, choice.index))
        if i == 0:
            first.append(choice)
    return items, first, ended


def prompt_logprobs(tokens: Sequence[int], k: int) -> list[Any]:
    """Returns one entry for each prompt token: (text, id, logprob, alternatives), but None for the first. The values
    depend only on the prompt and `k`.
    """
    base = text.prompt_hash(tokens) >> 34
    entries: list[Any] = [None]
    for i, token in enumerate(tokens[1:], 1):
        word = text.WORDS[token % len(text.WORDS)]
        best = text.logprob(base, i)
        entries.append((word, token, best, [(word, token, best), *text.alternatives(base, i, k)[1:]][:k]))
    return entries
