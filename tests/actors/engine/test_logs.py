"""A library that configures logging anew leaves the log files of Ray Serve in use."""

import logging
import subprocess
import sys
from logging.config import dictConfig
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

from actors.engine.logs import handlers_kept

REPLICA = """
import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from types import SimpleNamespace

import ray
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve._private.logging_utils import get_component_logger_file_path

# as Serve configures it in a replica; a whole one would need a Ray node
folder = Path(sys.argv[1])
ray._private.worker._global_node = SimpleNamespace(get_logs_dir_path=lambda: str(folder))
logger, file = logging.getLogger(SERVE_LOGGER_NAME), folder / "replica.log"
handler = MemoryHandler(1, target=logging.FileHandler(file))
logger.addHandler(handler)
assert get_component_logger_file_path() == "/replica.log"

from actors.engine.vllm.config import VllmEngineConfig
from actors.engine.vllm.launch import PhaseClock, launch
from actors.engine.vllm.stats import Ledger

try:
    launch(VllmEngineConfig(engine_id="d", role="decode", model=str(folder)), Ledger(print, print), PhaseClock())
except Exception as error:
    print("no engine:", repr(error))
assert "vllm.logger" in sys.modules
assert get_component_logger_file_path() == "/replica.log"
logger.warning("after")
assert "after" in file.read_text()
print("kept")
"""


def test_a_handler_has_its_target_back_and_writes_to_it(tmp_path: Path) -> None:
    file = logging.FileHandler(tmp_path / "log")
    buffer = MemoryHandler(1, target=file)
    logger = logging.getLogger("tests.buffered")
    logger.addHandler(buffer)
    try:
        with handlers_kept():
            dictConfig({"version": 1, "disable_existing_loggers": False})
            assert buffer.target is None
        logger.warning("after")
        assert (tmp_path / "log").read_text() == "after\n"
    finally:
        logger.removeHandler(buffer)
        file.close()


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_serve_finds_its_log_file_in_a_replica_that_has_imported_vllm(tmp_path: Path) -> None:
    """A restarted Serve controller asks for it, and stops a replica that cannot answer."""
    done = subprocess.run(
        [sys.executable, "-c", REPLICA, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["kept"], done.stdout + done.stderr
