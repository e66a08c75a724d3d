"""Workloads by name; the real traces where SLUICE_TRACES says where they are."""

import io
import json
import tarfile

import pytest

from benchmarks.workloads import catalog
from benchmarks.workloads.azure2024 import load_azure2024
from benchmarks.workloads.catalog import (
    WORKLOADS,
    TraceSource,
    WorkloadSpec,
    as_if_present,
    available,
    build,
    missing_traces,
    or_excerpt,
    traces_of,
)
from benchmarks.workloads.prefixes import Sharing, ideal_hit_share
from benchmarks.workloads.record import WorkloadError
from benchmarks.workloads.transform import LengthFilter
from predictors.traces import TraceError


def real(name: str) -> None:
    if not available(name):
        pytest.skip(f"the trace of {name} is not in SLUICE_TRACES")


@pytest.fixture
def traces(tmp_path):
    rows = [
        {
            "timestamp": 3_000 * (i // 5),
            "input_length": 600 + 10 * i,
            "output_length": 1 + i,
            "hash_ids": [0, i + 1],
        }
        for i in range(100)
    ]
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    return tmp_path


def test_steps_are_applied_in_the_order_that_is_promised(traces):
    spec = WorkloadSpec(
        name="mooncake-conversation",
        part="held_out",
        lengths=LengthFilter(max_output_tokens=95),
        compression=3.0,
        start_s=1.0,
        end_s=2.0,
        sharing=Sharing(1.0, groups=1, covered=(1.0, 1.0)),
        request_class="rag",
        ttft_slo_s=5.0,
    )
    made = build(spec, seed=1, traces=traces)
    # held out: rows 80..99 in ticks of five at 0, 3, 6, 9 s; compressed to 0, 1, 2, 3; the window [1, 2) holds the
    # second tick, rows 85..89
    assert [r.output_tokens for r in made] == [86, 87, 88, 89, 90]
    assert all(0 <= r.at_s < 1 for r in made)
    assert {(r.request_class, r.ttft_slo_s) for r in made} == {("rag", 5.0)}
    assert ideal_hit_share(made) > 0.2
    assert build(spec, 1, traces) == made
    assert build(spec, 2, traces) != made


def test_ticks_are_spread_unless_told_otherwise(traces):
    kept = build(WorkloadSpec(name="mooncake-conversation", spread_ticks=False), 1, traces)
    spread = build(WorkloadSpec(name="mooncake-conversation"), 1, traces)
    assert len({r.at_s for r in kept}) == 20
    assert len({r.at_s for r in spread}) == 100
    assert [r.request_id for r in kept] == [r.request_id for r in spread]


def test_a_rate_is_met(traces):
    made = build(WorkloadSpec(name="mooncake-conversation", rate_per_s=10.0, prompt_tokens=64), 1, traces)
    assert 99 / (made[-1].at_s - made[0].at_s) == pytest.approx(10.0)
    assert {r.prompt_tokens for r in made} == {64}


def test_a_file_by_its_path_with_its_first_requests(traces):
    path = traces / "mooncake_conversation_trace.jsonl"
    assert len(build(WorkloadSpec(path=str(path), requests=7), 1)) == 7


def test_synthetic_workloads_need_no_files(monkeypatch):
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    assert available("synthetic-chat") and not available("mooncake-conversation")
    assert len(build(WorkloadSpec(name="synthetic-chat", requests=50), 1)) == 50
    with pytest.raises(WorkloadError, match=r"set SLUICE_TRACES .* synthetic"):
        build(WorkloadSpec(name="mooncake-conversation"), 1)


def test_the_shipped_excerpt_stands_in_under_its_own_name(monkeypatch, traces):
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    assert catalog.or_excerpt("mooncake-conversation") == "mooncake-conversation-excerpt"
    made = build(WorkloadSpec(name="mooncake-conversation-excerpt", spread_ticks=False), 0)
    assert len(made) == 4_000 and made[0].prompt_tokens == 6_758 and made[-1].at_s == 1_301.999
    assert "first 4,000 rows" in (catalog.stand_in("mooncake-conversation-excerpt") or "")
    monkeypatch.setenv("SLUICE_TRACES", str(traces))
    assert catalog.or_excerpt("mooncake-conversation") == "mooncake-conversation"
    assert catalog.stand_in("mooncake-conversation") is None


def test_missing_files_and_empty_results_say_what_to_do(traces):
    with pytest.raises(WorkloadError, match="holds neither azure2023"):
        build(WorkloadSpec(name="azure2023-code"), 1, traces)
    with pytest.raises(WorkloadError, match="widen the window"):
        build(WorkloadSpec(name="mooncake-conversation", start_s=1e6), 1, traces)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a name or a path"),
        ({"name": "synthetic-chat", "path": "x"}, "either a name or a path"),
        ({"name": "toolagent"}, "no workload is called 'toolagent'"),
        ({"name": "synthetic-chat", "part": "test"}, "all, train or held_out"),
        ({"name": "synthetic-chat", "rate_per_s": 1.0, "compression": 2.0}, "not both"),
    ],
)
def test_impossible_specs_are_refused(arguments, message):
    with pytest.raises(WorkloadError, match=message):
        WorkloadSpec(**arguments)


RATES = "hour_since_2024-05-12T00Z,req_per_min_mid,rescaled_req_per_min\n0,50,60\n1,110,120\n"
FIGURES = {
    "x_hourly_rpm_digitised.csv": RATES,
    "x_input_cdf_digitised.csv": "tokens,cdf_pct_low,cdf_pct_high\n0,0,1\n100,40,60\n200,99,101\n300,100,100\n",
    "x_output_cdf_digitised.csv": "tokens,cdf_pct_low,cdf_pct_high\n0,0,20\n10,50,50\n20,100,100\n",
}


