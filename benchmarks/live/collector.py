"""A collector of traces for tests and benchmarks: it takes OTLP over HTTP by the protocol's own classes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Collector:
    """The spans that have come, and the attributes of the processes that sent them."""

    port: int
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """Answers wait until it is set; it is set from the start."""
    status: int = 200

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"


@contextmanager
def collector() -> Iterator[Collector]:
    """Runs a collector on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/traces"
            made.gate.wait(30)
            if made.status == 200:
                for sent in request.resource_spans:
                    made.resources.append({a.key: a.value.string_value for a in sent.resource.attributes})
                    made.spans += [span for scope in sent.scope_spans for span in scope.spans]
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(made.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Collector(server.server_port)
    made.gate.set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def attributes(span: Any) -> dict[str, Any]:
    """Returns the attributes of a span of the protocol."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
