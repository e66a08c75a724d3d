"""The ledger in Redis decides as the one in memory, holds a limit over several replicas, and may fail."""

import asyncio
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from app.ingress.tenants import gate as gate_module
from app.ingress.tenants.ledger import Ledger, Limits, Meter, Need, Refusal, Reservation
from app.ingress.tenants.shared_ledger import SharedLedger, SharedReservation, StoreDownError
from tests.app.ingress.rig import MODEL, Rig, pair, rig, until
from tests.app.ingress.tenants.test_gate import KeyFile, ask, error_of

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None,
    reason="redis-server is not installed (Debian, Ubuntu: apt-get install redis-server)",
)

_names = itertools.count()


class Server:
    """A redis-server on a socket of its own, without a port or a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", f"{self.folder}/redis.sock", "--save", ""]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self.folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"The server is now ready" in line or b"Ready to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    def stop(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.terminate()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
async def ledger(server: Server) -> AsyncIterator[SharedLedger]:
    made = SharedLedger(server.url, 600.0)
    yield made
    await made.close()


steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 7.0, 31.0]),
        st.booleans(),
        st.integers(1, 4),
        st.integers(1, 550),
        st.integers(0, 600),
    ),
    max_size=25,
)
limits = st.builds(
    Limits,
    requests_per_min=st.sampled_from([None, 1, 5]),
    tokens_per_min=st.sampled_from([None, 500]),
    parallel=st.sampled_from([None, 3]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limits=limits, steps=steps)
def test_redis_and_memory_decide_alike(
    server: Server, limits: Limits, steps: list[tuple[float, bool, int, int, int]]
) -> None:
    async def run() -> None:
        here, there = Ledger(), SharedLedger(server.url, 10**6)
        key, now_s = f"alike-{next(_names)}", 1e9
        running: list[tuple[Reservation, SharedReservation]] = []
        for wait_s, ends, sequences, tokens, used in steps:
            now_s += wait_s
            if ends and running:
                ours, theirs = running.pop(0)
                here.settle(ours, used, now_s)
                await there.settle(theirs, used, now_s)
                continue
            need = Need(sequences, tokens)
            ours_or = here.reserve(key, limits, need, now_s)
            theirs_or, meters = await there.reserve(key, limits, need, now_s)
            if isinstance(ours_or, Refusal) or isinstance(theirs_or, Refusal):
                assert isinstance(ours_or, Refusal) and isinstance(theirs_or, Refusal)
                assert theirs_or[:4] == ours_or[:4]
                assert theirs_or.wait_s == pytest.approx(ours_or.wait_s, abs=1e-4)
            else:
                running.append((ours_or, theirs_or))
            for known, told in zip(here.meters(key, limits, now_s), meters, strict=True):
                if known is None or told is None:
                    assert known is told
                    continue
                assert told[:2] == known[:2]
                assert told.reset_s == pytest.approx(known.reset_s, abs=1e-3)
        await there.close()

    asyncio.run(run())


async def test_a_limit_holds_over_replicas(server: Server, ledger: SharedLedger) -> None:
    other = SharedLedger(server.url, 600.0)
    limits = Limits(requests_per_min=10)
    asked = [(ledger, other)[i % 2].reserve("both", limits, Need(1, 1), 1e9) for i in range(30)]
    granted = [found for found, _ in await asyncio.gather(*asked) if isinstance(found, SharedReservation)]
    assert len(granted) == 10
    await other.close()


async def test_what_a_dead_replica_held_is_given_back(server: Server) -> None:
    dead, alive = SharedLedger(server.url, 100.0), SharedLedger(server.url, 100.0)
    limits = Limits(parallel=1, tokens_per_min=100)
    found, _ = await dead.reserve("given back", limits, Need(1, 90), 1e9)
    assert isinstance(found, SharedReservation)
    await dead.close()
    refused, _ = await alive.reserve("given back", limits, Need(1, 90), 1e9 + 99)
    assert isinstance(refused, Refusal)
    found, meters = await alive.reserve("given back", limits, Need(1, 90), 1e9 + 101)
    assert isinstance(found, SharedReservation)
    assert meters.tokens == Meter(100, 10, 0.0)
    await alive.close()


async def test_a_reservation_may_last_longer_than_others(ledger: SharedLedger) -> None:
    limits = Limits(parallel=1)
    found, _ = await ledger.reserve("longer", limits, Need(1, 1), 1e9, most_s=3660.0)
    assert isinstance(found, SharedReservation)
    refused, _ = await ledger.reserve("longer", limits, Need(1, 1), 1e9 + 3659)
    assert isinstance(refused, Refusal)
    found, _ = await ledger.reserve("longer", limits, Need(1, 1), 1e9 + 3661)
    assert isinstance(found, SharedReservation)


async def test_a_request_is_held_for_as_long_as_its_key_allows_it_to_take(
    server: Server, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key_id = f"long-{next(_names)}"
    secret = keys.add(id=key_id, parallel=2, timeout_s=3600.0)
    config = IngressConfig((MODEL,), sweep_interval_s=0.02, key_file=str(keys.path), quota_redis=server.url)
    async with rig(tmp_path, pair(tmp_path, auto=False), config) as made:
        asked = asyncio.create_task(ask(made, secret))
        await until(lambda: made.engines["p"].of(wire.Prefill), "a prefill")
        assert made.app._gate is not None and made.app._gate._shared is not None
        redis = made.app._gate._shared._redis
        [(_, ends_s)] = await redis.zrange(f"sluice:quota:{{{key_id}}}:held", 0, -1, withscores=True)
        # an hour and a minute, of which some seconds may have passed
        assert 3000 < ends_s - (await redis.time())[0] <= 3661
        asked.cancel()
        await made.idle()


async def sums(ledger: SharedLedger, key: str) -> tuple[int, int, int]:
    """Returns the sums of a key: members, sequences and tokens."""
    found = await ledger._redis.hmget(f"sluice:quota:{{{key}}}:sums", "members", "running", "held")
    members, running, held = (int(value or 0) for value in found)
    return members, running, held


async def added_up(ledger: SharedLedger, key: str) -> tuple[int, int, int]:
    """Returns what the members of a key add up to."""
    found = await ledger._redis.zrange(f"sluice:quota:{{{key}}}:held", 0, -1)
    parts = [member.decode().split(":")[1:] for member in found]
    return len(parts), sum(int(s) for s, _ in parts), sum(int(t) for _, t in parts)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, forgets=st.sets(st.integers(0, 24), max_size=2))
def test_the_sums_are_those_of_the_members_whatever_ends_expires_or_is_lost(
    server: Server, steps: list[tuple[float, bool, int, int, int]], forgets: set[int]
) -> None:
    async def run() -> None:
        # members expire within some steps
        ledger = SharedLedger(server.url, 20)
        key, now_s = f"sums-{next(_names)}", 1e9
        running: list[SharedReservation] = []
        for i, (wait_s, ends, sequences, tokens, used) in enumerate(steps):
            now_s += wait_s
            if i in forgets:
                await ledger._redis.delete(f"sluice:quota:{{{key}}}:{('sums', 'held')[i % 2]}")
            if ends and running:
                # it may have expired already
                await ledger.settle(running.pop(0), used, now_s)
            found, _ = await ledger.reserve(key, Limits(parallel=9), Need(sequences, tokens), now_s)
            if isinstance(found, SharedReservation):
                running.append(found)
            assert await sums(ledger, key) == await added_up(ledger, key)
        # what has been given back twice, or never, leaves nothing
        await ledger.reserve(key, Limits(parallel=1), Need(2, 1), now_s + 21)
        assert await sums(ledger, key) == await added_up(ledger, key) == (0, 0, 0)
        await ledger.close()

    asyncio.run(run())


async def test_a_reservation_does_not_walk_what_its_key_holds(ledger: SharedLedger) -> None:
    limits = Limits(parallel=10**6, tokens_per_min=10**9)
    held = [(await ledger.reserve("many", limits, Need(1, 10), 1e9))[0] for _ in range(200)]
    await ledger._redis.config_resetstat()
    for one in held[:50]:
        assert isinstance(one, SharedReservation)
        await ledger.settle(one, 10, 1e9)
        assert not isinstance((await ledger.reserve("many", limits, Need(1, 10), 1e9))[0], Refusal)
    called = await ledger._redis.info("commandstats")
    assert "cmdstat_zrange" not in called and called["cmdstat_zadd"]["calls"] == 50
    assert await sums(ledger, "many") == (200, 200, 2000)


async def test_what_a_replica_of_an_earlier_version_holds_counts(ledger: SharedLedger) -> None:
    limits = Limits(parallel=3)
    await ledger._redis.zadd("sluice:quota:{earlier}:held", {"old-0:2:50": 1e9 + 60})
    found, _ = await ledger.reserve("earlier", limits, Need(2, 1), 1e9)
    assert isinstance(found, Refusal) and found.used == 2
    found, _ = await ledger.reserve("earlier", limits, Need(1, 1), 1e9)
    assert isinstance(found, SharedReservation)
    # it takes its own back, and knows no sums
    await ledger._redis.zrem("sluice:quota:{earlier}:held", "old-0:2:50")
    found, _ = await ledger.reserve("earlier", limits, Need(2, 1), 1e9)
    assert isinstance(found, SharedReservation) and await sums(ledger, "earlier") == (2, 3, 2)


async def test_a_redis_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    ledger = SharedLedger(f"unix://{tmp_path}/nothing.sock", 600.0)
    with pytest.raises(StoreDownError):
        await ledger.reserve("k", Limits(), Need(1, 1))
    await ledger.close()


async def test_ingresses_count_together_and_alone_while_redis_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four replicas share 8 requests a minute: 8 by Redis, then 2 by this replica's share once Redis has died."""
    monkeypatch.setattr(gate_module, "STORE_RETRY_S", 0.05)
    redis = Server(tmp_path)
    redis.start()
    keys = KeyFile(tmp_path / "keys.json")
    secret = keys.add(requests_per_min=8)

    def limits_of(made: Rig) -> str:
        assert made.app._gate is not None
        return str(made.app._gate.status()["limits"])

    config = IngressConfig(
        (MODEL,), sweep_interval_s=0.02, replicas=4, key_file=str(keys.path), quota_redis=redis.url,
        offload_prompt_chars=100,
    )  # fmt: skip
    async with rig(tmp_path, pair(tmp_path), config) as made:
        assert limits_of(made) == "shared"
        # one is long enough to be tokenised in a thread
        answers = [await ask(made, secret, prompt="word " * (40 if i == 3 else 1)) for i in range(9)]
        assert [answer.status_code for answer in answers] == [200] * 8 + [429]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "7"
        assert error_of(answers[8])["code"] == "rate_limit_exceeded"
        await made.idle()
        redis.stop()
        codes = [(await ask(made, secret)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        assert made.metric("sluice_quota_store_errors_total") >= 1
        assert "Redis" in (await made.client.get("/sluice/status")).json()["api_keys"]["detail"]
        redis.start()
        # it has forgotten everything, and is asked again
        await until(lambda: limits_of(made) == "shared", "the end of the pause")
        assert (await ask(made, secret)).headers["x-ratelimit-remaining-requests"] == "7"
        assert made.app._gate is not None
        assert made.app._gate._store_error is None
    redis.stop()


async def test_parallel_sequences_in_redis_return_to_none(server: Server, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key_id = f"parallel-{next(_names)}"
    secret = keys.add(id=key_id, parallel=2, tokens_per_min=10_000)
    config = IngressConfig((MODEL,), sweep_interval_s=0.02, key_file=str(keys.path), quota_redis=server.url)
    async with rig(tmp_path, pair(tmp_path), config) as made:
        for _ in range(3):
            assert (await ask(made, secret, n=2)).status_code == 200
            assert made.app._gate is not None
            await until(lambda: not made.app._gate._settling, "settled requests")  # type: ignore[union-attr]
        last = await ask(made, secret)
        # 3 prompts of 3 tokens with twice 4 are 33; this one holds 7, and little has drained
        assert 10_000 - 40 <= int(last.headers["x-ratelimit-remaining-tokens"]) <= 10_000 - 7


async def test_what_is_settled_again_is_charged_once(ledger: SharedLedger) -> None:
    key_id, limits = f"again-{next(_names)}", Limits(tokens_per_min=1000, parallel=1)

    async def reserved() -> SharedReservation:
        held, _ = await ledger.reserve(key_id, limits, Need(1, 100), now_s=0.0)
        assert isinstance(held, SharedReservation)
        return held

    async def left() -> int:
        """Returns the tokens that are left, by a reservation of 1,000 that cannot be made."""
        refused, meters = await ledger.reserve(key_id, limits, Need(1, 1000), now_s=0.0)
        assert isinstance(refused, Refusal) and meters.tokens is not None
        return meters.tokens.left

    # the call was carried out, and its answer was lost
    first = await reserved()
    await ledger.settle(first, 60, now_s=0.0)
    await ledger.settle(first, 60, now_s=0.0, again=True)
    assert await left() == 940
    # the call was lost
    await ledger.settle(await reserved(), 60, now_s=0.0, again=True)
    assert await left() == 880


@pytest.mark.parametrize("carried_out", [False, True], ids=["the call was lost", "the answer was lost"])
async def test_what_ends_while_redis_is_away_holds_nothing_afterwards(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    """One sequence is the whole limit of the key, and would be held for ten minutes."""
    monkeypatch.setattr(gate_module, "STORE_RETRY_S", 0.05)
    keys = KeyFile(tmp_path / "keys.json")
    secret = keys.add(id=f"away-{next(_names)}", parallel=1, tokens_per_min=10_000)
    config = IngressConfig((MODEL,), sweep_interval_s=0.02, key_file=str(keys.path), quota_redis=server.url)
    call, away = SharedLedger._call, list[str]()

    async def flaky(self: SharedLedger, script: Any, key_id: str, given: list[Any]) -> Any:
        what = "reserve" if script is self._reserve else "settle"
        if what not in away:
            return await call(self, script, key_id, given)
        if carried_out:
            await call(self, script, key_id, given)
        raise StoreDownError("TimeoutError")

    monkeypatch.setattr(SharedLedger, "_call", flaky)
    async with rig(tmp_path, pair(tmp_path), config) as made:
        gate = made.app._gate
        assert gate is not None
        for what in ("settle", "reserve"):
            await until(lambda: gate.waits and not gate._settling, "a Redis that is asked")
            away.append(what)
            # the first one is settled with nobody, or reserved by this replica's own share
            assert (await ask(made, secret)).status_code == 200
            await until(lambda: not gate._settling and not gate.waits, "a Redis that fails")
            away.clear()
            await until(lambda: gate.waits, "the end of the pause")
            # the first answer of Redis may still count what has ended
            await ask(made, secret)
            await until(lambda: not gate._settling, "settled requests")
            assert (await ask(made, secret)).status_code == 200
            await until(lambda: not gate._settling, "settled requests")
    assert not gate._unsettled
