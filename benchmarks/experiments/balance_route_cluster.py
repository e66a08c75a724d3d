"""The simulated cluster of BalanceRoute (section 6.1), which its experiments share.

G decode workers end every step together (`barrier`), and each has at most `slots` sequences. Prefill is no bottleneck:
it is one engine with very short times, whose KV memory limits how much waits between prefill and decode. This memory is
the prompt pool. As in 6.1 the system is near saturation: after a first rush that fills slots and pool, requests come
somewhat faster than a perfectly balanced group could serve (`OVERLOAD`), so the pool never becomes empty. Requests that
do not fit wait before prefill, first come, first served. So arrivals limit no policy's rate, and throughput shows how
long steps last.

BR-0 and BR-H decide from the pool. The baselines are the vLLM router's policies: they send a request on at once when
its prefill ends. It then queues at its engine, and its KV counts against the same memory.

Policies, reducer, dispatcher and forecasts are the live router's own. Predictors are fitted on the earlier part of a
trace (the first 80 % by time, for ServeGen of another draw of the day) and judged on the rest. A router that has run
before has warm features, so the features are replayed over the training part.

Not claimed: the paper's absolute throughput. The paper does not print its step time; the profiles derive it from
Table 1 (`profiles/balanceroute_deepseek_v3_910c_throughput.yaml` from the throughput column, the other file from TPOT
P95). While slots are full, the sequence of decisions hardly depends on how long a step lasts, so one run gives both
results (`throughput_by_tpot_tok_s`). `throughput_same_load_tok_s` is the throughput of the slots that ran if the mean
load were that of the whole trace, and the heaviest worker were as far above the mean as it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from benchmarks.experiments.base import Config, Metrics
from benchmarks.sim import profiles
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import ControlPlane, EngineSpec, Forecasting, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.sim.records import RunResult
from benchmarks.workloads import transform
from benchmarks.workloads.catalog import WorkloadSpec, build, outcomes_of
from benchmarks.workloads.record import WorkloadRequest
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TimingProfile
from policies.state.views import Role
from predictors.features import replay
from predictors.forecast import ForecastConfig
from predictors.lgbm import LgbmPredictor
from predictors.lgbm_fit import LgbmConfig, fit_lgbm
from predictors.memorise import CLIENT, EXACT_MATCH, Memorised
from predictors.oracle import Oracle
from predictors.protocol import Outcome, Predictor
from predictors.survival import EmpiricalSurvival

PROFILE = "balanceroute_deepseek_v3_910c_throughput"
PROFILE_BY_TPOT = "balanceroute_deepseek_v3_910c"
# The rate of arrivals, as a multiple of the rate that a perfectly balanced group serves.
OVERLOAD = 1.15
# The seed of the sample on which predictors are fitted; runs use seeds from 0.
TRAIN_SEED = 1_000
# The number of outcomes from which the features learn before the run.
WARM_REQUESTS = 8_000
# Seconds between the first arrivals, so that each finds a free slot and there is no choice among several.
RUSH_S = 0.1
BLOCK_TOKENS = 256

# Our aim in place of the paper's: the mean of all workers, for the whole pool.
AIM: dict[str, Any] = {
    "pool_wide": True,
    "beta": 3.0,
    "pool_lag": 1.0,
    "center": 1.0,
    "refill": True,
    "gamma": 0.7,
}
# BR-H's parameters that differ from its defaults, because the pool holds minutes of work and leases do not end. They
# are those of least imbalance on the training part, seeds from 100 (the first pass of `balance_route_tuning`).
OURS: dict[str, Any] = {"ageing_s": 2_400.0, **AIM}
# The parameters of the papers' own BR-0 and BR-H that are not their defaults: waits do not count.
PAPERS_OWN: dict[str, Any] = {"ageing_s": None}
# What the same pass found for the paper's own BR-H, in place of the paper's gamma of 0.9 and beta of G.
TUNED_GAMMA, BETA_PER_WORKER = 0.7, 2.0
# W of the paper's own forms (`balance_route_tuning`, which also varies H, gamma and beta around their defaults).
TUNED = {"br_0": 12, "br_h": 12}
PRINTED = "br_h_printed"

BASELINES = ("random", "round_robin", "power_of_two", "join_shortest_queue")
PREDICTORS = ("oracle", "survival", "client", "exact_match", "lightgbm")
METHODS = (
    *BASELINES,
    "br_0",
    "br_0_pool",
    *(f"br_h {predictor}" for predictor in PREDICTORS),
    f"{PRINTED} oracle",
    *(f"br_h_pool {predictor}" for predictor in PREDICTORS),
    *(f"ours {predictor}" for predictor in PREDICTORS),
    "ours_leased oracle",
)
# A deployment grants leases: the KV of a pooled request is lent for 30 s at a time, and for 600 s in all.
LEASES = {"lease_s": 30.0, "max_lease_s": 600.0}
ENDLESS_LEASE_S = 1e6


@dataclass(frozen=True, slots=True)
class StandIn:
    """A workload and the size of the cluster that serves it.

    `requests` is the number that is drawn from a sampler, of which the runs take the last fifth; None takes all rows of
    a trace. `pool` is the pool's size per worker in prompts of mean length. `length` is the length of a run relative to
    that of the long-context workloads, whose outputs are the longest.
    """

    workload: str
    slots: int
    requests: int | None = 20_000
    min_output_tokens: int | None = None
    # ASSUMPTION: 16 prompts per worker; the paper has "hundreds of waiting requests" (section 1).
    pool: float = 16.0
    length: float = 1.0

    def spec(self, part: str) -> WorkloadSpec:
        lengths = None
        if self.min_output_tokens is not None:
            lengths = transform.LengthFilter(min_output_tokens=self.min_output_tokens)
        return WorkloadSpec(name=self.workload, requests=self.requests, part=part, lengths=lengths)


CASES = {
    # The long-context workloads have nine sequences per worker; workloads/standins.py derives this number.
    "recurring-long": StandIn("synthetic-heavy-tail-long-context", slots=9),
    "reasoning-long": StandIn("servegen-reasoning-long-context", slots=9),
    "reasoning": StandIn("servegen-reasoning", slots=16, pool=8.0),
    # The text of the paper has lost the bound on the output length; it calls the mean output "cap-bounded".
    "azure2024": StandIn(
        "azure2024-sample", 16, requests=60_000, min_output_tokens=200, pool=8.0, length=0.2
    ),
    "azure2023": StandIn("azure2023-conversation", slots=16, requests=None, pool=8.0, length=0.2),
}


@dataclass(frozen=True, slots=True)
class Sizing:
    """The capacity of a perfectly balanced group for requests of certain lengths.

    `context_tokens` is the mean KV tokens of a running request, and `step_s` the time of a decode step.
    """

    context_tokens: float
    step_s: float
    requests_per_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, lengths: Sequence[WorkloadRequest], workers: int, slots: int, t: TimingProfile) -> Sizing:
        """Returns the capacity for the requests `lengths`.

        A request with prompt s and output o runs for o steps with s + a KV tokens, a = 0 .. o - 1. Hence long outputs
        weigh more.
        """
        output = sum(r.output_tokens for r in lengths)
        held = sum(r.output_tokens * (r.prompt_tokens + (r.output_tokens - 1) / 2) for r in lengths)
        context = held / output
        step_s = t.decode_base_s + slots * (t.decode_per_seq_s + t.decode_per_kv_token_s * context)
        tokens_per_s = workers * slots / step_s
        return cls(context, step_s, tokens_per_s * len(lengths) / output, tokens_per_s)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a run, the size of its pool, and the lengths of warm-up and measured time."""

    requests: tuple[WorkloadRequest, ...]
    sizing: Sizing
    pool_tokens: int
    warmup_s: float
    measure_s: float


