"""A prefill or decode engine of vLLM as vllm-router sees it, with the timing and the slots of Sluice's sim engines.

    python -m benchmarks.overload.source prefill --port 8031 --timing '{"base_s": 0.005, "token_s": 0.0002}'
    python -m benchmarks.overload.source decode --port 8032 --timing '{"base_s": 0.04}' --slots 8 --most-requests 12

It is the ticking source of `benchmarks.peers.source`, served by uvicorn as a vLLM engine is, in which a step has at
most `slots` streams and the others wait in their order, and a prefill takes time: a step computes up to `slots` prompts
of up to 8,192 tokens together, as a sim engine's does. A word counts as a token.

With `--most-requests` it refuses with 503 what would be more requests at once, waiting or running, and with
`--most-tokens` a prompt when that number of tokens of prompts waits or is computed. These are the options
`--max-num-queued-reqs` and `--max-num-queued-tokens` of vLLM's own server (`vllm.config.SchedulerConfig`).
"""

import argparse
import asyncio
import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from actors.engine.sim.clock import StepClock
from benchmarks.peers.source import Application, Batch, Receive, Send

BUDGET_TOKENS = 8192
"""Prompt tokens of one step, as in `SimEngineConfig.prefill_budget_tokens`."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of a step: `base_s`, and `token_s` for each token of a prompt that it computes."""

    base_s: float
    token_s: float = 0.0


class Slots(Batch):
    """The streams of a decode engine, of which `slots` run; the others wait in the order in which they came."""

    def __init__(self, step_s: float, slots: int) -> None:
        super().__init__(step_s)
        self._slots = slots

    @property
    def unfinished(self) -> int:
        """The number of streams that run or wait."""
        return sum(one not in self._gone for one in (*self._running, *self._waiting))

    def begin_step(self) -> float | None:
        there = [one for one in (*self._running, *self._waiting) if one not in self._gone]
        self._gone.clear()
        self._running, self._waiting = there[: self._slots], there[self._slots :]
        return self._step_s if self._running else None


class Prompts:
    """The prompts of a prefill engine, which computes up to `slots` of them in a step."""

    def __init__(self, timing: Timing, slots: int) -> None:
        self._timing, self._slots = timing, slots
        self._queued: list[tuple[int, asyncio.Future[None]]] = []
        self._computed: list[asyncio.Future[None]] = []
        self._clock = StepClock()
        self._joined = False
        self.tokens = 0
        """Tokens of all prompts that wait or are computed."""

    async def compute(self, tokens: int) -> None:
        """Returns when a prompt of `tokens` tokens has been computed."""
        if not self._joined:
            self._clock.join(self)
            self._joined = True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queued.append((tokens, done))
        self.tokens += tokens
        self._clock.kick()
        try:
            await done
        finally:
            self.tokens -= tokens

    def begin_step(self) -> float | None:
        if not self._queued:
            return None
        tokens = count = 0
        for own, _ in self._queued[: self._slots]:
            if count and tokens + own > BUDGET_TOKENS:
                break
            tokens, count = tokens + own, count + 1
        self._computed = [done for _, done in self._queued[:count]]
        del self._queued[:count]
        return self._timing.base_s + self._timing.token_s * tokens

    def end_step(self) -> None:
        for done in self._computed:
            if not done.done():
                done.set_result(None)
        self._computed = []


class Limited(Application):
    """The ASGI application of a source with slots, which computes prompts and refuses what is too much."""

    def __init__(
        self, batch: Slots, prompts: Prompts, most_requests: int | None, most_tokens: int | None
    ) -> None:
        super().__init__(batch)
        self._slots, self._prompts = batch, prompts
        self._most_requests, self._most_tokens = most_requests, most_tokens

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            body = await _whole_body(receive)
            request = json.loads(body)
            if self._is_full(request):
                await _refuse(send)
                return
            if not request.get("stream"):
                await self._prompts.compute(words_of(request))

            async def again() -> MutableMapping[str, Any]:
                return {"type": "http.request", "body": body}

            receive = again
        await super().__call__(scope, receive, send)

    def _is_full(self, request: dict[str, Any]) -> bool:
        if request.get("stream"):
            return self._most_requests is not None and self._slots.unfinished >= self._most_requests
        return self._most_tokens is not None and self._prompts.tokens >= self._most_tokens


def words_of(request: dict[str, Any]) -> int:
    """Returns the words of a chat request, at least 1."""
    return max(1, sum(len(message["content"].split()) for message in request["messages"]))


async def _whole_body(receive: Receive) -> bytes:
    pieces, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has gone before its request was whole")
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


async def _refuse(send: Send) -> None:
    # as vLLM's server words it
    body = (
        b'{"error":{"message":"Request queue is full","type":"Service Unavailable","param":null,"code":503}}'
    )
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload.source", description=__doc__)
    parser.add_argument("role", choices=("prefill", "decode"), help="for the reader of the process table")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--timing", type=json.loads, required=True, help="fields of Timing as JSON")
    parser.add_argument("--slots", type=int, default=32, help="streams, or prompts, of one step")
    parser.add_argument("--most-requests", type=int, help="running and waiting; without it, any number")
    parser.add_argument("--most-tokens", type=int, help="of prompts; without it, any number")
    args = parser.parse_args(argv)
    timing = Timing(**args.timing)
    uvicorn.run(
        Limited(
            Slots(timing.base_s, args.slots),
            Prompts(timing, args.slots),
            args.most_requests,
            args.most_tokens,
        ),
        host="127.0.0.1",
        port=args.port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=1024,
    )


if __name__ == "__main__":
    main()
