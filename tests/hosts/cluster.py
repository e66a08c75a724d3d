"""A Ray cluster on hosts of `network`, with the application of deploy/multi-node.yaml in small.

It is made as docs/gpu-and-clusters.md describes it: `ray start` on each host with resources that say what the host is
for, the same wire secret everywhere, then `serve deploy`. The test's own thread is in the network of the client's host
meanwhile, so that every helper of `tests.live.serving` works against the cluster.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import yaml

from benchmarks.hosts.network import ROOT, TMP_PATH, Host, Lan, lan
from tests.live.serving import PATIENCE_S, App, config_file, plain_client

HEAD, WORKER, SPARE, CLIENT = "10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.9"
GCS_PORT, DASHBOARD_PORT, INGRESS_PORT, SERVE_PORT = 6379, 8265, 8000, 8001
FIRST_PORT, LAST_PORT = 7600, 7699
RAY_PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "dashboard-agent-grpc-port": 6382,
    "runtime-env-agent-port": 6383,
    "metrics-export-port": 6384,
    "dashboard-agent-listen-port": 6385,
    "min-worker-port": 10002,
    "max-worker-port": 10101,
}
OPEN_PORTS = ("6379:6385", f"{FIRST_PORT}:{LAST_PORT}", "8000", "8001", "8265", "10002:10101")
"""Ports that a host's firewall lets in; docs/gpu-and-clusters.md lists them."""
SECRET = "a secret of the hosts' tests"
ADMIN_KEY = "a key of the hosts' tests"
RAY_TOKEN = "0123456789abcdef" * 4
START_S = 300.0
HEAD_RESOURCES = {"ingress": 1.0, "router": 1.0, "prefill": 1.0, "decode": 1.0}
WORKER_RESOURCES = {"prefill": 1.0, "decode": 1.0}


@dataclass
class HostsApp(App):
    """The application on a cluster of hosts; its processes are those of all hosts."""

    hosts: Mapping[str, Host] = field(default_factory=dict)

    def processes(self) -> list[psutil.Process]:
        return [process for host in self.hosts.values() for process in host.processes()]

    def ready_engines(self) -> set[str]:
        """Returns the ids of the engines that are ready."""
        return {e["id"] for e in self.status()["engines"] if e["state"] == "ready"}

    def engines_on(self, host: Host) -> set[str]:
        """Returns the ids of the ready engines whose process runs on a host.

        An engine is found by the node that it announces: the id of the host's Ray node.
        """
        node = node_id(host)
        return {e["id"] for e in self.status()["engines"] if e["node"] == node and e["state"] == "ready"}


