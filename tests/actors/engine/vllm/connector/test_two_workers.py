"""The worker halves of two engines, with vLLM's own code and real NIXL agents, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
pytest.importorskip("nixl._api", reason="NIXL is not installed; `make setup` installs it")

from tests.actors.engine.vllm.connector.two_workers import by_permit, corrupt, disconnected, plain, seen
from tests.live.vllm_app import cpu_only

pytestmark = cpu_only("the KV of these workers is in host memory, and `integrity` works in no other")

ROOT = Path(__file__).parents[5]
# layers x heads x tokens x content x float32
BLOCK_BYTES = 4 * 3 * 128 * 128 * 4


@pytest.mark.timeout(400)
@pytest.mark.parametrize("integrity", ["off", "full"])
def test_vllm_reads_by_chunks_and_sees_leases_that_have_ended(integrity: str) -> None:
    """Of an aborted read vLLM gives the lender's blocks back, as after any read."""
    result = seen(plain, integrity=integrity)
    # Nothing moves for a request that ended during the handshake, and the lender hears so.
    assert (result["early"]["bytes"], result["early"]["given_back"], result["early_moved"]) == (
        0,
        True,
        False,
    )
    assert result["read"] == {
        "failed": False, "bytes": 5 * BLOCK_BYTES, "corrupt": False, "unscheduled": "", "level": None,
        "given_back": True,
    }  # fmt: skip
    assert result["same"] is True
    assert (result["stale"]["failed"], result["stale"]["corrupt"]) == (True, False)
    assert result["gone"] is True
    # A handle that does not fit fails its own request, not the worker.
    assert result["odd"] == {"no table": True, "no number": True, "no group": True, "no such block": True}
    assert (result["right"]["failed"], result["right_same"]) == (False, True)


@pytest.mark.timeout(400)
def test_a_changed_block_fails_the_read_and_the_next_one_is_right() -> None:
    result = seen(corrupt, integrity="full")
    assert (result["flip"]["failed"], result["flip"]["corrupt"]) == (True, True)
    assert (result["right"]["failed"], result["right"]["corrupt"]) == (False, False)
    assert result["same"] is True
    # The engine hears of the failure, by which the prompt is prefilled again, and counts it.
    assert result["counted"] == [1, 1, 1]
    assert result["heard"] == [["flip", False], ["right", True]]
    # before the first read, and once
    assert result["handshakes"] == ["p"]


@pytest.mark.timeout(400)
def test_a_lender_whose_connection_has_died_is_met_again() -> None:
    # otherwise each read from it would fail for as long as both engines live
    result = seen(disconnected)
    assert {name: result[name] for name in ("before", "after", "beside another one", "at last")} == {
        "before": False, "after": False, "beside another one": True, "at last": False,
    }  # fmt: skip
    assert result["same"] is True
    assert result["kept"] is True
    assert result["handshakes"] == ["p", "p", "p"]


@pytest.mark.timeout(400)
def test_without_its_agent_a_worker_reads_unscheduled_and_says_so(tmp_path: Path) -> None:
    result = seen(plain, flow_agent=f"unix:{tmp_path / 'nobody.sock'}")
    assert (result["read"]["failed"], result["read"]["unscheduled"]) == (False, "no_agent")
    assert result["same"] is True


@pytest.mark.timeout(400)
def test_reads_go_by_permits_of_a_real_agent_and_without_it_when_it_is_killed(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'flow.sock'}"
    command = [
        sys.executable, "-m", "actors.flow.host", "--node", "here", "--knows", "there", "--listen", address,
    ]  # fmt: skip
    agent = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline().startswith("ready ")
        result = seen(by_permit, agent.pid, flow_agent=address, flow_node="here", flow_silent_s=1.0)
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    assert (result["permitted"]["failed"], result["permitted"]["unscheduled"]) == (False, "")
    assert result["permitted"]["level"] >= 1
    assert result["same"] is True
    # with the 20 ms by default it would take no second
    assert (result["silent"]["failed"], result["silent"]["unscheduled"]) == (False, "silent")
    assert result["silent_s"] >= 1.0
    assert result["alone"]["failed"] is False
    assert result["alone"]["unscheduled"] in ("agent_lost", "no_agent", "silent")
    assert result["still_same"] is True
