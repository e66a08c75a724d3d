"""A real Prometheus beside a test, with the rules of deploy/prometheus: it scrapes every second and answers queries."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.live.servers import free_ports
from tests.live.serving import PATIENCE_S, ROOT

FILES = ROOT / "deploy" / "prometheus"
STOP_S = 30.0


def has_prometheus() -> bool:
    """Returns whether Prometheus is installed here."""
    return shutil.which("prometheus") is not None


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str
    http: httpx.Client

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Returns labels and value of each sample of the answer, without those that are no number."""
        answer = self.http.get(f"{self.url}/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, answer.text
        data: dict[str, Any] = answer.json()["data"]
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        found = [(sample["metric"], float(sample["value"][1])) for sample in data["result"]]
        return [(labels, value) for labels, value in found if value == value]

    def value(self, expression: str) -> float:
        """Returns the one value of the answer, or 0.0 where there is none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return found[0][1] if found else 0.0

    def wait(self, condition: Any, what: str) -> None:
        """Waits until the condition holds."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, f"not within {PATIENCE_S} s: {what}"
            time.sleep(0.5)


@contextmanager
def prometheus(folder: Path, jobs: Mapping[str, list[str]]) -> Iterator[Prometheus]:
    """Runs a Prometheus in `folder` that has these jobs of the shipped file, with these targets, host:port."""
    (port,) = free_ports(1)
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FILES / name) for name in config["rule_files"]]
    shipped = {job["job_name"]: job for job in config["scrape_configs"]}
    config["scrape_configs"] = [
        {**shipped[name], "static_configs": [{"targets": targets}]} for name, targets in jobs.items()
    ]
    folder.mkdir(exist_ok=True)
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    file.write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    http = httpx.Client(timeout=30, verify=False)
    made = Prometheus(f"http://127.0.0.1:{port}", http)
    try:
        made.wait(lambda: process.poll() is not None or _ready(made), "a ready Prometheus")
        assert process.poll() is None, log.read_text()[-4000:]
        yield made
    finally:
        http.close()
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _ready(made: Prometheus) -> bool:
    try:
        return made.http.get(f"{made.url}/-/ready").status_code == 200
    except httpx.HTTPError:
        return False
