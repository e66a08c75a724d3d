"""An application without Ray that has many engines in few processes: router, ingresses and engines are the real ones.

    python -m benchmarks.capacity.application --config FILE --port PORT

Every engine listens, announces itself to the router and reports to it as in a process of its own; only the event loop
is shared, by `PER_PROCESS` engines of a group at most. All ingresses listen on one port, and the kernel shares out the
connections among them (SO_REUSEPORT). No process gets a second life: when one ends, all end.
"""

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

import setproctitle

from actors import no_memory
from app.config import AppConfig, parse
from app.groups import EngineGroupConfig
from app.serve import load
from benchmarks.chaos.bare import Application, Part, Slot
from benchmarks.live.load import run_fast
from policies.routing.registry import decode_policy, prefill_policy

PER_PROCESS = 64
"""Most engines of a process. ASSUMPTION: their reports, ten a second each while they work, are then still a small part
of a core.
"""
LOOK_S = 0.05
"""Seconds between two looks at whether a process has ended."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def shares(engines: int, per_process: int = PER_PROCESS) -> list[int]:
    """Returns how many of the engines each process has: as few processes as may be, and as equal shares."""
    processes = -(-engines // per_process)
    return [len(range(place, engines, processes)) for place in range(processes)]


class Packed(Application):
    """The parts of an application whose engines share processes. It reads neither flows nor a dashboard."""

    def slots(self) -> list[Slot]:
        """Returns all processes of the application."""
        found = [Slot("Router", self._run_router)]
        for group in self._config.engines:
            title = f"{group.role.capitalize()}Engine"
            found += [Slot(title, self._engines(group, share)) for share in shares(group.replicas or 1)]
        return found + [Slot("Ingress", self._run_ingress) for _ in range(self._config.ingress.replicas or 1)]

    def _engines(self, group: EngineGroupConfig, count: int) -> Part:
        """Returns what serves `count` engines of a group; the end of one is the end of all."""

        async def run() -> None:
            await asyncio.gather(*(self._engine(group)() for _ in range(count)))

        return run


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM, and returns 0; or until a process ends by itself, and returns 1."""
    parser = argparse.ArgumentParser(prog="benchmarks.capacity.application", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--http-port", type=int, help="ignored: there is no proxy")
    args = parser.parse_args(argv)
    config: AppConfig = parse(load(args.config, args.port, args.http_port)["applications"][0]["args"])
    assert config.wire.socket_dir is not None
    os.makedirs(config.wire.socket_dir, 0o700, exist_ok=True)
    application = Packed(config)
    application.next_generation()
    slots = application.slots()
    ends: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: ends.append(received))
    # Loads the policies' compiled code once for all processes.
    prefill_policy(config.router.prefill.name, config.router.prefill.params)
    decode_policy(config.router.decode.name, config.router.decode.params)
    gc.freeze()
    for slot in slots:
        slot.pid = _fork(slot)
    ended = None
    while not ends and ended is None:
        time.sleep(LOOK_S)
        ended = next((slot for slot in slots if slot.pid and os.waitpid(slot.pid, os.WNOHANG)[0]), None)
    for slot in slots:
        if slot.pid is not None and slot is not ended:
            os.kill(slot.pid, signal.SIGKILL)
            os.waitpid(slot.pid, 0)
    if ended is not None:
        print(f"{ended.title} has ended by itself, so the application ends", file=sys.stderr)
        return 1
    return 0


def _fork(slot: Slot) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # the benchmarks know the role of a process by this title (`benchmarks.live.proctree`)
        setproctitle.setproctitle(f"ray::ServeReplica:sluice:{slot.title}")
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.WARNING,
            format=f"%(asctime)s {slot.title} %(process)d %(message)s",
        )
        run_fast(_serve(slot.run))
    except BaseException:
        logging.getLogger(__name__).exception("%s ends", slot.title)
    finally:
        os._exit(1)


async def _serve(part: Part) -> None:
    no_memory.watch()
    await part()


if __name__ == "__main__":
    sys.exit(main())
