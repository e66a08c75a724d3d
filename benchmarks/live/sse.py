"""Reads a streamed OpenAI answer at little cost, to find when its first text came and whether it is whole.

Each event up to the first one with text is parsed; after that only the bytes are searched. Not claimed: the number of
tokens, since a server may put several into one event (`finish_reason` "length" says that all of them came).
"""

import json
from typing import Any

END = b"\n\n"
_FINISH = (b'"finish_reason":"', b'"finish_reason": "')
_DONE = b"data: [DONE]"


class StreamReader:
    """The reader of one answer. `first_s` and `finish_s` are the `now_s` of its first text and its finish reason."""

    __slots__ = ("_rest", "done", "error", "events", "finish", "finish_s", "first_s", "usage")

    def __init__(self) -> None:
        self._rest = b""
        self.events = 0
        self.first_s: float | None = None
        self.finish_s: float | None = None
        self.finish: str | None = None
        self.done = False
        self.error: str | None = None
        self.usage: dict[str, Any] | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes body bytes that arrived at `now_s`, in seconds of any clock."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        cut = data.rfind(END) + len(END)
        if cut < len(END):
            self._rest = data
            return
        if cut < len(data):
            data, self._rest = data[:cut], data[cut:]
        self.events += data.count(END)
        if self.first_s is None:
            self._look_for_text(data, now_s)
        if b'"finish_reason":"' in data or b'"finish_reason": "' in data:
            self.finish_s, self.finish = now_s, _finish_reason(data)
        if b'"usage"' in data:
            self._read_usage(data)
        if b'"error"' in data:
            self._read_error(data)
        if _DONE in data:
            self.done = True

    def problem(self, finish: str = "length") -> str | None:
        """Returns why this answer is not whole or did not end with the reason `finish`; None when it is right."""
        if self.error is not None:
            return f"error event: {self.error}"
        if self.first_s is None:
            return "no text"
        if self.finish != finish:
            return f"finish_reason is {self.finish}, not {finish}"
        return None if self.done else "no [DONE]"

    def _look_for_text(self, data: bytes, now_s: float) -> None:
        for event in events_of(data):
            if text_of(event):
                self.first_s = now_s
                return

    def _read_usage(self, data: bytes) -> None:
        for event in events_of(data):
            self.usage = event.get("usage") or self.usage

    def _read_error(self, data: bytes) -> None:
        for event in events_of(data):
            if event.get("error") and self.error is None:
                self.error = json.dumps(event["error"])[:300]


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Returns the JSON objects of the whole events in `data`, without comments and [DONE].

    Raises ValueError for other text.
    """
    found = []
    for event in data.split(END):
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                value = line[5:].strip()
                if value != b"[DONE]":
                    found.append(json.loads(value))
    return found


def text_of(event: dict[str, Any]) -> str:
    """Returns the text that one chunk of a chat or plain completion adds; "" for role, usage and error chunks."""
    for choice in event.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            return str(text)
    return ""


def _finish_reason(data: bytes) -> str:
    for mark in _FINISH:
        start = data.find(mark)
        if start >= 0:
            start += len(mark)
            return data[start : data.find(b'"', start)].decode(errors="replace")
    raise ValueError("no finish reason in these events")
