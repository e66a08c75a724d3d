"""Settings that every test shares."""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from benchmarks.live.collector import Collector
    from tests.live.serving import App

# Ray keeps to loopback and sends no usage statistics; both are read when ray is imported, so they are set first.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Tests need no network: a model that is not on this machine is an error, not a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A busy machine is no counterexample: no example has a time limit, and none is refused for being slow to draw.
settings.register_profile("sluice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")

LONGEST = (
    "chaos/test_chaos.py", "chaos/test_kill_sim.py", "live/test_redis_gcs.py", "live/test_flow_agents_live.py",
    "parity/test_live_replay.py", "live/test_scaling_live.py", "live/test_two_ingresses.py",
    "live/test_experiments_live.py", "live/test_lost_gcs.py", "app/dashboard/test_page.py",
    "live/test_experiment_counts_live.py", "app/dashboard/test_run_routes.py",
)  # fmt: skip
"""Files whose tests take minutes, the longest first. None of them is left to one worker in the end."""
SHARED = Path(__file__).parent / "live" / "vllm_pair"
"""A folder whose files share engines: they follow one another, so that these start once."""
MARKED = re.compile(r"mark\.(live|vllm|chaos|browser)\b")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test of the marker `pure` where its module runs compiled."""
    if item.get_closest_marker("pure") is None:
        return
    from actors.code_form import code_form
    from actors.wire import channel

    if code_form(channel) == "compiled":
        pytest.skip("needs pure Python: `make test-pure` runs it")


@pytest.fixture(autouse=True)
def own_logging() -> None:
    """Each test begins with loggers that nobody has set up: replicas and commands set up those of their whole process,
    and which tests share a process differs from run to run.
    """
    logging.root.setLevel(logging.WARNING)
    for name in list(logging.root.manager.loggerDict):
        package, _, below = name.partition(".")
        if package in ("actors", "app", "policies", "predictors"):
            logger = logging.getLogger(name)
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
            if not below:
                logger.handlers = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the longest files to the front, and looks whether Makefile finds every test that starts something."""
    tests = Path(__file__).parent
    rank = {tests / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path, len(rank)), item.path.parent == SHARED))
    words: dict[Path, set[str]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {"live", "vllm", "chaos", "browser", "hosts"}
        if not marks or "hosts" in marks:
            continue
        if item.path not in words:
            words[item.path] = set(MARKED.findall(item.path.read_text()))
        if not words[item.path] or ("vllm" in words[item.path]) != ("vllm" in marks):
            raise pytest.UsageError(
                f"{item.nodeid}: Makefile finds a file by the text mark.live, mark.vllm, mark.chaos or mark.browser,"
                " and runs all or none of its marked tests as vLLM's: write the marks of this test so"
            )


@pytest.fixture(scope="session")
def vllm_traces() -> "Iterator[Collector]":
    """The collector of traces to which `vllm_app` sends its own."""
    from benchmarks.live.collector import collector

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

    file = config_file(tmp_path_factory.mktemp("vllm-app"), "cpu.yaml", chaos_config, board=vllm_dashboard)
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{vllm_traces.port}"}
    with serving(file, environment=traced) as running:
        yield running
