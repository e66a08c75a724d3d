"""What operators see of single requests: traces by OpenTelemetry."""
