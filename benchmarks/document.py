"""Makes `docs/results.md` from the committed results.

Each results file yields rows (`Row`). An experiment's file contains its rows; for each other file a reader below makes
them from what was measured, not from means or ratios that the file may also have. `benchmarks.check` compares all
documents with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import provenance, report
from benchmarks.aims.whose import COUNTED, counted
from benchmarks.capacity import report as capacity_report
from benchmarks.chaos import lenders_report, reads, recompute_report
from benchmarks.chaos.totals import added_up
from benchmarks.checkout import ROOT, code_digest
from benchmarks.decisions.dispatching import FLEET_PAIRS, fleet_name
from benchmarks.experiments import agreement, registry, truth
from benchmarks.experiments.base import Row, aimed
from benchmarks.hostile import report as hostile_report
from benchmarks.live import balance_report, scaling_report
from benchmarks.live import report as overhead_report
from benchmarks.live.composition_report import Block
from benchmarks.live.composition_report import rows as block_rows
from benchmarks.live.machine import overload
from benchmarks.live.stats import percentile
from benchmarks.live.streams import report as streams_report
from benchmarks.live.versus import LIMIT, ratio_of
from benchmarks.overload import report as overload_report
from benchmarks.peers import report as peers_report
from benchmarks.peers.gpu import report as gpu_report
from benchmarks.peers.real import report as real_report
from benchmarks.results_io import Stored, load
from benchmarks.runner import code_of
from benchmarks.seeds import spread
from benchmarks.transfer import report as transfer_report
from benchmarks.watching import cost_report, opened_report, page_report, traced_report, walk_report

RESULTS = ROOT / "benchmarks/results"
DOCUMENT = ROOT / "docs/results.md"
# A table of rows without figures of a paper is folded away if it has more rows than this.
FEW_ROWS = 30


@dataclass(frozen=True, slots=True)
class Section:
    """The section of one results file.

    `experiment` is the name of the experiment, or "" for a file that `python -m benchmarks run` did not write. `origin`
    is a text that names its command, commit, and seeds or machine. `commit` and `code` are those of its runs,
    and `since` says whether that code is still the present one (`provenance.since`). `overload` is the load of a
    machine that was overloaded before it measured (`benchmarks.live.machine`), else empty. `fitted` says what of the
    experiment was fitted on the figures that it is compared with (`registry.fitted`), or is empty. `stated` says
    whether an experiment's aims were stated before its runs (`stated_when`).
    """

    file: str
    experiment: str
    title: str
    rows: tuple[Row, ...]
    origin: str
    commit: str
    code: str
    since: str
    plots: tuple[str, ...] = ()
    overload: str = ""
    fitted: str = ""
    stated: str = ""

    @property
    def anchor(self) -> str:
        """The name of the section's anchor in docs/results.md."""
        return self.file.removesuffix(".json").replace("/", "-")


# ------------------------------------------------------------------------------------- rows of files without rows


def _waterfall(whole: Any) -> Iterator[Row]:
    for case in whole["cases"]:
        clients = f"bursts of {case['clients']}"
        yield Row(f"{clients}: TTFT p50", None, case["ttft_p50_ms"], "ms")
        yield Row(
            f"{clients}: TTFT p50 where each request is followed", None, case["ttft_p50_followed_ms"], "ms"
        )
        for row in case["hops"]:
            yield Row(f"{clients}: {row['name']}, {row['kind']}, mean", None, row["mean_ms"], "ms")


def _coldstart(whole: Any) -> Iterator[Row]:
    for start in whole["starts"]:
        yield Row("from the start to ready", None, start["ready_s"], "s")
        yield Row("then to the first token", None, 1e3 * start["first_answer_s"], "ms")
        yield Row("memory of all processes (PSS)", None, start["tree"]["total"]["pss_bytes"] / 2**30, "GiB")


_WAITS = {
    "wait_mean_s": "mean wait in the pool",
    "wait_p99_s": "p99 of the wait in the pool",
    "wait_longest_s": "longest wait in the pool",
    "ttft_mean_s": "mean TTFT",
    "ttft_p99_s": "p99 of TTFT",
}


