"""A prefix is lent over the whole path: real router, ingress, engines and sockets; only Ray is left out.

p0 has computed a prompt. The next one with the same head goes to p1, which takes turns with it, and z decodes. Whatever
happens to p0 while it lends, the answer is the same, in the same attempt.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from actors.engine.sim.engine import SimEngine
from actors.engine.sim.faults import Order, give
from actors.router.network.feed import NetworkConfig, RouterNetwork
from app.ingress.request import IngressRequest
from app.ingress.tokenizer import WordCodec
from policies.engine_model.blocks import block_hashes, salt_of
from policies.request.stage import LoanEnd, Stage
from policies.routing.registry import prefill_policy
from tests.app.ingress.rig import VOCAB, Rig, rig, until
from tests.app.ingress.test_with_sim import Sim

HEAD, BLOCK = 1200, 16
# 1 ms a token; the file says that the head of 1.2 MB moves in 12 ms
TIMING = {"prefill_base_s": 0.005, "prefill_per_token_s": 0.001, "kv_bytes_per_token": 1000}
TIERS = """
tiers:
  1: {bandwidth_bytes_per_s: 1.0e+8, latency_s: 0.0}
  3: {bandwidth_bytes_per_s: 1.0e+8, latency_s: 0.0}
"""


def words(name: str, count: int) -> str:
    return " ".join(f"{name}{i}" for i in range(count))


@dataclass
class Cluster:
    made: Rig
    sims: dict[str, Sim]
    faults: Path

    def engine(self, name: str) -> SimEngine:
        engine = self.sims[name].server.engine
        assert isinstance(engine, SimEngine)
        return engine

    async def ask(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 4} | more
        answer = await self.made.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def order(self, name: str, order: Order | None) -> None:
        give(self.faults, name, order)
        wanted = order or Order()
        faults = self.engine(name)._faults
        assert faults is not None
        await until(lambda: faults.order == wanted, f"{name} obeys")

    async def loans(self) -> list[dict[str, Any]]:
        """The loans under way, as the status shows them."""
        told = await self.made.client.get("/sluice/status")
        return told.json()["replica"]["loans"]  # type: ignore[no-any-return]

    def ended(self) -> dict[str, float]:
        """The number of loans that have ended, by how they did."""
        ends = get_args(LoanEnd)
        found = {how: self.made.metric("sluice_prefix_loans_total", result=how) for how in ends}
        return {how: number for how, number in found.items() if number}

    async def only(self) -> IngressRequest:
        """The only request, once it is there."""
        live = self.made.connections.live
        await until(lambda: live, "a request")
        (request,) = live.values()
        assert isinstance(request, IngressRequest)
        return request

    async def lending(self) -> IngressRequest:
        """The only request, once its prefix is to be lent."""
        request = await self.only()
        await until(lambda: request.stage is Stage.LENDING, "a request that borrows")
        return request


@pytest.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """Three engines. p0 and p1 have computed a prompt each, so the router knows their speeds."""
    links: dict[str, Any] = getattr(request, "param", {})
    (tmp_path / "network.yaml").write_text(TIERS)
    faults = tmp_path / "faults"
    faults.mkdir()
    network = RouterNetwork(NetworkConfig(str(tmp_path / "network.yaml")))
    async with rig(tmp_path, [], network=network, lend_prefixes=True) as made:
        made.router.dispatcher.prefill = prefill_policy("round_robin")
        sims: dict[str, Sim] = {}
        for name, role in (("p0", "prefill"), ("p1", "prefill"), ("z", "decode")):
            options = {"max_model_len": 2048, "timing": TIMING, "faults": str(faults), "links": links}
            sims[name] = await Sim.start(made, tmp_path, name, role, **options)
        here = Cluster(made, sims, faults)
        await until(lambda: len(made.connections.engines()) == 3 and made.connections.ready() is None)
        await until(
            lambda: made.connections.fleet is not None and made.connections.fleet.block_tokens == BLOCK
        )
        await here.ask(words("a", HEAD + 8))
        await here.ask(words("b", HEAD + 8))
        state = made.router.dispatcher.state
        await until(
            lambda: all(state.prefill_s_per_token(name) is not None for name in ("p0", "p1")), "known speeds"
        )
        await here.ask(words("c", 16))  # it is p1's turn now
        yield here
        await made.idle()
        for sim in sims.values():
            await until(sim.idle, "an idle engine")
            await sim.stop()


BORROWER = f"{words('a', HEAD)} {words('d', 40)}"
"""A prompt of which p0 has the first 75 blocks, and p1 none."""


async def test_the_head_is_lent_and_the_rest_computed(cluster: Cluster) -> None:
    before = {name: cluster.engine(name).metrics().prefill_tokens for name in ("p0", "p1")}
    answer = await cluster.ask(BORROWER)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == HEAD
    reader = cluster.engine("p1").metrics()
    assert (reader.transfers, reader.transfer_bytes) == (1, HEAD * 1000)
    assert reader.prefill_tokens - before["p1"] == 40
    assert cluster.engine("p0").metrics().prefill_tokens - before["p0"] == 1
    assert cluster.ended() == {"used": 1}
    assert await cluster.loans() == []
    # the same prompt, all of it in p1's cache or p0's, has the same answer
    assert (await cluster.ask(BORROWER))["choices"] == answer["choices"]


async def test_a_head_is_lent_only_to_prompts_with_its_salt(cluster: Cluster) -> None:
    index = cluster.made.router.dispatcher.state.prefix_index_of("p1")
    assert index is not None
    tokens = WordCodec(VOCAB).encode(BORROWER, True)
    blocks = (len(tokens) - 1) // BLOCK  # the last token is always computed
    sent = block_hashes(tokens[:-1], BLOCK, salt_of("mine"))

    def cached(answer: dict[str, Any]) -> int:
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    # p1's turn: what p0 has computed without a salt is neither lent nor found
    assert cached(await cluster.ask(BORROWER, cache_salt="mine")) == 0
    await until(lambda: index.blocks_held("p1", sent) == blocks, "the salted blocks in the router's index")
    # p0's turn, to which p1 lends
    assert cached(await cluster.ask(BORROWER, cache_salt="mine")) == blocks * BLOCK
    # p1's turn: it has the prompt with another salt only
    assert cached(await cluster.ask(BORROWER, cache_salt="theirs")) == 0


async def computed(
    cluster: Cluster, answer: dict[str, Any], request: IngressRequest | None, loan: str = "failed"
) -> None:
    """p1 has computed all of the prompt, in the first attempt, and the answer is that of an undisturbed one. The loan
    ended as `loan` says.
    """
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cluster.engine("p1").metrics().transfers == 0
    if request is not None:
        assert (request.attempts, request.retries, request.stage) == (0, 0, Stage.DONE)
    assert cluster.made.metric("sluice_retries_total", task="prefill", code="internal") == 0
    assert cluster.ended() == {loan: 1}


async def test_a_lender_that_refuses_costs_nothing_but_the_prefix(cluster: Cluster) -> None:
    await cluster.order("p0", Order(fail="internal"))
    answer = await cluster.ask(BORROWER)
    await computed(cluster, answer, None)
    await cluster.order("p0", None)


async def test_a_lender_that_stands_still_is_left_when_the_loan_is_worth_nothing_any_more(
    cluster: Cluster,
) -> None:
    await cluster.order("p0", Order(stalled=True))
    asked = asyncio.create_task(cluster.ask(BORROWER))
    request = await cluster.lending()
    await computed(cluster, await asked, request)
    # what it was asked for was cancelled
    assert not cluster.engine("p0")._prefills
    await cluster.order("p0", None)


async def test_a_lender_that_dies_while_it_lends_is_left_at_once(cluster: Cluster) -> None:
    await cluster.order("p0", Order(stalled=True))
    asked = asyncio.create_task(cluster.ask(BORROWER))
    request = await cluster.lending()
    await cluster.sims.pop("p0").stop()
    await computed(cluster, await asked, request)


@pytest.mark.parametrize(
    "cluster", [{"p1": {"bandwidth_bytes_per_s": 1e5, "latency_s": 0.0}}], indirect=True, ids=["slow link"]
)
async def test_a_lender_that_dies_while_its_prefix_is_read_is_left_at_once(cluster: Cluster) -> None:
    """The read would take 12 s, of which the router knows nothing."""
    asked = asyncio.create_task(cluster.ask(BORROWER))
    request = await cluster.only()
    reader = cluster.engine("p1")
    await until(lambda: len(reader._prefixes), "a read under way")
    assert await cluster.loans() == [{"lender": "p0", "borrower": "p1", "prompts": 1}]
    await cluster.sims.pop("p0").stop()
    await computed(cluster, await asked, request, "recomputed")
    assert reader.metrics().transfer_failures == 1


@pytest.mark.parametrize("order", [Order(lapse=True), Order(swap=True)], ids=["lost", "of another prompt"])
async def test_a_prefix_that_cannot_be_read_is_computed(cluster: Cluster, order: Order) -> None:
    await cluster.order("p0", order)
    asked = asyncio.create_task(cluster.ask(BORROWER))
    request = await cluster.only()
    await computed(cluster, await asked, request, "recomputed")
    await cluster.order("p0", None)
