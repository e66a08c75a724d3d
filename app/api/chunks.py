"""The bytes of OpenAI answers, streamed or whole, made from the engines' pieces of output without I/O.

A streamed token costs one JSON string escape (by orjson) and two concatenations: everything around it is built once per
choice. One `Choice` feeds both forms, so that a streamed answer and a whole one have the same content.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from actors.wire.messages import Out
from policies.record import record

DONE = b"data: [DONE]\n\n"
PART_ENTRIES = 32
"""Tokens whose log probabilities are turned into JSON at once; with 20 alternatives each these are 672 candidates, of
which each takes 2 to 5 us.
"""
_dumps = orjson.dumps


@record
class Envelope:
    """The fields that all chunks of one answer share.

    With `usage_null` each chunk has `"usage": null`, as OpenAI's do where the last chunk will carry usage.
    """

    id: str
    created: int
    model: str
    chat: bool
    usage_null: bool = False

    def head(self, *, whole: bool) -> bytes:
        """Returns the opening of a chunk (or of the whole answer) up to and including `"choices":[`."""
        kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and not whole:
            kind += ".chunk"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return _dumps(head)[:-1] + b',"choices":['


@dataclass(slots=True)
class Choice:
    """The state of one choice while it is generated. With `keep`, for whole answers, it also collects the pieces.

    `echo` is the prompt's text, which is put before the first piece; `echo_first` is the text of its first token.

    So that another engine can go on, it counts what the engine has sent: the number of `tokens`, their `ids` (where the
    engine sends them), and the characters of their text (`chars`). `resumed_at` has the number of tokens at each time
    that another engine went on.
    """

    index: int
    chat: bool
    logprobs: bool
    keep: bool
    echo: str = ""
    echo_first: str = ""
    started: bool = False
    finish: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0
    tokens: int = 0
    chars: int = 0
    # 4 bytes a token: a list of int objects would take nine times as much
    ids: "array[int]" = field(default_factory=partial(array, "i"))
    resumed_at: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    deltas: list[dict[str, Any]] = field(default_factory=list)

    def absorb(self, out: Out) -> tuple[str, list[Any] | None]:
        """Takes in a piece of output and returns its text and its logprob entries.

        The first piece of an echoed answer also has those of the prompt. Entries are None without `logprobs`.
        """
        text, entries, ids = out.text, out.logprobs, out.token_ids
        self.tokens += out.n_tokens
        # an engine that parses its output sends no text
        self.chars += len(text) or out.chars
        if ids:
            self.ids.fromlist(ids)
        if not self.started:
            self.started = True
            if self.echo:
                text = self.echo + text
            if out.prompt_logprobs and self.logprobs:
                # nothing predicts the first token: engines send None for it
                first = (self.echo_first, 0, None, ())
                entries = [first if e is None else e for e in out.prompt_logprobs] + list(entries or ())
        if out.finish is not None:
            self.finish, self.stop_reason = out.finish, out.stop_reason
        if self.keep:
            if text:
                self.texts.append(text)
            if entries:
                self.entries.extend(entries)
            if out.delta is not None:
                self.deltas.append(orjson.loads(out.delta))
        return text, entries if self.logprobs else None

    def restart(self) -> None:
        """Drops all output so far, of which nothing has been sent."""
        self.started, self.finish, self.stop_reason = False, None, None
        self.offset = self.tokens = self.chars = 0
        self.ids = array("i")
        self.resumed_at, self.texts, self.entries, self.deltas = [], [], [], []


class StreamWriter:
    """Builds the SSE bytes of one answer."""

    def __init__(self, envelope: Envelope) -> None:
        self._chat = envelope.chat
        self._head = b"data: " + envelope.head(whole=False)
        self._usage_null = envelope.usage_null
        self._suffix = self._after(None, None)
        self._prefixes: dict[int, bytes] = {}

    def piece(self, choice: Choice, out: Out, running: Callable[[], bytes] | None = None) -> bytes:
        """Returns the SSE bytes for `out`: an event, two where a chat choice begins with its role, or b"" for nothing.

        `running` returns the JSON of the usage of what has been absorbed so far, for `continuous_usage_stats`.
        """
        opening = b""
        if self._chat and not choice.started:
            usage = running and running()
            opening = self._event(choice.index, b'{"role":"assistant","content":""}', b"null", None, usage)
        text, entries = choice.absorb(out)
        usage = running and running()
        if out.finish is None and entries is None and out.delta is None and usage is None:
            if not text:
                return opening
            prefix = self._prefixes.get(choice.index) or self._prefix(choice.index)
            return opening + prefix + _dumps(text) + self._suffix
        if out.finish is None and not text and not entries and out.delta is None:
            return opening
        if out.delta is not None:
            body = out.delta
        elif self._chat:
            body = _dumps({"content": text}) if text else b"{}"
        else:
            body = _dumps(text)
        return opening + self._event(choice.index, body, b"".join(_logprobs(choice, entries)), choice, usage)

    def usage(self, usage: bytes, choices: list[Choice]) -> bytes:
        """Returns the last chunk, which has the usage and no choices."""
        return self._head + b'],"usage":' + usage + _migrations(choices) + b"}\n\n"

    def _prefix(self, index: int) -> bytes:
        field_name = b',"delta":{"content":' if self._chat else b',"text":'
        prefix = self._head + b'{"index":%d' % index + field_name
        self._prefixes[index] = prefix
        return prefix

    def _event(
        self, index: int, body: bytes, logprobs: bytes, choice: Choice | None, usage: bytes | None
    ) -> bytes:
        name = b',"delta":' if self._chat else b',"text":'
        return (
            self._head
            + b'{"index":%d' % index
            + name
            + body
            + self._after(choice, usage, logprobs, close=b"")
        )

    def _after(
        self,
        choice: Choice | None,
        usage: bytes | None,
        logprobs: bytes = b"null",
        close: bytes | None = None,
    ) -> bytes:
        if close is None:
            close = b"}" if self._chat else b""
        tail = close + b',"logprobs":' + logprobs + b"," + _finish(choice) + b"}]"
        if usage is not None:
            tail += b',"usage":' + usage
        elif self._usage_null:
            tail += b',"usage":null'
        if choice is not None and choice.resumed_at and choice.finish is not None:
            tail += _migrations([choice])
        return tail + b"}\n\n"


def whole_parts(envelope: Envelope, choices: list[Choice], usage: bytes) -> Iterator[bytes]:
    """Yields the JSON of an answer that is not streamed, in parts (some empty) of a few milliseconds each. All log
    probabilities of a large answer take seconds together.
    """
    yield envelope.head(whole=True)
    for n, choice in enumerate(choices):
        name, body = (
            (b',"message":', _message(choice))
            if envelope.chat
            else (b',"text":', _dumps("".join(choice.texts)))
        )
        opening = b'{"index":%d' % choice.index
        yield (b"," + opening if n else opening) + name + body + b',"logprobs":'
        yield from _logprobs(choice, choice.entries if choice.logprobs else None)
        yield b"," + _finish(choice) + b"}"
    yield b'],"usage":' + usage + _migrations(choices) + b"}"


def usage_json(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> bytes:
    """Returns OpenAI's usage object as JSON; `cached_tokens` are prompt tokens whose KV an engine had already."""
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
        % (
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            cached_tokens,
        )
    )


