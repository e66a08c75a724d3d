"""Requests on their way over real sockets: disconnects at every stage, lost engines and routers, slow
clients.

Afterwards nothing is held anywhere: `Rig.idle` looks at the ingress, the router and the engines.
"""

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from actors.wire import messages as wire
from actors.wire.channel import Channel
from app.ingress.config import IngressConfig
from app.ingress.exchange import HttpExchange
from app.ingress.tokenizer import WordCodec
from tests.app.ingress.rig import MODEL, Rig, ScriptedEngine, make_router, pair, raw, rig, until


def post(made: Rig, **more: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat(**more)))


def manual(directory: Path) -> list[ScriptedEngine]:
    return pair(directory, auto=False)


async def advance(made: Rig, stage: str) -> str:
    """Brings the one request under way to `stage`; returns its attempt_id."""
    p, d = made.engines["p"], made.engines["d"]
    await until(lambda: made.connections.live)
    await until(lambda: p.of(wire.Prefill))
    attempt_id = str(p.of(wire.Prefill)[-1].attempt_id)
    if stage == "prefill":
        return attempt_id
    if stage == "pool":
        d.kill()  # nowhere to decode
        link = made.router.engines.channel("d")
        assert link is not None
        await until(lambda: not link.open)
    p.finish_prefill(attempt_id)
    if stage == "pool":
        await until(lambda: made.connections.live[attempt_id].stage == "pooled")
        return attempt_id
    await until(lambda: d.of(wire.Decode))
    if stage == "transfer":
        return attempt_id
    d.admit(attempt_id)
    d.token(attempt_id, "first ")
    await until(lambda: made.connections.live[attempt_id].output_tokens == 1)
    return attempt_id


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("stage", ["prefill", "pool", "transfer", "decode"])
async def test_a_client_that_leaves_takes_everything_with_it(
    tmp_path: Path, stage: str, stream: bool
) -> None:
    async with rig(tmp_path, manual(tmp_path)) as made:
        task = post(made, stream=stream)
        attempt_id = await advance(made, stage)
        task.cancel()
        await made.idle()
        held: dict[str, tuple[str, type]] = {"prefill": ("p", wire.Cancel), "pool": ("p", wire.ReleaseKV)}
        name, kind = held.get(stage, ("d", wire.Cancel))
        assert [m.attempt_id for m in made.engines[name].of(kind)] == [attempt_id]
        assert (
            len([m for e in made.engines.values() for m in [*e.of(wire.Cancel), *e.of(wire.ReleaseKV)]]) == 1
        )
        assert made.metric("sluice_requests_total", code="499", **{"class": "standard", "model": MODEL}) == 1


def one_at_a_time(directory: Path) -> list[ScriptedEngine]:
    """The prefill engine computes one request at a time: the second waits at the router."""
    engines = manual(directory)
    engines[0].slots = 1
    return engines


async def test_a_client_that_leaves_the_queue_was_never_at_an_engine(tmp_path: Path) -> None:
    async with rig(tmp_path, one_at_a_time(tmp_path)) as made:
        first = post(made)
        attempt_id = await advance(made, "prefill")
        second = post(made)
        await until(lambda: made.router.dispatcher.queue_size == 1)
        second.cancel()
        await until(lambda: made.router.status().in_flight == 1, "the second to leave the router")
        assert made.router.dispatcher.queue_size == 0
        first.cancel()
        await made.idle()
        assert [(type(m), getattr(m, "attempt_id", None)) for m in made.engines["p"].received] == [
            (wire.Prefill, attempt_id),
            (wire.Cancel, attempt_id),
        ]


async def test_a_mass_disconnect_leaves_nothing(tmp_path: Path) -> None:
    engines = pair(tmp_path, step_s=0.01)
    async with rig(tmp_path, engines) as made:
        tasks = [post(made, stream=index % 2 == 0, max_tokens=100) for index in range(60)]
        await until(lambda: sum(request.output_tokens for request in made.connections.live.values()) > 30)
        for task in tasks:
            task.cancel()
        await made.idle()


