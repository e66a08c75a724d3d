"""KV events from real sim engines to a real router over real sockets: gaps, overrun, lost links, restarts."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine import report
from actors.engine.kv_mirror import KvMirror
from actors.engine.report import Reporter
from actors.engine.server import EngineServer
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.router import kv_feed
from actors.router.kv_feed import KvFeed
from actors.router.server import RouterServer
from actors.wire.channel import Identity
from actors.wire.kv import from_wire, pack_hashes
from actors.wire.messages import Admin, AdminAnswer, KvChange, KvEvents, KvState, Message
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.engine_model.blocks import block_hashes
from policies.routing.deepflow.locality import Locality
from policies.routing.simple.cache_aware import CacheAware
from policies.state.prefix_index import PrefixIndex, bytes_of
from policies.state.reducer import ClusterState
from tests.actors.engine.rig import Client, until
from tests.actors.router.test_server import Peer, peer

BLOCK = 16


class Cluster:
    """Sim engines, each with an ingress's connection, and a router that can be started again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.router: RouterServer
        self.servers: dict[str, EngineServer] = {}
        self.reporters: dict[str, Reporter] = {}
        self.clients: dict[str, Client] = {}
        self._routers = self._requests = 0

    async def start_router(self) -> None:
        self._routers += 1
        self.router = RouterServer(
            Identity("router", f"r{self._routers}"),
            Dispatcher(DispatchConfig(), Locality(), CacheAware()),
            engine_grace_s=0.1,
        )
        await self.router.start([f"unix:{self._directory}/r{self._routers}.sock"])

    async def find(self) -> tuple[str, ...]:
        return self.router.addresses

    async def engine(self, name: str, replay_blocks: int | None = None, **options: Any) -> None:
        config = {"max_model_len": 512, "kv_blocks": 64, "block_size_tokens": BLOCK} | options
        engine = SimEngine(SimEngineConfig(name, **config))
        me = Identity("engine", name)
        server = self.servers[name] = EngineServer(engine, me, [f"unix:{self._directory}/{name}.sock"])
        await server.start()
        reporter = self.reporters[name] = Reporter(me, server, self.find)
        reporter.start()
        if replay_blocks is not None:
            reporter._mirrors = [KvMirror(name, replay_blocks=replay_blocks)]
        client = self.clients[name] = Client()
        await client.connect(server.addresses)

    async def run(self, name: str, first_token: int, tokens: int = 100) -> list[int]:
        """Computes a prompt that no other request has on an engine, and returns its tokens."""
        self._requests += 1
        prompt = [first_token] + [7] * (tokens - 1)
        self.clients[name].decode(f"x{self._requests}", prompt, max_tokens=2)
        await self.clients[name].text(f"x{self._requests}")
        return prompt

    def index(self) -> PrefixIndex:
        (index,) = self.router.dispatcher.state.prefix_indexes
        return index

    def cached(self, name: str) -> frozenset[int]:
        engine = self.servers[name].engine
        assert isinstance(engine, SimEngine)
        return frozenset(engine._pool._refs) | frozenset(engine._pool._idle)

    async def settled(self, *names: str) -> None:
        """Waits until the router's index holds the content of the engines and no feed has a hole."""

        def equal() -> bool:
            state = self.router.dispatcher.state
            return all(
                (index := state.prefix_index_of(name)) is not None
                and index.wants(name) is None
                and set(index.content(name)) == self.cached(name)
                for name in names
            )

        await until(equal, f"an index that holds what {names} hold; {self.router.status().totals}")

    def hits(self, prompt: list[int]) -> dict[str, int]:
        return self.index().lookup(block_hashes(prompt[:-1], BLOCK))

    def total(self, name: str) -> float:
        return self.router.status().totals[f"kv_event_{name}"]

    async def stop(self) -> None:
        for name, server in self.servers.items():
            await self.reporters[name].stop()
            self.clients[name].channel.close()
            await server.stop()
        await self.router.stop()


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(report, "STATUS_CHANGED_S", 0.01)
    made = Cluster(tmp_path)
    await made.start_router()
    yield made
    await made.stop()


def dropping(reporter: Reporter, which: Callable[[KvEvents], bool]) -> list[KvEvents]:
    """Loses each batch that `which` names once, and returns the list of the lost ones."""
    lost: list[KvEvents] = []
    send = reporter._link.send

    def lossy(message: Message) -> bool:
        if isinstance(message, KvEvents) and message not in lost and which(message):
            lost.append(message)
            return True
        return send(message)

    reporter._link.send = lossy  # type: ignore[method-assign]
    return lost


async def test_the_index_follows_the_engines_also_when_they_evict(cluster: Cluster) -> None:
    await cluster.engine("a")
    await cluster.engine("b")
    prompts = [await cluster.run("a", n) for n in range(12)]  # 12 x 6 blocks do not fit into 64
    on_b = await cluster.run("b", 11)
    await cluster.settled("a", "b")
    assert len(cluster.cached("a")) < 12 * 6
    assert cluster.hits(on_b) == {"a": 6, "b": 6}
    assert cluster.hits(prompts[0]).get("a", 0) < 6
    gauges = cluster.router.status().gauges
    assert gauges["prefix_index_blocks"] >= len(cluster.cached("a") | cluster.cached("b"))
    assert gauges["prefix_index_bytes"] > 0
    assert cluster.total("gaps") == 0


