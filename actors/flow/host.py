"""Runs the agent of a node in a process of its own, without Ray: for tests, benchmarks and other schedulers.

    python -m actors.flow.host --node n1 --knows n2 --listen unix:/run/flow.sock --config '{"policy": "mfs"}'

The process prints one line `ready {...}` (the addresses as JSON) once it takes connections. It ends on SIGTERM, on
SIGINT, or when the process that started it has gone. Secret and certificates of the wire are those of the environment
(`actors.wire.environment`); with an address over TCP there must be a secret. `--peer n2=unix:/other.sock` names the
agent of another node, which must permit what leaves that node. With --coordinate it is the coordinator of the agents
of several nodes, whose configurations name its address.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import uuid
from typing import Literal

import uvloop

from actors import garbage, no_memory
from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.flow.coordinator import Coordinator
from actors.flow.directory import FixedDirectory
from actors.options import from_options
from actors.wire.channel import Identity
from actors.wire.environment import identity_of_environment
from actors.wire.link import at

PARENT_CHECK_S = 0.25


async def serve(server: FlowAgent | Coordinator, listen: list[str], parent_pid: int) -> None:
    """Serves until a signal arrives or the parent has gone."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
    await server.start(listen)
    garbage.settle()
    no_memory.watch()
    print("ready " + json.dumps({"id": server.me.id, "addresses": server.addresses}), flush=True)
    watch = asyncio.create_task(_watch_parent(parent_pid, done))
    await done.wait()
    watch.cancel()
    await server.stop()


async def _watch_parent(parent_pid: int, done: asyncio.Event) -> None:
    while os.getppid() == parent_pid:  # noqa: ASYNC110  (there is no event for it)
        await asyncio.sleep(PARENT_CHECK_S)
    done.set()


def main(argv: list[str] | None = None) -> int:
    """Runs the command with the arguments `argv` (None: the process's own) and returns its exit code."""
    parent_pid = os.getppid()
    parser = argparse.ArgumentParser(prog="python -m actors.flow.host", description=__doc__.split("\n")[0])
    parser.add_argument("--coordinate", action="store_true", help="coordinate agents instead of being one")
    parser.add_argument("--node", action="append", default=[], help="a node whose ports it owns; repeatable")
    parser.add_argument("--knows", action="append", default=[], help="another node that exists; repeatable")
    parser.add_argument(
        "--peer", action="append", default=[], help="NODE=ADDRESS of another node's agent; repeatable"
    )
    parser.add_argument("--listen", action="append", required=True, help="unix:/path or tcp:host:port")
    parser.add_argument("--router", help="address of a router, for reports and changes of the policy")
    parser.add_argument("--config", default="{}", help="fields of AgentConfig as a JSON object")
    args = parser.parse_args(argv)
    kind: Literal["agent", "coordinator"] = "coordinator" if args.coordinate else "agent"
    try:
        me = identity_of_environment(kind, f"{kind}-{uuid.uuid4().hex[:8]}")
        options = json.loads(args.config)
        if not isinstance(options, dict):
            raise ValueError("--config must be a JSON object")
        if bool(args.node) == args.coordinate:
            raise ValueError("give the agent's --node NAME, or --coordinate without one")
        if me.secret is None and any(address.startswith("tcp:") for address in args.listen):
            raise ValueError("TCP needs a secret: set SLUICE_WIRE_SECRET, the same for all processes")
        if wrong := [peer for peer in args.peer if not all(peer.partition("="))]:
            raise ValueError(f"--peer {wrong[0]}: write NODE=ADDRESS")
        config = from_options(AgentConfig, options, "--config")
    except (OSError, ValueError) as error:
        print(f"actors.flow.host: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    uvloop.run(_serve(me, args, config, parent_pid))
    return 0


async def _serve(me: Identity, args: argparse.Namespace, config: AgentConfig, parent_pid: int) -> None:
    if args.coordinate:
        arbiter = config.arbiter_config()
        made = Coordinator(me, config.drop_share, arbiter.port_bytes_per_s, arbiter.most_flows)
        await serve(made, args.listen, parent_pid)
        return
    peers: dict[str, tuple[str, ...]] = {}
    for peer in args.peer:
        node, _, address = peer.partition("=")
        peers[node] = (*peers.get(node, ()), address)
    nodes = frozenset((*args.node, *args.knows, *peers))
    find = at(args.router) if args.router else None
    directory = FixedDirectory(peers, nodes) if peers else None
    await serve(FlowAgent(me, args.node[0], nodes, config, find, directory), args.listen, parent_pid)


if __name__ == "__main__":
    sys.exit(main())
