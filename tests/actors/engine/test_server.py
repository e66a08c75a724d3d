"""The socket front: ownership by connection, batching, refusals. With the sim engine behind it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.engine.sim.ranks import sim_engine
from actors.wire.channel import Channel, Identity
from actors.wire.messages import (
    Admitted,
    Closed,
    Decode,
    Failed,
    Out,
    Prefill,
    PrefillDone,
    Pulled,
    Reading,
    Timed,
    Tokens,
)
from actors.wire.sockets import connect
from tests.actors.engine.rig import WAIT_S, Client, Node, Rig, until

PROMPT = list(range(10, 60))
SLOW = {"prefill_base_s": 0.02, "decode_base_s": 0.02}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        yield rig


async def node(rig: Rig, name: str = "c", role: Any = "colocated", **options: Any) -> Node:
    server = {k: options.pop(k) for k in ("max_in_flight", "replica") if k in options}
    return await rig.node(SimEngine(SimEngineConfig(name, role, **options)), name, **server)


async def test_two_ingresses_may_use_the_same_ids(rig: Rig) -> None:
    c = await node(rig, timing=SLOW)
    other = await rig.client(c, "other")
    c.client.decode("r", PROMPT, max_tokens=12)
    await c.client.wait("r", Out)
    other.decode("r", [1, 2, 3], max_tokens=500)
    await other.wait("r", Out)
    other.cancel("r")  # its own, not the first one's
    text = await c.client.text("r")
    assert len(c.client.outs("r")) == 12
    assert text != "".join(out.text for out in other.outs("r"))
    await c.rests()


async def test_one_cannot_cancel_or_release_what_is_anothers(rig: Rig) -> None:
    p = await node(rig, "p", "prefill")
    other = await rig.client(p, "other")
    await p.prefilled("r", PROMPT)
    other.cancel("r")
    other.release("r")
    other.prefill("mine", PROMPT)
    # Its answer shows that the two messages before it were handled.
    await other.wait("mine", PrefillDone)
    assert p.engine.status().leases == 2
    p.client.release("r")
    other.release("mine")
    await p.rests()


async def test_lost_connection_ends_everything_that_came_over_it(rig: Rig) -> None:
    """1,000 requests in all stages; a second ingress goes on undisturbed."""
    c = await node(rig, slots=64, timing=SLOW, kv_blocks=65_536)
    doomed = await rig.client(c, "doomed")
    c.client.decode("mine", PROMPT, max_tokens=30)
    for i in range(500):
        doomed.prefill(f"p{i}", [i, *PROMPT])
        doomed.decode(f"d{i}", [i, *PROMPT], max_tokens=4 if i % 2 else 2000)
    await until(lambda: c.engine.status().leases > 50, "leases")
    await until(lambda: any(isinstance(m, Tokens) for m in doomed.inbox), "tokens")
    assert c.engine.status().waiting > 0
    doomed.channel.abort("killed")
    await c.client.text("mine")
    await c.rests()
    assert c.engine.metrics().leases_expired == 0


async def test_lost_connection_during_a_pull_frees_after_it(rig: Rig) -> None:
    p = await node(rig, "p", "prefill")
    d = await node(rig, "d", "decode", hold_transfers_s=4.0)
    gone_p, gone_d = await rig.client(p, "gone"), await rig.client(d, "gone")
    for i in range(20):
        gone_p.prefill(f"r{i}", [i, *PROMPT])
        done = await gone_p.wait(f"r{i}", PrefillDone)
        gone_d.decode(f"r{i}", [i, *PROMPT], done.handle)
    await until(lambda: d.engine.status().running == 20, "transfers")
    await asyncio.sleep(0.1)
    gone_p.channel.abort("killed")
    gone_d.channel.abort("killed")
    await asyncio.sleep(0.1)
    assert p.used > 0
    await p.rests()
    await d.rests()
    assert d.engine.metrics().transfer_failures == 0


async def test_a_step_is_one_message_per_connection(rig: Rig) -> None:
    c = await node(rig)
    other = await rig.client(c, "other")
    for client, n in ((c.client, 3), (other, 2)):
        for i in range(n):
            client.decode(f"r{i}", [i, *PROMPT], max_tokens=20)
    for client, n in ((c.client, 3), (other, 2)):
        for i in range(n):
            await client.text(f"r{i}")
        sizes = [len(m.items) for m in client.inbox if isinstance(m, Tokens)]
        assert sum(sizes) == 20 * n
        assert max(sizes) == n


async def test_busy_id_is_refused_and_goes_on(rig: Rig) -> None:
    c = await node(rig, timing=SLOW)
    c.client.decode("r", PROMPT, max_tokens=10)
    c.client.decode("r", PROMPT, max_tokens=10)
    c.client.prefill("r", PROMPT)
    await until(lambda: sum(isinstance(m, Failed) for m in c.client.of("r")) == 2, "refusals")
    assert {m.code for m in c.client.of("r") if isinstance(m, Failed)} == {"bad_request"}
    await until(lambda: c.client.outs("r") and c.client.outs("r")[-1].finish, "the first one ends")
    await c.rests()


async def test_a_prefill_may_be_repeated(rig: Rig) -> None:
    """The older KV of the same request is given back, whether the ingress released it or not."""
    p = await node(rig, "p", "prefill")
    first = await p.prefilled("r", PROMPT)
    p.client.inbox.clear()
    second = await p.prefilled("r", PROMPT)
    assert second.handle != first.handle
    assert p.engine.status().leases == 1
    p.client.release("r")
    await p.rests()


async def test_too_many_requests_in_flight(rig: Rig) -> None:
    c = await node(rig, max_in_flight=3, timing=SLOW)
    for i in range(5):
        c.client.decode(f"r{i}", [i, *PROMPT])
    for attempt_id in ("r3", "r4"):
        failed = await c.client.wait(attempt_id, Failed)
        assert (failed.code, failed.retryable) == ("overloaded", True)
    for attempt_id in ("r0", "r1", "r2"):
        await c.client.text(attempt_id)
    await c.rests()
    c.client.decode("again", PROMPT)
    await c.client.text("again")


async def test_leases_do_not_count_as_in_flight(rig: Rig) -> None:
    p = await node(rig, "p", "prefill", max_in_flight=1)
    for i in range(3):
        await p.prefilled(f"r{i}", [i, *PROMPT])
    assert p.server.in_flight == 0
    for i in range(3):
        p.client.release(f"r{i}")
    await p.rests()


async def test_ended_leases_are_forgotten(rig: Rig) -> None:
    """Pulled or expired leases end without a message to the server; it must not remember them forever."""
    p = await node(rig, "p", "prefill", lease_s=0.05)
    for i in range(20):
        await p.prefilled(f"r{i}", [i, *PROMPT])
    await p.rests()
    await asyncio.sleep(0.06)
    await p.prefilled("last", PROMPT)
    assert len(p.server._requests) == 1
    await p.rests()


async def test_a_full_engine_refuses_its_oldest_leases_and_no_more_than_it_must(rig: Rig) -> None:
    """Six prompts of four blocks fill 24 of 25 blocks, which is 96 %. A further one has no room: one lease must end."""
    p = await node(rig, "p", "prefill", kv_blocks=25, max_model_len=200, slots=8)
    for i in range(6):
        await p.prefilled(f"r{i}", [i, *PROMPT])
    assert min([await p.client.renewed(f"r{i}") for i in range(6)]) > 0.0
    p.client.prefill("waits", [99, *PROMPT])
    await until(lambda: p.engine.status().waiting == 1, "a prompt that waits")
    assert p.engine.status().kv_usage > 0.95
    answers = [await p.client.renewed(f"r{i}") for i in range(6)]
    assert [answer > 0.0 for answer in answers] == [False, True, True, True, True, True]
    p.client.release("r0")
    await p.client.wait("waits", PrefillDone)
    for name in ("waits", *(f"r{i}" for i in range(1, 6))):
        p.client.release(name)
    await p.rests()


async def test_one_full_rank_refuses_its_own_leases_only(rig: Rig) -> None:
    config = SimEngineConfig("p", "prefill", kv_blocks=25, max_model_len=200, slots=8, dp_ranks=2)
    p = await rig.node(sim_engine(config), "p")
    held = [f"r{i}" for i in range(6)]
    for i, name in enumerate(held):
        p.client.channel.send(Prefill(name, [i, *PROMPT], {"max_tokens": 8}, 60.0, dp_rank=1))
        await p.client.wait(name, PrefillDone)
    p.client.channel.send(Prefill("other", [50, *PROMPT], {"max_tokens": 8}, 60.0, dp_rank=0))
    await p.client.wait("other", PrefillDone)
    p.client.channel.send(Prefill("waits", [99, *PROMPT], {"max_tokens": 8}, 60.0, dp_rank=1))
    await until(lambda: p.engine.status().ranks[1].waiting == 1, "a prompt that waits")
    # both ranks together are far from full
    assert p.engine.status().kv_usage < 0.6
    assert await p.client.renewed("other") > 0.0
    assert [await p.client.renewed(name) > 0.0 for name in held] == [False, True, True, True, True, True]
    for name in (*held, "other"):
        p.client.release(name)
    await p.client.wait("waits", PrefillDone)
    p.client.release("waits")
    await p.rests()


async def test_a_decode_says_when_its_kv_is_read_and_not_while_it_waits_for_a_slot(rig: Rig) -> None:
    p = await node(rig, "p", "prefill")
    d = await node(rig, "d", "decode", slots=1, timing=SLOW)
    done = [await p.prefilled(name, [n, *PROMPT]) for n, name in enumerate(("first", "second"))]
    d.client.decode("first", [0, *PROMPT], done[0].handle, max_tokens=500)
    await d.client.wait("first", Out)
    d.client.decode("second", [1, *PROMPT], done[1].handle)
    await until(lambda: d.engine.status().waiting == 1, "a request that waits for its slot")
    assert [type(m) for m in d.client.of("first")[:3]] == [Reading, Admitted, Out]
    assert not d.client.of("second")
    d.client.cancel("first")
    await d.client.text("second")
    assert [type(m) for m in d.client.of("second")[:2]] == [Reading, Admitted]


async def test_info_and_status(rig: Rig) -> None:
    c = await node(rig, replica="rep1")
    info = c.server.info()
    assert (info.node, info.replica, info.state, info.addresses) == (
        "n0",
        "rep1",
        "ready",
        c.server.addresses,
    )
    status = c.server.status()
    assert (status.engine_id, status.running, status.leases, status.kv_usage) == ("c", 0, 0, 0.0)


async def test_a_router_is_no_client_and_wrong_messages_close(rig: Rig) -> None:
    c = await node(rig)
    router = await connect(
        c.server.addresses, lambda: Channel(Identity("router", "x"), lambda channel, message: None)
    )
    async with asyncio.timeout(WAIT_S):
        await router.closed
    wrong = await rig.client(c, "wrong")
    wrong.channel.send(Closed("r", "finished"))
    async with asyncio.timeout(WAIT_S):
        await wrong.channel.closed
    engine = await connect(
        c.server.addresses, lambda: Channel(Identity("engine", "x"), lambda channel, message: None)
    )
    engine.send(Pulled("unknown"))  # no error
    engine.send(Closed("r", "finished"))
    async with asyncio.timeout(WAIT_S):
        await engine.closed
    c.client.decode("r", PROMPT)
    await c.client.text("r")


async def test_tcp_with_a_secret(rig: Rig) -> None:
    from actors.engine.server import EngineServer

    secret = b"shared"
    engine = SimEngine(SimEngineConfig("t"))
    server = EngineServer(engine, Identity("engine", "t", secret), ["tcp:127.0.0.1:0"])
    await server.start()
    try:
        client = Client()
        await client.connect(server.addresses, secret=secret)
        client.decode("r", PROMPT)
        assert await client.text("r")
        client.channel.close()
    finally:
        await server.stop()


async def test_what_came_with_a_trace_is_told_hop_by_hop_and_nothing_else(rig: Rig) -> None:
    p, d = await node(rig, "p", "prefill"), await node(rig, "d", "decode")
    place = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    p.client.channel.send(Prefill("told", PROMPT, {}, 60.0, trace=place))
    p.client.prefill("untold", [1, *PROMPT])
    for attempt_id, tokens, trace in (("told", PROMPT, place), ("untold", [1, *PROMPT], None)):
        done = await p.client.wait(attempt_id, PrefillDone)
        d.client.channel.send(Decode(attempt_id, tokens, {"max_tokens": 3}, done.handle, 60.0, trace=trace))
        await d.client.text(attempt_id)
    assert not [one for node_ in (p, d) for one in node_.client.of("untold") if isinstance(one, Timed)]
    (prefilled,) = [one for one in p.client.of("told") if isinstance(one, Timed)]
    assert (prefilled.stamps.process, prefilled.stamps.side) == ("p", "prefill")
    assert list(prefilled.stamps.at_s) == ["received", "admitted", "computed", "sent"]
    done = await p.client.wait("told", PrefillDone)
    # the moments before the report, so that a reader has them when the report comes
    assert p.client.of("told").index(prefilled) < p.client.of("told").index(done)
    (decoded,) = [one for one in d.client.of("told") if isinstance(one, Timed)]
    at_s = decoded.stamps.at_s
    assert set(at_s) == {"received", "reading", "admitted", "step", "first"}
    assert at_s["received"] <= at_s["reading"] <= at_s["admitted"] <= at_s["first"]
    assert at_s["step"] <= at_s["first"]
    assert d.client.of("told").index(decoded) < d.client.of("told").index(d.client.outs("told")[0])


async def test_a_cancelled_task_is_followed_no_more(rig: Rig) -> None:
    # it is followed until its first token, which the test comes before
    c = await node(rig, timing={"prefill_base_s": 3.0})
    c.client.channel.send(Decode("r", PROMPT, {"max_tokens": 500}, None, 60.0, trace="00-1-2-01"))
    await until(lambda: c.server._followed, "the task")
    c.client.cancel("r")
    await c.rests()
    assert not c.server._followed
    assert not [one for one in c.client.of("r") if isinstance(one, Timed)]
