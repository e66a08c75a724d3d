"""Runs `sluice` commands for the dashboard as processes of low priority, within bounds of time and output.

The server imports neither the SDK nor the benchmarks, so what they can do is asked of their command.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from app.dashboard.store import RunError

ROOT = Path(__file__).resolve().parents[2]
NICENESS = 10
MOST_BYTES = 64 << 20
"""Longest answer of a command. ASSUMPTION: a report of the longest run has some megabytes."""
MOST_ERROR_BYTES = 64 << 10
MOST_AT_ONCE = 2
"""Commands at a time, beside the one that sends a load: a page asks for one after the other."""


@dataclass(frozen=True, slots=True)
class Access:
    """How commands reach an application: an admin `key` (None: the key file of this machine), and the files of the
    `certificates` of its servers by their URLs (`benchmarks.certificates`).
    """

    key: str | None = None
    certificates: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Returns the environment of a command that has this access; no list of processes shows it."""
        found = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self.key is not None:
            found["SLUICE_ADMIN_KEY"] = self.key
        if self.certificates:
            found["SLUICE_SERVER_CERTS"] = json.dumps(dict(self.certificates))
        return found


async def spawn(arguments: Sequence[str], access: Access, **streams: Any) -> asyncio.subprocess.Process:
    """Starts `sluice ARGUMENTS`. Raises RunError 503 if no process can be started."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sluice.cli",
            *arguments,
            env=access.environment(),
            cwd=ROOT,
            # Ctrl-C at the server's terminal ends the server, which then ends this in order
            start_new_session=True,
            limit=1 << 20,
            **streams,
        )
    except OSError as error:
        raise RunError(503, f"no process can be started: {error.strerror}") from error
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process(process.pid).nice(NICENESS)
    return process


class Commands:
    """Asks commands that answer and end, a few at a time. `close` ends those that are under way."""

    def __init__(self, access: Access | None = None) -> None:
        self._access = Access() if access is None else access
        self._open = 0
        self._running: set[asyncio.subprocess.Process] = set()
        self._closed = False

    async def ask(self, arguments: Sequence[str], limit_s: float, given: bytes = b"") -> bytes:
        """Returns what a command prints. Raises RunError with its own words if it refuses, 429 if too many run, and 504
        if it takes longer than `limit_s`.
        """
        if self._open >= MOST_AT_ONCE:
            raise RunError(429, "the server is answering other questions about runs: try again in a moment")
        # counted before its process is there: others may ask while that starts
        self._open += 1
        try:
            return await self._ask(arguments, limit_s, given)
        finally:
            self._open -= 1

    async def _ask(self, arguments: Sequence[str], limit_s: float, given: bytes) -> bytes:
        pipe = asyncio.subprocess.PIPE
        process = await spawn(arguments, self._access, stdin=pipe, stdout=pipe, stderr=pipe)
        self._running.add(process)
        try:
            if self._closed:
                raise RunError(503, "the server is stopping")
            async with asyncio.timeout(limit_s):
                _, out, errors = await asyncio.gather(
                    _feed(process, given),
                    drained(process.stdout, MOST_BYTES),
                    drained(process.stderr, MOST_ERROR_BYTES),
                )
                status = await process.wait()
        except TimeoutError:
            raise RunError(504, f"`sluice {arguments[0]}` did not answer within {limit_s:g} s") from None
        finally:
            await end(process)
            self._running.discard(process)
        if status != 0:
            raise RunError(400, said(errors) or f"`sluice {arguments[0]}` ended with status {status}")
        return out

    async def ask_json(self, arguments: Sequence[str], limit_s: float, given: bytes = b"") -> Any:
        """Returns the JSON that a command prints. Raises RunError as `ask` does."""
        out = await self.ask(arguments, limit_s, given)
        try:
            return json.loads(out)
        except ValueError as error:
            raise RunError(500, f"`sluice {arguments[0]}` answered no JSON: {error}") from error

    async def close(self) -> None:
        """Ends every command that is under way; one that is still being started ends as soon as it is there."""
        self._closed = True
        for process in list(self._running):
            await end(process)


async def _feed(process: asyncio.subprocess.Process, given: bytes) -> None:
    assert process.stdin is not None
    # a process that has ended takes nothing more; uvloop says so by a RuntimeError
    with contextlib.suppress(OSError, RuntimeError):
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()


async def drained(stream: asyncio.StreamReader | None, most: int) -> bytes:
    """Returns the output up to `most` bytes; the rest is read and dropped, so that the process can end."""
    assert stream is not None
    kept = bytearray()
    while piece := await stream.read(1 << 16):
        if len(kept) < most:
            kept += piece[: most - len(kept)]
    return bytes(kept)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kills a process that has not ended, and waits for it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def said(errors: bytes) -> str:
    """Returns what a command wrote to its error output, without the names of the command on each line."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    known = ("experiment: ", "simulate: ", "sluice: ")
    told = [line[len(prefix) :] for line in lines for prefix in known if line.startswith(prefix)]
    # a traceback ends with the error
    return "\n".join(told or lines[-1:])[:4000]


def checked_text(body: Mapping[str, Any], most_bytes: int) -> str:
    """Returns the text in a body. Raises RunError 400 for one that is missing or too long."""
    text = body.get("text")
    if not isinstance(text, str) or not text.strip():
        raise RunError(400, "text is missing: give the file's content")
    if len(text.encode("utf-8", "replace")) > most_bytes:
        raise RunError(400, f"the file is longer than {most_bytes // 1024} kB")
    return text
