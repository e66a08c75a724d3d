"""The pair of engines that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.live.vllm_app import CORE_PROCESSES
from tests.live.vllm_pair.pair import START_S, Pair
from tests.processes import still_running


@pytest.fixture(scope="package")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The last act is a test, too: a killed owner takes its tree along, and a stopped one leaves nothing."""
    pair = Pair(tmp_path_factory.mktemp("vllm"))
    try:
        pair.p.wait_ready(START_S)
        pair.d.wait_ready(START_S)
        yield pair
        children = [*pair.p.children(), *pair.d.children()]
        assert len(children) >= 2 * CORE_PROCESSES
        pair.p.process.kill()
        pair.d.stop()
        assert still_running(children, timeout_s=60) == []
    finally:
        pair.p.stop()
        pair.d.stop()


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """Both engines, empty before and after each test, and no lease had to expire unless the test says so."""
    engines.idle()
    engines.expiring = 0
    before = engines.p.ask("metrics")["leases_expired"]
    yield engines
    engines.idle()
    assert engines.p.ask("metrics")["leases_expired"] == before + engines.expiring
