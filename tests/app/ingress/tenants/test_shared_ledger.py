"""The ledger in Redis decides as the one in memory, holds a limit over several replicas, and may fail."""

import asyncio
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
