"""Clients whose streams run while hosts fail: what each received, and how long it waited at most.

Waiting is counted in time that this process lived: a loop beside the streams wakes twenty times a second and counts at
most two of its periods each time, so that a machine that pauses everything makes no answer late.
"""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

TICK_S = 0.05


class LivedClock:
    """A clock that stands still while this process does not run."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = loop.time()
            self.now_s += min(now_s - last_s, 2 * TICK_S)
            last_s = now_s


@dataclass
class Answer:
    """One request: its prompt, what came back, and times on the lived clock."""

    prompt: str
    began_s: float
    ended_s: float | None = None
    text: str = ""
    error: str | None = None
    finished: bool = False
    news_s: list[float] = field(default_factory=list)

    def longest_wait_s(self, now_s: float) -> float:
        """Returns the longest time without news, from the beginning to the end (or to now)."""
        times = [self.began_s, *self.news_s, now_s if self.ended_s is None else self.ended_s]
        return max(b - a for a, b in itertools.pairwise(times))

    @property
    def tokens(self) -> int:
        return len(self.news_s)


class Load:
    """`clients` clients, each of which asks for one stream of `tokens` tokens after another while the block runs."""

    def __init__(self, url: str, clients: int, tokens: int, **body: Any) -> None:
        self.answers: list[Answer] = []
        self.clock = LivedClock()
        self._url, self._clients, self._tokens, self._body = url, clients, tokens, body
        self._going = True
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Lets every stream end, and waits for it."""
        self._going = False
        self._thread.join(600)
        assert not self._thread.is_alive(), f"streams without an end: {self.unfinished()}"

    def unfinished(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.ended_s is None]

    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is not None]

    def longest_wait_s(self) -> float:
        return max(answer.longest_wait_s(self.clock.now_s) for answer in self.answers)

    def done_since(self, began_s: float) -> int:
        """Returns how many requests that began after `began_s` have ended well."""
        return sum(a.began_s > began_s and a.finished and a.error is None for a in list(self.answers))

    async def _run(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, verify=False, limits=limits, trust_env=False) as http:
            clock = asyncio.create_task(self.clock.run())
            await asyncio.gather(*(self._client(http, number) for number in range(self._clients)))
            clock.cancel()

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        for n in itertools.count():
            if not self._going:
                return
            answer = Answer(f"client {number} asks {n}", self.clock.now_s)
            self.answers.append(answer)
            try:
                await self._stream(http, answer)
            except (httpx.HTTPError, OSError) as error:
                answer.error = repr(error)
            answer.ended_s = self.clock.now_s
            if answer.error is not None:
                await asyncio.sleep(0.2)

    async def _stream(self, http: httpx.AsyncClient, answer: Answer) -> None:
        body = {"prompt": answer.prompt, "max_tokens": self._tokens, "stream": True, "temperature": 0}
        async with http.stream("POST", f"{self._url}/v1/completions", json=body | self._body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread()).decode()}"
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    answer.finished = True
                elif line.startswith("data: "):
                    self._piece(answer, json.loads(line.removeprefix("data: ")))
        if not answer.finished and answer.error is None:
            answer.error = f"cut after {len(answer.text)} characters"

    def _piece(self, answer: Answer, piece: dict[str, Any]) -> None:
        if "error" in piece:
            answer.error = json.dumps(piece["error"])
            return
        for choice in piece.get("choices", ()):
            answer.text += choice["text"]
        answer.news_s.append(self.clock.now_s)


@contextlib.contextmanager
def load(url: str, clients: int = 12, tokens: int = 150, **body: Any) -> Iterator[Load]:
    """Runs a `Load` for the time of a block; at the end every stream has ended."""
    with Load(url, clients, tokens, **body) as running:
        yield running


def undisturbed(url: str, prompts: list[str], tokens: int, at_once: int = 40, **body: Any) -> dict[str, str]:
    """Returns the answers to these prompts, asked for while nothing fails, by prompt.

    The calling thread must be in the clients' network.
    """

    def ask(prompt: str) -> str:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0} | body
        reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=180, trust_env=False)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(prompts, pool.map(ask, prompts), strict=True))
