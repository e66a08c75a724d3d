"""The traces that the environment asks for: OTLP over HTTP, by the usual OTEL_* variables.

Without an endpoint there are none, and nothing of OpenTelemetry is imported.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.telemetry.decisions import DecisionTraces
    from actors.telemetry.export import Result
    from actors.telemetry.start import StartTrace
    from actors.telemetry.traces import Traces

_TRACES, _ALL = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether traces are to be sent: an endpoint is named, and neither SDK nor exporter is turned off."""
    return traces_endpoint(environment) is not None


def traces_endpoint(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the URL that takes traces, or None where none are to be sent. The variable of all signals names the
    collector, to which OpenTelemetry's specification adds the path of traces.
    """
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or environment.get("OTEL_TRACES_EXPORTER", "otlp").lower() == "none":
        return None
    if environment.get(_TRACES):
        return environment[_TRACES]
    root = environment.get(_ALL)
    return f"{root.rstrip('/')}/v1/traces" if root else None


def traces_of_environment(
    count: "Callable[[Result, int], None]", service: str, instance: str, forced_per_s: float | None = None
) -> "Traces | None":
    """Returns the traces of a `service` (OTEL_SERVICE_NAME comes first) of which this process is one `instance`, or
    None where none are wanted. `count` is called in another thread, with results and numbers of requests. Clients force
    at most `forced_per_s` traces a second (None: no bound).
    """
    if not is_wanted():
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from actors.telemetry.traces import Traces

    return Traces(OTLPSpanExporter(), count, _names(service, instance), forced_per_s=forced_per_s)


def decision_traces(instance: str, now_s: Callable[[], float]) -> "DecisionTraces | None":
    """Returns what adds the decisions of the router `instance` to traces, or None where none are wanted."""
    if not is_wanted():
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from actors.telemetry.decisions import DecisionTraces

    return DecisionTraces(OTLPSpanExporter(), _names("sluice-router", instance), now_s)


def start_trace(engine_id: str, role: str, kind: str) -> "StartTrace | None":
    """Returns the trace of the start of an engine, which begins now, or None where none is wanted."""
    if not is_wanted():
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from actors.telemetry.start import StartTrace

    return StartTrace(OTLPSpanExporter, _names("sluice-engine", engine_id), engine_id, role, kind)


def _names(service: str, instance: str) -> dict[str, str]:
    return {"service.name": os.environ.get("OTEL_SERVICE_NAME", service), "service.instance.id": instance}