async def test_a_lost_batch_is_replayed(cluster: Cluster) -> None:
    await cluster.engine("a")
    await cluster.run("a", 0)
    await cluster.settled("a")
    snapshots = cluster.total("snapshots")
    lost = dropping(cluster.reporters["a"], lambda batch: batch.seq == 1)
    second = await cluster.run("a", 1)
    await until(lambda: lost, "a lost batch")
    assert cluster.hits(second) == {}
    await cluster.run("a", 2)
    await cluster.settled("a")
    assert cluster.hits(second) == {"a": 6}
    assert cluster.total("gaps") == 1
    assert cluster.total("snapshots") == snapshots  # replayed, not told anew


async def test_a_question_that_was_lost_is_put_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.engine("a")
    await cluster.run("a", 0)
    await cluster.settled("a")
    monkeypatch.setattr(kv_feed, "ASK_AGAIN_S", 0.05)
    asked: list[object] = []
    lost = dropping(cluster.reporters["a"], lambda batch: batch.seq == 1 and len(asked) < 2)
    answer = cluster.reporters["a"]._on_message

    def deaf(channel: Any, message: Any) -> None:
        asked.append(message)
        if len(asked) > 1:
            answer(channel, message)

    cluster.reporters["a"]._link._on_message = deaf
    channel = cluster.reporters["a"]._link.channel
    assert channel is not None
    channel._on_message = deaf
    await cluster.run("a", 1)
    await until(lambda: lost, "a lost batch")
    await cluster.run("a", 2)
    await cluster.settled("a")
    assert len(asked) == 2


