"""Decode policies on a request trace that a user names: `python -m benchmarks trace FILE`.

The file has one of the published formats (`predictors.traces`, `predictors.servegen`,
`benchmarks.workloads.azure2024`), and its content says which. Each seed is one window of it. The windows do not overlap
and are spread over the whole file. The times of a window are divided by one factor, so that all windows have the same
mean rate and keep their bursts. That rate is `load` times what the tightest resource of the cluster carries at the
file's mean lengths, without regard to prefix hits (`composition_cluster.carried_per_s`). The first `WARMUP_SHARE` of a
window is not measured. Every policy gets the same windows, so differences are paired.

The cluster is that of `composition`: NetKV's fat tree of 64 GPUs with Llama-3-70B engines, 4 for prefill and 12 for
decode, without a barrier. `POLICIES` have the parameters of `composition_tuning`, and no forecasts, because most
traces do not name their clients. Nothing is fitted to the file.

Not claimed: that a policy which is best here is so on another cluster or at another load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.experiments import composition
from benchmarks.experiments import composition_cluster as cluster
from benchmarks.experiments.base import Config, ExperimentError, Metrics, Results, Variant
from benchmarks.report import number
from benchmarks.sim.cluster import simulate
from benchmarks.sim.metrics import summarise
from benchmarks.whatif.table import text_table
from benchmarks.workloads import transform
from benchmarks.workloads.catalog import digest_of, is_sampled, read_file
from benchmarks.workloads.prefixes import ideal_hit_share
from benchmarks.workloads.record import WorkloadError, WorkloadRequest

Policy = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""Name and parameters of a decode policy, and limits of the dispatcher."""


def _from_composition(name: str) -> Policy:
    policy, params, _ = composition.POLICIES[name]
    return policy, params, composition.LIMITS.get(name, {})