@dataclass
class Cluster:
    """The hosts, the Ray processes on them by host name, and a folder for files and logs.

    `away` is the host that is not the head. `prepare` is called with it before its Ray starts, and returns what is
    added to the environment there.
    """

    lan: Lan
    folder: Path
    prepare: Callable[[Host], Mapping[str, str]] = lambda host: {}
    away_resources: Mapping[str, float] = field(default_factory=dict)
    more_ports: Sequence[str] = ()
    away_name: str = ""
    rays: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def hosts(self) -> dict[str, Host]:
        return self.lan.hosts

    @property
    def head(self) -> Host:
        return self.lan.hosts["head"]

    @property
    def away(self) -> Host:
        return self.lan.hosts[self.away_name]

    def join(self, name: str, address: str) -> None:
        """Adds a host, which takes the place of the one that was `away` before."""
        host, self.away_name = self.lan.add(name, address), name
        self.start_ray(name, self.away_resources, **self.prepare(host))

    def environment(self, **more: str) -> dict[str, str]:
        """Returns what a host's processes find in their environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(TMP_PATH),
            "SLUICE_WIRE_SECRET": SECRET,
            "SLUICE_ADMIN_KEYS": ADMIN_KEY,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": RAY_TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **more,
        }

    def start_ray(self, name: str, resources: Mapping[str, float], **env: str) -> None:
        """Runs `ray start` on a host, as head where the host is the first one, until Ray runs there. It is run again
        where Ray gives up its own start after 30 s, as it does on a busy machine.
        """
        host = self.hosts[name]
        firewall(host, (*OPEN_PORTS, *self.more_ports))
        head = ["--head", f"--port={GCS_PORT}", f"--dashboard-host={host.address}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += [f"--address={HEAD}:{GCS_PORT}"] if self.rays else head
        command += [f"--node-ip-address={host.address}", f"--resources={json.dumps(dict(resources))}"]
        command += [f"--temp-dir={TMP_PATH}/ray", "--num-cpus=2", f"--object-store-memory={128 * 2**20}"]
        command += [f"--{option}={port}" for option, port in RAY_PORTS.items()]
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with self.log(f"ray-{name}") as log:
                begin = log.tell()
                self.rays[name] = host.start(command, log, self.environment(**env))
            while self.rays[name].poll() is None and time.monotonic() < end_s:
                if b"Ray runtime started." in (self.folder / f"ray-{name}.log").read_bytes()[begin:]:
                    return
                time.sleep(0.1)
        raise AssertionError(f"Ray does not start on {name}: {self.logs()}")

    def log(self, name: str) -> IO[bytes]:
        return (self.folder / f"{name}.log").open("ab")

    def wait_head(self) -> None:
        """Waits until the head's Ray takes orders. The calling thread must be in a network of the hosts."""
        url, headers = f"http://{HEAD}:{DASHBOARD_PORT}/api/version", {"authorization": f"Bearer {RAY_TOKEN}"}
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError), plain_client() as http:
                if http.get(url, headers=headers).status_code == 200:
                    return
            time.sleep(0.3)
        raise AssertionError(f"Ray's head does not answer within {START_S} s: {self.logs()}")

    def deploy(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Runs `serve deploy` on the head with deploy/multi-node.yaml, whose application args `change` has made
        small. The order is given again where Ray's dashboard ends the connection, as it does on a busy machine.
        """
        file = config_file(self.folder, "multi-node.yaml", change)
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file)]
        command += ["--address", f"http://{HEAD}:{DASHBOARD_PORT}"]
        end_s = time.monotonic() + START_S
        while True:
            try:
                self.hosts["head"].run(command, START_S, env=self.environment())
                return
            except AssertionError as error:
                if "Connection aborted" not in str(error) or time.monotonic() > end_s:
                    raise AssertionError(f"{error}\n{self.logs()}") from None
                time.sleep(2.0)

    def logs(self) -> str:
        """Returns the ends of what Ray printed and wrote on each host, for the text of a failure."""
        found = list(self.folder.glob("*.log"))
        for host in self.hosts.values():
            # a host's files are reached through its first process
            for session in Path(f"/proc/{host.pid}/root{TMP_PATH}/ray").glob("session_2*/logs"):
                found += [*session.glob("dashboard.log"), *session.glob("serve/*.log")]
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in found)


def without_files(args: dict[str, Any]) -> None:
    """Takes out what lies in files that these hosts do not have: certificates and API keys."""
    del args["wire"]["tls"]
    for key in ("tls_cert", "tls_key", "options"):
        del args["ingress"][key]


def small(args: dict[str, Any]) -> None:
    """Makes the application of deploy/multi-node.yaml small: sim engines, one prefill and one decode engine a host."""
    args["model"] = {"path": "sim", "name": "sim"}
    without_files(args)
    args["wire"]["ports"] = f"{FIRST_PORT}-{LAST_PORT}"
    args["ingress"]["replicas"] = 1
    # an answer takes 20 ms a token: streams last for seconds, and many of them cost little
    timing = {"prefill_base_s": 0.05, "decode_base_s": 0.02}
    for group in args["engines"]:
        group |= {"kind": "sim", "replicas": 2, "num_cpus": 0.1, "num_gpus": 0}
        group["resources"] = {group["role"]: 1}
        group["options"] = {"slots": group["options"]["slots"], "timing": timing, "lease_s": 8.0}
    # each request goes to the engine that was not asked for longest, so that pairs of engines across hosts are met
    args["router"] |= {"prefill": {"name": "round_robin"}, "decode": {"name": "round_robin"}}
    args["router"]["dispatch"]["lease_margin_s"] = 2.0


def _why_no_firewall() -> str | None:
    """Returns why hosts have no firewall here, in words, or None if they have one."""
    if shutil.which("iptables") is None:
        return "iptables is not installed"
    probe = "iptables -A INPUT -p tcp -m multiport --dports 1,2 -j DROP"
    done = subprocess.run(["unshare", "--net", *probe.split()], capture_output=True, text=True)
    return f"iptables does not work here: {done.stderr.strip()}" if done.returncode else None


NO_FIREWALL = _why_no_firewall()
"""Why hosts have no firewall; None if they have one."""


def firewall(host: Host, ports: Sequence[str]) -> None:
    """Has a host drop every attempt of another host to connect to a TCP port that is not among `ports`."""
    if NO_FIREWALL is not None:
        return
    rules = ["-i lo -j ACCEPT", "-p tcp ! --syn -j ACCEPT"]
    rules += [f"-p tcp -m multiport --dports {','.join(ports)} -j ACCEPT", "-p tcp -j DROP"]
    for rule in rules:
        host.run(["iptables", "-A", "INPUT", *rule.split()])


def refused_attempts(host: Host) -> int:
    """Returns how many packets the host's firewall has dropped."""
    lines = host.run(["iptables", "-L", "INPUT", "-v", "-n", "-x"]).splitlines()
    return sum(int(line.split()[0]) for line in lines if " DROP " in line and "policy" not in line)


def replica(app: HostsApp, host: Host, deployment: str) -> psutil.Process:
    """Returns the process of the only replica of a deployment (its name's first word will do) on a host."""
    found = host.processes(f"ServeReplica:{app.name}:{deployment}")
    assert len(found) == 1, f"{deployment} on {host.name}: {found}"
    return found[0]


def wire_addresses(host: Host) -> list[str]:
    """Returns the addresses at which processes of a host listen on a port of the wire, as `ss` prints them."""
    listening = [line.split()[3] for line in host.run(["ss", "-Hltn"]).splitlines()]
    return sorted(at for at in listening if FIRST_PORT <= int(at.rpartition(":")[2]) <= LAST_PORT)


def node_id(host: Host) -> str:
    """Returns the id of a host's Ray node, as its raylet's command line has it."""
    for process in host.processes("raylet"):
        for word in process.cmdline():
            if word.startswith(("--node_id=", "--node-id=")):
                return word.partition("=")[2]
    raise AssertionError(f"no raylet on {host.name}: {[p.cmdline()[:2] for p in host.processes()]}")


@contextlib.contextmanager
def cluster(
    change: Callable[[dict[str, Any]], None] = small,
    head: Mapping[str, float] = HEAD_RESOURCES,
    worker: Mapping[str, float] = WORKER_RESOURCES,
    prepare: Callable[[Host], Mapping[str, str]] = lambda host: {},
    more_ports: Sequence[str] = (),
) -> Iterator[tuple[Cluster, HostsApp]]:
    """Runs the application on two hosts for the time of a block, and yields when it is ready."""
    with (
        tempfile.TemporaryDirectory(prefix="sluice-hosts-") as folder,
        lan({"head": HEAD, "client": CLIENT}) as made,
    ):
        running = Cluster(made, Path(folder), prepare, worker, more_ports)
        running.start_ray("head", head)
        with made.hosts["client"].network():
            running.wait_head()
            running.join("worker", WORKER)
            running.deploy(change)
            app = HostsApp(
                running.rays["head"],
                f"http://{HEAD}:{INGRESS_PORT}",
                f"http://{HEAD}:{SERVE_PORT}",
                Path(folder) / "ray-head.log",
                "sluice",
                hosts=made.hosts,
            )
            try:
                _wait_ready(running, app)
                yield running, app
            finally:
                app.http.close()


def _wait_ready(running: Cluster, app: HostsApp) -> None:
    file = yaml.safe_load((running.folder / "multi-node.yaml").read_text())
    wanted = sum(group["replicas"] for group in file["applications"][0]["args"]["engines"])
    try:
        app.wait(
            lambda s: s["ready"] and sum(e["state"] == "ready" for e in s["engines"]) == wanted,
            f"{wanted} engines",
            START_S,
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{running.logs()}\n{serve_status(running)}") from None


def serve_status(running: Cluster) -> str:
    """Returns what `serve status` says, for the text of a failure."""
    command = [sys.executable, "-m", "ray.serve.scripts", "status"]
    command += ["--address", f"http://{HEAD}:{DASHBOARD_PORT}"]
    try:
        return running.hosts["head"].run(command, PATIENCE_S, env=running.environment())
    except AssertionError as error:
        return str(error)