def _balance(whole: Any) -> Iterator[Row]:
    # A file that was written before samples were kept has one sum for all rounds, and rows.
    rounds = whole.get("rounds", [whole])
    rows = whole.get("rows") or balance_report.table(
        whole["config"]["window_s"], balance_report.blocks_of(rounds)
    )
    base = rows[0]
    for row in rows:
        yield Row(f"{row['policy']}: imbalance", None, row["imbalance_tokens"], "tokens")
        if row is not base:
            ratio = base["imbalance_tokens"] / row["imbalance_tokens"]
            yield Row(f"{row['policy']}: imbalance of {base['policy']} over it", None, ratio, "x")
        yield Row(f"{row['policy']}: throughput", None, row["tok_s"], "tok/s")
        for key, what in _WAITS.items():
            if row.get(key) is not None:
                yield Row(f"{row['policy']}: {what}", None, row[key], "s")
        if "departures" in row:
            yield Row(f"{row['policy']}: forecast departures", None, row["departures"])
    yield Row("requests served", None, sum(one["served"] for one in rounds))
    yield Row("requests lost", None, sum(sum(one["lost"].values()) for one in rounds))
    yield Row("events that replay to another decision", None, sum(one["replay_differs"] for one in rounds))


def _composition(whole: Any) -> Iterator[Row]:
    live, simulated = ([Block(**block) for block in whole[side]] for side in ("live", "simulated"))
    for row in block_rows(live, simulated):
        load_ = "all loads" if row["load"] is None else f"load {row['load']:g}"
        if row["case"] == "NetKV":
            continue
        for figure, what in (("ttft_mean_s", "mean TTFT"), ("ttft_p95_s", "p95 of TTFT")):
            for side in ("live", "simulated"):
                ratio = row[f"{side}_{figure}_ratio"]
                name = f"{row['case']}, {load_}: {what} as a share of NetKV's, {side}"
                yield Row(name, None, ratio["mean"], "", ratio["half_width"])
    yield Row("requests sent", None, whole["sent"])
    yield Row("requests lost", None, len(whole["lost"]))


def _tiers(whole: Any) -> Iterator[Row]:
    for case in whole["config"]["cases"]:
        runs = [row for row in whole["rows"] if row["case"] == case["name"]]
        for key, what, unit, scale in (
            ("transfer_ms", "mean transfer", "ms", 1.0),
            ("ttft_ms", "mean TTFT", "ms", 1.0),
            ("near_share", "requests sent to the near rack", "%", 100.0),
        ):
            seen = spread([scale * run[key] for run in runs])
            yield Row(f"{case['name']}: {what}", None, seen.mean, unit, seen.half_width)


def _switching(whole: Any) -> Iterator[Row]:
    yield Row("policies switched under load", None, len(whole["rows"]))
    yield Row("answers", None, whole["served"])
    yield Row("requests lost", None, len(whole["lost"]))


def _chaos(whole: Any) -> Iterator[Row]:
    total = added_up(whole["runs"])
    yield Row("runs", None, total["runs"])
    yield Row("minutes", None, total["minutes"])
    yield Row("faults", None, total["faults"])
    yield Row("requests", None, total["requests"])
    yield Row("requests failed", None, sum(total["failed"].values()) + total["unended"])
    yield Row("wrong texts", None, sum(total["wrong"].values()))
    yield Row("runs that left something behind", None, len(total["leaks"]))
    orders = total["orders"]
    if orders is not None:
        yield Row("orders of an administrator", None, orders["number"])
        yield Row("orders reached before the next one", None, orders["reached"])
        yield Row("longest time to an order's acknowledgement", None, orders["acknowledged_longest_s"], "s")
    if total["loans"] is not None:
        for result, number in total["loans"].items():
            yield Row(f"loans of prefixes {result}", None, number)
    if total["counters"] is not None:
        for name, word in (("migrations", "migration"), ("retries", "retries")):
            yield Row(name, None, sum(count for key, count in total["counters"].items() if word in key))
    for kind, figures in total["kinds"].items():
        yield Row(f"{kind}: longest stall of {figures['number']}", None, figures["stall_longest_s"], "s")


DEARER = 10
"""Aim: by how many per cent a request of 64 engines may cost the dispatcher more than one of 2."""


def _decisions(whole: Any) -> Iterator[Row]:
    for row in whole["rows"]:
        for quantile in ("p50", "p99"):
            yield Row(f"{row['name']}: {quantile}", None, row[f"{quantile}_us"], "us", note=row["note"])
    cpu_us = {row["name"]: row["cpu_p50_us"] for row in whole["rows"]}
    for prefill, decode in FLEET_PAIRS:
        few, many = (cpu_us.get(fleet_name(prefill, decode, engines)) for engines in (2, 64))
        if few is not None and many is not None:
            dearer = 100.0 * (many / few - 1.0)
            name = f"CPU of a request, 64 engines against 2: {prefill} + {decode}"
            yield Row(name, None, dearer, "%", aim=f"at most {DEARER} %", met=dearer <= DEARER)


