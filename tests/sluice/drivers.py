"""One interface over both clients, so that each behaviour is tested once for both."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from sluice import AsyncSluice, Sluice


class Driver(Protocol):
    """Runs a call, or a whole stream, with a fresh client."""

    def call(
        self, url: str, name: str, *args: Any, settings: dict[str, Any] | None = None, **options: Any
    ) -> Any: ...

    def stream(
        self, url: str, name: str, *args: Any, settings: dict[str, Any] | None = None, **options: Any
    ) -> tuple[list[Any], Exception | None, Any]:
        """The chunks received, the error that ended them, and the stream."""
        ...


class SyncDriver:
    def call(
        self, url: str, name: str, *args: Any, settings: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        with Sluice(url, **(settings or {})) as client:
            return getattr(client, name)(*args, **options)

    def stream(
        self, url: str, name: str, *args: Any, settings: dict[str, Any] | None = None, **options: Any
    ) -> tuple[list[Any], Exception | None, Any]:
        chunks: list[Any] = []
        with Sluice(url, **(settings or {})) as client:
            stream = getattr(client, name)(*args, **options)
            try:
                with stream:
                    for chunk in stream:
                        chunks.append(chunk)
            except Exception as error:
                return chunks, error, stream
        return chunks, None, stream


class AsyncDriver:
    def call(
        self, url: str, name: str, *args: Any, settings: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        async def run() -> Any:
            async with AsyncSluice(url, **(settings or {})) as client:
                return await getattr(client, name)(*args, **options)

        return asyncio.run(run())

    def stream(
        self, url: str, name: str, *args: Any, settings: dict[str, Any] | None = None, **options: Any
    ) -> tuple[list[Any], Exception | None, Any]:
        async def run() -> tuple[list[Any], Exception | None, Any]:
            chunks: list[Any] = []
            async with AsyncSluice(url, **(settings or {})) as client:
                stream = getattr(client, name)(*args, **options)
                try:
                    async with stream:
                        async for chunk in stream:
                            chunks.append(chunk)
                except Exception as error:
                    return chunks, error, stream
            return chunks, None, stream

        return asyncio.run(run())
