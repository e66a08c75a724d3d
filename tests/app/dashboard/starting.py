"""A stand-in for `commands.spawn`: processes of a shell that start only when a test lets them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from app.dashboard.commands import Access


class Starting:
    """Processes that run `script`. None starts before `go` is set; `asked` is set when one was asked for."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.arguments: list[Sequence[str]] = []
        self.processes: list[asyncio.subprocess.Process] = []

    async def spawn(
        self, arguments: Sequence[str], access: Access, **streams: Any
    ) -> asyncio.subprocess.Process:
        self.arguments.append(arguments)
        self.asked.set()
        await self.go.wait()
        made = await asyncio.create_subprocess_exec("/bin/sh", "-c", f"exec {self.script}", **streams)
        self.processes.append(made)
        return made
