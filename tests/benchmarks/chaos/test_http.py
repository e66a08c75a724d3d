"""The harness's connections: their limits count the time for which the harness itself ran."""

import asyncio
import socket
import time

import pytest

from benchmarks.chaos.http import connect, get

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_a_listener_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = await connect(silent.getsockname()[1], 30.0)
        with pytest.raises(TimeoutError):
            await get(connection, "/", 0.2)
        assert connection.ended or not connection.usable


async def test_time_in_which_the_harness_stood_still_does_not_count() -> None:
    """The answer lies in the socket when the limit has passed by the clock."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(ANSWER)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        connection = await connect(server.sockets[0].getsockname()[1], 30.0)
        asyncio.get_running_loop().call_later(0.05, time.sleep, 3.0)
        assert await get(connection, "/", 2.0) == (200, b"ok")
        connection.drop()
