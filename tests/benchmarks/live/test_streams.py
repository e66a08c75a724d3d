"""The benchmark of many streams: counts, search and aims made by hand, clients of a server of the test, a live run."""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.live.proctree import Usage
from benchmarks.live.servers import ROOT, running
from benchmarks.live.streams.__main__ import main
from benchmarks.live.streams.clients import Counted, Stream, Streams, quantile_ms
from benchmarks.live.streams.measure import (
    Found,
    Plan,
    application,
    figures,
    measure,
    most_served,
    served,
    warm,
)
from benchmarks.live.streams.report import rows, rows_of

EVENT = b"b\r\ndata: {}\n\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_gaps_are_counted_by_what_they_are_longer_than_a_step() -> None:
    """A step is 20 ms. 21.05 ms is 1.05 ms too long (bin 10); two events in one read have no gap between them; an
    early one counts as in time.
    """
    streams = Streams(0.02, 2)
    stream = Stream(streams, b"")
    stream.took(1, 10.0)
    assert (streams.begun, streams.counted.events) == (1, 0)
    stream.took(1, 10.02105)
    stream.took(2, 10.0411)
    stream.took(1, 10.05)
    assert streams.counted.events == 4
    assert streams.counted.gaps == Counter({0: 3, 10: 1})
    assert not streams.settled.is_set()
    streams.failed("reset")
    assert streams.settled.is_set()
    streams.begin()
    assert (streams.counted.gaps, streams.counted.failed) == (Counter(), Counter(reset=1))


def test_what_processes_tell_is_added_up() -> None:
    whole = Counted()
    for gaps in ({"0": 98, "5": 1}, {"7": 1}):
        told = {"gaps": gaps, "late": {"1": 2}, "events": 50, "failed": {"reset": 1}}
        whole.add(Counted.of(json.loads(json.dumps(Counted.of(told).told()))))
    assert (whole.events, whole.late[1], whole.failed["reset"]) == (100, 4, 2)
    # 98 of 100 gaps end in bin 0 and the 99th in bin 5, from 0.5 to 0.6 ms
    assert [quantile_ms(whole.gaps, q) for q in (0.5, 0.98, 0.99, 1.0)] == pytest.approx([0.1, 0.1, 0.6, 0.8])
    with pytest.raises(ValueError, match="no stream had two events"):
        quantile_ms({}, 0.5)


@pytest.mark.parametrize(
    ("limit", "largest", "found"),
    [
        # 256 and 512 are served, 1,024 are too many, 768, 896 and 960 are served: 1,024 <= 1.1 x 960 + 1
        (1000, 4096, Found(960, 1024, True)),
        # 256 and 128 are too many, 64 and 96 are served, 112 and 104 are too many: 104 <= 1.1 x 96 + 1
        (100, 4096, Found(96, 104, True)),
        (5000, 1000, Found(1000, None, True)),
        (0, 4096, Found(None, 1, True)),
    ],
)
def test_the_search_ends_between_served_and_too_many(limit: int, largest: int, found: Found) -> None:
    tried: list[int] = []

    def good(n: int) -> bool:
        tried.append(n)
        return n <= limit

    assert most_served(256, largest, good, lambda n: True) == found
    assert len(tried) == len(set(tried)) <= 12


def test_the_search_ends_without_time() -> None:
    assert most_served(256, 4096, lambda n: True, lambda n: n < 1000) == Found(512, None, ended=False)
    assert most_served(256, 4096, lambda n: True, lambda n: False) == Found(None, None, ended=False)


def test_one_stream_in_a_hundred_is_slow_and_processes_share_the_rest() -> None:
    plan = Plan(10_000, 0.5)
    assert (plan.slow, plan.shares()) == (100, [4950, 4950])
    assert (Plan(201, 0.5).slow, Plan(201, 0.5).shares()) == (2, [100, 99])
    assert Plan(7, 0.5, processes=1).shares() == [7]
    assert Plan(1, 0.5).shares() == [1]


def test_tokens_of_slow_readers_are_counted_as_those_of_others() -> None:
    """198 clients read 1,980 events in 10 s, so the 200 streams had 2,000 tokens; 0.1 s of CPU is 50 us a token."""
    plan = Plan(200, 1.0, window_s=10.0)
    start = [Usage(1, "ingress", 3.0, 0, 0), Usage(2, "router", 1.0, 0, 0)]
    end = [Usage(1, "ingress", 3.1, 0, 0), Usage(2, "router", 1.02, 0, 0)]
    found = figures(plan, Counted(Counter({3: 1980}), Counter({0: 9}), 1980), start, end, 10.0)
    assert found["tokens_per_s"] == pytest.approx(200.0)
    assert found["cpu_us_per_token"] == {"ingress": pytest.approx(50.0), "router": pytest.approx(10.0)}
    assert found["beyond_ms"]["p99"] == pytest.approx(0.4)
    silent = figures(plan, Counted(), start, end, 10.0)
    assert (silent["cpu_us_per_token"], silent["beyond_ms"]["p99"]) == ({}, None)