@lru_cache(maxsize=8)
def rows_of(case: StandIn, part: str, seed: int) -> tuple[WorkloadRequest, ...]:
    """Returns the requests of one part of the case's workload: "all", "train" or "held_out"."""
    return tuple(build(case.spec(part), seed))


def load_of(
    case: StandIn, workers: int, pool: float, warmup_steps: int, steps: int, seed: int, part: str = "held_out"
) -> Load:
    """Returns the load of a run: a rush that fills slots and pool, then `OVERLOAD` times the rate of a balanced group.

    A trace has the same rows for every seed. The seed chooses the first row, and the rows before it follow at the end.
    """
    profile = profiles.load(PROFILE)
    rows = list(rows_of(case, part, seed))
    if case.requests is None:
        start = seed * len(rows) // 5 % len(rows)
        span_s = rows[-1].at_s + rows[-1].at_s / len(rows)
        later = [
            dataclasses.replace(r, request_id=r.request_id + "+", at_s=r.at_s + span_s) for r in rows[:start]
        ]
        rows = transform.rebase([*rows[start:], *later])
    sizing = Sizing.of(rows, workers, case.slots, profile)
    places = workers * case.slots
    rush = min(places + workers * int(pool), len(rows) - 1)
    span_s = (warmup_steps + steps) * sizing.step_s
    rows = transform.at_rate(rows, OVERLOAD * sizing.requests_per_s)
    full_s = places * RUSH_S
    made = tuple(
        dataclasses.replace(r, at_s=min(i, places) * RUSH_S if i < rush else full_s + later_s)
        for i, r in enumerate(rows)
        if (later_s := max(0.0, r.at_s - rows[rush].at_s)) < 1.3 * span_s
    )
    mean_prompt = sum(r.prompt_tokens for r in rows) / len(rows)
    largest = max(r.prompt_tokens for r in made)
    pool_tokens = int(max(pool * workers * mean_prompt, 2 * largest))
    return Load(made, sizing, pool_tokens, warmup_steps * sizing.step_s, steps * sizing.step_s)


