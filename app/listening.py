"""Listening: a socket whose failure says which port it is and what to do, and what all servers tell uvicorn."""

import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


def bound_socket(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """Returns a socket that is bound to a port (0: any free one) and does not block. Raises OSError that names it.

    With `reuse_port` other sockets may share the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno,
            f"cannot listen on {host}:{port} ({error.strerror}); free the port or choose another",
        ) from None
    sock.setblocking(False)
    return sock


IDLE_S, PROBE_S, PROBES = 30, 10, 3
"""Seconds without traffic after which the kernel probes a client, seconds between two probes, and how many without an
answer end the connection. ASSUMPTION: a client whose machine or network is gone costs its engine a minute at most, and
a phone that changes its network has time for it. Linux alone probes nobody.
"""


def probe_idle_clients(listening: socket.socket) -> None:
    """Has the kernel find out which clients of this socket are gone without a word, and end their connections.

    On a connection on which nothing is sent, as while a request waits in the queue or its whole answer is generated,
    nothing else would tell. Accepted connections inherit the options of the listening socket (Linux). A client that is
    there and reads nothing answers the probes.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Pipelined(HttpToolsProtocol):
    """uvicorn's protocol, which also tells the request that runs that its client has left. uvicorn tells only the last
    request of the connection. One before it, as a stream behind which a client has sent more, would wait for its client
    without end, or write to a closed connection, which is an error in the log.
    """

    _running: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)


def uvicorn_config(app: Any, tls_cert: str | None, tls_key: str | None, **more: Any) -> uvicorn.Config:
    """Returns the loaded configuration of a server that runs in a loop of ours, without logs, headers and lifespan of
    uvicorn. `more` are further settings. Raises OSError or ssl.SSLError for TLS files that cannot be used.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        lifespan="off",
        interface="asgi3",
        ws="none",
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        **more,
    )
    config.load()
    return config


def uvicorn_server(config: uvicorn.Config) -> uvicorn.Server:
    """Returns a server whose `startup` can be called without its `serve`, which would take over signals."""
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server