async def test_an_engine_lost_before_the_first_token_is_not_seen_by_the_client(tmp_path: Path) -> None:
    async with rig(tmp_path, manual(tmp_path)) as made:
        task = post(made)
        await advance(made, "transfer")
        other = ScriptedEngine("d2", "decode", tmp_path, peers=[made.engines["p"]])
        await other.start(made.router)
        await until(lambda: len(made.connections.engines()) == 3)
        made.engines["p"].auto = True
        made.engines["d"].kill()
        made.engines["d"].live.clear()
        answer = await task
        assert answer.status_code == 200
        assert len(other.of(wire.Decode)) == 1
        assert len(made.engines["p"].of(wire.ReleaseKV)) == 1
        assert made.metric("sluice_retries_total", task="decode", reason="engine_lost") == 1
        await made.idle()
        await other.stop()


async def with_another(made: Rig, directory: Path) -> ScriptedEngine:
    """Adds a second decode engine, which answers by itself."""
    other = ScriptedEngine("d2", "decode", directory, peers=[made.engines["p"]])
    await other.start(made.router)
    await until(lambda: len(made.connections.engines()) == 3)
    made.engines["p"].auto = True
    made.engines[other.name] = other
    return other


@pytest.mark.parametrize("how", ["lost", "stalled", "failed", "silent"])
async def test_a_running_stream_goes_on_at_another_engine(tmp_path: Path, how: str) -> None:
    config = IngressConfig(
        served_names=(MODEL,), sweep_interval_s=0.02, token_gap_limit_s=1.0 if how == "silent" else 100.0
    )
    async with rig(tmp_path, manual(tmp_path), config) as made:
        task = post(made, stream=True, stream_options={"include_usage": True})
        attempt_id = await advance(made, "decode")
        other, d = await with_another(made, tmp_path), made.engines["d"]
        match how:
            case "lost":
                d.kill()
                d.live.clear()
            case "stalled":
                # the engine says so to the router, and the router to the ingress
                d.state = "stalled"
                assert d.link is not None
                d.link.send(wire.Announce(d.info()))
            case "failed":
                del d.live[attempt_id]
                d.send(wire.Failed(attempt_id, "decode", "stalled", "its core stands still", True))
        answer = await task
        (decode,) = other.of(wire.Decode)
        assert decode.resume == wire.Resume(0, 1, [], len("first "))
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"content":"first "' in answer.text
        assert '"sluice":{"migrations":1,"resumed":[{"index":0,"after_tokens":1}]}' in answer.text
        told = how in ("stalled", "silent")
        assert [m.attempt_id for m in d.of(wire.Cancel)] == ([attempt_id] if told else [])
        code = {"lost": "engine_lost"}.get(how, "stalled")
        assert made.metric("sluice_migrations_total", code=code) == 1
        await made.idle()


async def test_a_pause_of_the_ingress_is_no_stall_of_its_engines(tmp_path: Path) -> None:
    config = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, token_gap_limit_s=1.0)
    async with rig(tmp_path, manual(tmp_path), config) as made:
        task = post(made)
        attempt_id = await advance(made, "decode")
        # nothing of this process runs meanwhile
        time.sleep(2.5)  # noqa: ASYNC251
        await asyncio.sleep(0.2)
        assert attempt_id in made.connections.live
        made.engines["d"].token(attempt_id, finish="stop")
        assert (await task).status_code == 200
        assert not made.engines["d"].of(wire.Cancel)
        await made.idle()


@pytest.mark.parametrize(
    ("code", "status"), [("bad_request", 400), ("internal", 502), ("deadline", 504), ("draining", 503)]
)
async def test_an_engines_refusal_becomes_a_status(tmp_path: Path, code: str, status: int) -> None:
    async with rig(tmp_path, manual(tmp_path)) as made:
        task = post(made, stream=True)
        attempt_id = await advance(made, "transfer")
        made.engines["d"].live.pop(attempt_id)
        made.engines["d"].send(
            wire.Failed(attempt_id, "decode", code, "no such thing", False, "response_format")
        )
        answer = await task
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == ("response_format" if status == 400 else None)
        # what took all of its time would take it once more
        assert answer.headers.get("x-should-retry") == ("false" if code == "deadline" else None)
        await made.idle()


