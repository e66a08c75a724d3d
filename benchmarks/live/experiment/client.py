"""Sends the requests of a trial at their times, whether or not earlier ones have ended, and notes how each one went.

It uses raw HTTP/1.1 on kept-alive connections (`benchmarks.live.load`), which takes little from the server beside it. A
request takes an idle connection, or opens one.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.certificates import pinned
from benchmarks.live.experiment.requests import Planned, body_of
from benchmarks.live.load import StreamConnection
from benchmarks.live.sse import StreamReader

PATH = "/v1/completions"
MOST_CONNECTIONS = 4_096
"""Most requests under way. ASSUMPTION: below the descriptors that a process may have; one more is not sent and counts
as failed, because a client that waits with its next request measures another load."""


@dataclass(slots=True)
class Sent:
    """One request of a trial and how it went. Times are seconds from the start of the trial's load; `ttft_s` and the
    others count from the moment in which it was sent. `problem` says why there is no whole answer, or is None.
    """

    number: int
    phase: str
    request_class: str
    prompt_tokens: int
    output_tokens: int
    planned_s: float
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    id: str = ""
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    status: int | None = None
    cached_tokens: int | None = None
    problem: str | None = "not answered in time"

    @property
    def ttft_s(self) -> float | None:
        """The time to the first text of a whole answer."""
        if self.problem is not None or self.first_s is None or self.sent_s is None:
            return None
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of each later token of a whole answer; None for a single token."""
        if self.problem is not None or self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """The time to the end of a whole answer."""
        if self.problem is not None or self.last_s is None or self.sent_s is None:
            return None
        return self.last_s - self.sent_s

    @property
    def met(self) -> bool | None:
        """Whether the request met its objectives; None without any. One that failed missed them."""
        if self.ttft_slo_s is None and self.tpot_slo_s is None:
            return None
        if self.problem is not None:
            return False
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        late = self.ttft_slo_s is not None and (ttft_s is None or ttft_s > self.ttft_slo_s)
        slow = self.tpot_slo_s is not None and tpot_s is not None and tpot_s > self.tpot_slo_s
        return not (late or slow)

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by name, with times to the microsecond."""
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}


class Client:
    """The client of one trial. `ended` is called with each request that has ended, whatever its answer was."""

    def __init__(
        self,
        url: str,
        model: str,
        name: str,
        api_key: str | None = None,
        ended: Callable[[Sent], None] = lambda _: None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server: write http://HOST:PORT")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (pinned(url) or ssl.create_default_context()) if parts.scheme == "https" else None
        self._model, self._name, self._ended = model, name, ended
        self._head = [
            f"POST {parts.path.rstrip('/').removesuffix('/v1')}{PATH} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            *([] if api_key is None else [f"authorization: Bearer {api_key}"]),
        ]
        self.start_s = 0.0
        self.idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self.under_way = 0

    async def run(self, plan: Sequence[Planned], seed: int, patience_s: float) -> list[Sent]:
        """Sends all of `plan`; after the last request it waits at most `patience_s`. Returns them in order of time.

        A cancelled run ends its connections; what was sent until then is in the requests that `ended` got.
        """
        self.start_s = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        sent: list[Sent] = []
        try:
            for number, one in enumerate(plan):
                record = Sent(
                    number, one.phase, one.request_class, one.prompt_tokens, one.output_tokens, one.at_s,
                    one.ttft_slo_s, one.tpot_slo_s, f"{self._name}-{number}",
                )  # fmt: skip
                # made before the time comes, so that a long prompt delays nothing
                body = body_of(one, self._model, seed, number)
                await asyncio.sleep(max(0.0, self.start_s + one.at_s - time.perf_counter()))
                sent.append(record)
                task = asyncio.ensure_future(self._ask(record, body))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks, timeout=patience_s)
        finally:
            late = list(tasks)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for connection in list(self._all):
                connection.drop()
        return sent

    def now_s(self) -> float:
        """Returns the time since the start of the load."""
        return time.perf_counter() - self.start_s

    async def _ask(self, record: Sent, body: bytes) -> None:
        try:
            if len(self._all) >= MOST_CONNECTIONS and not self.idle:
                record.problem = f"not sent: {MOST_CONNECTIONS} requests are under way"
                return
            self.under_way += 1
            try:
                connection = self.idle.pop() if self.idle else await self._connect()
                lines = [*self._head, f"x-request-id: {record.id}", f"content-length: {len(body)}", "", ""]
                await connection.ask(record, "\r\n".join(lines).encode() + body)
            except OSError as error:
                record.problem = f"no connection: {error}"
            finally:
                self.under_way -= 1
        finally:
            self._ended(record)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self), self._host, self._port, ssl=self._tls
        )
        self._all.add(connection)
        return connection

    def lost(self, connection: _Connection) -> None:
        """Forgets a connection that has ended."""
        self._all.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)


class _Connection(StreamConnection):
    """A connection that carries one request after the other, each sent when it is due."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._record: Sent | None = None
        self._done: asyncio.Future[None]

    async def ask(self, record: Sent, request: bytes) -> None:
        """Sends a request now, and returns when its answer has ended."""
        self._record = record
        self._done = asyncio.get_running_loop().create_future()
        self.send(request)
        record.sent_s = self.sent_s - self._client.start_s
        try:
            await self._done
        except asyncio.CancelledError:
            self.drop()
            raise

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._client.lost(self)

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        super().on_head(status, headers)
        if self._record is not None:
            self._record.status = status

    def answered(self, reader: StreamReader, problem: str | None, reusable: bool) -> None:
        record, self._record = self._record, None
        if record is None:
            return
        start_s = self._client.start_s
        if problem is not None and reader.finish == "stop" and reader.done and reader.error is None:
            # an engine whose answers may end by themselves
            problem = None
        record.problem = problem
        if reader.first_s is not None:
            record.first_s = reader.first_s - start_s
        if reader.finish_s is not None:
            record.last_s = reader.finish_s - start_s
        usage = reader.usage or {}
        record.output_tokens = int(usage.get("completion_tokens") or record.output_tokens)
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens")
        if reusable:
            self._client.idle.append(self)
        if not self._done.done():
            self._done.set_result(None)
