"""Runs one engine with its server in a process of its own, without Ray: for tests, benchmarks and debugging.

    python -m actors.engine.host --kind sim --role prefill --listen unix:./p0.sock --config '{"slots": 64}'

The process prints one line `ready {...}` (the EngineInfo as JSON) once it serves requests; with `--router` it reports
to the router at that address. It ends on SIGTERM, on SIGINT, or when the process that started it has gone. Secret and
certificates of the wire are those of the environment (`actors.wire.environment`).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import uuid
from typing import Any

import msgspec

from actors.engine.protocol import Engine
from actors.engine.registry import ENGINES, engine_config
from actors.engine.report import Reporter
from actors.engine.server import EngineServer
from actors.wire.channel import Identity
from actors.wire.environment import identity_of_environment
from actors.wire.link import at

PARENT_CHECK_S = 0.25
DRAIN_S = 2.0


async def serve(
    engine: Engine, me: Identity, listen: list[str], parent_pid: int, router: str | None = None
) -> None:
    """Serves until a signal arrives or the parent has gone, then drains and stops. A second signal has no effect."""
    server = EngineServer(engine, me, listen, node="local")
    reporter = None if router is None else Reporter(me, server, at(router))
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
    await server.start()
    if reporter is not None:
        reporter.start()
    print("ready " + msgspec.json.encode(server.info()).decode(), flush=True)
    watch = asyncio.create_task(_watch_parent(parent_pid, done))
    await done.wait()
    watch.cancel()
    if os.getppid() == parent_pid:
        await server.drain(DRAIN_S)
    if reporter is not None:
        await reporter.stop()
    await server.stop()


async def _watch_parent(parent_pid: int, done: asyncio.Event) -> None:
    while os.getppid() == parent_pid:  # noqa: ASYNC110  (there is no event for it)
        await asyncio.sleep(PARENT_CHECK_S)
    done.set()


def main(argv: list[str] | None = None) -> int:
    """Runs the command with the arguments `argv` (None: the process's own) and returns its exit code."""
    parent_pid = os.getppid()
    parser = argparse.ArgumentParser(prog="python -m actors.engine.host", description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=tuple(ENGINES), default="sim")
    parser.add_argument("--role", choices=("prefill", "decode", "colocated"), default="colocated")
    parser.add_argument("--id", default="", help="engine id; default: role and a random suffix")
    parser.add_argument(
        "--listen", action="append", required=True, help="unix:/path or tcp:host:port; repeatable"
    )
    parser.add_argument("--router", help="address of a router, to which the engine reports")
    parser.add_argument("--config", default="{}", help="options of the engine as a JSON object")
    args = parser.parse_args(argv)
    try:
        options = json.loads(args.config)
        if not isinstance(options, dict):
            raise ValueError("--config must be a JSON object")
        engine_id = args.id or f"{args.role}-{uuid.uuid4().hex[:8]}"
        facts = {"engine_id": engine_id, "role": args.role}
        me = identity_of_environment("engine", engine_id)
        engine = ENGINES[args.kind].make(engine_config(args.kind, facts, options, "--config"))
    except (OSError, ValueError) as error:
        print(f"actors.engine.host: {error}", file=sys.stderr)
        return 2
    _run(serve(engine, me, args.listen, parent_pid, args.router))
    return 0


def _run(coroutine: Any) -> None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        asyncio.run(coroutine)
        return
    uvloop.run(coroutine)


if __name__ == "__main__":
    sys.exit(main())
