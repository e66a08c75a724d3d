"""The content of one answer as a client has got it, streamed or whole: text, tokens, and how each choice ended."""

import json
from dataclasses import dataclass, field
from typing import Any

from benchmarks.live.sse import END


@dataclass(slots=True)
class Said:
    """One choice of an answer. `tokens` and `logprobs` are filled if the client asked for logprobs, `calls` by tools.

    `margins` are the differences between the logprobs of the two most likely tokens, None where there was only one.
    """

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish: str | None = None


class Answer:
    """An answer that arrives in pieces. `error` is the code of an error event or of an error answer."""

    def __init__(self, stream: bool) -> None:
        self.stream = stream
        self.status: int | None = None
        self.choices: dict[int, Said] = {}
        self.error: str | None = None
        self.message = ""
        self.done = False
        self.note: dict[str, Any] | None = None
        self._rest = b""

    def head(self, status: int) -> None:
        """Takes the status, which comes before the body."""
        self.status = status

    def feed(self, data: bytes) -> bool:
        """Takes bytes of the body. Returns whether they were progress: content rather than a comment."""
        self._rest += data
        if not self.stream or self.status != 200:
            return False
        cut = self._rest.rfind(END) + len(END)
        if cut < len(END):
            return False
        events, self._rest = self._rest[:cut], self._rest[cut:]
        progress = False
        for event in events.split(END):
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._event(line[5:].strip())
                    progress = True
        return progress

    def end(self) -> None:
        """Reads the body of an answer that came whole, after its last byte."""
        if self.stream and self.status == 200:
            return
        try:
            body = json.loads(self._rest)
        except ValueError:
            self.error = "not JSON"
            return
        self.done = True
        self._object(body)

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
        else:
            self._object(json.loads(data))

    def _object(self, body: dict[str, Any]) -> None:
        if (error := body.get("error")) is not None:
            self.error = str(error.get("code") or error.get("type"))
            self.message = str(error.get("message"))
        if body.get("sluice") is not None:
            self.note = body["sluice"]
        for choice in body.get("choices") or ():
            said = self.choices.setdefault(choice.get("index", 0), Said())
            content = choice.get("delta") or choice.get("message") or {}
            said.text += choice.get("text") or content.get("content") or ""
            for at, call in enumerate(content.get("tool_calls") or ()):
                function = call.get("function") or {}
                parts = said.calls.setdefault(call.get("index", at), ["", ""])
                parts[0] += function.get("name") or ""
                parts[1] += function.get("arguments") or ""
            said.finish = choice.get("finish_reason") or said.finish
            if choice.get("logprobs"):
                _take_logprobs(said, choice["logprobs"])


def _take_logprobs(said: Said, logprobs: dict[str, Any]) -> None:
    """Adds the logprobs of one choice, in the form of chat completions or of completions."""
    if logprobs.get("content") is not None:
        for entry in logprobs["content"]:
            said.tokens.append(entry["token"])
            said.logprobs.append(entry["logprob"])
            said.margins.append(_margin([top["logprob"] for top in entry.get("top_logprobs") or ()]))
        return
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs.get("tokens") or ())
    for token, logprob, top in zip(
        logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), tops, strict=False
    ):
        said.tokens.append(token)
        said.logprobs.append(logprob)
        said.margins.append(_margin(list((top or {}).values())))


def _margin(logprobs: list[float]) -> float | None:
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else None
