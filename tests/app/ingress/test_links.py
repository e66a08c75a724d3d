"""Connections to engines: one that cannot be reached, one that leaves the fleet, one that comes back elsewhere."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actors.wire import messages as wire
from actors.wire.channel import WireError
from actors.wire.sockets import listen
from app.api.extensions import ClassSlo
from app.ingress import connections, links
from app.ingress.config import IngressConfig
from app.ingress.connections import Connected
from app.ingress.digests import session_digest
from app.ingress.tenants.unnamed import unnamed_tenant
from policies.request.stage import Stage
from policies.request.terms import Terms
from tests.app.ingress.rig import MODEL, Rig, ScriptedEngine, pair, rig, until


def lives(made: Rig) -> list[Connected]:
    return list(made.connections.live.values())


async def test_an_engine_that_nobody_can_reach_costs_a_retry_not_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_GRACE_S", 0.2)
    _, d = pair(tmp_path)
    ghost = ScriptedEngine("ghost", "prefill", tmp_path)
    async with rig(tmp_path, [d]) as made:
        # The router believes the engine, but nobody listens at its address.
        await ghost.announce(made.router)
        await until(lambda: len(made.connections.engines()) == 2)
        task = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
        await until(lambda: made.connections.live)
        real = ScriptedEngine("real", "prefill", tmp_path)
        d.peers.append(real)
        await real.start(made.router)
        answer = await task
        assert answer.status_code == 200
        assert made.metric("sluice_retries_total", task="prefill", reason="engine_lost") == 1
        await made.idle()
        await real.stop()
        await ghost.stop()


async def test_nobody_is_blamed_for_engines_that_go_before_they_were_reached(tmp_path: Path) -> None:
    """Two engines leave one after the other with a request on its way to them, which neither has ever got."""
    _, d = pair(tmp_path)
    async with rig(tmp_path, [d]) as made:
        ghosts = [ScriptedEngine(f"ghost-{i}", "prefill", tmp_path) for i in range(2)]
        await ghosts[0].announce(made.router)
        await until(lambda: len(made.connections.engines()) == 2)
        task = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
        for ghost, successor in zip(
            ghosts, (ghosts[1], ScriptedEngine("real", "prefill", tmp_path)), strict=True
        ):
            await until(
                lambda ghost=ghost: any(e.route and e.route.engine_id == ghost.name for e in lives(made))
            )
            if successor.name == "real":
                d.peers.append(successor)
                await successor.start(made.router)
            else:
                await successor.announce(made.router)
            await until(lambda s=successor: any(info.id == s.name for info in made.connections.engines()))
            ghost.kill()
        answer = await task
        assert answer.status_code == 200, answer.text
        assert made.metric("sluice_retries_total", task="prefill", reason="engine_lost") == 2
        await made.idle()
        await successor.stop()


async def test_a_time_in_which_we_stood_still_is_no_reason_to_give_an_engine_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, d = pair(tmp_path)
    slow = ScriptedEngine("slow", "prefill", tmp_path)
    async with rig(tmp_path, [d]) as made:
        await slow.announce(made.router)  # nobody listens there yet
        await until(lambda: len(made.connections.engines()) == 2)
        task = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
        await until(lambda: made.connections.live)
        slow.server, _ = await listen(slow.address, slow._channel)
        d.peers.append(slow)
        link = made.connections._engines.get("slow")
        assert link is not None
        assert link._waited_s is not None
        monkeypatch.setattr(links, "CONNECT_GRACE_S", link._waited_s + 5.0)
        time.sleep(6.0)  # noqa: ASYNC251  (the whole machine was away, longer than what is left of the grace)
        assert (await task).status_code == 200
        assert len(slow.of(wire.Prefill)) == 1
        assert made.metric("sluice_retries_total", task="prefill", reason="engine_lost") == 0
        made.engines["slow"] = slow
        await made.idle()
        await slow.stop()


@pytest.mark.parametrize("peer", ["engine", "router"])
async def test_a_message_that_an_ingress_does_not_take_is_counted(tmp_path: Path, peer: str) -> None:
    p, d = pair(tmp_path)
    async with rig(tmp_path, [p, d]) as made:
        assert made.metric("sluice_protocol_errors_total", peer=peer) == 0
        if peer == "engine":
            d.channels[0].send(wire.Cancel("x"))
        else:
            made.router._ingresses.broadcast(wire.Cancel("x"))
        await until(lambda: made.metric("sluice_protocol_errors_total", peer=peer) == 1)
        await until(lambda: made.connections.router_connected() and made.connections.ready() is None)


async def test_a_bug_in_the_sweep_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        swept: list[float] = []

        def sweep(period_s: float) -> None:
            swept.append(period_s)
            if len(swept) == 1:
                raise ValueError("a bug")

        monkeypatch.setattr(made.connections._engines, "sweep", sweep)
        await until(lambda: len(swept) >= 3)
        assert made.metric("sluice_internal_errors_total") == 1


async def test_an_engine_that_left_the_list_finishes_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MISSING_GRACE_S", 0.05)
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made:
        p, d = made.engines["p"], made.engines["d"]
        task = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
        await until(lambda: p.of(wire.Prefill))
        attempt_id = p.of(wire.Prefill)[0].attempt_id
        p.finish_prefill(attempt_id)
        await until(lambda: d.of(wire.Decode))
        d.admit(attempt_id)
        assert d.link is not None
        d.link.abort("only the router lost it")
        await until(lambda: [info.id for info in made.connections.engines()] == ["p"])
        # The ingress's connection stays while its request runs.
        assert d.channels[0].open
        d.token(attempt_id, finish="stop")
        assert (await task).status_code == 200
        await until(lambda: not d.channels)
        await made.idle()


async def test_an_engine_that_comes_back_elsewhere_is_found_there(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        made.engines["d"].kill()
        (tmp_path / "new").mkdir()
        again = ScriptedEngine("d", "decode", tmp_path / "new", peers=[made.engines["p"]])
        made.engines["d"] = again
        await again.start(made.router)
        await until(lambda: again.channels)
        answer = await made.client.post("/v1/chat/completions", json=made.chat())
        assert answer.status_code == 200
        assert len(again.of(wire.Decode)) == 1
        await made.idle()
        await again.stop()


async def test_the_router_hears_class_slo_priority_and_session(tmp_path: Path) -> None:
    slo = {"interactive": ClassSlo(ttft_s=0.5, tpot_s=0.05)}
    config = IngressConfig(served_names=(MODEL,), class_slo=slo, sweep_interval_s=0.02, ceiling="interactive")
    async with rig(tmp_path, pair(tmp_path), config) as made:
        heard: list[Any] = []
        submit = made.router._submit

        def listen(channel: Any, message: wire.Submit) -> None:
            heard.append(message)
            submit(channel, message)

        made.router._submit = listen  # type: ignore[method-assign]
        body = made.chat(n=2, session="s", slo={"ttft_ms": 100})
        await made.client.post(
            "/v1/chat/completions", json=body, headers={"x-sluice-priority": "interactive"}
        )
        (message,) = heard
        # the class fills in what is missing
        tenant = unnamed_tenant("", "127.0.0.1", made.connections.salt)
        timeout_s = config.request_timeout_s
        session = session_digest("s", made.connections.salt)
        assert message.terms == Terms(
            -1, "interactive", 0.1, 0.05, session, timeout_s=timeout_s, tenant=tenant, slo_presses=False
        )
        assert (message.slots, message.max_tokens) == (2, 4)
        await made.idle()


@pytest.mark.parametrize(
    "options",
    [
        {"served_names": ()},
        {"served_names": ("",)},
        {"max_in_flight": 0},
        {"request_timeout_s": 0},
        {"max_retries": -1},
        {"max_body_bytes": 10},
        {"max_body_bytes": 2**20, "max_waiting_bytes": 2**20 - 1},
        {"max_connections": 0},
        {"tokenise_threads": 0},
        {"max_tokenising_chars": 0},
        {"class_slo": {"vip": ClassSlo()}},
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ingress: "):
        IngressConfig(**({"served_names": (MODEL,)} | options))


async def test_a_replica_waits_until_it_can_serve_and_not_longer_than_it_is_told(tmp_path: Path) -> None:
    async with rig(tmp_path, []) as made:
        assert not await made.connections.wait_ready(0.2)
        engines = pair(tmp_path)
        waiting = asyncio.create_task(made.connections.wait_ready(60.0))
        for engine in engines:
            await engine.start(made.router)
        assert await waiting
        for engine in engines:
            await engine.stop()


async def test_warm_engines_begin_no_readiness_and_keep_it(tmp_path: Path) -> None:
    engines = pair(tmp_path)
    async with rig(tmp_path, []) as made:
        for engine in engines:
            engine.duty = "warm"
            await engine.start(made.router)
        await until(lambda: len(made.connections.engines()) == 2 and engines[1].channels != [], "links")
        await until(lambda: made.connections.ready() == "no engine that can decode is ready and active")
        # a request waits, because somebody may activate an engine
        task = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
        await until(lambda: made.router.dispatcher.queue_size == 1)
        for engine in engines:
            assert engine.link is not None
            engine.duty = "active"
            engine.link.send(wire.Announce(engine.info()))
        engines[0].peers, engines[1].peers = [engines[1]], [engines[0]]
        assert (await task).status_code == 200
        assert made.connections.ready() is None
        for engine in engines:
            assert engine.link is not None
            engine.duty = "warm"
            engine.link.send(wire.Announce(engine.info()))
        await until(lambda: all(info.duty == "warm" for info in made.connections.engines()))
        assert made.connections.ready() is None
        await made.router.stop()
        await until(lambda: made.connections.decides_here())
        # alone it does not activate engines either
        task = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
        await until(lambda: [life.stage for life in made.connections.live.values()] == [Stage.QUEUED])
        task.cancel()
        await until(lambda: not made.connections.live)
        for engine in engines:
            engine.live.clear()


@pytest.mark.parametrize("status", [-1, 1, 200, 600])
async def test_a_router_rejects_with_an_errors_status_only(tmp_path: Path, status: int) -> None:
    """A head with any other number could not be written, and the client would wait for its answer."""
    async with rig(tmp_path, pair(tmp_path)) as made:
        with pytest.raises(WireError, match="rejects with status"):
            made.connections._from_router(None, wire.Reject("a", status, "no", 1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("wait_s", [-1.0, 1e308, math.inf, math.nan])
async def test_a_router_names_a_wait_that_a_client_can_have(tmp_path: Path, wait_s: float) -> None:
    """Of infinity no whole seconds can be made, and the client would wait for its answer."""
    async with rig(tmp_path, pair(tmp_path)) as made:
        with pytest.raises(WireError, match="has a client wait for"):
            made.connections._from_router(None, wire.Reject("a", 429, "no", wait_s))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        # as workers of a replica that decides alone, these took all memory
        {"dp_ranks": 2**53, "slots": 2**53, "kv_blocks": 2**53},
        # a replica that had taken this in failed every request
        {"max_model_len": -1},
    ],
)
async def test_a_fleet_that_no_router_has_is_not_taken(tmp_path: Path, wrong: dict[str, Any]) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        before = made.connections.fleet
        assert before is not None
        lie = replace(before, engines=[*before.engines, replace(before.engines[0], id="lie", **wrong)])
        made.router._ingresses.broadcast(lie)
        await until(lambda: made.metric("sluice_protocol_errors_total", peer="router") == 1)
        await until(lambda: made.connections.router_connected() and made.connections.ready() is None)
        assert {info.id for info in made.connections.engines()} == {"p", "d"}
        assert (await made.client.post("/v1/chat/completions", json=made.chat())).status_code == 200


async def test_blocks_without_tokens_are_not_hashed(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        before = made.connections.fleet
        assert before is not None
        made.router._ingresses.broadcast(replace(before, block_tokens=0))
        await until(lambda: made.metric("sluice_protocol_errors_total", peer="router") == 1)
        await until(lambda: made.connections.router_connected() and made.connections.ready() is None)
        assert (
            made.connections.fleet is not None and made.connections.fleet.block_tokens == before.block_tokens
        )
        assert (await made.client.post("/v1/chat/completions", json=made.chat())).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": 1},
        {"index": -1},
        {"index": 2**53},
        {"n_tokens": -1},
        {"token_ids": [2**31]},
        {"delta": b""},
        {"delta": b"[]"},
        {"delta": b'{"a":"\xed\xa0\x80"}'},
    ],
    ids=str,
)
async def test_output_that_cannot_be_ends_the_engines_connection_not_the_request(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    """The answer to the client was 500, or a stream that no client can read."""
    p, d = pair(tmp_path)
    async with rig(tmp_path, [p, d]) as made:
        d.auto = False
        task = asyncio.create_task(made.client.post("/v1/chat/completions", json=made.chat()))
        await until(lambda: d.of(wire.Decode))
        (life,) = lives(made)
        d.auto = True
        d.channels[0].send(wire.Tokens([replace(wire.Out(life.attempt_id, "lie", 1), **wrong)]))
        answer = await task
        assert answer.status_code == 200 and "lie" not in answer.text
        assert made.metric("sluice_protocol_errors_total", peer="engine") == 1


@pytest.mark.parametrize("lease_s", [-1.0, float("-inf"), float("inf"), float("nan")])
async def test_an_engine_grants_no_lease_of_an_impossible_length(tmp_path: Path, lease_s: float) -> None:
    """An alarm at such a time could not be set."""
    async with rig(tmp_path, pair(tmp_path)) as made:
        link = made.connections._engines.get("p")
        assert link is not None
        for message in (
            wire.PrefillDone("a", b"h", 3, 0, lease_s, 0.0, 0.0, 9),
            wire.KVRenewed("a", lease_s),
        ):
            with pytest.raises(WireError, match="grants a lease of"):
                made.connections._from_engine(link, message)


async def test_a_replica_with_nothing_to_do_sweeps_seldom_until_something_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer pause would be hours here, so all that follows happens because it was ended."""
    monkeypatch.setattr(connections, "IDLE_SWEEPS", 10**6)
    config = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02)
    p, d = pair(tmp_path, auto=False)
    async with rig(tmp_path, [p, d], config) as made:
        replica = made.connections
        await until(lambda: replica._sweeps_seldom, "nothing to sweep")
        late = await made.client.post(
            "/v1/chat/completions", json=made.chat(), headers={"x-sluice-timeout-s": "0.2"}
        )
        assert late.status_code == 504
        await until(lambda: replica._sweeps_seldom, "nothing to sweep after the request")
        d.kill()
        await until(lambda: [info.id for info in replica.engines()] == ["p"], "an engine leaves")
        await until(lambda: not replica._engines._retired, "its link ends")
        await until(lambda: replica._sweeps_seldom, "nothing to sweep without the engine")
        await made.router.stop()
        await until(replica.decides_here, "the replica decides itself")
        assert not replica._sweeps_seldom
