"""Traces of single requests for operators, by OpenTelemetry."""
