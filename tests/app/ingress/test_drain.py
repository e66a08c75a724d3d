"""An ingress that is stopped: what runs gets its time, then an error; nothing that was written is cut."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.wire import messages as wire
from app.ingress.http import listener
from tests.app.ingress.rig import Rig, pair, raw, rig, until


async def decoding(made: Rig, **more: Any) -> tuple["asyncio.Task[httpx.Response]", str]:
    """Sends a request and brings it to its first token; returns its answer to come and its attempt."""
    p, d = made.engines["p"], made.engines["d"]
    seen = len(p.of(wire.Prefill))
    task = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat(**more)))
    await until(lambda: len(p.of(wire.Prefill)) > seen)
    attempt_id = str(p.of(wire.Prefill)[-1].attempt_id)
    p.finish_prefill(attempt_id)
    await until(lambda: any(m.attempt_id == attempt_id for m in d.of(wire.Decode)))
    d.admit(attempt_id)
    d.token(attempt_id, "first ")
    await until(lambda: made.connections.live[attempt_id].output_tokens == 1)
    return task, attempt_id


async def test_what_has_not_ended_by_then_ends_with_an_error(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made:
        stream, _ = await decoding(made, stream=True)
        whole, _ = await decoding(made)
        stopping = asyncio.create_task(made.listener.stop(drain_s=0.3))
        await until(lambda: made.app.draining)
        answers = await asyncio.gather(stream, whole)
        await stopping
        last = json.loads(answers[0].text.strip().split("\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "draining"
        assert '"content":"first "' in answers[0].text
        assert "[DONE]" not in answers[0].text
        assert (answers[1].status_code, answers[1].json()["error"]["code"]) == (503, "draining")
        assert answers[1].headers["connection"] == "close"
        await made.idle()
        assert len(made.engines["d"].of(wire.Cancel)) == 2


async def test_a_client_of_a_draining_replica_is_sent_elsewhere(tmp_path: Path) -> None:
    """The refusal ends the connection, so that the next try opens one to another replica."""
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made:
        running, attempt_id = await decoding(made, stream=True)
        # a second connection, kept alive
        async with httpx.AsyncClient(base_url=made.url) as other:
            assert (await other.get("/health")).headers.get("connection") != "close"
            stopping = asyncio.create_task(made.listener.stop(drain_s=100))
            await until(lambda: made.app.draining)
            refused = await other.post("/v1/chat/completions", json=made.chat())
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert refused.headers.get_list("connection") == ["close"]
            # the listening socket is closed: another replica would answer here
            with pytest.raises(httpx.ConnectError):
                await other.get("/health")
        made.engines["d"].token(attempt_id, "last", finish="stop")
        assert (await running).text.endswith("data: [DONE]\n\n")
        await stopping


async def test_an_answer_that_is_complete_is_not_cut_while_its_client_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a busy machine the client takes seconds for all of it
    monkeypatch.setattr(listener, "FLUSH_S", 60.0)
    text = "x" * 8_000_000
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made:
        sock = socket.socket()
        # far less than the answer, of which most then waits in the ingress
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", made.listener.port))
        body = json.dumps(made.chat()).encode()
        await loop.sock_sendall(sock, raw("POST", "/v1/chat/completions", body))
        p, d = made.engines["p"], made.engines["d"]
        await until(lambda: p.of(wire.Prefill))
        attempt_id = p.of(wire.Prefill)[0].attempt_id
        p.finish_prefill(attempt_id)
        await until(lambda: d.of(wire.Decode))
        d.admit(attempt_id)
        d.token(attempt_id, text, finish="stop")
        await until(lambda: not made.app.in_flight)
        stopping = asyncio.create_task(made.listener.stop(drain_s=1))
        await asyncio.sleep(0.1)
        got = 0
        while piece := await loop.sock_recv(sock, 1 << 20):
            got += len(piece)
        assert got > len(text)
        await stopping
        sock.close()


async def test_a_client_that_does_not_read_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.listener.port)
        body = json.dumps(made.chat()).encode()
        writer.write(raw("POST", "/v1/chat/completions", body))
        p, d = made.engines["p"], made.engines["d"]
        await until(lambda: p.of(wire.Prefill))
        attempt_id = p.of(wire.Prefill)[0].attempt_id
        p.finish_prefill(attempt_id)
        await until(lambda: d.of(wire.Decode))
        d.admit(attempt_id)
        # more than the sockets hold; the reader stops at its own limit
        d.token(attempt_id, "x" * 40_000_000, finish="stop")
        await until(lambda: not made.app.in_flight)
        await made.listener.stop(drain_s=1)
        assert not reader.at_eof()
        writer.close()
