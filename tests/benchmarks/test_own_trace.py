"""Decode policies on a user's own trace: what is read of each format, what is refused, and what the table says."""

import json
import tarfile
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import own_trace
from benchmarks.experiments.base import ExperimentError, Results
from benchmarks.own_trace import BASE, FIGURES, POLICIES, Options, plan, run, table, window
from benchmarks.workloads.record import WorkloadError
from predictors.traces import TraceError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
ROWS = 24
SMALL = Options(requests=10, seeds=2)


def azure_2023(i: int) -> str:
    return f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.6805900,{300 + 40 * i},{10 + i}"


def azure_2024(i: int) -> str:
    return f"2024-05-10 00:{i // 60:02d}:{i % 60:02d}.009930+00:00,{300 + 40 * i},{10 + i}"


def burstgpt(i: int) -> str:
    return f"{5 + i},ChatGPT,{300 + 40 * i},{10 + i},{310 + 41 * i},Conversation log"


def mooncake(i: int) -> str:
    return json.dumps(
        {
            "timestamp": 1_000 * i,
            "input_length": 300 + 40 * i,
            "output_length": 10 + i,
            "hash_ids": [7][: i // 6],
        }
    )


TEXTS = {
    "azure 2023": "\n".join([AZURE, *map(azure_2023, range(ROWS))]),
    "azure 2024": "\n".join([AZURE, *map(azure_2024, range(ROWS))]),
    "burstgpt": "\n".join([BURSTGPT, *map(burstgpt, range(ROWS))]),
    "mooncake": "\n".join(map(mooncake, range(ROWS))),
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two policies, which need no compiled code."""
    monkeypatch.setattr(own_trace, "POLICIES", {name: POLICIES[name] for name in (BASE, "round robin")})


def written(folder: Path, text: str) -> Path:
    # the name says nothing of the kind
    path = folder / "mine.txt"
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", TEXTS)
def test_the_same_requests_come_out_of_each_format(tmp_path: Path, kind: str) -> None:
    planned = plan(written(tmp_path, TEXTS[kind]), SMALL)
    # rows 0 to 9, and those from 24 // 2 on
    for seed, first in ((0, 0), (1, 12)):
        made = window(planned.variants[0].config, seed)
        assert [r.prompt_tokens for r in made] == [300 + 40 * i for i in range(first, first + 10)]
        assert [r.output_tokens for r in made] == [10 + i for i in range(first, first + 10)]
        rate = planned.variants[0].config["rate_per_s"]
        # they come every second: at the rate of the runs every 1 / rate
        assert [r.at_s for r in made] == pytest.approx([i / rate for i in range(10)])
        assert {(r.ttft_slo_s, r.tpot_slo_s) for r in made} == {(5.0, 0.1)}
    assert "24 requests, 760 prompt and 22 output tokens" in planned.head[0]
    assert ("no shared prefixes known" in planned.head[0]) == (kind != "mooncake")


def test_an_archive_of_distributions_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-trace.csv").write_text(
        "".join(f"{start},0.5,1.0,Gamma,1.0,2.0\n" for start in range(0, 86_400, 600))
    )
    lengths = {
        str(s): {"input_tokens": "{50: 1.0}", "output_tokens": "{100: 1.0}"} for s in range(0, 86_400, 21_600)
    }
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps(lengths))
    with tarfile.open(tmp_path / "mine.tar.xz", "w:xz") as archive:
        for name in ("chunk-0-trace.csv", "chunk-0-dataset.json"):
            archive.add(tmp_path / name, name)
    planned = plan(tmp_path / "mine.tar.xz", SMALL)
    assert "requests sampled, 50 prompt and 100 output tokens" in planned.head[0]
    assert len(window(planned.variants[0].config, 1)) == 10


def test_every_policy_gets_the_same_windows_and_the_answer_is_the_same_again(
    tmp_path: Path, quick: None
) -> None:
    path = written(tmp_path, TEXTS["azure 2023"])
    found = run(plan(path, SMALL), jobs=1)
    assert list(found.runs) == [BASE, "round robin"]
    assert found.seeds == (0, 1)
    text = table(found)
    assert text == table(run(plan(path, SMALL), jobs=1))
    head, base, other = text.splitlines()
    assert "TTFT mean, ms" in head and "%" not in base and other.count("%") == len(FIGURES)


def test_the_table_has_paired_differences(tmp_path: Path) -> None:
    """TTFT 100 and 200 ms against 90 and 170 ms: -10 and -15 %; 12.5 +- 12.706 * 3.5355 / sqrt(2) = 31.8 by Student."""
    base: dict[str, float | None] = {
        "ttft_mean_s": 0.1,
        "ttft_p99_s": 0.4,
        "tpot_mean_s": 0.01,
        "goodput_per_s": 0.0,
        "rejected": 0.0,
    }
    ours = {**base, "ttft_mean_s": 0.09, "rejected": 2.0}
    runs: dict[str, dict[int, dict[str, float | None]]] = {
        BASE: {0: base, 1: {**base, "ttft_mean_s": 0.2}},
        "NetKV fleet": {0: ours, 1: {**ours, "ttft_mean_s": 0.17, "tpot_mean_s": None}},
    }
    text = table(Results("trace", False, {name: {} for name in runs}, runs))
    last = [cell.strip() for cell in text.splitlines()[-1].split("  ") if cell.strip()]
    # nothing can be said in per cent of a goodput of 0
    assert last == ["NetKV fleet", "130.0 (-12.5 ± 31.8 %)", "400.0 (+0.0 ± 0.0 %)", "–", "0.0000", "4"]


def test_a_single_window_has_no_interval(tmp_path: Path, quick: None) -> None:
    text = table(run(plan(written(tmp_path, TEXTS["burstgpt"]), Options(requests=10, seeds=1)), jobs=1))
    assert "±" not in text and "%" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "mine.txt:1: no requests in it: the file is empty"),
        ("\n\n", "mine.txt:1: no requests in it"),
        (AZURE + "\n", "mine.txt: no requests in it"),
        (
            "when,in,out\n1,2,3\n",
            "mine.txt:1: cannot tell the trace's kind: the header lacks TIMESTAMP, Context",
        ),
        ("TIMESTAMP,ContextTokens\nx,3\n", "the header lacks GeneratedTokens of Azure's"),
        ("Timestamp,Request tokens\nx,3\n", "and Response tokens of BurstGPT's"),
        ('{"timestamp": 1, "prompt": 2}\n', "mine.txt:1: not a Mooncake row"),
        (TEXTS["azure 2023"] + "\n2023-11-16 19:00:00.0,nan,5\n", "mine.txt:26: not an Azure row"),
        (TEXTS["azure 2023"] + "\nnan,5,5\n", "mine.txt:26: not an Azure row"),
        (TEXTS["burstgpt"] + "\nnan,ChatGPT,5,5,10,x\n", "mine.txt:26: not a BurstGPT row: timestamp"),
        (TEXTS["burstgpt"] + "\n99,ChatGPT,5\n", "mine.txt:26: not a BurstGPT row"),
        (TEXTS["burstgpt"] + "\n1e300,ChatGPT,5,5,10,x\n", "mine.txt:26: .*timestamp must be"),
        (TEXTS["burstgpt"] + "\n99,ChatGPT,1000000000000,5,5,x\n", "mine.txt:26: .*at most 10,000,000"),
        (TEXTS["burstgpt"] + f"\n99,ChatGPT,{'9' * 5000},5,5,x\n", "mine.txt:26: not a BurstGPT row"),
        (TEXTS["burstgpt"] + "\n99,ChatGPT,0,0,0,x\n", "mine.txt:26: 0 prompt and 0 output.*--skip-unusable"),
        (
            TEXTS["burstgpt"] + "\n99,ChatGPT,9000000,5,5,x\n",
            "mine.txt:26: 9,000,000 prompt .*--skip-unusable",
        ),
        (
            TEXTS["burstgpt"] + "\n3,ChatGPT,5,5,10,x\n",
            "mine.txt:26: its time lies 25 s before .*sort its lines",
        ),
        (BURSTGPT + "\n7,ChatGPT,5,5,10,x" * ROWS, "mine.txt:2 on: a rate needs .*give more --requests"),
        (
            TEXTS["mooncake"] + '\n{"timestamp": NaN, "input_length": 5, "output_length": 5, "hash_ids": []}',
            ":25: ",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises((TraceError, WorkloadError), match=says):
        plan(written(tmp_path, text), SMALL)


def test_rows_that_no_engine_serves_are_left_out_on_request(tmp_path: Path) -> None:
    lines = TEXTS["burstgpt"] + "\n99,ChatGPT,0,0,0,x\n100,ChatGPT,9000000,5,5,x\n"
    planned = plan(written(tmp_path, lines), Options(requests=10, seeds=2, skip_unusable=True))
    assert "24 requests, 760 prompt" in planned.head[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"requests": 13, "seeds": 2}, "has 24 requests: 2 windows of 13 do not fit"),
        ({"seeds": 3}, "3 windows of 10 do not fit; give fewer --requests"),
    ],
)
def test_windows_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, int], says: str) -> None:
    with pytest.raises(ExperimentError, match=says):
        plan(written(tmp_path, TEXTS["mooncake"]), Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"requests": 9}, "--requests 9: give at least 10"),
        ({"seeds": 0}, "--seeds 0: give at least 1"),
        ({"requests": 50_000, "seeds": 3}, "above 100,000"),
        ({"load": 0.0}, "--load 0: give a number above 0"),
        ({"load": float("nan")}, "--load nan"),
        ({"ttft_slo_s": float("inf")}, "--ttft-slo inf"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(ExperimentError, match=says):
        Options(**options)  # type: ignore[arg-type]


def test_the_command_prints_the_table_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    path = written(tmp_path, TEXTS["mooncake"])
    args = ["--requests", "10", "--seeds", "2", "--jobs", "1"]
    assert program.main(["trace", str(path), *args]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mine.txt: 24 requests") and "round robin" in out
    for bad, says in ((tmp_path / "none.csv", "no such trace file"), (tmp_path, "holds neither ServeGen's")):
        assert program.main(["trace", str(bad), *args]) == 2
        assert says in capsys.readouterr().err
    (tmp_path / "torn.tar.xz").write_bytes(b"\xfd7zXZ")
    assert program.main(["trace", str(tmp_path / "torn.tar.xz"), *args]) == 2
    assert "cannot read the archive" in capsys.readouterr().err


def test_the_compared_policies_are_those_that_the_composition_was_tuned_beside() -> None:
    assert next(iter(POLICIES)) == BASE
    assert POLICIES["NetKV, the paper's"][1]["queue"] == "iterations"
    assert POLICIES["NetKV Topo-Only"][1]["variant"] == "topo_only"
    assert POLICIES["NetKV fleet"][1]["contention"] == "fleet"
