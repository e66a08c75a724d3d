"""A sim engine of several data-parallel ranks: the contract of all engines, and each request on its rank."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.protocol import Engine
from actors.engine.server import EngineServer
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.ranks import SimRanks, sim_engine
from actors.wire.channel import Identity, WireError
from actors.wire.messages import Admitted, Decode, Failed, Prefill, PrefillDone, Pull
from tests.actors.engine.contract import EngineContract
from tests.actors.engine.rig import Client, Node, Rig, until
from tests.actors.engine.sim.test_contract import SLOW

PROMPT = list(range(10, 60))


class TestSimRanksContract(EngineContract):
    """`EngineContract` on a sim engine of two ranks behind a barrier."""

    def make(
        self,
        role: str,
        name: str,
        *,
        slots: int = 8,
        lease_s: float = 30.0,
        max_lease_s: float = 600.0,
        hold_transfers_s: float = 0.0,
        slow: bool = False,
    ) -> Engine:
        return sim_engine(
            SimEngineConfig(
                name,
                role,  # type: ignore[arg-type]
                slots=slots,
                kv_blocks=1024,
                lease_s=lease_s,
                max_lease_s=max_lease_s,
                hold_transfers_s=hold_transfers_s,
                timing=SLOW if slow else {},
                dp_ranks=2,
                barrier=True,
            )
        )

    async def test_cancel_a_queued_prefill(self, rig: Rig) -> None:
        """The contract's, where a queue forms: on one rank."""
        p = await rig.node(self.make("prefill", "p", slots=1, slow=True), "p")
        for attempt_id in ("first", "r"):
            p.client.channel.send(Prefill(attempt_id, PROMPT, {}, 60.0, dp_rank=1))
        await until(lambda: p.engine.status().waiting == 1, "queue")
        p.client.cancel("r")
        await p.client.wait("first", PrefillDone)
        p.client.release("first")
        await p.rests()
        assert p.client.of("r") == []

    async def test_facts_and_health(self, rig: Rig) -> None:
        """The contract's, with the slots of both ranks."""
        c = await rig.node(self.make("colocated", "c", slots=5), "c")
        info = c.server.info()
        assert (info.id, info.role, info.slots, info.node) == ("c", "colocated", 10, "n0")
        await c.server.check_health()
        await c.server.stop()
        with pytest.raises(RuntimeError):
            await c.server.check_health()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        yield rig


async def node(rig: Rig, name: str = "c", role: Any = "colocated", **options: Any) -> Node:
    config = {"slots": 4, "kv_blocks": 512, "dp_ranks": 3} | options
    return await rig.node(sim_engine(SimEngineConfig(name, role, **config)), name)


def active(node: Node) -> list[int]:
    return [rank.running + rank.waiting for rank in node.engine.status().ranks]


async def test_it_announces_the_slots_and_blocks_of_all_ranks(rig: Rig) -> None:
    info = (await node(rig, barrier=True)).engine.info()
    assert (info.id, info.slots, info.kv_blocks, info.dp_ranks, info.barrier) == ("c", 12, 1536, 3, True)


async def test_a_request_runs_on_the_rank_that_was_asked_for(rig: Rig) -> None:
    c = await node(rig, timing=SLOW)
    for n, rank in enumerate((2, 0, 2)):
        c.client.channel.send(Decode(f"r{n}", PROMPT, {"max_tokens": 500}, None, 60.0, dp_rank=rank))
    for n in range(3):
        await c.client.wait(f"r{n}", Admitted)
    assert active(c) == [1, 0, 2]
    total = c.engine.status()
    assert total.running == 3
    assert total.kv_blocks_used == sum(rank.kv_blocks_used for rank in total.ranks) > 0
    for n in range(3):
        c.client.cancel(f"r{n}")
    await c.rests()


async def test_without_a_rank_the_least_loaded_one_takes_it(rig: Rig) -> None:
    c = await node(rig, timing=SLOW)
    for n in range(6):
        c.client.decode(f"r{n}", PROMPT, max_tokens=500)
    await c.client.wait("r5", Admitted)
    assert active(c) == [2, 2, 2]
    for n in range(6):
        c.client.cancel(f"r{n}")
    await c.rests()


async def test_an_unknown_rank_is_refused(rig: Rig) -> None:
    c = await node(rig)
    c.client.channel.send(Decode("d", PROMPT, {}, None, 60.0, dp_rank=3))
    c.client.channel.send(Prefill("p", PROMPT, {}, 60.0, dp_rank=-1))
    for attempt_id in ("d", "p"):
        assert "0 to 2" in (await c.client.wait(attempt_id, Failed)).message
    await c.rests()


async def test_kv_moves_from_one_rank_to_another_and_to_other_engines(rig: Rig) -> None:
    a, b = await node(rig, "a"), await node(rig, "b")
    a.client.channel.send(Prefill("r", PROMPT, {}, 60.0, dp_rank=1))
    done = await a.client.wait("r", PrefillDone)
    assert [rank.leases for rank in a.engine.status().ranks] == [0, 1, 0]
    b.client.channel.send(Decode("r", PROMPT, {"max_tokens": 3}, done.handle, 60.0, dp_rank=2))
    assert (await b.client.wait("r", Admitted)).transfer_bytes > 0
    await b.client.text("r")
    await a.rests()
    await b.rests()


async def test_ranks_of_one_engine_pull_from_each_other_also_where_peers_must_prove_themselves(
    tmp_path: Path,
) -> None:
    engine = sim_engine(SimEngineConfig("a", kv_blocks=512, dp_ranks=2))
    server = EngineServer(engine, Identity("engine", "a", b"secret"), [f"unix:{tmp_path}/a.sock"])
    await server.start()
    client = Client()
    await client.connect(server.addresses, secret=b"secret")
    a = Node(engine, server, client)
    client.channel.send(Prefill("r", PROMPT, {}, 60.0, dp_rank=0))
    done = await client.wait("r", PrefillDone)
    client.channel.send(Decode("r", PROMPT, {"max_tokens": 3}, done.handle, 60.0, dp_rank=1))
    assert (await client.wait("r", Admitted)).transfer_bytes > 0
    await client.text("r")
    await a.rests()
    client.channel.close()
    await server.stop()


async def test_each_rank_has_a_prefix_cache_of_its_own(rig: Rig) -> None:
    c = await node(rig)
    cached = []
    for n, rank in enumerate((0, 0, 1)):
        c.client.channel.send(Decode(f"r{n}", PROMPT, {"max_tokens": 2}, None, 60.0, dp_rank=rank))
        cached.append((await c.client.wait(f"r{n}", Admitted)).cached_tokens)
        await c.client.text(f"r{n}")
    assert cached == [0, 48, 0]
    assert [len(c.engine.kv_events(rank)) for rank in range(3)] == [1, 1, 0]


async def test_a_lease_key_of_no_rank_breaks_the_connection_that_sent_it(rig: Rig) -> None:
    engine = (await node(rig)).engine
    assert isinstance(engine, SimRanks)
    for key in ("7.ab/1", "x", ""):
        with pytest.raises(WireError, match="has no lease"):
            engine.peer_message(None, Pull(key))  # type: ignore[arg-type]


def test_a_barrier_needs_ranks() -> None:
    with pytest.raises(ValueError, match="set dp_ranks to 2 or more"):
        SimEngineConfig("c", barrier=True)
    with pytest.raises(ValueError, match="dp_ranks is 0"):
        SimEngineConfig("c", dp_ranks=0)