class Mortal(ScriptedEngine):
    """An engine that dies of every request, and is back at once."""

    def on_message(self, channel: Channel, message: wire.Message) -> None:
        super().on_message(channel, message)
        if isinstance(message, wire.Decode):
            del self.live[message.attempt_id]
            self.send(wire.Failed(message.attempt_id, "decode", "engine_dead", "it has died", True))


async def test_a_client_of_openai_kills_two_engines_and_not_six(tmp_path: Path) -> None:
    """A client of OpenAI sends what failed with 5xx twice more by itself, unless the server says not to."""
    engines: list[ScriptedEngine] = [Mortal(f"c{n}", "colocated", tmp_path, auto=False) for n in range(8)]
    async with rig(tmp_path, engines) as made:
        client = openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="any")
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(model=MODEL, prompt="a prompt that kills", max_tokens=4)
        assert (failed.value.status_code, failed.value.code) == (500, "request_kills_engines")
        assert sum(len(engine.of(wire.Decode)) for engine in engines) == 2
        await client.close()
        await made.idle()


async def test_a_request_that_killed_two_engines_is_refused_when_it_is_sent_again(tmp_path: Path) -> None:
    engines: list[ScriptedEngine] = [Mortal(f"c{n}", "colocated", tmp_path, auto=False) for n in range(4)]
    async with rig(tmp_path, engines) as made:
        killed = []
        # the same again, then of another tenant, with another parameter, and with another prompt
        for more in (
            {},
            {},
            {"user": "another"},
            {"top_k": 3},
            {"messages": [{"role": "user", "content": "x"}]},
        ):
            answer = await post(made, **more)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_kills_engines")
            assert answer.headers["x-should-retry"] == "false"
            killed.append(sum(len(engine.of(wire.Decode)) for engine in engines))
        assert killed == [2, 2, 4, 6, 8]
        assert made.metric("sluice_killers_refused_total") == 1
        await made.idle()


@pytest.mark.parametrize("comes_through", [True, False])
async def test_deaths_under_two_sends_of_a_request_add_up_unless_one_between_them_comes_through(
    tmp_path: Path, comes_through: bool
) -> None:
    engines = [ScriptedEngine(f"c{n}", "colocated", tmp_path, auto=False) for n in range(4)]
    async with rig(tmp_path, engines, IngressConfig((MODEL,), max_retries=0, sweep_interval_s=0.02)) as made:

        async def sent(dies: bool) -> str | None:
            """Sends the request to an engine that dies of it, or that completes it; returns the error's code."""
            task = post(made)
            await until(lambda: made.connections.live, "a request under way")
            (attempt_id,) = made.connections.live
            await until(lambda: any(attempt_id in engine.live for engine in engines), "an engine that has it")
            (engine,) = (engine for engine in engines if attempt_id in engine.live)
            if dies:
                del engine.live[attempt_id]
                engine.send(wire.Failed(attempt_id, "decode", "engine_dead", "it has died", True))
            else:
                engine.token(attempt_id, finish="stop")
            answer = await task
            return answer.json()["error"]["code"] if answer.status_code != 200 else None

        assert await sent(dies=True) == "engine_dead"
        if comes_through:
            assert await sent(dies=False) is None
        assert await sent(dies=True) == ("engine_dead" if comes_through else "request_kills_engines")
        await made.idle()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("internal", "An engine failed at the request's decode (internal); try again later."),
        ("deadline", "The request took longer than the server allows."),
        ("overloaded", "The engine that had the request has as many as it takes; try again later."),
        (
            "bad_output",
            "The output broke the grammar that the request asks for, or is no valid tool call; try again, or ask for a "
            "simpler one.",
        ),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_an_engines_name_and_exception_stay_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, told: str, begun: bool
) -> None:
    said = "vLLM could not take the request: ValueError('/srv/secret.py')\nforged"
    async with rig(tmp_path, manual(tmp_path)) as made:
        task = post(made, stream=True)
        attempt_id = await advance(made, "decode" if begun else "transfer")
        made.engines["d"].live.pop(attempt_id)
        made.engines["d"].send(wire.Failed(attempt_id, "decode", code, said, False))
        answer = await task
        assert answer.status_code == 200 if begun else answer.status_code >= 500
        body = answer.text.rpartition("data: ")[2] if begun else answer.text
        error = json.loads(body)["error"]
        assert (error["message"], error["code"]) == (told, code)
        assert "secret" not in answer.text
        await made.idle()
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if line.startswith("a request ends with")]
    assert f"The decode engine d failed ({code})" in line and "/srv/secret.py" in line
    assert "\n" not in line


