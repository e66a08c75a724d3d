"""Listening: a socket whose failure says which port it is and what to do, and what all servers tell uvicorn."""

import socket
from typing import Any

import uvicorn


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