def _fuzz(whole: Any) -> Iterator[Row]:
    for name, part in whole["parts"].items():
        yield Row(f"{name}: cases", None, part["cases"])
        findings = len(part["findings"])
        yield Row(f"{name}: findings", None, findings, aim="none", met=findings == 0)
        yield Row(f"{name}: growth of the RSS", None, part["rss_last_mb"] - part["rss_first_mb"], "MB")


def _permits(whole: Any) -> Iterator[Row]:
    rows = {row["name"]: row for row in whole["rows"]}
    for name, row in rows.items():
        for quantile in ("p50", "p99"):
            us = row[f"{quantile}_us"]
            most_us = _most_us(name, quantile)
            aim = "" if most_us is None else f"at most {most_us:,.0f} us"
            yield Row(
                f"{name}: {quantile}", None, us, "us", aim=aim, met=None if most_us is None else us <= most_us
            )
    lone = "lone read of 500 ms, "
    whole_us = rows[f"{lone}unscheduled"]["p50_us"]
    for name, row in rows.items():
        if name.startswith(lone) and "agent" in name:
            longer = 100.0 * (row["p50_us"] / whole_us - 1.0)
            yield Row(
                f"{name}: longer than unscheduled", None, longer, "%", aim="at most 1 %", met=longer <= 1.0
            )

    for swept in whole["silences"]:
        machine = "all cores busy" if swept["busy"] else "machine as it is"
        name = f"agent silent for {1e3 * swept['silent_s']:g} ms, {machine}: reads without permits"
        yield Row(name, None, 100.0 * swept["unscheduled"] / swept["reads"], "%")


def _most_us(row: str, quantile: str) -> float | None:
    """Returns the aim for a row of the benchmark of permits in microseconds, None where there is none."""
    if row.startswith("read permitted"):
        return {"p50": 1_000.0, "p99": 5_000.0}[quantile]
    return 100.0 if row.startswith("chunk ends, mfs") and quantile == "p50" else None