def one(**more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"streams": 200, "slow": 2, "open": 198, "step_s": 0.5, "tokens_per_s": 400.0}
    found |= {"beyond_ms": {"p50": 1.0, "p99": 10.0, "worst": 30.0}, "late_p99_ms": 0.2, "failed": {}}
    found |= {"rss_per_stream_bytes": 60_000.0, "cpu_us_per_token": {"ingress": 15.0, "router": 5.0}}
    return found | more


@pytest.mark.parametrize(
    "more",
    [
        {"failed": {"reset": 1}},
        {"open": 197},
        {"beyond_ms": {"p50": 1.0, "p99": 10.1, "worst": 30.0}},
        {"beyond_ms": {"p50": None, "p99": None, "worst": None}},
        {"tokens_per_s": 199.0},
    ],
)
def test_streams_are_served_if_all_are_open_and_their_tokens_come_in_time(more: dict[str, Any]) -> None:
    assert served(one())
    assert not served(one(**more))


@pytest.mark.parametrize(
    ("more", "missed"),
    [
        ({}, []),
        ({"rss_per_stream_bytes": 60_001.0}, ["memory of a stream in the ingress"]),
        ({"cpu_us_per_token": {"ingress": 15.1, "router": 5.0}}, ["CPU of ingress and router a token"]),
        ({"open": 190}, ["streams that failed"]),
    ],
)
def test_each_aim_is_judged(more: dict[str, Any], missed: list[str]) -> None:
    found = list(rows_of(one(**more)))
    assert [row.name.partition(": ")[2] for row in found if row.met is False] == missed
    assert sum(row.met is not None for row in found) == 3
    assert found[0].name == "200 streams of 500 ms, 2 read slowly: memory of a stream in the ingress"


def test_a_search_without_time_says_so() -> None:
    tried = [one(streams=256, step_s=0.02), one(streams=512, step_s=0.02)]
    search_ = {"step_s": 0.02, "most": 512, "too_many": None, "ended": False, "tried": tried}
    found = [row for row in rows({"many": one(), "search": search_}) if row.name.startswith("most")]
    assert (found[0].ours, found[0].note) == (512, "the time was up before the search ended")
    assert [row.ours for row in found[1:]] == [10.0, 15.0, 5.0]
    nothing = {**search_, "most": None, "tried": []}
    assert not [row for row in rows({"many": one(), "search": nothing}) if row.name.startswith("most")]


def test_the_application_has_room_for_all_streams(tmp_path: Path) -> None:
    made = application(0.5, 10_000, tmp_path / "app")
    args = yaml.safe_load((tmp_path / "app" / "app.yaml").read_text())["applications"][0]["args"]
    decode = next(group for group in args["engines"] if group["role"] == "decode")
    assert decode["replicas"] * decode["options"]["slots"] >= 10_000
    assert decode["options"]["timing"]["decode_base_s"] == 0.5
    limits = args["ingress"]["options"]
    assert all(limits[name] > 10_000 for name in ("max_connections_per_address", "max_in_flight"))
    assert "benchmarks.chaos.bare" in made.argv and "app.serve" not in made.argv


def test_a_process_without_streams_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--streams", "1"])
    assert ended.value.code == 2 and "needs a stream" in capsys.readouterr().err


@asynccontextmanager
async def ticking(step_s: float, refuse: int = 0) -> AsyncIterator[int]:
    """A server that answers each connection with an event every `step_s`, but refuses the first `refuse` of them."""
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        refused = asked <= refuse
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n" if refused else HEAD)
        while not refused and not writer.is_closing():
            writer.write(EVENT)
            await asyncio.sleep(step_s)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_a_process_of_clients_reads_streams_and_obeys() -> None:
    async with ticking(0.05, refuse=1) as port:
        words = ("--port", str(port), "--streams", "6", "--rate", "200", "--step-ms", "50")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.live.streams.clients", *words, cwd=ROOT, stdin=pipe, stdout=pipe
        )
        assert process.stdin is not None and process.stdout is not None
        told = json.loads(await process.stdout.readline())
        assert told == {"open": 5, "failed": {"answer HTTP/1.1 503": 1}}
        process.stdin.write(b"begin\n")
        await asyncio.sleep(1.0)
        process.stdin.write(b"end\n")
        counted = Counted.of(json.loads(await process.stdout.readline()))
        assert await process.wait() == 0
    assert counted.events >= 10 and counted.gaps.total() == counted.events
    assert counted.failed == Counter({"answer HTTP/1.1 503": 1})
    assert counted.late.total() > 0


@pytest.mark.live
@pytest.mark.timeout(300)
def test_many_streams_in_their_short_form() -> None:
    """All streams are open at once and nothing of them stays; no time is judged."""
    lines: list[str] = []
    plan = Plan(200, 0.5, rate_per_s=100.0, settle_s=1.0, window_s=3.0)
    # a unix socket's path is short, and pytest's folders are deep
    with (
        tempfile.TemporaryDirectory(prefix="sluice-") as folder,
        running(application(0.5, 200, Path(folder) / "app"), lines.append) as server,
    ):
        warm(server, plan)
        found = measure(server, plan, lines.append)
    assert (found["open"], found["in_flight"], found["failed"]) == (198, 200, {}), lines
    assert found["events"] > 0 and {"ingress", "router"} <= set(found["cpu_us_per_token"])
    assert sum(row.met is not None for row in rows_of(found)) == 3
