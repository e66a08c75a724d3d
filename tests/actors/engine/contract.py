"""Duties of every engine, as tests. A subclass names the implementation by overriding `make`.

Each rule of `actors.engine.protocol` has at least one test here. They observe an engine from outside only: its answers
over a socket, its status and its metrics.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.engine.protocol import Engine
from actors.wire.messages import Admitted, Failed, Out, PrefillDone, Reading
from tests.actors.engine.rig import Node, Rig, until

PROMPT = list(range(10, 60))
LEASE_S, HOLD_S = 4.0, 4.0
"""Seconds of a lease, and of a transfer, that something must precede, in tests that see both. A busy machine may keep
the process waiting for two of them."""


class EngineContract:
    """Tests of one implementation."""

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
        """A new engine. `slow`: a prefill and a step take long enough to be interrupted (0.4 s and 20 ms)."""
        raise NotImplementedError

    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[Rig]:
        async with Rig(tmp_path) as rig:
            yield rig

    async def pair(self, rig: Rig, **decode_options: float) -> tuple[Node, Node]:
        prefill = await rig.node(self.make("prefill", "p"), "p")
        decode = await rig.node(self.make("decode", "d", **decode_options), "d")  # type: ignore[arg-type]
        return prefill, decode

    # ---------------------------------------------------------------------------------------------- answers

    async def test_a_prefill_answers_once_and_holds_its_kv(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p"), "p")
        done = await p.prefilled("r", PROMPT)
        assert done.prompt_tokens == len(PROMPT)
        assert done.kv_bytes > 0
        assert p.engine.status().leases == 1
        assert p.used > 0
        p.client.release("r")
        await p.rests()
        assert [type(m) for m in p.client.of("r")] == [PrefillDone]

    async def test_a_decode_is_admitted_once_and_finishes_each_choice(self, rig: Rig) -> None:
        c = await rig.node(self.make("colocated", "c"), "c")
        c.client.decode("r", PROMPT, max_tokens=9, n=3, ignore_eos=True)
        for index in range(3):
            await c.client.text("r", index)
        await c.rests()
        messages = c.client.of("r")
        assert isinstance(messages[0], Admitted)
        assert sum(isinstance(m, Admitted) for m in messages) == 1
        assert not any(isinstance(m, Failed) for m in messages)
        for index in range(3):
            outs = c.client.outs("r", index)
            assert sum(out.n_tokens for out in outs) == 9
            assert [out.finish for out in outs][-1] == "length"
            assert not any(out.finish for out in outs[:-1])

    async def test_split_and_colocated_say_the_same(self, rig: Rig) -> None:
        p, d = await self.pair(rig)
        c = await rig.node(self.make("colocated", "c"), "c")
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle, temperature=0)
        c.client.decode("r", PROMPT, temperature=0)
        assert await d.client.text("r") == await c.client.text("r")
        admitted = await d.client.wait("r", Admitted)
        assert admitted.transfer_bytes > 0
        assert d.engine.metrics().transfers == 1
        for node in (p, d, c):
            await node.rests()

    async def test_the_prefill_copy_is_freed_by_the_pull(self, rig: Rig) -> None:
        p, d = await self.pair(rig)
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle, max_tokens=200)
        await d.client.wait("r", Admitted)
        await p.rests()  # while the decode goes on
        d.client.cancel("r")
        await d.rests()

    async def test_one_pull_serves_all_choices(self, rig: Rig) -> None:
        p, d = await self.pair(rig)
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle, n=4)
        for index in range(4):
            await d.client.text("r", index)
        assert d.engine.metrics().transfers == 1
        await p.rests()
        await d.rests()

    # ---------------------------------------------------------------------------------------------- leases

    async def test_a_lease_ends_by_itself(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p", lease_s=0.2), "p")
        await p.prefilled("r", PROMPT)
        await p.rests()
        assert p.engine.metrics().leases_expired == 1

    async def test_a_lease_is_renewed_for_as_long_as_it_is_asked_for(self, rig: Rig) -> None:
        p, d = (
            await rig.node(self.make("prefill", "p", lease_s=LEASE_S), "p"),
            await rig.node(self.make("decode", "d"), "d"),
        )
        done = await p.prefilled("r", PROMPT)
        for _ in range(4):
            await asyncio.sleep(LEASE_S / 3)
            assert 0.0 < await p.client.renewed("r") <= LEASE_S
        assert (p.engine.status().leases, p.engine.metrics().leases_expired) == (1, 0)
        d.client.decode("r", PROMPT, done.handle)
        await d.client.text("r")
        await p.rests()
        assert await p.client.renewed("r") == 0.0

    async def test_a_lease_that_is_renewed_no_more_ends_by_itself(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p", lease_s=0.5), "p")
        await p.prefilled("r", PROMPT)
        assert await p.client.renewed("r") > 0.0
        await p.rests()
        assert p.engine.metrics().leases_expired == 1
        assert await p.client.renewed("r") == 0.0
        assert await p.client.renewed("never") == 0.0

    async def test_no_lease_lasts_longer_than_the_longest(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p", lease_s=LEASE_S, max_lease_s=LEASE_S + 0.2), "p")
        await p.prefilled("r", PROMPT)
        answers = []
        while p.engine.status().leases:
            answers.append(await p.client.renewed("r"))
            await asyncio.sleep(0.01)
        assert max(answers) <= LEASE_S
        # what was left at the last answers shrinks with the age of the lease
        given = [answer for answer in answers if answer > 0.0]
        assert given[-1] < given[0]
        assert p.engine.metrics().leases_expired == 1

    async def test_an_ended_lease_cannot_be_pulled(self, rig: Rig) -> None:
        p, d = await self.pair(rig)
        done = await p.prefilled("r", PROMPT)
        p.client.release("r")
        await p.rests()
        d.client.decode("r", PROMPT, done.handle)
        failed = await d.client.wait("r", Failed)
        assert (failed.task, failed.code, failed.retryable) == ("decode", "kv_load", True)
        await d.rests()

    async def test_release_is_idempotent_and_unknown_ids_are_no_error(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p"), "p")
        p.client.release("never")
        p.client.cancel("never")
        await p.prefilled("r", PROMPT)
        p.client.release("r")
        p.client.release("r")
        p.client.cancel("r")
        await p.rests()
        await p.prefilled("r2", PROMPT)  # it still works

    async def test_a_read_protects_the_lease_from_its_end(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p", lease_s=LEASE_S), "p")
        d = await rig.node(self.make("decode", "d", hold_transfers_s=LEASE_S + 0.5), "d")
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle)
        await d.client.text("r")
        await p.rests()
        assert p.engine.metrics().leases_expired == 0

    async def test_a_read_protects_the_lease_from_release(self, rig: Rig) -> None:
        p, d = await self.pair(rig, hold_transfers_s=HOLD_S)
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle)
        await until(lambda: d.engine.status().running == 1, "transfer")
        await asyncio.sleep(0.1)
        p.client.release("r")
        await asyncio.sleep(0.1)
        assert p.used > 0
        await d.client.text("r")
        await p.rests()
        await d.rests()

    # ---------------------------------------------------------------------------------------------- cancel

    async def test_cancel_a_queued_prefill(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p", slots=1, slow=True), "p")
        p.client.prefill("first", PROMPT)
        p.client.prefill("r", PROMPT)
        await until(lambda: p.engine.status().waiting == 1, "queue")
        p.client.cancel("r")
        await p.client.wait("first", PrefillDone)
        p.client.release("first")
        await p.rests()
        assert p.client.of("r") == []

    async def test_cancel_a_prefill_under_way(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p", slow=True), "p")
        p.client.prefill("r", PROMPT)
        await until(lambda: p.engine.status().running == 1, "computing")
        p.client.cancel("r")
        await p.rests()
        assert p.client.of("r") == []

    async def test_cancel_a_leased_prefill(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p"), "p")
        await p.prefilled("r", PROMPT)
        p.client.cancel("r")
        await p.rests()
        assert p.engine.metrics().leases_expired == 0

    async def test_cancel_a_queued_decode_frees_the_prefill_copy(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p"), "p")
        d = await rig.node(self.make("decode", "d", slots=1, slow=True), "d")
        done = await p.prefilled("r", PROMPT)
        d.client.decode("first", PROMPT, max_tokens=2000)
        await d.client.wait("first", Out)
        d.client.decode("r", PROMPT, done.handle)
        await until(lambda: d.engine.status().waiting == 1, "queue")
        d.client.cancel("r")
        await p.rests()
        d.client.cancel("first")
        await d.rests()
        assert d.client.of("r") == []
        assert p.engine.metrics().leases_expired == 0

    async def test_cancel_in_transfer_lets_the_read_end_first(self, rig: Rig) -> None:
        p, d = await self.pair(rig, hold_transfers_s=HOLD_S)
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle)
        await until(lambda: d.engine.status().running == 1, "transfer")
        await asyncio.sleep(0.1)
        d.client.cancel("r")
        await asyncio.sleep(0.1)
        assert p.used > 0
        assert d.used > 0
        await d.rests()
        await p.rests()
        assert {type(message) for message in d.client.of("r")} <= {Reading}

    async def test_cancel_a_decode_under_way(self, rig: Rig) -> None:
        c = await rig.node(self.make("colocated", "c", slow=True), "c")
        c.client.decode("r", PROMPT, max_tokens=500, n=2)
        await until(lambda: c.client.outs("r", 1), "second choice")
        c.client.cancel("r")
        await c.rests()
        seen = len(c.client.of("r"))
        await asyncio.sleep(0.1)
        assert len(c.client.of("r")) == seen
        assert not any(isinstance(m, Failed) for m in c.client.of("r"))

    async def test_an_id_can_be_used_again_after_cancel(self, rig: Rig) -> None:
        p, d = await self.pair(rig, hold_transfers_s=0.3)
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle)
        await until(lambda: d.engine.status().running == 1, "transfer")
        d.client.cancel("r")
        p.client.inbox.clear()
        again = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, again.handle)
        await d.client.text("r")
        await p.rests()
        await d.rests()

    # ---------------------------------------------------------------------------------------------- deadlines, drain

    async def test_a_late_prefill_fails(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p", slots=1, slow=True), "p")
        p.client.prefill("first", PROMPT)
        p.client.prefill("r", PROMPT, timeout_s=0.0)
        failed = await p.client.wait("r", Failed)
        assert (failed.task, failed.code, failed.retryable) == ("prefill", "deadline", False)
        await p.client.wait("first", PrefillDone)
        p.client.release("first")
        await p.rests()

    async def test_a_late_decode_fails(self, rig: Rig) -> None:
        c = await rig.node(self.make("colocated", "c", slow=True), "c")
        c.client.decode("r", PROMPT, timeout_s=0.3, max_tokens=2000)
        failed = await c.client.wait("r", Failed)
        assert (failed.task, failed.code, failed.retryable) == ("decode", "deadline", False)
        await c.rests()

    async def test_a_decode_that_is_late_in_transfer_frees_both_sides(self, rig: Rig) -> None:
        p, d = await self.pair(rig, hold_transfers_s=1.0)
        done = await p.prefilled("r", PROMPT)
        d.client.decode("r", PROMPT, done.handle, timeout_s=0.2)
        assert (await d.client.wait("r", Failed)).code == "deadline"
        await p.rests()
        await d.rests()
        assert [type(m) for m in d.client.of("r") if not isinstance(m, Reading)] == [Failed]

    async def test_drain_refuses_new_work_and_waits_for_the_rest(self, rig: Rig) -> None:
        c = await rig.node(self.make("colocated", "c", slow=True), "c")
        c.client.decode("r", PROMPT, max_tokens=20)
        await c.client.wait("r", Admitted)
        draining = asyncio.create_task(c.server.drain(timeout_s=60.0))
        await until(lambda: c.server.status().state == "draining", "draining")
        c.client.decode("late", PROMPT)
        failed = await c.client.wait("late", Failed)
        assert (failed.code, failed.retryable) == ("draining", True)
        assert await draining
        assert len(await c.client.text("r")) > 0
        assert c.server.info().state == "draining"

    async def test_drain_waits_for_leases(self, rig: Rig) -> None:
        p = await rig.node(self.make("prefill", "p"), "p")
        await p.prefilled("r", PROMPT)
        assert not await p.server.drain(timeout_s=0.1)
        p.client.release("r")
        assert await p.server.drain(timeout_s=30.0)

    # ---------------------------------------------------------------------------------------------- state

    async def test_facts_and_health(self, rig: Rig) -> None:
        c = await rig.node(self.make("colocated", "c", slots=5), "c")
        info = c.server.info()
        assert (info.id, info.role, info.slots, info.node) == ("c", "colocated", 5, "n0")
        assert info.addresses == c.server.addresses
        assert info.kv_blocks == c.free_at_start
        await c.server.check_health()
        await c.server.stop()
        await c.server.stop()  # idempotent

    async def test_totals_only_grow(self, rig: Rig) -> None:
        c = await rig.node(self.make("colocated", "c"), "c")
        c.client.decode("r", PROMPT, max_tokens=8, ignore_eos=True)
        await c.client.text("r")
        metrics = c.engine.metrics()
        assert metrics.prefill_tokens == len(PROMPT)
        assert metrics.decode_tokens == 8
        assert metrics.kv_blocks_total == metrics.kv_blocks_used + metrics.kv_blocks_free