# ---------------------------------------------------------------------------------------------------- predictors


@lru_cache(maxsize=8)
def history(case: StandIn, workers: int, train_requests: int) -> tuple[Outcome, ...]:
    """Returns the last `train_requests` outcomes of the training part, as a router would have logged them.

    They come at the rate of the runs and end after the step times of a balanced group. Only those that ended before
    time 0 are included.
    """
    rows: Sequence[WorkloadRequest] = rows_of(case, "train", TRAIN_SEED)[-train_requests:]
    sizing = Sizing.of(rows, workers, case.slots, profiles.load(PROFILE))
    rows = transform.rebase(transform.at_rate(rows, OVERLOAD * sizing.requests_per_s))
    end_s = rows[-1].at_s
    logged = []
    for r in rows:
        outcome = outcomes_of(
            [dataclasses.replace(r, request_id="train " + r.request_id, at_s=r.at_s - end_s)]
        )[0]
        finish_s = outcome.arrival.arrival_s + r.output_tokens * sizing.step_s
        if finish_s < 0.0:
            logged.append(dataclasses.replace(outcome, finish_s=finish_s))
    return tuple(logged)


@lru_cache(maxsize=8)
def fitted(case: StandIn, workers: int, train_requests: int) -> LgbmPredictor:
    """Returns a LightGBM predictor that is fitted on `history`."""
    outcomes = history(case, workers, train_requests)
    return fit_lgbm(outcomes, replay(outcomes), LgbmConfig())


@dataclass(frozen=True, slots=True)
class Source:
    """A maker of a run's predictor (`Forecasting.source`)."""

    name: str
    case: StandIn
    workers: int
    train_requests: int

    def __call__(self, lengths: Mapping[str, int]) -> Predictor:
        if self.name == "oracle":
            return Oracle(lengths)
        if self.name == "lightgbm":
            return fitted(self.case, self.workers, self.train_requests)
        outcomes = history(self.case, self.workers, self.train_requests)
        if self.name == "survival":
            return EmpiricalSurvival.fit(outcomes)
        levels = {"client": (CLIENT,), "exact_match": EXACT_MATCH}[self.name]
        memory = Memorised(levels, EmpiricalSurvival.fit(outcomes))
        for outcome in outcomes:
            memory.observe(outcome)
        return memory

    def warm(self) -> tuple[Outcome, ...]:
        """Returns the outcomes from which a run's features learn before it; only LightGBM reads features."""
        return (
            history(self.case, self.workers, self.train_requests)[-WARM_REQUESTS:]
            if self.name == "lightgbm"
            else ()
        )


# ---------------------------------------------------------------------------------------------------------- runs