def merge_deltas(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one message made of streamed deltas: strings are joined, and tool calls are matched by their index."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for key, value in delta.items():
            if key == "tool_calls":
                for call in value or ():
                    _merge_call(calls.setdefault(call.get("index", 0), {}), call)
            elif isinstance(value, str) and key != "role" and isinstance(message.get(key), str):
                message[key] += value
            elif value is not None:
                message[key] = value
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def _merge_call(target: dict[str, Any], call: dict[str, Any]) -> None:
    for key, value in call.items():
        if key == "function":
            function = target.setdefault("function", {"name": "", "arguments": ""})
            for name, part in (value or {}).items():
                function[name] = function.get(name, "") + (part or "")
        elif key != "index" and value is not None:
            target[key] = value


def _message(choice: Choice) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.texts)}
    if choice.deltas:
        message["content"] = None
        message |= merge_deltas(choice.deltas)
    return _dumps(message)


def _migrations(choices: list[Choice]) -> bytes:
    """Returns the `sluice` member that says where engines changed in the midst of a choice; b"" where none did."""
    resumed = [{"index": choice.index, "after_tokens": at} for choice in choices for at in choice.resumed_at]
    if not resumed:
        return b""
    return b',"sluice":' + _dumps({"migrations": len(resumed), "resumed": resumed})


def _finish(choice: Choice | None) -> bytes:
    if choice is None or choice.finish is None:
        return b'"finish_reason":null'
    finish = b'"finish_reason":' + _dumps(choice.finish)
    return finish if choice.stop_reason is None else finish + b',"stop_reason":' + _dumps(choice.stop_reason)


def _logprobs(choice: Choice, entries: list[Any] | None) -> Iterator[bytes]:
    """Yields the JSON of entries of a choice in parts, of `PART_ENTRIES` each; "null" where there are none to show."""
    if entries is None:
        yield b"null"
        return
    slices = [entries[at : at + PART_ENTRIES] for at in range(0, len(entries), PART_ENTRIES)]
    if choice.chat:
        yield b'{"content":['
        for n, some in enumerate(slices):
            content = _dumps([_chat_entry(*entry) for entry in some])[1:-1]
            yield b"," + content if n else content
        yield b"]}"
        return
    lists: dict[str, list[bytes]] = {name: [] for name in _completion_entries(choice, [])}
    for some in slices:
        for name, values in _completion_entries(choice, some).items():
            lists[name].append(_dumps(values)[1:-1])
        yield b""
    for n, (name, parts) in enumerate(lists.items()):
        yield (b"," if n else b"{") + _dumps(name) + b":[" + b",".join(parts) + b"]"
    yield b"}"


def _chat_entry(token: str, _id: int, logprob: float | None, top: list[Any]) -> dict[str, Any]:
    entry = _token(token, logprob)
    entry["top_logprobs"] = [_token(text, value) for text, _, value in top]
    return entry


def _token(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode())}


def _completion_entries(choice: Choice, entries: list[Any]) -> dict[str, Any]:
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, _, logprob, top in entries:
        result["tokens"].append(token)
        result["token_logprobs"].append(None if logprob is None else _finite(logprob))
        result["top_logprobs"].append({text: _finite(value) for text, _, value in top} if top else None)
        result["text_offset"].append(choice.offset)
        choice.offset += len(token)
    return result


def _finite(logprob: float | None) -> float | None:
    """Returns the log probability, but at least -9999.0, the lowest in OpenAI's answers, as JSON has no -Infinity."""
    return None if logprob is None else max(logprob, -9999.0)
