"""The traces that the environment asks for: OTLP over HTTP, by the usual OTEL_* variables.

Without an endpoint there are none, and nothing of OpenTelemetry is imported.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.telemetry.export import Result, Traces

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether traces are to be sent: an endpoint is named, and neither SDK nor exporter is turned off."""
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    no_exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").lower() == "none"
    return not disabled and not no_exporter and any(environment.get(name) for name in _ENDPOINTS)


def traces_of_environment(
    count: "Callable[[Result, int], None]", service: str, instance: str
) -> "Traces | None":
    """Returns the traces of a `service` (OTEL_SERVICE_NAME comes first) of which this process is one `instance`, or
    None where none are wanted. `count` is called in another thread, with results and numbers of requests.
    """
    if not is_wanted():
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from actors.telemetry.export import Traces

    names = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service), "service.instance.id": instance}
    return Traces(OTLPSpanExporter(), count, names)