async def test_without_a_router_it_serves_on_and_says_so(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        for engine in made.engines.values():
            engine.auto = False
        task = post(made)
        attempt_id = await advance(made, "prefill")
        await made.router.stop()
        await until(lambda: not made.connections.router_connected())
        made.engines["p"].finish_prefill(attempt_id)  # the pool decision is ours now
        await until(lambda: made.engines["d"].of(wire.Decode))
        made.engines["d"].admit(attempt_id)
        made.engines["d"].token(attempt_id, finish="stop")
        assert (await task).status_code == 200
        for engine in made.engines.values():
            engine.auto = True
        answer = await made.client.post("/v1/chat/completions", json=made.chat())
        assert answer.status_code == 200
        assert made.metric("sluice_fallback_decisions_total", task="prefill") == 1
        assert made.metric("sluice_fallback_decisions_total", task="decode") == 2
        status = (await made.client.get("/sluice/status")).json()
        assert status["router"]["connected"] is False
        assert status["router"]["fallback"] is True
        assert status["ready"] is True


async def next_router(made: Rig, directory: Path, order: str = "engines, ingress") -> None:
    """Replaces the router by one that engines and ingress find in the order given: all "engines", or one by its id."""
    await made.router.stop()
    await until(lambda: not made.connections.router_connected())
    made.router = make_router(directory)
    await made.router.start([f"unix:{directory}/next.sock"])
    found = directory / "router.sock"
    found.unlink(missing_ok=True)
    for who in order.split(", "):
        if who == "ingress":
            found.symlink_to("next.sock")
            await until(made.connections.router_connected)
            continue
        for engine_id in made.engines if who == "engines" else (who,):
            await made.engines[engine_id].announce(made.router)
            await until(lambda i=engine_id: i in {s.engine_id for s in made.router.status().statuses})  # type: ignore[misc]


def charges(made: Rig) -> dict[str, tuple[int, int]]:
    """Prompts that compute and slots in use of each engine, as the router has them."""
    workers = made.router.dispatcher.state.snapshot(0.0).workers
    return {name: (worker.prefilling, worker.slots_used) for name, worker in workers.items()}


def held_kv(made: Rig) -> dict[str, bool]:
    """Whether each engine is charged KV, as the router has it."""
    workers = made.router.dispatcher.state.snapshot(0.0).workers
    return {name: worker.kv_tokens > 0 for name, worker in workers.items()}


@pytest.mark.parametrize(
    "order", ["engines, ingress", "ingress, engines", "p, ingress, d", "d, ingress, p", "ingress, d, p"]
)
@pytest.mark.parametrize(
    ("stage", "charged", "kv"),
    [
        ("prefill", {"p": (1, 0), "d": (0, 0)}, {"p": True, "d": False}),
        ("transfer", {"p": (0, 0), "d": (0, 1)}, {"p": True, "d": True}),
        ("decode", {"p": (0, 0), "d": (0, 1)}, {"p": False, "d": True}),
    ],
)
async def test_a_router_that_comes_back_adopts_what_runs_and_ends_with_nothing(
    tmp_path: Path, stage: str, charged: dict[str, tuple[int, int]], kv: dict[str, bool], order: str
) -> None:
    async with rig(tmp_path, manual(tmp_path)) as made:
        task = post(made)
        attempt_id = await advance(made, stage)
        await next_router(made, tmp_path, order)
        await until(lambda: made.router.status().in_flight == 1)
        await until(lambda: (charges(made), held_kv(made)) == (charged, kv))
        p, d = made.engines["p"], made.engines["d"]
        if stage == "prefill":
            p.finish_prefill(attempt_id)
            await until(lambda: d.of(wire.Decode))
        if stage != "decode":
            d.admit(attempt_id)
        d.token(attempt_id, finish="stop")
        assert (await task).status_code == 200
        assert made.metric("sluice_fallback_decisions_total", task="decode") == 0
        await made.idle()


async def test_a_router_that_comes_back_charges_a_colocated_request_where_it_computes(tmp_path: Path) -> None:
    engine = ScriptedEngine("c", "colocated", tmp_path, auto=False)
    async with rig(tmp_path, [engine]) as made:
        task = post(made)
        await until(lambda: engine.of(wire.Decode))
        attempt_id = engine.of(wire.Decode)[0].attempt_id
        await next_router(made, tmp_path)
        await until(lambda: made.router.status().in_flight == 1)
        assert charges(made) == {"c": (1, 1)}
        engine.admit(attempt_id)
        await until(lambda: charges(made) == {"c": (0, 1)}, "the admission to reach the router")
        engine.token(attempt_id, finish="stop")
        assert (await task).status_code == 200
        await made.idle()


async def test_a_restarted_router_that_knows_no_engine_yet_stops_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        await made.router.stop()
        await until(lambda: not made.connections.router_connected())
        made.router = make_router(tmp_path)
        await made.router.start([f"unix:{tmp_path}/router.sock"])
        await until(made.connections.router_connected)
        assert (await made.client.get("/health/ready")).status_code == 200
        assert (await post(made)).status_code == 200
        assert made.metric("sluice_fallback_decisions_total", task="prefill") == 1
        for engine in made.engines.values():
            await engine.announce(made.router)
        await until(lambda: not made.connections.decides_here())
        assert (await post(made)).status_code == 200
        assert made.metric("sluice_fallback_decisions_total", task="prefill") == 1
        await made.idle()


async def test_a_pooled_request_is_answered_before_its_lease_ends(tmp_path: Path) -> None:
    engines = pair(tmp_path, auto=False, lease_s=0.5)
    config = IngressConfig(served_names=(MODEL,), max_retries=0, sweep_interval_s=0.02)
    async with rig(tmp_path, engines, config, lease_margin_s=0.001, max_prefills=1) as made:
        task = post(made)
        attempt_id = await advance(made, "pool")
        answer = await task
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert [m.attempt_id for m in made.engines["p"].of(wire.ReleaseKV)] == [attempt_id]
        await made.idle()


async def test_the_total_time_of_a_request_is_bounded(tmp_path: Path) -> None:
    config = IngressConfig(served_names=(MODEL,), request_timeout_s=0.2, sweep_interval_s=0.02)
    async with rig(tmp_path, manual(tmp_path), config) as made:
        answer = await post(made)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        assert answer.json()["error"]["message"] == "The request took longer than the server allows."
        await made.idle()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_answer_to_which_no_token_is_added_ends(tmp_path: Path, stream: bool) -> None:
    config = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, idle_limit_s=2.0)
    async with rig(tmp_path, manual(tmp_path), config) as made:
        task = post(made, stream=stream)
        attempt_id = await advance(made, "decode")
        answer = await task
        assert answer.status_code == (200 if stream else 504)
        error = json.loads(answer.text.rpartition("data: ")[2])["error"]
        assert error["code"] == "idle"
        assert error["message"] == "No further token came for longer than the server waits for one."
        assert [m.attempt_id for m in made.engines["d"].of(wire.Cancel)] == [attempt_id]
        assert made.metric("sluice_idle_answers_total") == 1
        await made.idle()


