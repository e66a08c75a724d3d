"""The Ray side of Sluice: thin shells (engines, router, telemetry) around the pure `policies`."""
