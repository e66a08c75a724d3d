"""Clients against a real ingress, router and sim engines, without Ray: right answers pass, and faults are counted."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import asks
from benchmarks.chaos.answers import Answer
from benchmarks.chaos.asks import Ask, difference, sim_ask
from benchmarks.chaos.clients import Apart, Clients
from benchmarks.chaos.http import connect, get
from tests.app.ingress.rig import VOCAB, Rig, pair, rig, until
from tests.app.ingress.test_with_sim import Sim


def judge(ask: Ask, answer: Answer) -> tuple[str, str] | None:
    why = difference(ask, answer)
    return None if why is None else ("wrong", why)


@asynccontextmanager
async def ticking(clients: Clients) -> AsyncIterator[None]:
    clock = asyncio.create_task(clients.clock.run())
    yield
    clock.cancel()
    with suppress(asyncio.CancelledError):
        await clock


@pytest.fixture
async def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(asks, "_codec", asks.WordCodec(VOCAB))
    async with rig(tmp_path, []) as made:
        options = {"max_model_len": 8192, "timing": {"decode_base_s": 1e-4}}
        engines = [await Sim.start(made, tmp_path, name, role, **options) for name, role in ROLES]
        await until(lambda: len(made.connections.engines()) == 2 and made.connections.ready() is None)
        yield made
        await made.idle()
        for engine in engines:
            await engine.stop()


ROLES = (("p", "prefill"), ("d", "decode"))


async def test_every_form_of_request_is_answered_as_the_pure_function_says(sim: Rig) -> None:
    clients = Clients(sim.listener.port, judge, lambda: None)
    rng = random.Random(4)
    forms: set[str] = set()

    async def one(ask: Ask) -> None:
        connection = await connect(sim.listener.port, 30.0)
        await clients.send(connection, ask)
        connection.drop()

    async with ticking(clients):
        for _ in range(10):
            drawn = [sim_ask(rng, 0.02) for _ in range(12)]
            forms |= {word for ask in drawn for word in ask.form.split("+")}
            await asyncio.gather(*map(one, drawn))
    tally = clients.tally
    assert (tally.requests, tally.right) == (120, 120), (tally.details, tally.failed)
    assert not tally.wrong
    assert forms >= {"short", "middle", "stream", "whole", "n", "stop", "logprobs"}


async def test_an_answer_to_another_question_is_wrong(sim: Rig) -> None:
    """The expected answer is that of another seed; the judge must see it in text, stream or whole."""
    clients = Clients(sim.listener.port, judge, lambda: None)
    async with ticking(clients):
        for stream in (True, False):
            body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 20, "seed": 1, "stream": stream}
            wrong = (asks.answer_of([1, 2, 3], body | {"seed": 2}, 0),)
            connection = await connect(sim.listener.port, 30.0)
            await clients.send(connection, Ask("/v1/completions", body, 0.0, "short", wrong))
            connection.drop()
    assert sum(clients.tally.wrong.values()) == 2
    assert clients.tally.right == 0


async def test_only_what_ends_with_a_dead_ingress_counts_apart(tmp_path: Path) -> None:
    """Three streams are cut: one of an ingress that nobody harmed, one of an ingress that lives, one of a dead one. An
    error answer counts as failed whatever was done to its ingress.
    """
    async with rig(tmp_path, pair(tmp_path, step_s=0.02)) as made:
        clients = Clients(made.listener.port, judge, lambda: None)
        body = {"prompt": [1, 2, 3], "max_tokens": 400, "stream": True}
        async with ticking(clients):
            sent = []
            for _ in range(3):
                connection = await connect(made.listener.port, 30.0)
                ask = Ask("/v1/completions", body, 8.0, "x")
                sent.append((connection, asyncio.create_task(clients.send(connection, ask))))
            await until(lambda: sum(bool(e.answer.choices) for e in clients.open) == 3, "three streams")
            clients.set_apart({sent[1][0].local_port}, Apart("stop ingress", lambda: False))
            # it is seen to be dead a little later than its connection ends
            looks = iter((False, False))
            clients.set_apart({sent[2][0].local_port}, Apart("kill ingress", lambda: next(looks, True)))
            for connection, task in sent:
                connection.transport.abort()
                await task
            connection = await connect(made.listener.port, 30.0)
            clients.set_apart({connection.local_port}, Apart("kill ingress", lambda: True))
            bad = Ask("/v1/completions", {"prompt": [1], "max_tokens": 10**7}, 0.0, "x")
            await clients.send(connection, bad)
            connection.drop()
        tally = clients.tally
        assert tally.requests == 4
        assert [(key.partition(":")[0], count) for key, count in tally.apart.items()] == [("kill ingress", 1)]
        assert sum(tally.failed.values()) == 3
        assert sum(count for cause, count in tally.failed.items() if cause.startswith("400 ")) == 1
        await made.idle()


async def test_a_gap_in_a_stream_is_noted(tmp_path: Path) -> None:
    """The decode engine sends two tokens, waits until the clock says a second more, and sends the last one."""
    engines = pair(tmp_path, auto=False)
    p, d = engines
    async with rig(tmp_path, engines) as made:
        clients = Clients(made.listener.port, judge, lambda: None)
        async with ticking(clients):
            connection = await connect(made.listener.port, 30.0)
            body = {"prompt": [1, 2, 3], "max_tokens": 3, "stream": True}
            task = asyncio.create_task(clients.send(connection, Ask("/v1/completions", body, 0.0, "short")))
            await until(lambda: p.live, "a prefill")
            (attempt_id,) = p.live
            p.finish_prefill(attempt_id)
            await until(lambda: attempt_id in d.live, "a decode")
            d.admit(attempt_id)
            d.token(attempt_id)
            await until(lambda: any(e.answer.choices for e in clients.open), "a token")
            since_s = clients.clock.now_s
            await until(lambda: clients.clock.now_s > since_s + 1.0, "a second")
            assert clients.waiting_s() >= 1.0
            d.token(attempt_id, finish="length")
            await task
            connection.drop()
        (gap,) = [gap for gap in clients.tally.gaps if gap.seconds >= 1.0]
        assert not gap.apart
        assert gap.end_s - gap.start_s == gap.seconds
        await made.idle()


async def test_a_connection_says_when_the_other_end_goes(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        connection = await connect(made.listener.port, 30.0)
        status, body = await get(connection, "/sluice/status", 30.0)
        assert (status, connection.usable) == (200, True)
        assert b"engines" in body
        await made.listener.stop(drain_s=0.0)
        await until(lambda: connection.ended, "the end")
        assert not connection.usable
