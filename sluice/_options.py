"""The options of a request as typed keywords, and the body that they become.

The options are TypedDicts, so that the four calls (chat, stream_chat, completions, stream_completions) of both clients
share one definition that type checkers and editors see. An option that is None is not sent, so the server's default
holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from .types import ChatMessage

PriorityClass = Literal["interactive", "standard", "batch"]
MessageLike = Mapping[str, Any] | ChatMessage
"""A message as a dict in OpenAI's shape, or a message of an earlier result (`result.message`)."""
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A prompt or several: one text, several texts, the token ids of one prompt, or the token ids of several."""


@dataclass(frozen=True)
class SLO:
    """Latency objectives of one request, in milliseconds.

    `ttft_ms` is the time to the first token, and `tpot_ms` the time per output token after it. Raises ValueError unless
    they are finite and above 0.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"SLO: {name} must be a finite number of milliseconds above 0, got {value!r}"
                )

    def body(self) -> dict[str, float]:
        """Returns the `slo` object of the request body."""
        fields = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}
        return {name: value for name, value in fields.items() if value is not None}


class RequestOptions(TypedDict, total=False):
    """The options that chats and completions share."""

    model: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | None
    response_format: Mapping[str, Any] | None
    user: str | None
    priority: int | PriorityClass | None
    """A class name, or an integer; requests with a smaller one are served earlier."""
    slo: SLO | None
    session: str | None
    """Name that all requests of one conversation share; the server's forecasts of lengths learn by it."""
    cache_salt: str | None
    """A text; only requests with the same one (or none, as they have) share KV in the prefix caches of engines."""
    migrate: bool | None
    """Whether another engine may go on with an answer when one fails in its midst; the server's default is yes."""
    server_timeout_s: float | None
    """Seconds after which the server gives the request up; its own limit counts where that is lower."""
    extra_body: Mapping[str, Any] | None
    """Further fields of the body, sent as they are; they win over the options above."""
    extra_headers: Mapping[str, str] | None
    timeout_s: float | None
    """Seconds in place of `Timeouts.total_s` for this call, with its retries and a stream's whole length."""


class ChatOptions(RequestOptions, total=False):
    """The options of `chat` and `stream_chat`."""

    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None


class CompletionOptions(RequestOptions, total=False):
    """The options of `completions` and `stream_completions`."""

    logprobs: int | None
    echo: bool | None
    suffix: str | None


_TRANSPORT_OPTIONS = frozenset({"migrate", "server_timeout_s", "extra_body", "extra_headers", "timeout_s"})


def chat_body(
    messages: str | Sequence[MessageLike], options: ChatOptions, *, model: str | None, stream: bool
) -> bytes:
    """Returns the JSON body of POST /v1/chat/completions. Raises TypeError for an option that does not exist."""
    body = _common(options, ChatOptions.__optional_keys__, model=model, stream=stream)
    return _encode({"messages": _messages(messages), **body})


def completion_body(
    prompt: Prompt,
    options: CompletionOptions,
    *,
    model: str | None,
    stream: bool,
) -> bytes:
    """Returns the JSON body of POST /v1/completions. Raises TypeError for an option that does not exist."""
    body = _common(options, CompletionOptions.__optional_keys__, model=model, stream=stream)
    return _encode({"prompt": prompt if isinstance(prompt, str) else list(prompt), **body})


def _messages(messages: str | Sequence[MessageLike]) -> list[Mapping[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [m.model_dump(exclude_none=True) if isinstance(m, ChatMessage) else m for m in messages]


def _common(
    options: Mapping[str, Any], known: frozenset[str], *, model: str | None, stream: bool
) -> dict[str, Any]:
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(
            f"unknown option {unknown[0]!r}; body fields the SDK does not know go into extra_body={{...}}"
        )
    body = {k: v for k, v in options.items() if v is not None and k not in _TRANSPORT_OPTIONS}
    if model is not None:
        body.setdefault("model", model)
    slo = options.get("slo")
    if slo is not None:
        body["slo"] = slo.body()
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    extra = options.get("extra_body") or {}
    if "stream" in extra:
        raise TypeError("extra_body must not hold 'stream'; say stream=True in the call instead")
    return {**body, **extra}


def _encode(body: Mapping[str, Any]) -> bytes:
    """Returns `body` as UTF-8 JSON.

    Raises ValueError for a value that JSON cannot hold (NaN, a lone surrogate, an object).
    """
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise ValueError(f"the request cannot be written as JSON: {error}") from error
