"""The report says what was measured, and is written in three forms."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkout import code_digest
from benchmarks.document import RESULTS, section
from benchmarks.live import coldstart, overhead
from benchmarks.live.measure import Measurement, TreeState, add_difference, add_modelled, bodies, prompts
from benchmarks.live.profile import Profile, Spot
from benchmarks.live.report import Results, cpu_table, markdown, rows, summary, write

MACHINE = {
    "cpu": "CPU",
    "cores": 2,
    "memory_gib": 4,
    "python": "3.11",
    "commit": "abc",
    "load_1min_before": 0.1,
    "clean": True,
    "code_of": ["benchmarks/seeds.py"],
    "code": code_digest(["benchmarks/seeds.py"]),
}


def case(**changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "target": "Sluice, sim engines",
        "client": "python",
        "path": "/v1/chat/completions",
        "concurrency": 32,
        "tokens": 16,
        "requests": 1000,
        "wall_s": 1.0,
        "requests_per_s": 1708.0,
        "tokens_per_s": 16000.0,
        "e2e_ms": {"p50": 20.0},
        "ttft_ms": {"p50": 4.0, "p95": 6.0},
        "tpot_ms": {"p50": 1.2, "mean": 1.3},
        "cpu_ms_per_request": {"ingress": 0.5, "decode": 0.25, "gcs": 0.001},
        "cpu_ms_per_token": {"ingress": 0.03, "decode": 0.01},
        "client_cpu_ms_per_request": 0.2,
        "failures": {},
        "other_cores": 0.25,
    }
    return Measurement(**(values | changes))


def results(*cases: Measurement) -> Results:
    tree = TreeState(
        "Sluice, sim engines", 12.0, {"gcs": {"processes": 1, "rss_bytes": 3 << 30, "pss_bytes": 2 << 30}},
        {"processes": 1, "rss_bytes": 3 << 30, "pss_bytes": 2 << 30}, {"gcs": 0.02},
    )  # fmt: skip
    profile = Profile(
        "ingress",
        7,
        100,
        0.25,
        [Spot("f (x.py)", 0.5, 0.75)],
        [Spot("g (x.py)", 0.1, 0.9)],
        [Spot("f (x.py:3)", 0.4, 0.4)],
    )
    return Results({"seed": 0}, MACHINE, "", list(cases), [tree], [profile], ["a note"])


def test_the_figures_that_tell_most() -> None:
    floor = case(target="bare listener", requests_per_s=3416.0)
    alone = case(concurrency=1, added={"ttft_p50": 2.5})
    long = case(concurrency=8, tokens=2000)
    said = "\n".join(summary(results(floor, case(), alone, long)))
    # ingress 0.5 ms: 2,000 requests/s; 0.751 + 0.2 ms on two cores: 2,103
    assert "at most 2,000 requests/s in the busiest process (ingress), 2,103 on all cores" in said
    assert "0.50 x the bare listener's" in said
    assert "added TTFT p50 2.50 ms" in said
    assert "long streams cost 0.040 ms CPU a token" in said
    assert "whole tree 2.00 GiB" in said


def judged(
    *cases: Measurement, idle: dict[str, float] | None = None
) -> dict[str, tuple[float | None, str, bool | None]]:
    """The rows with an aim of these cases, and of a server with this CPU at rest: figure, aim and verdict by name."""
    whole = asdict(results(*cases))
    for tree in whole["trees"]:
        tree["idle_cpu"] = idle or {}
    return {row.name: (row.ours, row.aim, row.met) for row in rows(whole) if row.aim}


def test_the_aims_of_the_issue_are_judged_where_they_stand() -> None:
    busy = case(concurrency=128, cpu_ms_per_request={"ingress": 0.18, "router": 0.16, "decode": 0.9})
    lean = case(
        concurrency=128, client="wrk", cpu_ms_per_request={"ingress": 0.1, "router": 0.1, "decode": 0.9}
    )
    long = case(concurrency=8, tokens=500, cpu_ms_per_request={"ingress": 4.0, "router": 5.0})
    long.cpu_ms_per_token = {"ingress": 0.008, "router": 0.01, "decode": 0.5}
    found = judged(busy, lean, long, case(), idle={"gcs": 0.03, "ingress": 0.021, "decode": 0.4})
    at = "Sluice, sim engines"
    assert found == {
        f"{at}, python, c = 128, 16 tokens: CPU of ingress and router a request": (
            pytest.approx(0.34),
            "at most 0.2 ms",
            False,
        ),
        f"{at}, wrk, c = 128, 16 tokens: CPU of ingress and router a request": (
            pytest.approx(0.2),
            "at most 0.2 ms",
            True,
        ),
        f"{at}, python, c = 8, 500 tokens: CPU of ingress and router a token": (
            pytest.approx(0.018),
            "at most 0.02 ms",
            True,
        ),
        # the engine is not counted
        f"{at}: CPU at rest, all that is no engine, of one core": (pytest.approx(5.1), "at most 5", False),
    }
    text = markdown(results(busy))
    assert "CPU of ingress and router a request | 0.34 ms | at most 0.2 ms | missed |" in text


def test_other_servers_have_no_aim() -> None:
    floor = case(target="bare listener", concurrency=128, cpu_ms_per_request={"listener": 0.1})
    assert [name for name in judged(floor) if "bare" in name] == []


def test_the_committed_results_say_whether_the_aims_are_met() -> None:
    found = {row.name: row.met for row in section(RESULTS, "overhead/overhead-sim.json").rows if row.aim}
    at = "Sluice, sim engines, python, c = 128, 16 tokens: CPU of ingress and router a request"
    assert found[at] is not None and len(found) >= 4


def test_what_is_added() -> None:
    mine, base = case(), case(ttft_ms={"p50": 1.0, "p95": 5.0}, tpot_ms={"p50": 1.0, "mean": 1.0})
    add_difference(mine, base)
    assert mine.added == pytest.approx({"ttft_p50": 3.0, "ttft_p95": 1.0, "tpot_p50": 0.2, "tpot_mean": 0.3})
    add_modelled(mine, ttft_s=0.002, step_s=0.001)
    assert mine.added == pytest.approx({"ttft_p50": 2.0, "ttft_p95": 4.0, "tpot_p50": 0.2, "tpot_mean": 0.3})


def test_cpu_table_joins_the_small_roles() -> None:
    text = cpu_table([case()], lambda c: c.cpu_ms_per_request, 3)
    assert "| ingress | 0.500 |" in text
    assert "| other | 0.001 |" in text
    assert "| **sum** | 0.751 |" in text
    assert "gcs" not in text


def test_markdown_holds_every_part() -> None:
    text = markdown(results(case(failures={"status 500": 2})))
    for part in (
        "| 1000 | 2 |",
        "1,708.0",
        "a note",
        "`f (x.py)`",
        "50.0%",
        "`g (x.py)`",
        "90.0%",
        "25% of the time",
        "gcs",
        "3,072",
        "commit abc",
    ):
        assert part in text


def test_written_files(tmp_path: Path) -> None:
    files = write(results(case(), case(client="wrk", ttft_ms=None, tpot_ms=None)), tmp_path / "out")
    assert [file.name for file in files] == ["overhead.json", "overhead.md", "overhead.png"]
    stored = json.loads(files[0].read_text())
    assert stored["cases"][0]["requests_per_s"] == 1708.0
    assert stored["config"] == {"seed": 0}
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_prompts_follow_the_seed() -> None:
    assert prompts(3, 20) == prompts(3, 20)
    assert prompts(3, 20) != prompts(4, 20)
    assert len(set(prompts(3, 512))) == 512


def test_bodies_ask_for_exactly_the_tokens() -> None:
    chat = json.loads(bodies("m", ["hello"], 16, "/v1/chat/completions")[0])
    assert (chat["max_tokens"], chat["ignore_eos"], chat["stream"], chat["temperature"]) == (
        16,
        True,
        True,
        0,
    )
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert json.loads(bodies("m", ["hello"], 16, "/v1/completions")[0])["prompt"] == "hello"


def test_phases_of_a_cold_start() -> None:
    log = "[   0.0 s] starting Ray\nnoise\n[  12.5 s] Router 1/1\n[  20.1 s] ready: smollm2 on http://127.0.0.1:1 (x)\n"
    said = coldstart.phases(log)
    assert said[:2] == [(0.0, "starting Ray"), (12.5, "Router 1/1")]
    assert coldstart.model_name(said) == "smollm2"


def test_quick_is_smaller(tmp_path: Path) -> None:
    def plan(*options: str) -> tuple[int, float]:
        args = overhead._arguments([*options, "--wrk", "none"])
        chosen = overhead.Bench(args, tmp_path, "").plan(32, 6000, 20.0)
        return chosen.requests, chosen.max_s

    assert plan() == (6000, 20.0)
    assert plan("--quick") == (600, 5.0)
    assert plan("--requests", "100") == (100, 20.0)
    assert plan("--quick", "--requests", "100") == (64, 5.0)


def test_cold_start_report() -> None:
    tree = results().trees[0]
    start = coldstart.Start(33.25, 0.041, [(0.0, "starting Ray"), (33.0, "ready: m on http://x")], tree)
    text = coldstart.markdown(coldstart.Result({"config": "deploy/sim.yaml"}, MACHINE, "", [start]))
    assert "Ready after 33.2 s" in text
    assert "the first token then took 41 ms" in text
    assert "| starting Ray | 0.0 |" in text
    assert "2.00 GiB PSS" in text