def config_of(case: str, method: str, workers: int, quick: bool, **params: Any) -> dict[str, Any]:
    """Returns the config of a method of METHODS; `params` replace parameters of BR-H.

    "br_0" and "br_h" are the paper's own, whose single best is of the window; "br_0_pool" and "br_h_pool" are the same
    with the single best of the whole pool, as 3.2 may also be read; "br_h_printed" is "br_h" with the gamma and beta
    that the paper prints instead of tuned ones; "ours" is BR-H with what was added to it. Leases do not end, except
    with "ours_leased", which is "ours" under `LEASES`.
    """
    config: dict[str, Any] = {
        "case": case,
        "workers": workers,
        "warmup_steps": int(CASES[case].length * (2_000 if quick else 8_000)),
        "steps": int(CASES[case].length * (3_000 if quick else 14_000)),
        "train_requests": 2_000 if quick else 8_000,
    }
    if method in BASELINES:
        return config | {"policy": method, "params": {}}
    rule, _, predictor = method.partition(" ")
    if rule.startswith("ours"):
        own = {**OURS, **params}
        config |= LEASES if rule == "ours_leased" else {}
    else:
        window = TUNED[rule.removesuffix("_pool").removesuffix("_printed")]
        tuned = {"gamma": TUNED_GAMMA, "beta": BETA_PER_WORKER * workers}
        tuned = tuned if predictor and rule != PRINTED else {}
        own = {**PAPERS_OWN, "window": window, "pool_wide": rule.endswith("_pool"), **tuned, **params}
    if not predictor:
        return config | {"policy": "balance_route_0", "params": own}
    return config | {"policy": "balance_route_h", "predictor": predictor, "params": own}


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates one run of a config from `config_of` and returns its metrics."""
    case = CASES[config["case"]]
    pool = config.get("pool", case.pool)
    part = config.get("part", "held_out")
    load = load_of(case, config["workers"], pool, config["warmup_steps"], config["steps"], seed, part)
    result = simulate(sim_config(config, case, load, seed), load.requests)
    return figures(result, load, config["workers"], case.slots)


def sim_config(config: Config, case: StandIn, load: Load, seed: int) -> SimConfig:
    """Returns the simulator's configuration of a run."""
    profile = profiles.load(PROFILE)
    policy, workers = config["policy"], config["workers"]
    prefill = dataclasses.replace(profile, prefill_per_token_s=1e-6)
    forecasts = None
    if config.get("predictor") is not None:
        states = ForecastConfig(config.get("refresh_tokens", 16), config.get("gate", 0.5))
        source = Source(config["predictor"], case, workers, config["train_requests"])
        forecasts = Forecasting(source, states=states, history=source.warm())
    return SimConfig(
        engines=(
            EngineSpec(
                "prefill",
                Role.PREFILL,
                1,
                prefill,
                kv_blocks=load.pool_tokens // BLOCK_TOKENS,
                block_size_tokens=BLOCK_TOKENS,
                prefill_budget_tokens=1 << 20,
                prefix_cache=False,
                lease_s=config.get("lease_s", ENDLESS_LEASE_S),
                max_lease_s=config.get("max_lease_s", ENDLESS_LEASE_S),
            ),
            EngineSpec(
                "decode",
                Role.DECODE,
                workers,
                profile,
                slots=case.slots,
                kv_blocks=1 << 20,
                block_size_tokens=BLOCK_TOKENS,
                prefix_cache=False,
                barrier="step",
            ),
        ),
        decode=(policy, dict(config["params"])),
        dispatch=DispatchConfig(
            max_queue=1 << 20,
            queue_timeout_s=1e6,
            kv_high_water=1.0,
            overcommit_slots=1 << 20 if policy in BASELINES else 0,
            overcommit="always" if policy in BASELINES else "never",
            # the paper has neither rule
            starvation_s=math.inf,
            overdue_by_slo=False,
            seed=seed,
        ),
        control=ControlPlane(
            hop_s=0.0,
            ingress_s=0.0,
            status_s=1.0,
            tick_s=1.0,
            progress_s=0.25,
            forecast_s=0.25,
            kv_events=False,
            request_timeout_s=1e6,
            prefill_limit_s=math.inf,
            transfer_limit_s=math.inf,
        ),
        forecasts=forecasts,
        seed=seed,
        warmup_s=load.warmup_s,
        measure_s=load.measure_s,
        drain=False,
    )


def figures(result: RunResult, load: Load, workers: int, slots: int) -> Metrics:
    """Returns the paper's three figures of a run (imbalance, TPOT P95, throughput) and measures that explain them."""
    found = summarise(result)
    steps = result.steps
    profile, other = profiles.load(PROFILE), profiles.load(PROFILE_BY_TPOT)
    step_s = (steps.busy_s + steps.idle_s) / (workers * steps.steps)
    fixed_s = profile.decode_base_s + slots * profile.decode_per_seq_s
    envelope = max(0.0, step_s - fixed_s) / profile.decode_per_kv_token_s
    by_tpot_s = other.decode_base_s + slots * other.decode_per_seq_s + other.decode_per_kv_token_s * envelope
    mean_load = max(0.0, steps.busy_s / (workers * steps.steps) - fixed_s) / profile.decode_per_kv_token_s
    same_load = slots * load.sizing.context_tokens + envelope - mean_load
    running = steps.tokens / steps.steps
    throughput = steps.tokens / result.duration_s
    return {
        "imbalance_tokens": steps.mean_imbalance_tokens,
        "full_imbalance_tokens": steps.full_imbalance_tokens,
        "tpot_p95_ms": None if found["tpot_p95_s"] is None else 1e3 * found["tpot_p95_s"],
        "throughput_tok_s": throughput,
        "throughput_same_load_tok_s": running / (fixed_s + profile.decode_per_kv_token_s * same_load),
        "throughput_by_tpot_tok_s": running / by_tpot_s,
        "barrier_free_tok_s": throughput * (1.0 + steps.idle_s / steps.busy_s),
        "barrier_idle_share": found["barrier_idle_share"],
        "envelope_tokens": envelope,
        "running": running,
        "steps": float(steps.steps),
        "ideal_tok_s": load.sizing.tokens_per_s,
        "context_tokens": load.sizing.context_tokens,
        "pool_mean_s": found["pool_mean_s"],
        "finished": found["finished"],
        "rejected": found["rejected"],
    }