async def test_a_report_that_fails_is_not_the_last(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.engine("a")
    server, failures = cluster.reporters["a"]._server, list[bool]()
    status = server.status

    def fails_once() -> object:
        if not failures:
            failures.append(True)
            raise ValueError("a bug")
        return status()

    monkeypatch.setattr(server, "status", fails_once)
    await until(lambda: failures, "a failed report")
    await cluster.run("a", 0)
    await cluster.settled("a")


def test_an_engine_that_does_not_answer_is_asked_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, sent = [0.0], list[Any]()
    monkeypatch.setattr(kv_feed, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    feed = KvFeed(ClusterState(), lambda event: None)
    feed.announced("w", 0, SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    feed.want(True)
    asked_s: list[float] = []
    for tick in range(1, 5 * 300):
        now_s[0] = tick / 5
        before = len(sent)
        feed.tick()
        asked_s += [now_s[0]] * (len(sent) - before)
    # after 2, 4, 8, 16, 32 and then every 60 s, at the tick after it
    assert asked_s == pytest.approx([2.2, 6.4, 14.6, 30.8, 63.0, 123.2, 183.4, 243.6], abs=0.21)


def test_a_snapshot_without_end_takes_no_more_memory_than_a_full_index() -> None:
    state, applied, channel = ClusterState(), list[Any](), SimpleNamespace(send=lambda message: None)
    part = [KvChange("stored", pack_hashes(range(1000)))]
    part_bytes = bytes_of(from_wire(part))
    # 3.5 parts are for content
    state.limit_indexes(4 * part_bytes)
    feed = KvFeed(state, applied.append)
    feed.announced("w", 0, channel)  # type: ignore[arg-type]
    for number in range(10):
        feed.state("w", channel, KvState("w", "e", 5, number, 10, part))  # type: ignore[arg-type]
        assert len(feed._sources["w"].parts) <= 3
    (event,) = applied
    assert (event.next_seq, len(event.chains)) == (5, 3)
    assert feed.totals()["prefix_index_refused_blocks"] == 7000
    # the next snapshot has all the room again
    feed.state("w", channel, KvState("w", "e", 9, 0, 1, part))  # type: ignore[arg-type]
    assert len(applied[1].chains) == 1


async def test_where_the_engine_has_the_batches_no_more_it_tells_all_it_holds(cluster: Cluster) -> None:
    await cluster.engine("a", replay_blocks=6)  # one prompt's
    await cluster.run("a", 0)
    await cluster.settled("a")
    snapshots = cluster.total("snapshots")
    lost = dropping(cluster.reporters["a"], lambda batch: batch.seq in (1, 2))
    for n in (1, 2):
        await cluster.run("a", n)
        await until(lambda n=n: len(lost) == n, "a lost batch")  # type: ignore[misc]
    await cluster.run("a", 3)
    await cluster.settled("a")
    assert cluster.total("snapshots") == snapshots + 1


async def test_a_restarted_router_rebuilds_the_same_index(cluster: Cluster) -> None:
    for name in ("a", "b"):
        await cluster.engine(name)
    for n in range(11):
        await cluster.run("ab"[n % 2], n, 40 + 10 * n)
    await cluster.run("a", 3)
    await cluster.run("b", 3)
    await cluster.settled("a", "b")
    before = {name: cluster.index().content(name) for name in ("a", "b")}
    await cluster.router.stop()
    await cluster.start_router()
    await until(lambda: len(cluster.router.dispatcher.state.prefix_indexes) == 1, "an index")
    await cluster.settled("a", "b")
    assert {name: cluster.index().content(name) for name in ("a", "b")} == before
    assert cluster.total("snapshots") == 2
    extra = await cluster.run("b", 99)  # and it goes on from there
    await cluster.settled("a", "b")
    assert cluster.hits(extra) == {"b": 6}
    assert cluster.total("gaps") == 0


async def test_what_happened_while_the_link_was_down_is_fetched(cluster: Cluster) -> None:
    await cluster.engine("a")
    await cluster.run("a", 0)
    await cluster.settled("a")
    snapshots = cluster.total("snapshots")
    lost = dropping(cluster.reporters["a"], lambda batch: batch.seq == 1)
    meanwhile = await cluster.run("a", 1)
    await until(lambda: lost, "a lost batch")
    channel = cluster.reporters["a"]._link.channel
    assert channel is not None
    # on a busy machine a short grace could pass before the engine is back
    cluster.router.engines._grace_s = 600.0
    channel.abort("link lost")
    await cluster.settled("a")  # with no further batch from the engine
    assert cluster.hits(meanwhile) == {"a": 6}
    assert cluster.total("snapshots") == snapshots


async def test_a_forgotten_engine_is_fenced_out_and_another_life_of_it_starts_empty(cluster: Cluster) -> None:
    await cluster.engine("a")
    await cluster.engine("b")
    prompt = await cluster.run("a", 0)
    await cluster.run("b", 0)
    await cluster.settled("a", "b")
    assert cluster.hits(prompt) == {"a": 6, "b": 6}
    await cluster.reporters["a"].stop()
    await until(lambda: cluster.hits(prompt) == {"b": 6}, "a fenced-out engine")
    await cluster.servers["a"].stop()
    await cluster.engine("a")
    other = await cluster.run("a", 5)
    await cluster.settled("a", "b")
    assert cluster.hits(prompt) == {"b": 6}
    assert cluster.hits(other) == {"a": 6}


async def test_a_new_epoch_over_the_same_connection_fences_the_old_one_out(cluster: Cluster) -> None:
    await cluster.engine("a")
    prompt = await cluster.run("a", 0)
    await cluster.settled("a")
    engine = cluster.servers["a"].engine
    assert isinstance(engine, SimEngine)
    assert engine._pool.clear()
    # the events get lost: the engine's life begins anew
    engine.kv_events()
    cluster.reporters["a"]._mirrors = [KvMirror("a")]
    other = await cluster.run("a", 5)
    await cluster.settled("a")
    assert (cluster.hits(prompt), cluster.hits(other)) == ({}, {"a": 6})


async def test_prompts_are_hashed_in_the_blocks_of_the_engines_that_tell_what_they_cache(
    cluster: Cluster,
) -> None:
    await cluster.engine("a")
    await cluster.engine("quiet", kv_events=False, block_size_tokens=32)
    await until(lambda: len(cluster.router.status().statuses) == 2, "two engines")
    assert cluster.router.fleet().block_tokens == BLOCK
    assert cluster.router.status().gauges["prefix_index_feeds"] == 1


async def test_engines_send_only_while_some_policy_looks_at_hits(cluster: Cluster) -> None:
    await cluster.engine("a")
    first = await cluster.run("a", 0)
    await cluster.settled("a")
    ingress = await peer(cluster.router, "ingress", "i")
    await policy(ingress, "round_robin", "round_robin")
    assert cluster.router.fleet().block_tokens is None
    batches = cluster.total("batches")
    unseen = await cluster.run("a", 1)
    mirror = cluster.reporters["a"]._mirrors[0]
    await until(lambda: mirror.blocks == len(cluster.cached("a")), "a mirror that follows")
    await policy(ingress, "random", "cache_aware")
    assert cluster.router.fleet().block_tokens == BLOCK
    await cluster.settled("a")
    assert cluster.total("batches") == batches
    assert (cluster.hits(first), cluster.hits(unseen)) == ({"a": 6}, {"a": 6})
    later = await cluster.run("a", 2)
    await cluster.settled("a")
    assert cluster.hits(later) == {"a": 6}
    assert cluster.total("gaps") == 0


async def policy(ingress: Peer, prefill: str, decode: str) -> None:
    """Changes both policies by name, as an administrator does."""
    change = json.dumps({"prefill": {"name": prefill}, "decode": {"name": decode}}).encode()
    ingress.channel.send(Admin(1, "set_policy", change))
    answer = await ingress.get(AdminAnswer)
    assert isinstance(answer, AdminAnswer)
    assert answer.status == 200, answer.body
