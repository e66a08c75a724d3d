"""The HTTP of the synchronous clients: attempts, retries, limits of time, and whole answers."""

from __future__ import annotations

import random
import time
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import httpx

from ._core import LIMITS, LOOPBACK, Answer, Call, Deadline, Settings, check_status, failure, retry_delay_s
from ._errors import SluiceError
from ._stream import OpenResponse, Watchdog

if TYPE_CHECKING:
    from typing import Self


class Transport:
    """A client's connections to one server. It may be shared between threads."""

    def __init__(self, settings: Settings, http_client: httpx.Client | None) -> None:
        self._settings, self._owns_http = settings, http_client is None
        self._http = http_client or httpx.Client(mounts=dict.fromkeys(LOOPBACK), limits=LIMITS)
        self._rng = random.Random()

    @property
    def base_url(self) -> str:
        """The root URL of the server, without `/v1`."""
        return self._settings.base_url

    def close(self) -> None:
        """Closes the connections, unless `http_client` was given. Streams that are still open break."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, call: Call) -> Answer:
        """Sends the call, with retries, and returns the whole answer."""
        deadline = Deadline(call.total_s(self._settings))
        opened = self._open(call, deadline)
        return self._read(call, opened)

    def _open(self, call: Call, deadline: Deadline) -> OpenResponse:
        """Repeats attempts as the retry policy allows, until one is answered with 2xx. Its body is not read yet."""
        attempt = 0
        while True:
            try:
                return self._attempt(call, deadline)
            except SluiceError as error:
                delay_s = retry_delay_s(error, attempt, call, self._settings, deadline, self._rng)
                if delay_s is None:
                    raise
            time.sleep(delay_s)
            attempt += 1

    def _attempt(self, call: Call, deadline: Deadline) -> OpenResponse:
        timeout = deadline.httpx_timeout(self._settings.timeouts)
        request = self._http.build_request(**call.request_args(self._settings), timeout=timeout)
        try:
            response = self._http.send(request, stream=True)
        except httpx.RequestError as error:
            raise failure(error, call, self._settings, deadline) from error
        report = partial(failure, call=call, settings=self._settings, deadline=deadline)
        opened = OpenResponse(response, deadline, Watchdog(response, deadline), report)
        if not response.is_success:
            check_status(self._read(call, opened))
        return opened

    def _read(self, call: Call, opened: OpenResponse) -> Answer:
        try:
            body = opened.response.read()
        except httpx.RequestError as error:
            raise opened.failure(error) from error
        finally:
            opened.close()
        if opened.watchdog.fired:
            raise opened.deadline.error()
        return Answer(call, opened.response.status_code, opened.response.headers, body)