BASE = "cache+load-aware"
POLICIES: Mapping[str, Policy] = {
    BASE: _from_composition("CLA"),
    "round robin": ("round_robin", {}, {}),
    "shortest queue": _from_composition("JSQ"),
    "NetKV, the paper's": _from_composition("NetKV, the paper's"),
    "NetKV Topo-Only": _from_composition("NetKV"),
    "NetKV fleet": ("netkv", {**cluster.STEP, "contention": "fleet"}, {}),
    "composition": _from_composition("composition, no forecasts"),
}
SLOTS = 32  # ASSUMPTION: as in `defaults`
WARMUP_SHARE = 0.2  # ASSUMPTION
LEAST_REQUESTS = 10
"""ASSUMPTION: fewest requests of a window."""
MOST_REQUESTS = 100_000
"""Most requests of all windows together; a bound on memory and time."""
SAMPLED = 2
"""Requests that are sampled for each one that runs, because a sampler gives only about as many as it should."""
DEFAULT_REQUESTS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A column of the table: a metric, shown times `scale` in `unit`."""

    label: str
    metric: str
    scale: float
    unit: str


FIGURES = (
    Figure("TTFT mean", "ttft_mean_s", 1e3, "ms"),
    Figure("TTFT p99", "ttft_p99_s", 1e3, "ms"),
    Figure("TPOT mean", "tpot_mean_s", 1e3, "ms"),
    Figure("goodput", "goodput_per_s", 1.0, "req/s"),
)
COUNTS = ("rejected", "unfinished")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of the command. `requests` is the length of each of the `seeds` windows; None takes
    `DEFAULT_REQUESTS`, or fewer where the file is short. With `skip_unusable`, rows that no engine can serve are left
    out.
    """

    requests: int | None = None
    seeds: int = 5
    load: float = 0.7
    ttft_slo_s: float = 5.0  # NetKV VI-A, for RAG
    tpot_slo_s: float = 0.1  # ASSUMPTION
    skip_unusable: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("requests", self.requests, LEAST_REQUESTS), ("seeds", self.seeds, 1)):
            if value is not None and value < least:
                raise ExperimentError(f"--{name} {value}: give at least {least}")
        if (self.requests or 1) * self.seeds > MOST_REQUESTS:
            raise ExperimentError(
                f"--requests times --seeds is above {MOST_REQUESTS:,}: give fewer requests or seeds"
            )
        for name, seconds in (
            ("load", self.load),
            ("ttft-slo", self.ttft_slo_s),
            ("tpot-slo", self.tpot_slo_s),
        ):
            if not 0 < seconds < float("inf"):
                raise ExperimentError(f"--{name} {seconds:g}: give a number above 0")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The variants to run, and what the head of the table says of the file and of the runs."""

    variants: Sequence[Variant]
    seeds: range
    head: Sequence[str]


def plan(path: Path, options: Options) -> Plan:
    """Reads the file and returns what to run on it. Raises WorkloadError or TraceError for a file that cannot be used,
    and ExperimentError for options that do not fit it.
    """
    most = SAMPLED * options.seeds * (options.requests or DEFAULT_REQUESTS)
    rows = _rows(str(path), most, options.skip_unusable)
    share = len(rows) // options.seeds
    count = min(DEFAULT_REQUESTS, share) if options.requests is None else options.requests
    if count > share or count < LEAST_REQUESTS:
        raise ExperimentError(
            f"{path} has {len(rows):,} requests: {options.seeds} windows of {max(count, LEAST_REQUESTS):,} do not fit;"
            f" give fewer --requests (at least {LEAST_REQUESTS}) or fewer --seeds, or a longer file"
        )
    prompt = sum(r.prompt_tokens for r in rows) / len(rows)
    output = sum(r.output_tokens for r in rows) / len(rows)
    rate_per_s = options.load * carried_per_s(prompt, output)
    span_s = (count - 1) / rate_per_s
    run = {
        "file": str(path),
        "content": digest_of(path) if path.is_file() else str(path),
        "most": most,
        "skip_unusable": options.skip_unusable,
        "requests": count,
        "windows": options.seeds,
        "rate_per_s": rate_per_s,
        "ttft_slo_s": options.ttft_slo_s,
        "tpot_slo_s": options.tpot_slo_s,
        **_CLUSTER,
        "warmup_s": WARMUP_SHARE * span_s,
        # the last request comes at `span_s`, and the window's end does not belong to it
        "measure_s": (1.0 - WARMUP_SHARE) * span_s * (1.0 + 1e-6),
    }
    for k in range(options.seeds):
        window(run, k)
    shared = ideal_hit_share(rows)
    head = (
        f"{path.name}: {len(rows):,} requests{' sampled' if is_sampled(path) else ''}, {prompt:,.0f} prompt and "
        f"{output:,.0f} output tokens in the mean, "
        + (f"{100 * shared:.1f} % of the prompt tokens shared" if shared else "no shared prefixes known"),
        f"{options.seeds} windows of {count:,} requests at {rate_per_s:.3g}/s, {options.load:g} of what the simulated "
        f"cluster carries; objectives TTFT {options.ttft_slo_s:g} s and TPOT {options.tpot_slo_s:g} s",
    )
    return Plan(
        [
            Variant(name, {**run, "policy": policy, "params": dict(params), **limits})
            for name, (policy, params, limits) in POLICIES.items()
        ],
        range(options.seeds),
        head,
    )


_CLUSTER: Mapping[str, Any] = {"gpus": 64, "oversubscription": 4.0, "barrier": False, "slots": SLOTS}


def carried_per_s(prompt_tokens: float, output_tokens: float) -> float:
    """Returns the requests of these mean lengths that the cluster carries per second; KV may allow fewer than `SLOTS`
    sequences at once.
    """
    slots = max(1, min(SLOTS, int(cluster.KV_TOKENS / (prompt_tokens + output_tokens))))
    config = {**_CLUSTER, "slots": slots}
    return cluster.carried_per_s(config, round(prompt_tokens) or 1, output_tokens, output_tokens)


@lru_cache(maxsize=2)
def _rows(file: str, most: int, skip_unusable: bool) -> tuple[WorkloadRequest, ...]:
    """Returns the requests of the file that an engine can serve; about `most` where they are sampled."""
    found = read_file(Path(file), most, seed=0, drop_empty=skip_unusable)
    too_long = [r for r in found if r.prompt_tokens + r.output_tokens > cluster.KV_TOKENS]
    if too_long and not skip_unusable:
        one = too_long[0]
        raise WorkloadError(
            f"{Path(file).parent / one.request_id}: {one.prompt_tokens:,} prompt and {one.output_tokens:,} output"
            f" tokens need more KV than the {cluster.KV_TOKENS:,} tokens of a simulated engine; --skip-unusable leaves"
            " such rows out"
        )
    return tuple(r for r in found if r.prompt_tokens + r.output_tokens <= cluster.KV_TOKENS)


def window(config: Config, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of one window at the rate of the runs, in order of time."""
    rows = _rows(config["file"], config["most"], config["skip_unusable"])
    start = seed * (len(rows) // config["windows"])
    made = transform.rebase(rows[start : start + config["requests"]])
    try:
        made = transform.at_rate(made, config["rate_per_s"])
    except WorkloadError as error:
        raise WorkloadError(
            f"{config['file']}: the window from {made[0].request_id} on: {error}; give more --requests"
        ) from error
    return list(transform.with_class(made, "standard", config["ttft_slo_s"], config["tpot_slo_s"]))


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates one window under one policy; `benchmarks.runner` calls this in its worker processes."""
    made = dataclasses.replace(
        cluster.sim_config(config, seed), learn_contention="contention" in config["params"]
    )
    found = summarise(simulate(made, window(config, seed)))
    return {name: found.get(name) for name in (*(figure.metric for figure in FIGURES), *COUNTS)}


def run(planned: Plan, jobs: int) -> Results:
    """Runs every policy on every window. Raises RunsFailedError where some run fails."""
    runs: dict[str, dict[int, dict[str, float | None]]] = {v.name: {} for v in planned.variants}
    todo = [(variant, seed) for seed in planned.seeds for variant in planned.variants]

    def finish(job: runner.Job, outcome: runner.Outcome) -> None:
        runs[job[0].name][job[1]] = outcome[0]

    # the runner's processes import this module by its name
    from benchmarks import own_trace

    runner.run_all("trace", own_trace, todo, jobs, finish)
    return Results("trace", False, {v.name: v.config for v in planned.variants}, runs)


def table(results: Results) -> str:
    """Returns the comparison as text: means over the windows, and in brackets the difference from `BASE` in per cent
    with half of its 95 % interval, window by window.
    """
    header = ("policy", *(f"{figure.label}, {figure.unit}" for figure in FIGURES), "not served")
    lines = [
        (name, *(_cell(results, name, figure) for figure in FIGURES), _not_served(results, name))
        for name in results.runs
    ]
    return text_table(header, lines)


def _cell(results: Results, name: str, figure: Figure) -> str:
    if not (results.measured(name, figure.metric) and results.measured(BASE, figure.metric)):
        return "–"
    mean = number(figure.scale * results.mean(name, figure.metric))
    if name == BASE or 0.0 in results.values(BASE, figure.metric):
        return mean
    below, half = results.reduction_percent(BASE, name, figure.metric)
    # a difference that rounds to 0 has no sign of its own
    return f"{mean} ({round(-below, 1) + 0.0:+.1f}{'' if half is None else f' ± {half:.1f}'} %)"


def _not_served(results: Results, name: str) -> str:
    return f"{sum(sum(results.values(name, count, missing=0.0)) for count in COUNTS):.0f}"
