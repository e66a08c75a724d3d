"""Settings that every test shares."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.actors.telemetry.collector import Collector
    from tests.live.serving import App

# Ray keeps to loopback and sends no usage statistics; both are read when ray is imported, so they are set first.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Tests need no network: a model that is not on this machine is an error, not a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A busy machine is no counterexample: no example has a time limit, and none is refused for being slow to draw.
settings.register_profile("sluice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")


@pytest.fixture(scope="session")
def vllm_traces() -> "Iterator[Collector]":
    """The collector of traces to which `vllm_app` sends its own."""
    from tests.actors.telemetry.collector import collector

    with collector() as to:
        yield to


@pytest.fixture(scope="session")
def vllm_dashboard() -> int:
    """The port of the dashboard of `vllm_app`."""
    from benchmarks.live.servers import free_ports

    return free_ports(1)[0]


@pytest.fixture(scope="session")
def vllm_app(
    tmp_path_factory: pytest.TempPathFactory, vllm_traces: "Collector", vllm_dashboard: int
) -> "Iterator[App]":
    """A whole Sluice on real vLLM engines, started once for all tests that need one; see tests.live.vllm_app."""
    from tests.live.serving import config_file, serving
    from tests.live.vllm_app import chaos_config

    folder = tmp_path_factory.mktemp("vllm-app")

    def with_a_dashboard(args: dict[str, Any]) -> None:
        chaos_config(args)
        args["dashboard"] = {"port": vllm_dashboard, "folder": str(folder)}

    file = config_file(folder, "cpu.yaml", with_a_dashboard)
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{vllm_traces.port}"}
    with serving(file, environment=traced) as running:
        yield running
