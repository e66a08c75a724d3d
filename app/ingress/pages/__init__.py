"""The pages for people: `/` has links, and `/docs` documents the API and tries it. Nothing is loaded from other hosts.

`/docs` is drawn by openapi-explorer, whose script is shipped here as it is in its npm package, compressed:

    package     openapi-explorer 2.4.820 (dist/browser/openapi-explorer.min.js), by Authress
    licence     Apache-2.0 (openapi-explorer.LICENSE)
    SHA-256     of the script before compression: EXPLORER_SHA256
"""

import gzip
import html
from functools import cache
from importlib.resources import files
from string import Template

import orjson

from app.api.openapi import document
from app.ingress.http.reply import Headers, Reply, Request

EXPLORER_SHA256 = "6bb3f4f29b0d740f1fc0970cd4245e01d2c1346df5a26ecd20a2f7a5dda5f837"

_HTML: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    ),
]
_SCRIPT: Headers = [
    (b"content-type", b"text/javascript; charset=utf-8"),
    (b"cache-control", b"max-age=3600"),
    (b"vary", b"accept-encoding"),
]
_JSON: Headers = [(b"content-type", b"application/json")]


class Pages:
    """Answers the paths of this module; each method is an endpoint of `app.ingress.asgi`."""

    def __init__(self, served_names: tuple[str, ...], version: str) -> None:
        self._model = served_names[0]
        self._openapi = orjson.dumps(document(served_names, version))

    def index(self, request: Request, reply: Reply, request_id: object) -> None:
        """Answers with the page of links; its example names the host under which the client reached this server."""
        host = request.headers.get(b"host", b"127.0.0.1:8000").decode("latin-1")
        page = Template(_file("index.html").decode())
        text = page.substitute(model=html.escape(self._model), url=html.escape(f"http://{host}"))
        reply.respond(200, _HTML, text.encode())

    def docs(self, request: Request, reply: Reply, request_id: object) -> None:
        """Answers with the API's documentation, whose script reads `/openapi.json`."""
        reply.respond(200, _HTML, _file("docs.html"))

    def explorer(self, request: Request, reply: Reply, request_id: object) -> None:
        """Answers with the script of the documentation page, compressed where the client accepts gzip."""
        script = _file("openapi-explorer.min.js.gz")
        if b"gzip" in request.headers.get(b"accept-encoding", b""):
            reply.respond(200, [*_SCRIPT, (b"content-encoding", b"gzip")], script)
        else:
            reply.respond(200, _SCRIPT, gzip.decompress(script))

    def openapi(self, request: Request, reply: Reply, request_id: object) -> None:
        """Answers with the OpenAPI document."""
        reply.respond(200, _JSON, self._openapi)


@cache
def _file(name: str) -> bytes:
    return files(__name__).joinpath(name).read_bytes()