def _same_cell(one: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return all(one[name] == row[name] for name in ("policy", "load", "lends"))


def _tight(name: str, cells: Sequence[Mapping[str, Any]], note: str) -> Iterator[Row]:
    """Yields the share of late requests and the P95 of transfers in the runs of one policy at one load."""
    requests = sum(one["requests"] for one in cells)
    took_ms = [value for one in cells for value in one["transfer_ms"]]
    if not took_ms:
        return
    late = 1.0 - sum(one["in_time"] for one in cells) / requests
    yield Row(f"{name}: tight requests late", None, 100.0 * late, "%", note=note)
    yield Row(f"{name}: tight transfers, P95", None, percentile(took_ms, 0.95), "ms", note=note)


def _mfs(whole: Any) -> Iterator[Row]:
    for aim in whole["aims"]:
        yield Row(aim["what"], None, aim["found"], aim=aim["bound"], met=aim["met"])
    for row in whole["rows"]:
        policy = row["policy"] if row["lends"] else f"{row['policy']}, stage 1 off"
        name, note = f"{policy}, {100 * row['load']:.0f} % of the link", row["invalid"] and "invalid"
        yield Row(f"{name}: requests in time", None, 100.0 * row["attainment"], "%", note=note)
        yield from _tight(
            name, [one["tight"] for one in whole.get("cells", ()) if _same_cell(one, row)], note
        )
        yield Row(f"{name}: tight transfers, P99", None, row["tight_transfer_p99"], "ms", note=note)
        yield Row(f"{name}: tight TTFT, P99", None, row["tight_ttft_p99"], "ms", note=note)
        yield Row(f"{name}: prefills, P99", None, row["prefill_p99"], "ms", note=note)
        if row["link_share"] is not None:
            yield Row(f"{name}: bandwidth used", None, 100.0 * row["link_share"], "%")
        if row["unscheduled"] is not None:
            yield Row(f"{name}: flows without permits", None, 100.0 * row["unscheduled"], "%")
        yield Row(f"{name}: requests failed", None, row["failures"])
    for kind, seconds in whole.get("lone", {}).get("prefill_s", {}).items():
        yield Row(f"{kind}, alone: prefill of a cached prompt", None, 1e3 * seconds, "ms")
        yield Row(f"{kind}, alone: transfer", None, 1e3 * whole["lone"]["transfer_s"][kind], "ms")
        yield Row(
            f"{kind}, alone: from KV to first token", None, 1e3 * whole["lone"]["after_kv_s"][kind], "ms"
        )


def _predictors(whole: Any) -> Iterator[Row]:
    for name, trace in whole["traces"].items():
        survival, learned = (trace["evaluations"][which]["overall"] for which in ("survival", "lightgbm"))
        brier = learned["brier"] / survival["brier"] - 1.0
        yield Row(f"{name}: Brier, LightGBM against survival", None, 100.0 * brier, "%")
        error = learned["conditional_mae_tokens"] / survival["conditional_mae_tokens"] - 1.0
        yield Row(f"{name}: conditional MAE, LightGBM against survival", None, 100.0 * error, "%")
        yield Row(f"{name}: ECE of LightGBM", None, learned["ece"])
        if trace["signal"] is not None:
            yield Row(f"{name}: p of the permutation test", None, trace["signal"]["p_value"])


def _dtype(whole: Any) -> Iterator[Row]:
    has = ", ".join(whole["bf16_instructions"]) or "no"
    for measure, seconds in whole["seconds"].items():
        ratio = ratio_of("", measure, seconds["bfloat16"], seconds["float32"])
        name, half_width = f"{measure.rpartition(',')[0]}: float32 / bfloat16", (ratio.high - ratio.low) / 2
        yield Row(name, None, ratio.ratio, half_width=half_width, note=f"{has} instructions for bfloat16")


def _versus(whole: Any) -> Iterator[Row]:
    for one in whole["ratios"]:
        name, half = (
            f"{one['row']}, {one['measure']}: {whole['ours']} / {whole['base']}",
            one["high"] - one["low"],
        )
        yield aimed(Row(name, None, one["ratio"], half_width=half / 2), f"at most {LIMIT:g}", most=LIMIT)


def _validation(whole: Any) -> Iterator[Row]:
    aims = agreement.AIMS_PERCENT[whole["setup"]["kind"]]
    for case in whole["cases"]:
        policies = "/".join(case["policies"])
        for line in agreement.lines_of(case):
            name = f"{policies}: {line.measure.upper()} p{100 * line.quantile:.0f}"
            yield Row(f"{name}, live", None, line.live_ms, "ms")
            yield Row(f"{name}, simulated", None, line.simulated_ms, "ms")
            row = Row(f"{name}, simulated against live", None, line.error_percent, "%")
            within = aims.get(line.measure)
            if within is not None:
                row = aimed(row, f"within {within:g} %", least=-within, most=within)
            yield row


Reader = Callable[[Any], Iterator[Row]]


@dataclass(frozen=True, slots=True)
class Other:
    """A results file that `python -m benchmarks run` did not write.

    `command` is the command that writes it, and `read` makes its rows from what was measured. `drawn` says that a plot
    of the same name lies beside it.
    """

    title: str
    command: str
    read: Reader
    drawn: bool = False


OTHERS: dict[str, Other] = {
    "experiments/validate_live/sim.json": Other(
        "Simulator against a live app on sim engines",
        "python -m benchmarks.experiments.validate_live",
        _validation,
        drawn=True,
    ),
    "experiments/validate_live/vllm.json": Other(
        "Simulator against a live app on vLLM's CPU engines",
        "python -m benchmarks.experiments.validate_live --engines vllm",
        _validation,
        drawn=True,
    ),
    "experiments/truth/sim.json": Other(
        "Simulator against a live app on sim engines, by load and policy",
        "python -m benchmarks.experiments.truth",
        truth.rows,
    ),
    "experiments/truth/vllm.json": Other(
        "Simulator against a live app on vLLM's CPU engines, by load",
        "python -m benchmarks.experiments.truth --engines vllm",
        truth.rows,
    ),
    "predictors/results.json": Other(
        "Predictors of answer length, on the last fifth of each trace",
        "python -m benchmarks.predictors --traces DIR",
        _predictors,
    ),
    "decisions/decisions.json": Other("Time of a decision", "python -m benchmarks.decisions", _decisions),
    "permits/permits.json": Other("Time of a permit for a KV read", "python -m benchmarks.permits", _permits),
    "hostile/hostile.json": Other(
        "The streams of others beside hostile clients, sim engines without Ray",
        "python -m benchmarks.hostile",
        hostile_report.rows,
    ),
    "fuzz/fuzz.json": Other(
        "Hostile input by a seed: cases and findings of the fuzzer", "python -m tests.fuzz", _fuzz
    ),
    "overload/sim.json": Other(
        "Overload by several tenants beside vllm-router, sim engines and ticking sources, in one run",
        "python -m benchmarks.overload",
        overload_report.rows,
        drawn=True,
    ),
    "overload/vllm.json": Other(
        "Overload by several tenants beside vLLM's own server, vLLM's CPU engine, in one run",
        "python -m benchmarks.overload --setup vllm",
        overload_report.rows,
        drawn=True,
    ),
    "mfs/link.json": Other(
        "KV reads by deadline on a real link, vLLM's CPU engines (MFS)",
        "python -m benchmarks.mfs",
        _mfs,
        drawn=True,
    ),
    "mfs/link-130.json": Other(
        "The same with fewer requests, on older code and a machine whose cores are twice as fast",
        "python -m benchmarks.mfs --requests 130",
        _mfs,
        drawn=True,
    ),
    "mfs/sim.json": Other(
        "KV flows of all stages by deadline, 16 sim engines with one hot sender (MFS)",
        "python -m benchmarks.mfs --setup sim",
        _mfs,
        drawn=True,
    ),
    "transfer/transfer.json": Other(
        "KV reads by the order of their blocks, as the pools grow old (FlowKV)",
        "python -m benchmarks.transfer",
        transfer_report.figures,
    ),
    "overhead/overhead-sim.json": Other(
        "What Sluice adds to an engine: sim engines",
        "python -m benchmarks.live.overhead --only sim",
        overhead_report.rows,
        drawn=True,
    ),
    "overhead/overhead-vllm.json": Other(
        "What Sluice adds to an engine: vLLM's CPU engines (few requests)",
        "python -m benchmarks.live.overhead --only vllm --quick",
        overhead_report.rows,
        drawn=True,
    ),
    "overhead/waterfall.json": Other(
        "Where the time to the first token goes in bursts, hop by hop: sim engines",
        "python -m benchmarks.live.waterfall",
        _waterfall,
        drawn=True,
    ),
    "streams/streams.json": Other(
        "Many streams at once, sim engines without Ray: memory, CPU and gaps",
        "python -m benchmarks.live.streams",
        streams_report.rows,
    ),
    "capacity/capacity.json": Other(
        "What one router carries: requests/s by ingress processes and engines, sim engines without Ray",
        "python -m benchmarks.capacity",
        capacity_report.rows,
        drawn=True,
    ),
    "overhead/coldstart-sim.json": Other(
        "Cold start, sim engines",
        "python -m benchmarks.live.coldstart --config deploy/sim.yaml",
        _coldstart,
    ),
    "overhead/coldstart-cpu.json": Other(
        "Cold start, one vLLM engine to prefill and one to decode",
        "python -m benchmarks.live.coldstart",
        _coldstart,
    ),
    "versus/versus.json": Other(
        "What reliability, exact policies, flows and scaling cost a request: this code against that before all of them",
        "python -m benchmarks.live.versus --base ../base --only serve",
        _versus,
    ),
    "peers/peers.json": Other(
        "Sluice beside vllm-router on engines that tick alike, in one run",
        "python -m benchmarks.peers",
        peers_report.rows,
        drawn=True,
    ),
    "peers/real.json": Other(
        "Sluice on real engines, in one run: beside vllm-router and Ray Serve LLM with one engine to prefill and one to"
        " decode, and beside vLLM's own server and an idle Ray with one engine",
        "python -m benchmarks.peers.real",
        real_report.rows,
        drawn=True,
    ),
    "peers/gpu.json": Other(
        "Sluice beside vLLM's own server and vllm-router on one GPU, the shape of an 8B model with dummy weights",
        "python -m benchmarks.peers.gpu",
        gpu_report.rows,
    ),
    "watching/cost.json": Other(
        "What it costs to watch: a dashboard, three readers of it, and traces; sim engines",
        "python -m benchmarks.watching.cost",
        cost_report.rows,
        drawn=True,
    ),
    "watching/traced.json": Other(
        "Traces while engines are killed: spans against tasks, times against the whole; sim engines",
        "python -m benchmarks.watching.traced",
        traced_report.rows,
        drawn=True,
    ),
    "watching/opened.json": Other(
        "A page of the dashboard, open for half an hour: heap and main thread",
        "python -m benchmarks.watching.opened",
        opened_report.rows,
        drawn=True,
    ),
    "watching/walk.json": Other(
        "A walk through the dashboard of 16 busy sim engines in a browser: views, experiments, a what-if",
        "python -m benchmarks.watching.walk",
        walk_report.rows,
    ),
    "watching/page.json": Other(
        "The dashboard's page beside 1,024 engines: main thread of an update by view, and heap",
        "python -m tests.dashboard.cost",
        page_report.rows,
    ),
    "dtype/dtype.json": Other(
        "What float32 costs against bfloat16 on a CPU",
        "python -m benchmarks.live.dtype",
        _dtype,
    ),
    "switching/switching-sim.json": Other(
        "Every policy switched under load, sim engines",
        "python -m benchmarks.live.switching",
        _switching,
    ),
    "switching/switching-vllm.json": Other(
        "Every policy switched under load, vLLM's CPU engines",
        "python -m benchmarks.live.switching --engines vllm",
        _switching,
    ),
    "chaos/sim.json": Other(
        "Faults under load, sim engines", "python -m benchmarks.chaos", _chaos, drawn=True
    ),
    "chaos/sim-bare.json": Other(
        "Faults under load, sim engines without Ray", "python -m benchmarks.chaos --bare", _chaos, drawn=True
    ),
    "chaos/sim-bare-flow.json": Other(
        "Faults under load, sim engines without Ray, reads by permit",
        "python -m benchmarks.chaos --bare --flow",
        _chaos,
        drawn=True,
    ),
    "chaos/sim-bare-flow-lend.json": Other(
        "Faults under load, sim engines without Ray that lend prefixes, reads by permit",
        "python -m benchmarks.chaos --bare --flow --lend",
        _chaos,
        drawn=True,
    ),
    "chaos/sim-gcs.json": Other(
        "Faults under load, sim engines on a Ray with Redis, whose control process fails as well",
        "python -m benchmarks.chaos --gcs",
        _chaos,
        drawn=True,
    ),
    "chaos/sim-scaling.json": Other(
        "Faults under load while an autoscaler changes the fleet, sim engines",
        "python -m benchmarks.chaos --scaling",
        _chaos,
        drawn=True,
    ),
    "chaos/vllm.json": Other(
        "Faults under load, vLLM's CPU engines",
        "python -m benchmarks.chaos --engines vllm",
        _chaos,
        drawn=True,
    ),
    "chaos/vllm-flow.json": Other(
        "Faults under load, vLLM's CPU engines, reads by permit",
        "python -m benchmarks.chaos --engines vllm --flow",
        _chaos,
        drawn=True,
    ),
    "chaos/sim-soak.json": Other(
        "An hour with a fault a minute, sim engines",
        "python -m benchmarks.chaos --soak",
        _chaos,
        drawn=True,
    ),
    "reads/reads.json": Other(
        "Faults of single reads of KV between two hosts, vLLM's CPU engines",
        "python -m benchmarks.chaos.reads",
        reads.rows,
    ),
    "reads/lenders.json": Other(
        "Faults of the lender of a prefix while it is read, vLLM's CPU engines",
        "python -m benchmarks.chaos.lenders",
        lenders_report.rows,
    ),
    "recompute/recompute.json": Other(
        "The pause of a stream after its decode engine was killed, by the tokens computed again, vLLM's CPU engines",
        "python -m benchmarks.chaos.recompute",
        recompute_report.rows,
        drawn=True,
    ),
    "balance/balance.json": Other(
        "Imbalance live: 16 decode sim engines near saturation",
        "python -m benchmarks.live.balance",
        _balance,
        drawn=True,
    ),
    "balance/waits.json": Other(
        "Imbalance and waits live, with a pool that waits for a minute: 8 decode sim engines",
        "python -m benchmarks.live.balance --setup waits",
        _balance,
        drawn=True,
    ),
    "balance/waits-vllm.json": Other(
        "Imbalance and waits live, with a pool that waits for a minute: 2 decode engines of vLLM",
        "python -m benchmarks.live.balance --setup waits-vllm",
        _balance,
        drawn=True,
    ),
    "netkv_tiers/netkv_tiers.json": Other(
        "KV transfers live on two network tiers, one four times slower",
        "python -m benchmarks.live.netkv_tiers",
        _tiers,
    ),
    "composition/composition.json": Other(
        "The composition live, beside the simulator on the same requests",
        "python -m benchmarks.live.composition",
        _composition,
        drawn=True,
    ),
    "scaling_live/scaling.json": Other(
        "A live fleet that grows, drains and switches: sim engines",
        "python -m benchmarks.live.scaling",
        scaling_report.scaling_rows,
    ),
    "scaling_live/steps.json": Other(
        "Starts, activations, switches and drains live: vLLM's CPU engines",
        "python -m benchmarks.live.scaling_steps",
        scaling_report.steps_rows,
        drawn=True,
    ),
}
"""The results files that `python -m benchmarks run` did not write, in the document's order."""


def expected() -> list[str]:
    """Returns the results files that there should be, relative to the folder of results."""
    return [*(f"experiments/{registry.place(name)}" for name in registry.EXPERIMENTS), *OTHERS]


# ------------------------------------------------------------------------------------------------------ the document


def sections(results: Path = RESULTS) -> list[Section]:
    """Returns the document's sections: experiments in the registry's order, then the other files that exist."""
    places = [results / "experiments" / registry.place(name) for name in registry.EXPERIMENTS]
    found = [_of_experiment(results, path) for path in places if path.exists()]
    found += [_of_other(results, file) for file in OTHERS if (results / file).exists()]
    return found


def section(results: Path, file: str) -> Section:
    """Returns the section of the results file `file`. Raises ExperimentError for a file that has no results."""
    if file in OTHERS and (results / file).exists():
        return _of_other(results, file)
    return _of_experiment(results, results / file)


def _of_experiment(results: Path, path: Path) -> Section:
    stored = load(path)
    file = path.relative_to(results)
    plots = tuple((file.parent / stored.results.experiment / plot).as_posix() for plot in stored.plots)
    origins = provenance.of_experiment(stored)
    made_by = provenance.shown(origins) or f"commit {stored.commit}"
    present = code_of(registry.load(stored.results.experiment)) if origins else ""
    origin = f"`{stored.command}`, {stored.date}, {_seeds(stored.results.seeds)}; {made_by}"
    when = stated_when(stored)
    origin += f"; {when}" if when else ""
    summary = ". ".join([stored.summary, *report.stand_ins(stored.results)])
    commit, code = provenance.commits(origins) or stored.commit, provenance.codes(origins)
    since = provenance.since(file.as_posix(), origins, present, stored.verified)
    name = stored.results.experiment
    fitted = registry.fitted(name) or ""
    return Section(
        file.as_posix(), name, summary, stored.rows, origin, commit, code, since, plots, "", fitted, when
    )


BEFORE, AFTER = "stated before the runs", "in no file before the runs"


def stated_when(stored: Stored) -> str:
    """Returns in words whether the aims of an experiment were stated in a file before its runs; "" without aims."""
    if not any(row.aim for row in stored.rows):
        return ""
    return f"aims {BEFORE} ({stored.aims})" if stored.aims else f"aims {AFTER}"


def _seeds(seeds: Sequence[int]) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _of_other(results: Path, file: str) -> Section:
    other = OTHERS[file]
    whole = json.loads((results / file).read_text("utf-8"))
    origins, paths = provenance.of_other(whole), provenance.paths_of_other(whole)
    where = provenance.shown(origins) or _unknown_code(whole)
    present = code_digest(paths) if origins and paths is not None else ""
    plot = Path(file).with_suffix(".png")
    plots = (plot.as_posix(),) if (results / plot).exists() else ()
    ran = " and ".join(f"`{command}`" for command in provenance.commands(whole) or [other.command])
    commit = provenance.commits(origins) or _unknown_commit(whole)
    return Section(
        file,
        "",
        other.title,
        tuple(other.read(whole)),
        f"{ran}; {where}",
        commit,
        provenance.codes(origins),
        provenance.since(file, origins, present),
        plots,
        overload(whole) or "",
    )


def _unknown_commit(whole: Any) -> str:
    machine = whole.get("machine", "")
    return str(whole.get("commit") or (machine["commit"] if isinstance(machine, dict) else ""))


def _unknown_code(whole: Any) -> str:
    """Returns the machine and the commit of a file that does not know which code ran."""
    machine = whole.get("machine", "")
    if isinstance(machine, dict):
        machine = f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}"
    return f"{machine}, commit {whole['commit']}" if "commit" in whole else str(machine)


