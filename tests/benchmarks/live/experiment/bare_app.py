"""An application without Ray on sim engines (`benchmarks.chaos.bare`), for tests of experiments: back in seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.live.servers import ROOT, Command, free_ports, python, running
from sluice import Sluice
from tests.processes import command_line

KEY = "a-key-of-the-tests"


@dataclass(frozen=True)
class Bare:
    """A running application: its URL, the key of its administrators, the address of its dashboard if it has one, and
    the pid of the process that started it.
    """

    url: str
    key: str = KEY
    dashboard: str | None = None
    pid: int = 0

    def client(self) -> Sluice:
        return Sluice(self.url, admin_key=self.key)

    def process(self, title: str) -> psutil.Process:
        """Returns the present process of this title, such as `Router`."""
        tree = psutil.Process(self.pid).children(recursive=True)
        (found,) = [one for one in tree if command_line(one).rstrip().endswith(f":{title}")]
        return found


@contextmanager
def bare_app(folder: Path, board: bool = False, **args: Any) -> Iterator[Bare]:
    """A context with one prefill and two decode engines of 5 ms a step, unless `args` say otherwise. With `board` it
    has a dashboard, whose runs lie in `folder`/runs.
    """
    port, board_port = free_ports(2)
    if board:
        runs = {"folder": str(folder / "runs")}
        args["dashboard"] = {"port": board_port, "folder": str(folder / "board"), "experiments": runs}
    options = {"timing": {"prefill_base_s": 0.005, "decode_base_s": 0.005}, "slots": 32, "vocab_size": 32_000}
    app = {
        "model": {"path": "sim", "name": "sim"},
        "engines": [
            {"name": "prefill", "role": "prefill", "kind": "sim", "replicas": 1, "options": options},
            {"name": "decode", "role": "decode", "kind": "sim", "replicas": 2, "options": options},
        ],
        "ingress": {"replicas": 1, "options": {"admin_keys": [KEY], "max_migrations": 20}},
        "wire": {"socket_dir": str(folder / "wire")},
        **args,
    }
    file = folder / "app.yaml"
    schema = {"applications": [{"name": "sluice", "import_path": "app.graph:build", "args": app}]}
    file.write_text(yaml.safe_dump(schema))
    (folder / "orders").mkdir()
    argv = python("-m", "benchmarks.chaos.bare", "--config", str(file), "--port", str(port))
    argv += ["--orders", str(folder / "orders")]
    command = Command("bare", argv, port, "/health/ready", env={"PYTHONPATH": str(ROOT)}, timeout_s=120.0)
    with running(command, print) as server:
        shown = f"http://127.0.0.1:{board_port}" if board else None
        yield Bare(f"http://127.0.0.1:{port}", KEY, shown, server.pid)
