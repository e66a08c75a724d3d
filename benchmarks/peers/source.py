"""An engine for routers that speak vLLM's HTTP protocol, which ticks as a sim engine does.

    python -m benchmarks.peers.source --role prefill --port 8101 --step-s 0.001

It is the smallest server on uvicorn (vLLM's own stands on it, too) without a model, tokeniser or validation. A prefill
answers with one JSON body that names a KV transfer. A decode waits for the transfer's time and streams a chunk a step.
The steps are those of the sim engine's own clock (`actors.engine.sim.clock`): work joins the next step, which begins at
once if none is under way.

Not claimed: slots, a budget of tokens, and KV blocks. The sim engines beside it have more of all of them than the rows
need. A source is therefore no dearer than a sim engine, and whoever stands in front of it has the advantage.

Source of the protocol: vllm-project/router, src/routers/http/vllm_pd_router.rs (`kv_transfer_params` of the NIXL
connector, `max_tokens` 1 and no stream for the prefill), as of 0.1.17.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson
import uvicorn

from actors.engine.sim.clock import StepClock

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
DONE = b"data: [DONE]\n\n"


class Stream:
    """One request among the steps: how many tokens it still wants, and how many wait to be sent."""

    __slots__ = ("_ready", "left", "made")

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.made = 0
        self._ready = asyncio.Event()

    def step(self) -> None:
        """Takes the token of a step that has ended."""
        self.left -= 1
        self.made += 1
        self._ready.set()

    async def taken(self) -> int:
        """Waits for a token and returns the number of those that were made since the last call."""
        await self._ready.wait()
        self._ready.clear()
        made, self.made = self.made, 0
        return made


class Steps:
    """The member of a step clock that gives each stream a token a step. Steps last for `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._clock = StepClock()
        self._waiting: list[Stream] = []
        self._running: list[Stream] = []
        self._joined = False

    def add(self, stream: Stream) -> None:
        """Lets a stream join the next step. Must be called in the event loop."""
        if not self._joined:
            self._clock.join(self)
            self._joined = True
        self._waiting.append(stream)
        self._clock.kick()

    def drop(self, stream: Stream) -> None:
        """Ends a stream whose client has left; one that has ended already is none."""
        stream.left = 0

    def begin_step(self) -> float | None:
        """Returns the duration of the next step, or None without a stream."""
        running = [stream for stream in self._running if stream.left > 0]
        self._running, self._waiting = running + self._waiting, []
        return self._step_s if self._running else None

    def end_step(self) -> None:
        """Gives every stream of the step its token."""
        for stream in self._running:
            if stream.left > 0:
                stream.step()


class Source:
    """The ASGI application of one engine."""

    def __init__(self, role: str, steps: Steps, transfer_s: float) -> None:
        self.role = role
        self._steps = steps
        self._transfer_s = transfer_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one HTTP request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served here")
        if scope["method"] != "POST":
            models = {"object": "list", "data": [{"id": "sim", "object": "model", "owned_by": self.role}]}
            await _answer(send, models)
            return
        asked = orjson.loads(await _body(receive))
        chat = scope["path"].endswith("/chat/completions")
        moved = asked.get("kv_transfer_params") or {}
        if moved.get("do_remote_decode") or not asked.get("stream"):
            await self._prefill(send, int(asked["max_tokens"]), chat)
        else:
            if moved.get("do_remote_prefill"):
                await asyncio.sleep(self._transfer_s)
            await self._decode(send, int(asked["max_tokens"]), chat, asked)

    async def _prefill(self, send: Send, tokens: int, chat: bool) -> None:
        stream = Stream(tokens)
        self._steps.add(stream)
        while stream.left > 0:
            await stream.taken()
        whole = {"role": "assistant", "content": " word" * tokens}
        choice = {"index": 0, "finish_reason": "length"}
        choice |= {"message": whole} if chat else {"text": whole["content"]}
        transfer = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "source",
            "remote_block_ids": [0],
            "remote_host": "127.0.0.1",
            "remote_port": 0,
        }
        await _answer(send, {"id": "cmpl-0", "choices": [choice], "kv_transfer_params": transfer})

    async def _decode(self, send: Send, tokens: int, chat: bool, asked: dict[str, Any]) -> None:
        pieces = Pieces(chat, tokens, bool((asked.get("stream_options") or {}).get("include_usage")))
        stream = Stream(tokens)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        if chat:
            await send({"type": "http.response.body", "body": pieces.role, "more_body": True})
        self._steps.add(stream)
        try:
            sent = 0
            while sent < tokens:
                made = await stream.taken()
                sent += made
                body = pieces.token * made if sent < tokens else pieces.token * (made - 1) + pieces.last
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": pieces.usage + DONE, "more_body": False})
        finally:
            self._steps.drop(stream)


class Pieces:
    """The ready-made events of a stream, as vLLM's server shapes them."""

    def __init__(self, chat: bool, tokens: int, usage: bool) -> None:
        word = {"delta": {"content": " word"}} if chat else {"text": " word"}
        self._chat = chat
        self.role = self._event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        self.token = self._event(word | {"finish_reason": None})
        self.last = self._event(word | {"finish_reason": "length"})
        counts = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        self.usage = self._data({"choices": [], "usage": counts}) if usage else b""

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._data({"choices": [{"index": 0, "logprobs": None} | choice]})

    def _data(self, fields: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = {"id": "chatcmpl-0123456789abcdef", "object": kind, "created": 1_700_000_000, "model": "sim"}
        return b"data: " + orjson.dumps(head | fields) + b"\n\n"


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, body: dict[str, Any]) -> None:
    data = orjson.dumps(body)
    headers = [*_JSON, (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def main(argv: list[str] | None = None) -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--step-s", type=float, required=True, help="time of a step, which makes one token a stream"
    )
    parser.add_argument("--transfer-s", type=float, default=0.0, help="time of a KV transfer")
    args = parser.parse_args(argv)
    source = Source(args.role, Steps(args.step_s), args.transfer_s)
    uvicorn.run(
        source, host="127.0.0.1", port=args.port, log_level="warning", access_log=False, lifespan="off"
    )


if __name__ == "__main__":
    main()
