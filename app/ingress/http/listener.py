"""The ingress replica's own listener on the public port, inside a loop that already runs.

uvicorn's `Server` accepts connections and holds the TLS context and the Date header. Its main loop and signal handlers
are left out, because the process belongs to Ray (or a test). Connections with TLS are accepted by a `TlsDoor`
(`handshakes.py`), which counts them before their handshakes. Connections speak the fast protocol (`protocol.py`). With
`fast` off, uvicorn's own protocol drives the ASGI application, as in Serve's proxy: that is slower and gives equal
answers. `/version` names the protocol in use.
"""

import asyncio
import logging
import resource
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import uvicorn

from actors import garbage, no_memory
from app.ingress.asgi import OBSERVED, OUTPUT, IngressApp
from app.ingress.http.crowd import Crowd
from app.ingress.http.handshakes import HANDSHAKE_S, TlsDoor
from app.ingress.http.hosts import permits
from app.ingress.http.memory import SharedBytes
from app.ingress.http.protocol import Bounds, FastHttpProtocol, cut_slow
from app.ingress.http.reply import Reply, Request
from app.listening import bound_socket, probe_idle_clients, uvicorn_config, uvicorn_server

log = logging.getLogger(__name__)

SWEEP_S = 1.0

ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts before it serves others. Where the process may open no more files, Python 3.11
tries, logs and plans another try for each of them, every second. uvloop accepts and closes instead.
"""

FLUSH_S = 3.0
"""Seconds that clients get to read the ends of their answers when the listener stops. ASSUMPTION: a client that reads
at all reads some hundred kB in that time.
"""

FLUSH_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """Address and limits of a listener. Port 0 picks a free port; TLS needs both files.

    With `reuse_port` several replicas share a port. A request must arrive within `request_read_s`, and a TLS handshake
    must end within `handshake_s`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: str | None = None
    tls_key: str | None = None
    reuse_port: bool = False
    backlog: int = 2048
    keep_alive_s: float = 75.0
    request_read_s: float = 30.0
    handshake_s: float = HANDSHAKE_S
    fast: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"listener: port must be 0 to 65535, got {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("listener: tls_cert and tls_key belong together")
        if min(self.keep_alive_s, self.request_read_s, self.handshake_s) <= 0:
            raise ValueError("listener: keep_alive_s, request_read_s and handshake_s must be > 0")


