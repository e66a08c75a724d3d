"""A listening socket whose failure says which port it is and what to do."""

import socket


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
