"""`python -m app.drain`: has every Sluice replica of this node finish its work, before the node goes away.

Ray Serve drains the replicas that it stops. A node that is taken away is not stopped by Serve: SIGTERM goes to Ray's
raylet, which ends its workers at once. So Kubernetes (`preStop` in `deploy/kuberay.yaml`), or whoever shuts a node
down, runs this command first. Engines take no new work and hand on what does not end in time; an ingress stops
listening and completes its answers.

Each replica listens on a unix socket in the folder of the internal sockets, which only its own user can enter.
"""

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from actors.private_folder import make_private
from app.user_folder import user_folder

log = logging.getLogger("ray.serve")

SUFFIX = ".drain"
ANSWER_MARGIN_S = 10.0
"""Seconds beyond the drain that a replica has for its answer.

ASSUMPTION: cutting what is left and closing connections takes a second or two, and more on an overloaded node.
"""


def socket_directory(configured: str | None) -> str:
    """Returns the folder of the internal unix sockets: `wire.socket_dir`, or the user's own."""
    return configured or str(user_folder())


class DrainPoint:
    """The socket at which a replica takes the order to drain; `drain(seconds)` obeys it, only once."""

    def __init__(self, directory: str, name: str, drain: Callable[[float], Awaitable[object]]) -> None:
        self._path = Path(directory, name + SUFFIX)
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens. Raises OSError, also if others may write into the folder: whoever reaches the socket may drain."""
        make_private(self._path.parent)
        self._server = await asyncio.start_unix_server(self._asked, self._path)

    async def stop(self) -> None:
        """Stops listening and removes the socket. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._path.unlink(missing_ok=True)

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            seconds = float(await reader.readline())
            if self._draining is None:
                self._draining = asyncio.create_task(self._run(seconds))
            # The drain goes on if whoever asked for it leaves.
            await asyncio.shield(self._draining)
            writer.write(b"drained\n")
            await writer.drain()
        except (ValueError, ConnectionError) as error:
            log.warning("a request to drain was not understood, or its sender left: %s", error)
        finally:
            writer.close()

    async def _run(self, seconds: float) -> None:
        log.info("draining for at most %g s", seconds)
        await self._drain(seconds)


async def drain_node(directory: str, seconds: float, say: Callable[[str], None]) -> bool:
    """Has every replica with a socket in `directory` drain. Returns False if one did not say that it has.

    The socket of a replica that was killed is removed.
    """
    began_s = time.monotonic()

    async def one(path: Path) -> bool | None:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return None
        except FileNotFoundError:  # it ended by itself meanwhile
            return None
        writer.write(f"{seconds}\n".encode())
        try:
            async with asyncio.timeout(seconds + ANSWER_MARGIN_S):
                answer = await reader.readline()
        except (TimeoutError, ConnectionError) as error:
            answer = repr(error).encode()
        writer.close()
        good = answer == b"drained\n"
        took = f"after {time.monotonic() - began_s:.1f} s"
        said = "drained" if good else f"did not drain ({answer.decode().strip() or 'it ended'})"
        say(f"{path.name.removesuffix(SUFFIX)} {said} {took}")
        return good

    answers = [
        answer for answer in await asyncio.gather(*map(one, _sockets(directory))) if answer is not None
    ]
    if not answers:
        say(f"no replica has a socket in {directory}: nothing to drain")
    return all(answers)


def _sockets(directory: str) -> list[Path]:
    return sorted(Path(directory).glob("*" + SUFFIX))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Returns 0 when every replica of this node has drained, else 1."""
    parser = argparse.ArgumentParser(prog="python -m app.drain", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time for running work (default: %(default)s)"
    )
    parser.add_argument("--socket-dir", help="the configuration's wire.socket_dir, where it has one")
    args = parser.parse_args(argv)
    say = lambda text: print(text, flush=True)  # noqa: E731
    return 0 if asyncio.run(drain_node(socket_directory(args.socket_dir), args.seconds, say)) else 1


if __name__ == "__main__":
    sys.exit(main())