def archive(path, changes=None):
    with tarfile.open(path, "w:xz") as made:
        for name, text in {**FIGURES, **(changes or {})}.items():
            info = tarfile.TarInfo(f"azure2024_figures/{name}")
            info.size = len(text)
            made.addfile(info, io.BytesIO(text.encode()))
    return path


def test_digitised_curves_become_a_sampler(tmp_path):
    made = load_azure2024(archive(tmp_path / "a.tar.xz"))
    assert made.arrivals.rates_per_s == (1.0, 2.0)
    # the middle of the readings: half of the inputs up to 100 tokens, all up to 200 (what lies above 100 % is cut)
    assert made.prompt.knots == ((0.0, 1.0), (0.5, 100.0), (1.0, 200.0))
    assert made.output.knots == ((0.0, 1.0), (0.5, 10.0), (1.0, 20.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_input_cdf_digitised.csv": FIGURES["x_input_cdf_digitised.csv"] + "400,a,100\n"},
            r"input_cdf_.*\.csv:6: ",
        ),
        (
            {"x_input_cdf_digitised.csv": FIGURES["x_input_cdf_digitised.csv"] + "400,-1,100\n"},
            r"input_cdf_.*\.csv:6: ",
        ),
        ({"x_output_cdf_digitised.csv": "a,b\n"}, r"output_cdf_.*\.csv:1: the header"),
        ({"x_output_cdf_digitised.csv": "tokens,cdf_pct_low,cdf_pct_high\n5,10,20\n"}, "ends at 15%"),
    ],
)
def test_damaged_curves_name_file_and_line(tmp_path, changes, message):
    with pytest.raises(TraceError, match=message):
        load_azure2024(archive(tmp_path / "a.tar.xz", changes))


def test_no_archive(tmp_path):
    (tmp_path / "a.tar.xz").write_bytes(b"no")
    with pytest.raises(TraceError, match="cannot read"):
        load_azure2024(tmp_path / "a.tar.xz")
    with pytest.raises(TraceError, match="hourly_rpm"):
        load_azure2024(tmp_path)


@pytest.mark.parametrize(
    ("name", "rows", "prompt_mean", "output_mean"),
    [
        ("mooncake-conversation", 12_031, 12_035, 343),
        ("mooncake-synthetic", 3_993, 15_325, 149),
        ("azure2023-conversation", 19_366, 1_155, 211),
        ("azure2023-code", 8_819, 2_048, 28),
    ],
)
def test_real_rows_have_the_published_figures(name, rows, prompt_mean, output_mean):
    real(name)
    made = build(WorkloadSpec(name=name), seed=0)
    assert len(made) == rows
    assert sum(r.prompt_tokens for r in made) / rows == pytest.approx(prompt_mean, abs=1)
    assert sum(r.output_tokens for r in made) / rows == pytest.approx(output_mean, abs=1)


def test_real_mooncake_blocks_hit_as_published():
    real("mooncake-conversation")
    made = build(WorkloadSpec(name="mooncake-conversation"), seed=0)
    # 0.366 counts blocks with the last, partly filled one; tokens of full blocks hit a little more often
    assert ideal_hit_share(made) == pytest.approx(0.373, abs=0.001)


@pytest.mark.parametrize("name", ["servegen-reasoning", "azure2024-sample"])
def test_real_samplers_draw_what_is_published(name):
    real(name)
    made = build(WorkloadSpec(name=name, requests=5_000), seed=1)
    outputs = sorted(r.output_tokens for r in made)
    p95 = {"servegen-reasoning": 5_701, "azure2024-sample": 455}[name]
    assert outputs[int(0.95 * len(outputs))] == pytest.approx(p95, rel=0.12)


def test_every_named_trace_says_which_file_it_is():
    files = [s.file for s in WORKLOADS.values() if isinstance(s, TraceSource)]
    assert all(not f.endswith(".xz") for f in files)
    synthetic = [n for n in WORKLOADS if not isinstance(WORKLOADS[n], TraceSource)]
    assert all(n.startswith("synthetic-") for n in synthetic)
    assert catalog.traces_dir() is None or catalog.traces_dir().is_dir()


def test_the_traces_that_source_files_name_are_told_apart_by_their_content(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_TRACES", str(tmp_path))
    (tmp_path / "a.py").write_text('TRACE = "mooncake-conversation"\n')
    (tmp_path / "b.py").write_text('TRACE = "mooncake-conversation-excerpt"\n')
    assert traces_of(["a.py", "b.py"], tmp_path) == ()
    trace = tmp_path / "mooncake_conversation_trace.jsonl"
    trace.write_text("1")
    (tmp_path / "mooncake_synthetic_trace.jsonl").write_text("1")
    (first,) = traces_of(["a.py", "b.py"], tmp_path)
    assert first.startswith("mooncake_conversation_trace.jsonl sha256:")
    # shipped rows are part of the code, and what nobody names is not read
    assert traces_of(["b.py", "absent.py"], tmp_path) == ()
    trace.write_text("22")
    assert traces_of(["a.py"], tmp_path) not in ((), (first,))
    had = ["mooncake_conversation_trace.jsonl.xz sha256:ab"]
    assert missing_traces(["a.py", "b.py"], had, tmp_path) == []
    assert missing_traces(["a.py", "b.py"], (), tmp_path) == ["mooncake_conversation_trace.jsonl"]


def test_variants_can_be_named_as_if_all_traces_were_here(monkeypatch):
    monkeypatch.delenv("SLUICE_TRACES", raising=False)
    with as_if_present():
        assert or_excerpt("mooncake-conversation") == "mooncake-conversation"
    assert or_excerpt("mooncake-conversation") == "mooncake-conversation-excerpt"
