"""A sim engine fails as it is ordered to, only if its configuration says so, and is well again afterwards."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.engine.sim import faults
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.engine.sim.faults import POISON, Order, give
from actors.engine.sim.links import SimLink
from actors.wire.messages import Failed, PrefillDone
from tests.actors.engine.rig import Node, Rig, until
from tests.actors.engine.test_server_processes import Host

PROMPT = list(range(10, 60))


async def faulty(rig: Rig, folder: Path, **options: Any) -> tuple[Node, SimEngine]:
    engine = SimEngine(SimEngineConfig("c", "colocated", faults=str(folder), **options))
    return await rig.node(engine, "c"), engine


async def obeys(engine: SimEngine, folder: Path, order: Order | None) -> None:
    assert engine._faults is not None
    obeyed = engine._faults
    give(folder, "c", order)
    await until(lambda: obeyed.order == (order or Order()), "the order")


@pytest.mark.parametrize("code", ["internal", "kv_load"])
async def test_an_engine_that_fails_at_once_and_is_well_again(tmp_path: Path, code: Any) -> None:
    async with Rig(tmp_path) as rig:
        c, engine = await faulty(rig, tmp_path)
        await obeys(engine, tmp_path, Order(fail=code))
        c.client.prefill("p", PROMPT)
        c.client.decode("d", PROMPT)
        for attempt_id in ("p", "d"):
            failed = await c.client.wait(attempt_id, Failed)
            assert (failed.code, failed.retryable) == (code, True)
        await obeys(engine, tmp_path, None)
        c.client.decode("again", PROMPT)
        assert await c.client.text("again")
        await c.rests()


async def test_a_hoarding_engine_holds_memory_until_it_is_well_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [b"all that there is"]
    monkeypatch.setattr(faults, "hoarded", lambda: taken)
    async with Rig(tmp_path) as rig:
        _, engine = await faulty(rig, tmp_path)
        assert engine._faults is not None
        for order, held in ((Order(hoard=True), taken), (Order(slow=2.0), []), (None, [])):
            await obeys(engine, tmp_path, order)
            assert engine._faults._hoard == held


async def test_a_stalled_engine_ends_no_step_and_lives(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        c, engine = await faulty(rig, tmp_path)
        c.client.decode("r", PROMPT, max_tokens=5000)
        await until(lambda: c.client.outs("r"), "a token")
        await obeys(engine, tmp_path, Order(stalled=True))
        await until(lambda: not engine._clock.ticking, "the clock rests")
        c.client.prefill("p", PROMPT)
        # tokens of earlier steps may still be on their way to the client
        before = engine.metrics().decode_tokens
        await asyncio.sleep(0.3)
        assert engine.metrics().decode_tokens == before
        assert not c.client.of("p")
        await obeys(engine, tmp_path, None)
        await c.client.wait("p", PrefillDone)
        sent = len(c.client.outs("r"))
        await until(lambda: len(c.client.outs("r")) > sent, "more tokens")
        c.client.cancel("r")
        c.client.release("p")
        await c.rests()


async def test_a_slow_engine_takes_ten_times_as_long_for_a_step(tmp_path: Path) -> None:
    """Steps follow an absolute schedule, so 1,000 ordinary ones of 1 ms take 1 s, and slow ones never fewer than 10."""
    async with Rig(tmp_path) as rig:
        c, engine = await faulty(rig, tmp_path)
        await obeys(engine, tmp_path, Order(slow=10.0))
        c.client.decode("r", PROMPT, max_tokens=30)
        began_s = asyncio.get_running_loop().time()
        await c.client.text("r")
        assert asyncio.get_running_loop().time() - began_s >= 30 * 0.01 - 0.01
        await c.rests()


def test_an_order_with_an_unknown_field_changes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with Rig(tmp_path) as rig:
            c, engine = await faulty(rig, tmp_path)
            await obeys(engine, tmp_path, Order(slow=2.0))
            (tmp_path / "c").write_text('{"explode": true}')
            await asyncio.sleep(0.3)
            assert engine._faults is not None
            assert engine._faults.order == Order(slow=2.0)
            await c.rests()

    asyncio.run(run())


async def test_without_the_option_nothing_is_obeyed(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        engine = SimEngine(SimEngineConfig("c", "colocated"))
        c = await rig.node(engine, "c")
        give(tmp_path, "c", Order(fail="internal", stalled=True))
        c.client.decode("r", [*POISON["decode"], *PROMPT])
        assert await c.client.text("r")
        assert engine._faults is None


@pytest.mark.parametrize("task", ["prefill", "decode"])
async def test_poison_kills_the_process_that_takes_it_as_that_task(tmp_path: Path, task: Any) -> None:
    host = Host(tmp_path, "colocated", faults=str(tmp_path))
    prompt = [*POISON[task], *PROMPT]
    try:
        client = await host.client()
        if task == "prefill":
            client.decode("harmless", prompt)
            assert await client.text("harmless")
            client.prefill("poison", prompt)
        else:
            client.prefill("harmless", prompt)
            await client.wait("harmless", PrefillDone)
            client.decode("poison", prompt)
        assert await asyncio.to_thread(host.process.wait, 30) == -signal.SIGKILL
    finally:
        host.end()


async def test_steps_that_stand_still_are_a_stall_and_the_work_goes_elsewhere(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        c, engine = await faulty(rig, tmp_path, stall_s=0.5, replace_after_stalls=1e6)
        c.client.decode("r", PROMPT, max_tokens=5000)
        await until(lambda: c.client.outs("r"), "a token")
        await obeys(engine, tmp_path, Order(stalled=True))
        await until(lambda: any(isinstance(m, Failed) for m in c.client.of("r")), "the end of the work")
        (failed,) = [m for m in c.client.of("r") if isinstance(m, Failed)]
        assert (failed.code, failed.retryable) == ("stalled", True)
        assert c.server.status().state == "stalled"
        assert engine.metrics().stalls == 1
        await obeys(engine, tmp_path, None)
        await until(lambda: c.server.status().state == "ready", "ready again")
        c.client.decode("again", PROMPT)
        assert await c.client.text("again")
        await c.rests()


async def test_an_idle_engine_whose_steps_cannot_begin_is_stalled_too_and_then_lost(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        c, engine = await faulty(rig, tmp_path, stall_s=0.5, replace_after_stalls=2.0)
        await c.server.check_health()
        await obeys(engine, tmp_path, Order(stalled=True))
        await until(lambda: c.server.status().state == "down", "the loss")
        with pytest.raises(RuntimeError, match="no step"):
            await c.server.check_health()


async def test_a_long_step_and_a_long_rest_are_no_stall(tmp_path: Path) -> None:
    """A prefill of 1.5 s in one step, and as much time without work, with a limit of 0.5 s."""
    async with Rig(tmp_path) as rig:
        c, engine = await faulty(rig, tmp_path, stall_s=0.5, timing={"prefill_base_s": 1.5})
        done = await c.prefilled("p", PROMPT)
        assert done.compute_s >= 1.4
        await asyncio.sleep(1.0)
        assert engine.metrics().stalls == 0
        c.client.release("p")
        await c.rests()


async def pair(rig: Rig, folder: Path, faulty_role: str) -> tuple[Node, Node, SimEngine]:
    """A prefill and a decode engine with a link between them, and the one named c, which obeys orders."""
    sims = {
        role: SimEngine(
            SimEngineConfig(
                "c" if role == faulty_role else role,
                role,  # type: ignore[arg-type]
                faults=str(folder) if role == faulty_role else None,
                links={"*": SimLink(1e9)} if role == "prefill" else {},
            )
        )
        for role in ("prefill", "decode")
    }
    nodes = [await rig.node(engine, engine.config.engine_id) for engine in sims.values()]
    return nodes[0], nodes[1], sims[faulty_role]


async def test_what_is_read_over_a_cut_link_arrives_after_the_cut(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        p, d, engine = await pair(rig, tmp_path, "decode")
        first = await p.prefilled("first", PROMPT)
        d.client.decode("first", PROMPT, first.handle)
        expected = await d.client.text("first")
        await obeys(engine, tmp_path, Order(cut=True))
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle)
        await asyncio.sleep(0.3)
        assert not d.client.outs("r")
        assert p.engine.status().leases == 1
        await obeys(engine, tmp_path, None)
        assert await d.client.text("r") == expected
        await p.rests()
        await d.rests()


async def test_a_read_that_times_out_over_a_cut_link_fails_and_frees_all(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        p, d, engine = await pair(rig, tmp_path, "decode")
        engine._puller._timeout_s = 0.1
        await obeys(engine, tmp_path, Order(cut=True))
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle)
        failed = await d.client.wait("r", Failed)
        assert (failed.code, failed.retryable) == ("kv_load", True)
        await d.rests()
        await obeys(engine, tmp_path, None)
        await p.rests()


async def test_leases_that_are_ended_in_the_middle_free_their_blocks_and_fail_their_reads(
    tmp_path: Path,
) -> None:
    async with Rig(tmp_path) as rig:
        p, d, engine = await pair(rig, tmp_path, "prefill")
        done = await p.prefilled("r", PROMPT)
        assert p.used
        await obeys(engine, tmp_path, Order(expire=True))
        await p.rests()
        assert engine.metrics().leases_expired == 1
        d.client.decode("r", PROMPT, done.handle)
        failed = await d.client.wait("r", Failed)
        assert (failed.code, failed.retryable) == ("kv_load", True)
        await obeys(engine, tmp_path, None)
        done = await p.prefilled("s", PROMPT)
        d.client.decode("s", PROMPT, done.handle)
        assert await d.client.text("s")
        await p.rests()
        await d.rests()


async def test_while_new_leases_lapse_none_can_be_read_and_all_blocks_are_free(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        p, d, engine = await pair(rig, tmp_path, "prefill")
        await obeys(engine, tmp_path, Order(lapse=True))
        for number, name in enumerate(("r", "s"), 1):
            done = await p.prefilled(name, PROMPT)
            await p.rests()
            assert engine.metrics().leases_expired == number
            d.client.decode(name, PROMPT, done.handle)
            failed = await d.client.wait(name, Failed)
            assert (failed.code, failed.retryable) == ("kv_load", True)
        await obeys(engine, tmp_path, None)
        done = await p.prefilled("t", PROMPT)
        d.client.decode("t", PROMPT, done.handle)
        assert await d.client.text("t")
        await p.rests()
        await d.rests()


async def test_the_kv_of_another_prompt_is_refused(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        p, d, engine = await pair(rig, tmp_path, "prefill")
        await obeys(engine, tmp_path, Order(swap=True))
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle)
        failed = await d.client.wait("r", Failed)
        assert (failed.code, failed.retryable) == ("unknown_handle", True)
        p.client.release("r")
        await p.rests()
        await obeys(engine, tmp_path, None)
        done = await p.prefilled("s", PROMPT)
        d.client.decode("s", PROMPT, done.handle)
        assert await d.client.text("s")
