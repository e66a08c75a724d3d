"""Flow scheduling in the whole application on sim engines: the node's agent permits their reads, is restarted by Ray,
takes another policy, and ends when no engine wants it any more; agents of two nodes have one coordinator.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.live.servers import free_ports
from sluice.admin import Dashboard
from tests.live.serving import PATIENCE_S, ROOT, App, config_file, serving
from tests.processes import command_line

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def scheduled(args: dict[str, Any]) -> None:
    """Schedules flows, in an application whose transfers take a while."""
    args["flow"] = {"enabled": True, "policy": {"name": "mfs"}}


@pytest.fixture(scope="module")
def port() -> int:
    """The dashboard's port."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("flows"), "sim.yaml", scheduled, board=port)) as running:
        yield running


def answer(app: App) -> str:
    """Completes a prompt and returns the id of the answer."""
    body = {"model": "sim", "prompt": "some words " * 200, "max_tokens": 3}
    done = httpx.post(f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert done.status_code == 200, done.text
    return str(done.json()["id"])


def agents(app: App) -> list[psutil.Process]:
    """Returns the processes of the agents."""
    return [process for process in app.processes() if "AgentActor" in command_line(process)]


def permits(app: App) -> float:
    return app.metric("sluice_router_flow_permits_total")


def until(app: App, condition: Any, what: str) -> None:
    """Sends requests until the condition holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, what
        answer(app)
        time.sleep(0.2)


def test_reads_are_permitted_and_explained(app: App) -> None:
    until(app, lambda: permits(app) > 0, "no permit was counted")
    # another test may have killed the agent before
    until(app, lambda: app.metric("sluice_router_flow_agents") == 1, "no agent is connected")
    until(app, lambda: len(agents(app)) == 1, "there is not one agent")
    explained: list[dict[str, Any]] = []

    def is_explained() -> bool:
        answered = answer(app)
        # the agent reports once a second
        time.sleep(1.5)
        asked = app.http.get(f"{app.url}/sluice/admin/explain/{answered}").json()
        explained.extend(asked["flows"])
        return any(flow["first_level"] >= 1 and not flow["unscheduled"] for flow in explained)

    until(app, is_explained, f"no flow is explained: {explained}")


def test_the_dashboard_shows_the_level_of_each_transfer_and_what_levels_hold(app: App, port: int) -> None:
    seen: list[Any] = []

    def shown() -> bool:
        with Dashboard(f"http://127.0.0.1:{port}") as dashboard:
            _, snapshot = next(dashboard.watch())
        seen.append(snapshot["transfers"])
        slowest, levels = seen[-1]["slowest"], seen[-1]["levels"]
        known = {one["level"] for one in slowest if one["level"] is not None}
        held = [one["held"] for one in levels]
        return bool(known) and known <= {one["level"] for one in levels} and None not in held

    until(app, shown, f"the last of what the dashboard showed: {seen[-1:]}")


def test_the_policy_is_changed_at_the_agents(app: App) -> None:
    until(app, lambda: app.metric("sluice_router_flow_agents") == 1, "no agent is connected")
    url = f"{app.url}/sluice/admin/policy"
    assert app.http.put(url, json={"flow": "edf"}).json()["flow"]["name"] == "edf"
    assert "no such" in app.http.put(url, json={"flow": "no such"}).text
    before = permits(app)
    until(app, lambda: permits(app) > before, "no permit came after the change")
    assert app.http.get(url).json()["flow"]["name"] == "edf"


def test_a_killed_agent_is_restarted_and_requests_go_on(app: App) -> None:
    until(app, lambda: len(agents(app)) == 1, "there is no agent")
    (old,) = agents(app)
    old.kill()
    for _ in range(5):
        answer(app)
    until(app, lambda: any(process.pid != old.pid for process in agents(app)), "it was not restarted")
    before = permits(app)
    until(app, lambda: permits(app) > before, "the new agent permits nothing")


def test_a_stopped_agent_holds_no_request_up(app: App) -> None:
    until(app, lambda: len(agents(app)) == 1, "there is no agent")
    (agent,) = agents(app)
    agent.send_signal(signal.SIGSTOP)
    try:
        for _ in range(5):
            answer(app)
    finally:
        agent.send_signal(signal.SIGCONT)
    before = permits(app)
    until(app, lambda: permits(app) > before, "the schedule was not taken up again")


KEEPER = """
import asyncio, json, sys
import ray
from app import flow_agent
from app.config import FlowConfig
from app.endpoints import WireConfig

async def main():
    ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False)
    node = ray.get_runtime_context().get_node_id()
    share = flow_agent.FlowShare(FlowConfig(enabled=True), (), unwanted_s=3.0)
    keeper = flow_agent.AgentKeeper("test", node, share, WireConfig(socket_dir=sys.argv[1]))
    keeper.start()
    print(json.dumps(keeper.address), flush=True)
    found = flow_agent.RayDirectory(flow_agent.directory_name("test", share))
    while not await found.addresses(node):
        await asyncio.sleep(0.1)
    there = [await found.exists(node), await found.exists("nowhere"), await found.addresses(node)]
    print(json.dumps({"found": there}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    keeper.stop()
    print("stopped", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(json.dumps({"found": await found.addresses(node)}), flush=True)

asyncio.run(main())
"""


def test_an_agent_is_found_in_rays_store_and_ends_when_nobody_wants_it(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(tmp_path)], stdin=pipe, stdout=pipe, env=env, text=True
    ) as keeper:
        assert keeper.stdout is not None and keeper.stdin is not None
        lines = (line for line in keeper.stdout if line.startswith('"unix:'))
        socket = Path(json.loads(next(lines)).removeprefix("unix:"))
        wait_for(socket.exists, "the agent does not listen")
        found = (json.loads(line)["found"] for line in keeper.stdout if line.startswith('{"found"'))
        assert next(found) == [True, False, [f"unix:{socket}"]]
        tree = psutil.Process(keeper.pid).children(recursive=True)
        (agent,) = [process for process in tree if "AgentActor" in command_line(process)]
        keeper.stdin.write("\n")
        keeper.stdin.flush()
        wait_for(lambda: not agent.is_running() or not socket.exists(), "it did not end")
        agent.wait(PATIENCE_S)
        time.sleep(2.0)
        tree = psutil.Process(keeper.pid).children(recursive=True)
        assert not [process for process in tree if "ray::AgentActor" in command_line(process)]
        keeper.stdin.write("\n")
        keeper.stdin.flush()
        assert next(found) == []


COORDINATED = """
import asyncio, json, os, signal, sys
import ray
from ray.cluster_utils import Cluster
from app import flow_agent, wanted
from app.config import FlowConfig
from app.endpoints import WireConfig

share = flow_agent.FlowShare(FlowConfig(enabled=True), (), unwanted_s=6.0)
name = flow_agent.coordinator_name("test", share)

def keeper(node):
    return flow_agent.AgentKeeper("test", node.node_id, share, WireConfig(socket_dir=sys.argv[1]))

def coordinators():
    return [a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"] == name]

async def coordinated():
    "Returns the coordinator's process once both agents are connected to it."
    while True:
        try:
            actor = ray.get_actor(name, namespace=flow_agent.NAMESPACE)
            if await actor.agents.remote() == 2:
                return await actor.wanted.remote()
        except (ValueError, ray.exceptions.RayError):
            pass
        await asyncio.sleep(0.2)

async def main():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes = [cluster.head_node, cluster.add_node(num_cpus=1)]
        ray.init(address=cluster.address, log_to_driver=False)
        first, second = (keeper(node) for node in nodes)
        found = flow_agent.RayDirectory(flow_agent.directory_name("test", share))
        first.start()
        while not await found.addresses(nodes[0].node_id):
            await asyncio.sleep(0.1)
        await asyncio.sleep(2 * wanted.WANTED_S)
        print(json.dumps({"alone": [await found.several(), len(coordinators())]}), flush=True)
        second.start()
        pid = await coordinated()
        os.kill(pid, signal.SIGKILL)
        again = await coordinated()
        print(json.dumps({"several": [await found.several(), len(coordinators()), again != pid]}), flush=True)
        second.stop()
        while coordinators():
            await asyncio.sleep(0.2)
        print(json.dumps({"left": [await found.several(), bool(await found.addresses(nodes[0].node_id))]}), flush=True)
        first.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()

asyncio.run(main())
"""


@pytest.mark.nightly
def test_agents_of_two_nodes_start_one_coordinator_which_is_restarted_and_ends(tmp_path: Path) -> None:
    """One agent alone starts none; with the second there is one, also after it is killed; it goes with the second."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COORDINATED, str(tmp_path)],
        env=env,
        text=True,
        capture_output=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert said == [
        {"alone": [False, 0]},
        {"several": [True, 1, True]},
        {"left": [False, True]},
    ], done.stderr


def wait_for(condition: Any, what: str) -> None:
    """Waits until the condition holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.1)
