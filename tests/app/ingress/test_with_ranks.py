"""Data-parallel ranks as workers, end to end: a sim engine of four ranks behind a barrier, real sockets and HTTP."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.engine.sim.ranks import SimRanks
from tests.actors.router.test_kv_feed import policy
from tests.actors.router.test_server import peer
from tests.app.ingress.rig import Rig, rig, until
from tests.app.ingress.test_with_sim import Sim

RANKS = 4


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[tuple[Rig, SimRanks]]:
    """One prefill engine of two ranks without a barrier, one decode engine of four ranks with one."""
    async with rig(tmp_path, []) as made:
        p = await Sim.start(made, tmp_path, "p", "prefill", dp_ranks=2)
        options = {"dp_ranks": RANKS, "barrier": True, "slots": 64, "timing": {"decode_base_s": 0.01}}
        d = await Sim.start(made, tmp_path, "d", "decode", **options)
        await until(lambda: len(made.connections.engines()) == 2 and made.connections.ready() is None)
        await until(lambda: len(made.router.dispatcher.state.snapshot(0.0).workers) == 2 + RANKS)
        await until(lambda: len(made.router.status().statuses) == 2)
        assert isinstance(d.server.engine, SimRanks)
        yield made, d.server.engine
        for sim in (p, d):
            await until(sim.idle, "an idle engine")
            await sim.stop()


def by_router(made: Rig) -> dict[str, int]:
    workers = made.router.dispatcher.state.snapshot(0.0).workers
    return {name: worker.slots_used for name, worker in workers.items() if name.startswith("d#")}


def by_engine(engine: SimRanks) -> dict[str, int]:
    return {f"d#{n}": rank.running + rank.waiting for n, rank in enumerate(engine.status().ranks)}


async def stream(made: Rig, n: int, max_tokens: int) -> None:
    body = {"prompt": [n % 90 + 1] * 40, "max_tokens": max_tokens, "stream": True}
    await made.client.post("/v1/completions", json=body)


async def test_requests_run_on_the_rank_that_the_router_chose_and_disconnects_leave_nothing(
    made: tuple[Rig, SimRanks],
) -> None:
    rig, engine = made
    workers = rig.router.dispatcher.state.snapshot(0.0).workers
    assert {w.barrier for name, w in workers.items() if name.startswith("d#")} == {"d"}
    assert {w.barrier for name, w in workers.items() if name.startswith("p#")} == {""}
    clients = [asyncio.create_task(stream(rig, n, 400)) for n in range(30)]
    await until(lambda: sum(by_engine(engine).values()) == 30, "all decode")
    chosen = by_router(rig)
    assert by_engine(engine) == chosen
    # The shortest queue gives each rank its share.
    assert all(chosen.values())
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)
    await rig.idle()
    await until(lambda: not any(by_engine(engine).values()), "idle ranks")
    workers = rig.router.dispatcher.state.snapshot(0.0).workers
    assert all(w.slots_used == w.kv_tokens == w.prefilling == w.sending == 0 for w in workers.values())


async def test_answers_are_whole_and_each_rank_s_cache_is_in_the_index(made: tuple[Rig, SimRanks]) -> None:
    rig, engine = made
    await policy(await peer(rig.router, "ingress", "admin"), "locality", "cache_aware")
    await asyncio.gather(*(stream(rig, n, 5) for n in range(40)))
    await rig.idle()
    state = rig.router.dispatcher.state

    def same() -> bool:
        return all(
            (index := state.prefix_index_of(f"d#{n}")) is not None
            and set(index.content(f"d#{n}")) == {*rank._pool._refs, *rank._pool._idle}
            for n, rank in enumerate(engine.ranks)
        )

    await until(same, "an index that holds what each rank holds")
    assert any(rank._pool.cached for rank in engine.ranks)


async def test_an_engine_of_several_ranks_that_lost_its_link_serves_on(made: tuple[Rig, SimRanks]) -> None:
    rig, engine = made
    link = rig.router.engines.channel("d")
    assert link is not None
    link.abort("link lost")
    await until(lambda: rig.router.engines.channel("d") not in (None, link), "the engine is back")
    assert set(by_router(rig)) == set(by_engine(engine))
    await stream(rig, 1, 5)
    await rig.idle()
