"""A sim engine's prefill that reads the head of its prompt from another engine, over real sockets."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.engine.sim.links import SimLink
from actors.wire.messages import Failed, Prefill, PrefillDone
from tests.actors.engine.rig import Node, Rig, until

# 4 blocks of 16 tokens and one token more, then the rest of the prompt
HEAD, PROMPT = list(range(10, 75)), list(range(10, 110))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        yield rig


async def node(rig: Rig, name: str, **options: Any) -> Node:
    return await rig.node(SimEngine(SimEngineConfig(name, "prefill", **options)), name)


async def borrowed(p: Node, attempt_id: str, prefix: bytes | None, prompt: list[int] = PROMPT) -> PrefillDone:
    p.client.channel.send(Prefill(attempt_id, prompt, {}, 60.0, prefix=prefix))
    return await p.client.wait(attempt_id, PrefillDone)


@pytest.mark.parametrize("links", [{}, {"*": SimLink(1e9)}])
async def test_the_head_is_read_and_only_the_rest_computed(rig: Rig, links: dict[str, SimLink]) -> None:
    lender, p = await node(rig, "l", links=links), await node(rig, "p")
    lent = await lender.prefilled("r", HEAD)
    done = await borrowed(p, "r", lent.handle)
    assert done.cached_tokens == 64
    metrics = p.engine.metrics()
    assert metrics.prefill_tokens == 100 - 64
    assert (metrics.transfers, metrics.transfer_bytes) == (1, lent.kv_bytes * 64 // 65)
    # the read has freed the lender's copy; a second one over the same head moves nothing
    await lender.rests()
    again = await lender.prefilled("s", HEAD)
    assert (await borrowed(p, "s", again.handle)).cached_tokens == 96
    assert p.engine.metrics().transfers == 1
    await lender.rests()
    # the text does not depend on where the KV came from
    c = await rig.node(SimEngine(SimEngineConfig("c")), "c")
    d = await rig.node(SimEngine(SimEngineConfig("d", "decode")), "d")
    c.client.decode("r", PROMPT)
    d.client.decode("r", PROMPT, done.handle)
    assert await d.client.text("r") == await c.client.text("r")
    p.client.release("s")
    await p.rests()


@pytest.mark.parametrize("kind", ["nonsense", "no text", "of another prompt", "of itself"])
async def test_a_strange_prefix_is_no_reason_to_fail(rig: Rig, kind: str) -> None:
    lender, p = await node(rig, "l"), await node(rig, "p")
    if kind == "nonsense":
        prefix = b"x"
    elif kind == "no text":
        prefix = b"\x97\xa1\xd5" + b"\x00" * 6  # an array whose first text is no UTF-8
    elif kind == "of another prompt":
        prefix = (await lender.prefilled("other", [1, *HEAD])).handle
    else:
        prefix = (await p.prefilled("own", HEAD)).handle
    done = await borrowed(p, "r", prefix)
    assert done.cached_tokens == (64 if kind == "of itself" else 0)
    assert p.engine.metrics().transfers == 0


async def test_a_prefix_that_is_gone_is_computed(rig: Rig) -> None:
    lender, p = await node(rig, "l"), await node(rig, "p")
    lent = await lender.prefilled("r", HEAD)
    lender.client.release("r")
    await lender.rests()
    assert (await borrowed(p, "r", lent.handle)).cached_tokens == 0
    assert p.engine.metrics().transfer_failures == 1


async def test_a_lender_that_dies_in_the_middle_costs_the_prefill_nothing_but_time(rig: Rig) -> None:
    # the read would take a minute
    lender, p = await node(rig, "l", links={"*": SimLink(1e4)}), await node(rig, "p")
    lent = await lender.prefilled("r", HEAD)
    p.client.channel.send(Prefill("r", PROMPT, {}, 60.0, prefix=lent.handle))
    await until(lambda: p.used, "blocks for the prefix")
    await lender.server.stop()
    assert (await p.client.wait("r", PrefillDone)).cached_tokens == 0
    p.client.release("r")
    await p.rests()


async def test_a_cancelled_prefill_leaves_no_block_when_its_read_has_ended(rig: Rig) -> None:
    lender, p = await node(rig, "l"), await node(rig, "p", timing={"transfer_latency_s": 3.0})
    lent = await lender.prefilled("r", HEAD)
    p.client.channel.send(Prefill("r", PROMPT, {}, 60.0, prefix=lent.handle))
    await until(lambda: p.used, "blocks for the prefix")
    p.client.cancel("r")
    await p.rests()
    await lender.rests()
    assert not [m for m in p.client.of("r") if isinstance(m, PrefillDone | Failed)]
    assert p.engine.metrics().prefill_tokens == 0


async def test_without_room_for_the_prefix_it_is_not_read(rig: Rig) -> None:
    lender = await node(rig, "l")
    p = await node(rig, "p", kv_blocks=8, max_model_len=128)
    lent = await lender.prefilled("r", HEAD)
    held = await p.prefilled("held", [5] * 96)
    p.client.channel.send(Prefill("r", PROMPT, {}, 60.0, prefix=lent.handle))
    # the lender's copy is freed unread, and the prefill waits for blocks as any other does
    await lender.rests()
    assert held.prompt_tokens == 96 and p.engine.metrics().transfers == 0
    p.client.release("held")
    assert (await p.client.wait("r", PrefillDone)).cached_tokens == 0
