"""Fixtures of the SDK's tests: a scripted server, and clients that talk to it over real sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import RetryPolicy, Sluice
from tests.sluice.drivers import AsyncDriver, Driver, SyncDriver
from tests.sluice.server import ContractServer

FAST_RETRY = RetryPolicy(max_retries=3, base_delay_s=0.001, max_delay_s=0.002)


@pytest.fixture(autouse=True)
def no_sluice_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLUICE_BASE_URL", "SLUICE_API_KEY", "SLUICE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    # Key files of servers on this machine lie there.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def server() -> Iterator[ContractServer]:
    running = ContractServer()
    running.start()
    yield running
    running.stop()


@pytest.fixture
def client(server: ContractServer) -> Iterator[Sluice]:
    with Sluice(server.url, retry=FAST_RETRY) as opened:
        yield opened


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
def driver(request: pytest.FixtureRequest) -> Driver:
    made: Driver = request.param()
    return made