async def test_the_wait_for_another_engine_counts_as_idle(tmp_path: Path) -> None:
    """The decode engine is lost in the midst of the answer, and there is no other one."""
    config = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, idle_limit_s=2.0)
    async with rig(tmp_path, manual(tmp_path), config) as made:
        task = post(made, stream=True)
        await advance(made, "decode")
        made.engines["d"].kill()
        made.engines["d"].live.clear()
        answer = await task
        assert '"content":"first "' in answer.text
        assert json.loads(answer.text.rpartition("data: ")[2])["error"]["code"] == "idle"
        assert made.metric("sluice_migrations_total", code="engine_lost") == 1
        assert made.metric("sluice_idle_answers_total") == 1
        await made.idle()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_limits_its_own_request(tmp_path: Path, begun: bool) -> None:
    async with rig(tmp_path, manual(tmp_path)) as made:
        # long enough for the first token to come on a busy machine
        headers = {"x-sluice-timeout-s": "5" if begun else "0.2"}
        path = "/v1/chat/completions"
        task = asyncio.create_task(made.client.post(path, json=made.chat(stream=begun), headers=headers))
        if begun:
            await advance(made, "decode")
        answer = await task
        assert answer.status_code == (200 if begun else 504)
        error = json.loads(answer.text.rpartition("data: ")[2])["error"]
        assert error["code"] == "deadline"
        assert error["message"] == "The request took longer than its 'x-sluice-timeout-s' allows."
        await made.idle()
        refused = await made.client.post(path, json=made.chat(), headers={"x-sluice-timeout-s": "0"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-sluice-timeout-s")
        assert "a positive number of seconds" in refused.json()["error"]["message"]


async def test_a_client_that_does_not_read_is_cut(tmp_path: Path) -> None:
    config = IngressConfig(served_names=(MODEL,), slow_client_bytes=10_000, sweep_interval_s=0.02)
    async with rig(tmp_path, manual(tmp_path), config) as made:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", made.listener.port))
        body = json.dumps(made.chat(stream=True, max_tokens=1000)).encode()
        await loop.sock_sendall(sock, raw("POST", "/v1/chat/completions", body))
        attempt_id = await advance(made, "decode")
        for _ in range(400):
            made.engines["d"].token(attempt_id, "x" * 50_000)
            await asyncio.sleep(0)
            if attempt_id not in made.connections.live:
                break
        await made.idle()
        assert made.metric("sluice_slow_clients_total") == 1
        assert [m.attempt_id for m in made.engines["d"].of(wire.Cancel)] == [attempt_id]
        sock.close()


async def test_a_full_router_queue_is_429_with_its_reason(tmp_path: Path) -> None:
    async with rig(tmp_path, one_at_a_time(tmp_path), max_queue=1) as made:
        tasks = {post(made) for _ in range(3)}  # one computes, one waits
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        answer = done.pop().result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        for task in waiting:
            task.cancel()
        await made.idle()


async def test_the_first_of_many_prompts_that_fails_ends_them_all(tmp_path: Path) -> None:
    async with rig(tmp_path, manual(tmp_path)) as made:
        await made.router.stop()
        for engine in made.engines.values():
            engine.kill()
        await until(lambda: not made.connections.router_connected() and made.connections.ready() is not None)
        body = {"prompt": ["a", "b", "c"], "max_tokens": 2}
        answer = await made.client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        assert not made.connections.live
        assert not made.app.in_flight


async def test_prompts_that_are_tokenised_for_clients_that_left_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, goes_on = WordCodec.encode, threading.Event()

    def slowly(codec: WordCodec, text: str, special: bool) -> list[int]:
        if len(text) > 100:
            goes_on.wait(100)
        return encode(codec, text, special)

    monkeypatch.setattr(WordCodec, "encode", slowly)
    config = IngressConfig(served_names=(MODEL,), max_in_flight=2, offload_prompt_chars=100)
    async with rig(tmp_path, pair(tmp_path), config) as made:
        left = [post(made, messages=[{"role": "user", "content": "a " * 100}]) for _ in range(2)]
        await until(lambda: made.app.in_flight == 2)
        for task in left:
            task.cancel()
        await until(lambda: not made.app.in_flight)
        # Without a refusal any number of prompts could wait for the thread.
        assert (await post(made)).status_code == 429
        goes_on.set()
        await until(lambda: not made.app._preparing)
        assert (await post(made)).status_code == 200
        await made.idle()


async def test_an_answer_that_cannot_be_written_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams whose output comes in one iteration of the loop; writing the first one's fails."""
    flush, failed = HttpExchange.flush, list[HttpExchange]()

    def fails_once(exchange: HttpExchange) -> None:
        if not failed:
            failed.append(exchange)
            raise ValueError("a bug")
        flush(exchange)

    async with rig(tmp_path, manual(tmp_path)) as made:
        p, d = made.engines["p"], made.engines["d"]
        tasks = [post(made, stream=True) for _ in range(2)]
        await until(lambda: len(p.of(wire.Prefill)) == 2)
        attempt_ids = [m.attempt_id for m in p.of(wire.Prefill)]
        for attempt_id in attempt_ids:
            p.finish_prefill(attempt_id)
        await until(lambda: len(d.of(wire.Decode)) == 2)
        for attempt_id in attempt_ids:
            d.admit(attempt_id)
        monkeypatch.setattr(HttpExchange, "flush", fails_once)
        d.send(wire.Tokens([wire.Out(attempt_id, "word ", 1, finish="stop") for attempt_id in attempt_ids]))
        d.live.clear()
        answers = sorted([await task for task in tasks], key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [200, 500]
        assert "word" in answers[0].text and "[DONE]" in answers[0].text
        assert made.metric("sluice_internal_errors_total") == 1


async def test_draining_refuses_new_requests_and_lets_old_ones_end(tmp_path: Path) -> None:
    async with rig(tmp_path, manual(tmp_path)) as made:
        task = post(made)
        attempt_id = await advance(made, "decode")
        drained = asyncio.create_task(made.app.drain(60))
        await until(lambda: made.app.draining)
        assert (await made.client.post("/v1/chat/completions", json=made.chat())).status_code == 503
        assert (await made.client.get("/health/ready")).status_code == 503
        made.engines["d"].token(attempt_id, finish="stop")
        assert (await task).status_code == 200
        assert await drained


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_output_that_makes_no_sense_fails_its_request_alone(tmp_path: Path, stream: bool) -> None:
    async with rig(tmp_path, manual(tmp_path)) as made:
        good = post(made, stream=stream)
        good_attempt_id = await advance(made, "decode")
        bad = post(made, stream=stream, logprobs=True)
        await until(lambda: len(made.engines["p"].of(wire.Prefill)) == 2)
        attempt_id = made.engines["p"].of(wire.Prefill)[-1].attempt_id
        made.engines["p"].finish_prefill(attempt_id)
        await until(lambda: len(made.engines["d"].of(wire.Decode)) == 2)
        made.engines["d"].admit(attempt_id)
        made.engines["d"].token(attempt_id, "x", logprobs=[5], finish="stop")
        answer = await bad
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        made.engines["d"].token(good_attempt_id, "last", finish="stop")
        answer = await good
        assert answer.status_code == 200
        assert "last" in answer.text
        await made.idle()


async def test_tool_deltas_of_an_engine_reach_the_client_in_both_forms(tmp_path: Path) -> None:
    engines = pair(tmp_path, auto=False, features=("tools",))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    pieces = [
        b'{"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":""}}]}',
        b'{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\": "}}]}',
        b'{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}',
    ]
    async with rig(tmp_path, engines) as made:
        for stream in (True, False):
            made.engines["p"].received.clear()
            made.engines["d"].received.clear()
            task = post(made, stream=stream, tools=tools)
            await until(lambda: made.engines["p"].of(wire.Prefill))
            attempt_id = made.engines["p"].of(wire.Prefill)[0].attempt_id
            made.engines["p"].finish_prefill(attempt_id)
            await until(lambda: made.engines["d"].of(wire.Decode))
            assert json.loads(made.engines["d"].of(wire.Decode)[0].chat)["tools"] == tools
            made.engines["d"].admit(attempt_id)
            for index, delta in enumerate(pieces):
                made.engines["d"].token(attempt_id, "", "tool_calls" if index == 2 else None, delta=delta)
            text = (await task).text
            if stream:
                lines = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
                deltas = [line["choices"][0]["delta"] for line in lines]
                assert deltas[1:] == [json.loads(piece) for piece in pieces]
                assert lines[-1]["choices"][0]["finish_reason"] == "tool_calls"
            else:
                choice = json.loads(text)["choices"][0]
                assert choice["finish_reason"] == "tool_calls"
                assert choice["message"]["content"] is None
                assert choice["message"]["tool_calls"] == [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                ]
        await made.idle()
