"""A small HTTP server with given answers, plain or with TLS, for what asks an application."""

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Told:
    """A running server: its URL, the (method, path, bearer token) of each request, and its `answers` by path.

    A request without the `key`, where one is set, is answered 401, and an unknown path 503.
    """

    answers: Mapping[str, str]
    key: str | None = None
    url: str = ""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)


@contextmanager
def told_server(
    answers: Mapping[str, str], key: str | None = None, files: tuple[str, str] | None = None
) -> Iterator[Told]:
    """A context with a server on a free port; with `files` (certificate, key) it speaks TLS."""
    told = Told(answers, key)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
            told.asked.append((self.command, self.path, token))
            refused = told.key is not None and token != told.key
            status = 401 if refused else 200 if self.path in told.answers else 503
            body = told.answers.get(self.path, '{"error": {"message": "not here"}}').encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told.url = f"http{'s' if files else ''}://127.0.0.1:{server.server_port}"
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