def document(results: Path = RESULTS) -> str:
    """Returns the text of docs/results.md."""
    shown = sections(results)
    parts = [f"{_HEAD}\n\n{_stated(shown)}", _contents(shown)]
    for one in shown:
        source = f"[{one.file}](../benchmarks/results/{one.file}): {one.origin}."
        parts.append(f'<a id="{one.anchor}"></a>\n\n## {one.title}\n\n{source}')
        if one.fitted:
            parts.append(f"**Fitted on figures that stand beside it:** {one.fitted}.")
        papers = [row for row in one.rows if row.paper is not None]
        ours = [row for row in one.rows if row.paper is None]
        if papers:
            parts.append(_table(report.HEADER, papers, one.experiment))
        if ours:
            header = ("figure", f"ours, {one.overload}" if one.overload else "ours", "aim")
            table = _table(header, ours, one.experiment)
            summary = f"<summary>{len(ours)} figures that no paper prints</summary>"
            folded = papers or len(ours) > FEW_ROWS
            parts.append(f"<details>{summary}\n\n{table}\n\n</details>" if folded else table)
        parts += [f"![{Path(plot).stem}](../benchmarks/results/{plot})" for plot in one.plots]
    return "\n\n".join(parts) + "\n"


def _stated(shown: Sequence[Section]) -> str:
    """Returns the sentence that counts the results of experiments whose aims were stated before their runs."""
    with_aims = [one for one in shown if one.stated]
    before = sum(BEFORE in one.stated for one in with_aims)
    return (
        "*aims stated*: whether a file with the aims (`benchmarks/aims/stated`) was in the commit of the runs, whose"
        f" digest is in the results. Of {len(with_aims)} results of `run` with aims, {before} had them stated before"
        f" their runs. The aims of the other {len(with_aims) - before} stood in the experiment's code only, or were"
        " written to the file later, so nothing shows that they are older than the results."
    )