class Listener:
    """Listens for one application. `start` raises OSError, with the port in its message, where it cannot bind."""

    def __init__(
        self,
        app: IngressApp,
        config: ListenerConfig,
        dispatch: Callable[[Request, Reply], None] | None = None,
    ) -> None:
        """`dispatch` answers the requests; by default that is the whole application."""
        self._app = app
        self._dispatch = dispatch or app.dispatch
        self._config = config
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._door: TlsDoor | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.port = config.port

    async def start(self) -> None:
        config = self._config
        sock = self._socket = bound_socket(config.host, config.port, config.reuse_port)
        self.port = sock.getsockname()[1]
        probe_idle_clients(sock)
        permitted = permits(config.host, self._app.config.allowed_hosts)
        limits, refused = self._app.config, self._app.metrics.listener_refused
        max_connections = _affordable(limits.max_connections)
        crowd = Crowd(max_connections, min(max_connections, limits.max_connections_per_address), refused)
        fast_protocol = partial(
            FastHttpProtocol,
            dispatch=self._dispatch,
            bounds=Bounds(
                max_body_bytes=limits.max_body_bytes,
                large=OUTPUT,
                slow_client_bytes=limits.slow_client_bytes,
                memory=self._app.request_memory,
                unread=SharedBytes(limits.max_unread_bytes, cut_slow),
                crowd=crowd,
                observed=OBSERVED,
                permits=permitted,
                admit=self._app.admit_head,
                refused=refused,
            ),
        )
        self._app.transport = "fast" if config.fast else "plain"
        settings = uvicorn_config(
            partial(self._app, permits=permitted),
            config.tls_cert,
            config.tls_key,
            http=fast_protocol if config.fast else "auto",
            backlog=min(config.backlog, ACCEPTED_AT_ONCE),
            timeout_keep_alive=int(config.keep_alive_s),
            # uvicorn's own protocol counts the new connection, too
            limit_concurrency=max_connections + 1,
        )
        server = uvicorn_server(settings)
        await server.on_tick(0)
        await server.startup([sock] if settings.ssl is None else [])
        # the kernel's queue is longer than what is accepted at once
        sock.listen(config.backlog)
        if settings.ssl is not None:
            make = partial(_connection, server)
            self._door = TlsDoor(
                sock, settings.ssl, crowd, make, refused, config.handshake_s, ACCEPTED_AT_ONCE
            )
            self._door.open()
        garbage.settle()
        no_memory.watch()
        self._server = server
        self._ticker = asyncio.create_task(self._tick(server))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Takes no new connections, and gives running answers `drain_s` seconds; those left end with an error event.

        Then every connection is closed once its client has read what was written, and cut after `FLUSH_S`. Idempotent.
        """
        server, self._server = self._server, None
        if server is None or self._ticker is None:
            return
        await self._accept_waiting()
        for one in server.servers:
            one.close()
        if self._door is not None:
            self._door.close()
        if drain_s > 0:
            await self._app.drain(drain_s)
        # the last output of each answer is written at the end of this iteration
        await asyncio.sleep(0)
        self._ticker.cancel()
        if self._door is not None:
            await self._door.end_handshakes(FLUSH_S)
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await self._flushed(server)
        for connection in list(server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        for one in server.servers:
            await one.wait_closed()

    async def _flushed(self, server: uvicorn.Server) -> None:
        """Waits until every connection has ended, which a closed one does when its last bytes have been sent."""
        for _ in range(round(FLUSH_S / FLUSH_POLL_S)):
            await asyncio.sleep(0)
            if not server.server_state.connections:
                return
            await asyncio.sleep(FLUSH_POLL_S)

    async def _accept_waiting(self) -> None:
        """Lets the loop accept the connections that wait in the listening socket's queue.

        A closed listening socket resets them, even where another process listens on the same port.
        """
        assert self._socket is not None
        queue = select.poll()
        queue.register(self._socket, select.POLLIN)
        # A turn of the loop accepts one connection or more; new ones may arrive as fast, so the number is bounded.
        for _ in range(self._config.backlog):
            if not queue.poll(0):
                break
            await asyncio.sleep(0)

    async def _tick(self, server: uvicorn.Server) -> None:
        """Renews the Date header once a second, and closes connections that have idled too long."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await server.on_tick(0)
                if self._config.fast:
                    for connection in list(server.server_state.connections):
                        connection.sweep(SWEEP_S, self._config.keep_alive_s, self._config.request_read_s)  # type: ignore[union-attr]
            except Exception:  # a bug; the sweep goes on
                self._app.metrics.internal_errors.inc()
                log.exception("the listener's sweep failed; it is tried again in %g s", SWEEP_S)


def _connection(server: uvicorn.Server) -> asyncio.Protocol:
    """Returns the protocol of a new connection, as uvicorn's `Server` makes it."""
    config = server.config
    make: Callable[..., asyncio.Protocol] = config.http_protocol_class
    return make(config=config, server_state=server.server_state, app_state=server.lifespan.state)


def _affordable(max_connections: int) -> int:
    """Returns the connections that clients may have: a quarter of the file descriptors stays for engines and router."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    affordable = max_connections if files == resource.RLIM_INFINITY else min(max_connections, files * 3 // 4)
    if affordable < max_connections:
        log.warning(
            "at most %d connections (ingress.options.max_connections is %d), because the process may open %d files",
            affordable,
            max_connections,
            files,
        )
    return affordable
