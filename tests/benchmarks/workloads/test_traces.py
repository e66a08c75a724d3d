"""Trace files as workloads: what is kept, and what is refused with file and line."""

import json
import lzma
import tracemalloc
from pathlib import Path

import pytest

from benchmarks.workloads import traces
from benchmarks.workloads.record import WorkloadError
from benchmarks.workloads.traces import estimate_memory_bytes, load_trace, stream_trace
from predictors.traces import TraceError
from predictors.traces import load_trace as load_outcomes

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"


def row(at_ms: float, prompt: int = 1_200, output: int = 7, blocks: tuple[int, ...] = (0, 4, 9)) -> str:
    return json.dumps(
        {"timestamp": at_ms, "input_length": prompt, "output_length": output, "hash_ids": list(blocks)}
    )


def mooncake(folder: Path, *lines: str) -> Path:
    path = folder / "t.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mooncake_rows_keep_order_and_full_blocks_only(tmp_path):
    path = mooncake(tmp_path, row(3_000), row(3_000, 1_024, 5, (0, 4)), row(4_500, 100, 5, (8,)))
    first, second, third = load_trace(path)
    assert [r.at_s for r in (first, second, third)] == [0.0, 0.0, 1.5]
    # 1,200 tokens fill two blocks of 512, the third is partly filled; 1,024 fill two; 100 fill none
    assert [r.block_hashes for r in (first, second, third)] == [(0, 4), (0, 4), ()]
    assert first.block_tokens == 512
    assert first.session and not third.session
    assert [r.request_id for r in (first, second)] == ["t.jsonl:1", "t.jsonl:2"]


def test_requests_are_named_as_the_predictors_name_them(tmp_path):
    path = mooncake(tmp_path, row(0), row(3_000))
    outcomes = load_outcomes(path)
    assert [r.request_id for r in load_trace(path)] == [o.arrival.request_id for o in outcomes]
    assert [r.prompt_key for r in load_trace(path)] == [o.arrival.prompt_key for o in outcomes]


def test_azure_plain_and_compressed_are_the_same_but_for_the_name(tmp_path):
    (tmp_path / "t.csv").write_text(AZURE)
    with lzma.open(tmp_path / "t.csv.xz", "wt") as file:
        file.write(AZURE)
    plain, packed = load_trace(tmp_path / "t.csv"), load_trace(tmp_path / "t.csv.xz")
    assert [(r.prompt_tokens, r.output_tokens) for r in plain] == [(374, 44), (396, 109)]
    assert plain[1].at_s == pytest.approx(4.314579, abs=1e-5)
    assert [r.at_s for r in plain] == [r.at_s for r in packed]


def test_time_that_goes_back_is_refused_unless_sorting_is_asked_for(tmp_path):
    path = mooncake(tmp_path, row(3_000), row(0, 1_100), row(3_000, 1_150))
    with pytest.raises(TraceError, match=r"t\.jsonl:2: its time lies 3 s before"):
        load_trace(path)
    with pytest.raises(TraceError, match="sort=True"):
        list(stream_trace(path))
    # sorted stably: of the two at 3 s the file's first one stays first
    assert [(r.at_s, r.prompt_tokens) for r in load_trace(path, sort=True)] == [
        (0, 1_100),
        (3, 1_200),
        (3, 1_150),
    ]
    assert list(stream_trace(path, sort=True)) == load_trace(path, sort=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a Mooncake row"),
        (row(0)[:-9], "not a Mooncake row"),
        (row(-1), "timestamp must be"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp must be"),
        ('{"timestamp": true, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp must be"),
        (row(0, prompt=-5), ">= 0"),
        (row(0, output=-5), ">= 0"),
        (row(0, blocks=(1, -2)), "hash_ids must be"),
        (row(0, prompt=1_024), "3 hash_ids of 512 tokens for a prompt of 1024"),
        (row(0, prompt=0, blocks=()), "no engine serves that"),
        (row(0, output=0), "no engine serves that"),
    ],
)
def test_a_broken_line_names_file_and_line(tmp_path, line, message):
    path = mooncake(tmp_path, row(0), "", line)
    with pytest.raises(TraceError, match=rf"t\.jsonl:3: .*{message}"):
        load_trace(path)


def test_a_broken_azure_line_names_file_and_line(tmp_path):
    (tmp_path / "t.csv").write_text(AZURE + "2023-11-16 18:15:51.0,x,1\n")
    with pytest.raises(TraceError, match=r"t\.csv:4: not an Azure"):
        load_trace(tmp_path / "t.csv")


def test_rows_without_tokens_are_left_out_only_on_request(tmp_path):
    path = mooncake(tmp_path, row(0), row(1_000, output=0), row(2_000))
    assert [r.request_id for r in load_trace(path, drop_empty=True)] == ["t.jsonl:1", "t.jsonl:3"]


def test_an_empty_a_missing_and_a_torn_file(tmp_path):
    with pytest.raises(TraceError, match="no requests in it"):
        load_trace(mooncake(tmp_path, ""))
    with pytest.raises(TraceError, match="no such trace file"):
        load_trace(tmp_path / "none.csv")
    whole = lzma.compress((HEADER + AZURE.removeprefix(HEADER) * 1).encode() * 200)
    (tmp_path / "torn.csv.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"torn\.csv\.xz"):
        load_trace(tmp_path / "torn.csv.xz")


def test_a_trace_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = mooncake(tmp_path, *(row(i * 10) for i in range(5_000)))
    monkeypatch.setattr(traces, "stream_trace", lambda *a, **k: pytest.fail("it was read"))
    with pytest.raises(WorkloadError, match=r"need about .* MiB .*stream_trace"):
        load_trace(path, memory_limit_bytes=1_000_000)


def test_a_trace_that_proves_longer_than_its_head_is_refused_while_read(tmp_path):
    # prompts without blocks at the head, then some with many: the estimate is too low
    lines = [row(i, 10, 1, ()) for i in range(2_000)]
    lines += [row(2_000 + i, 512 * 400, 1, (0,) * 400).replace(" ", "") for i in range(300)]
    path = mooncake(tmp_path, *lines)
    limit = estimate_memory_bytes(path) + 1
    assert limit < 2_300 * traces.REQUEST_BYTES + 300 * 400 * traces.BLOCK_BYTES
    with pytest.raises(WorkloadError, match="stream_trace"):
        load_trace(path, memory_limit_bytes=limit)


def test_it_can_still_be_streamed_in_constant_memory(tmp_path):
    path = mooncake(tmp_path, *(row(i * 10) for i in range(8_000)))
    tracemalloc.start()
    try:
        count = sum(1 for _ in stream_trace(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 8_000
    assert peak < 8_000 * traces.REQUEST_BYTES / 10


@pytest.mark.parametrize("packed", [False, True])
def test_the_estimate_covers_what_loading_takes_and_not_much_more(tmp_path, packed):
    lines = [row(i * 10, 512 * (i % 40) + 600, 5, tuple(range(i, i + i % 40 + 1))) for i in range(3_000)]
    path = mooncake(tmp_path, *lines)
    if packed:
        path = tmp_path / "t.jsonl.xz"
        path.write_bytes(lzma.compress((tmp_path / "t.jsonl").read_bytes()))
    tracemalloc.start()
    try:
        loaded = load_trace(path)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(loaded) == 3_000
    assert taken < estimate_memory_bytes(path) < 3 * taken