def _contents(shown: Sequence[Section]) -> str:
    """Returns the table of all results files with the code that made them."""
    header = (
        *("results", *(owner.value for owner in COUNTED), "aims stated"),
        *("commit", "code", "code since", "overload"),
    )
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for one in shown:
        told = counted(one.experiment, one.rows)
        when = "" if not one.stated else "before" if BEFORE in one.stated else "in no file"
        cells = (*(told[owner] for owner in COUNTED), when, one.commit, one.code, one.since, one.overload)
        lines.append(f"| [{one.title}](#{one.anchor}) | {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Row], experiment: str) -> str:
    """Returns a table in Markdown. `header` ends with the column of aims, which is left out where no row has one."""
    judged = any(row.aim for row in rows)
    header = header if judged else header[:-1]
    right = len(header) - 1 - judged
    lines = ["| " + " | ".join(header) + " |", "|---" + "|--:" * right + "|---" * judged + "|"]
    for row in rows:
        name, paper, ours, difference, aim = report.cells(row, experiment)
        shown = f"{name} ({row.note})" if row.note else name
        cells = (shown, paper, ours, difference) if right == 3 else (shown, ours)
        cells = (*cells, aim) if judged else cells
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


_HEAD = """# Results

`python -m benchmarks document` writes this page from the files in `benchmarks/results`; `python -m benchmarks check`
compares them. *paper*: as the paper prints it; *ours*: mean over the seeds, with half of its 95 % interval;
*difference*: ours against the paper's, in per cent of it, or in points where the unit is a percentage; *aim*: what was
aimed at, and whether it is *met* or *missed* (the whole interval says so; where there is none, the figure) or *open*
(the interval holds a bound, or it was not judged). A paper's aim is a figure that the paper prints, or in a few rows
what it says in words; where a rule or constants of ours are held against a paper's figure, that is counted apart, and
so are our own aims (`benchmarks/aims/whose.py`). A paper's figure and a measurement count together once, and what
cannot fail is not counted: [which rows, and why](not_reproduced.md#aims-that-are-not-counted).
[What could not be reproduced](not_reproduced.md) has the papers' aims that are missed or open, with their causes. What
an experiment had to assume, where a figure differs and why, is in its module's docstring (`benchmarks/experiments`).
Workloads named `synthetic`, and excerpts of a trace, are not the trace. Figures of different machines are not compared.
*code*: the digest of the code that made the runs; a file without one was written before runs kept it. *code since*:
whether that code is the *same* today or has *changed*, in which case the figures are of the named commit; behind it,
how many runs of a drawn sample were equal when later code computed them again (`python -m benchmarks verify`).
*hot path*: whether the modules that can be compiled ran *compiled* or as *pure Python* in a live measurement; a file
that does not say so was written before runs kept it.
*overload*: programs that ran or waited on the cores of the machine in the minute before a live measurement, where they
were more than the cores. Times and rates of such a file are those of a machine that other programs used too."""
