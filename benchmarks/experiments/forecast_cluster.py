"""The cells of the experiment `forecast_value`: BalanceRoute's cluster under pools, outputs and arrivals that differ.

The cluster is that of `balance_route_cluster`: G decode workers behind one barrier, long prompts, a prefill engine that
is no bottleneck. Transfers take next to no time here, because with short outputs slots would else wait for KV for much
of their time, which would hide the balance. A cell is one of `POOLS` with one of `OUTPUTS`:

    long     more requests than a balanced group serves; the pool is always full (Table 1's regime)
    short    some requests wait most of the time, because slots are nearly all taken
    dry      a slot is free for almost every request when it comes
    spare    about the load of "dry" and twice the slots, which then never decide
    bursty   the pool fills and runs dry in turns: two rates that alternate at random

    heavy    lognormal outputs with a heavy tail, many windows long
    capped   outputs that nearly all end at the `max_tokens` of their request, which every predictor is given
    near     outputs about as long as the window

The load is a multiple of what a perfectly balanced group with full slots serves (`Sizing`), by the mean lengths of past
requests. A run begins with running requests whose remainders are uniform shares of their lengths, so that their ends do
not fall together. Most prompts recur and the rest has clients, as in the stand-in for the paper's trace, so exact match
and LightGBM have something to learn from.

Not claimed: any trace. `balance_route_table3` compares predictors with the paper's Table 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, takewhile

import numpy as np

from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments.base import Config, Metrics
from benchmarks.experiments.composition_cluster import CLIENTS
from benchmarks.experiments.forecast_dial import Dial, Judge, Past
from benchmarks.experiments.forecast_expected import ExpectedBalanceRouteH, Remembered
from benchmarks.sim import profiles
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.config import Forecasting, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.sim.records import RunResult
from benchmarks.workloads.arrivals import Arrivals, MarkovModulated, Poisson
from benchmarks.workloads.catalog import outcomes_of
from benchmarks.workloads.lengths import Lengths, Lognormal
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.standins import LONG_CONTEXT_PROMPT
from benchmarks.workloads.synthetic import Recurrence, Synthetic
from policies.routing.balance.balance_route_h import BalanceRouteH
from predictors.features import replay
from predictors.forecast import ForecastConfig
from predictors.lgbm import LgbmPredictor
from predictors.lgbm_fit import LgbmConfig, fit_lgbm
from predictors.memorise import EXACT_MATCH, Memorised
from predictors.oracle import Oracle
from predictors.protocol import Outcome, Predictor
from predictors.survival import EmpiricalSurvival

WORKERS, SLOTS = 8, 9
HORIZON = 48
"""H of the forecasts: the default of BR-H and of the composition."""
GATE = 0.5
"""The gate of the forecasts, which is the live router's."""
PREDICTORS = ("survival", "exact match", "lightgbm")
"""The sources that a deployment can have."""
HISTORY = 4_000
# The seed of past requests; runs have others (`forecast_value.SEEDS_FROM`).
HISTORY_SEED = 1_000_000
# As in the stand-in for the paper's trace (`benchmarks.workloads.standins`).
RECURRENCE = Recurrence(p_recur=0.7, prompts=200, spread=0.01)
# 3 GB, the KV of a mean prompt, then take less than a hundredth of a step.
FAST_BYTES_PER_S = 1e13
# No prompt is this long, so none has a block to share; caches are off in any case.
NO_BLOCKS = 1 << 20
# Seconds between the first arrivals, so that each is placed before the next comes.
RUSH_S = 0.02


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output lengths of a cell. `caps` are the `max_tokens` of which each request has one, evenly (none: no cap).

    Times are in decode steps of full slots; those of `warmup_steps` are not measured.
    """

    lengths: Lengths
    warmup_steps: int
    steps: int
    caps: tuple[int, ...] = ()


OUTPUTS: Mapping[str, Outputs] = {
    # ASSUMPTION: the deviation is that of ServeGen's reasoning clients; their mean would make runs four times as long.
    "heavy": Outputs(Lognormal.of_mean(400.0, 1.5, cap_tokens=6_000), 1_500, 4_500),
    # ASSUMPTION: more than nine in ten of these lengths lie above the largest cap.
    "capped": Outputs(Lognormal.of_mean(4_000.0, 1.3, cap_tokens=16_384), 1_200, 4_800, caps=(128, 256, 512)),
    # ASSUMPTION: a mean of four thirds of the window.
    "near": Outputs(Lognormal.of_mean(64.0, 0.8, cap_tokens=512), 300, 1_200),
}


@dataclass(frozen=True, slots=True)
class Pool:
    """The pressure on the slots in a cell: the load, the slots of a worker, and the pool's bound.

    `prompts` is the bound of the pool in mean prompts for each worker. `bursts` are two loads that alternate, each for
    an exponential time with a mean of two outputs of mean length; without them arrivals are Poisson.
    """

    load: float
    slots: int = SLOTS
    prompts: float = 64.0
    bursts: tuple[float, float] | None = None


POOLS: Mapping[str, Pool] = {
    "long": Pool(cluster.OVERLOAD, prompts=16.0),
    "short": Pool(0.88),
    "dry": Pool(0.7),
    "spare": Pool(0.75, slots=2 * SLOTS),
    "bursty": Pool(0.75, bursts=(1.2, 0.3)),
}
CELLS = (
    *(("long", outputs) for outputs in ("heavy", "near")),
    *(("short", outputs) for outputs in OUTPUTS),
    *(("dry", outputs) for outputs in OUTPUTS),
    ("spare", "near"),
    *(("bursty", outputs) for outputs in OUTPUTS),
)


# ---------------------------------------------------------------------------------------------------------- requests


def requests_of(outputs: str, arrivals: Arrivals, seed: int, count: int) -> list[WorkloadRequest]:
    """Returns `count` requests of a kind of outputs, whose times are those of `arrivals`."""
    kind = OUTPUTS[outputs]
    model = Synthetic(
        f"forecast-{outputs}",
        arrivals,
        prompt=LONG_CONTEXT_PROMPT,
        output=kind.lengths,
        clients=CLIENTS,
        recurrence=RECURRENCE,
        block_tokens=NO_BLOCKS,
    )
    made = list(islice(model.stream(seed), count))
    if not kind.caps:
        return made
    picks = np.random.default_rng((seed, len(kind.caps))).integers(len(kind.caps), size=count)
    return [
        dataclasses.replace(r, max_tokens=cap, output_tokens=min(r.output_tokens, cap))
        for r, cap in zip(made, (kind.caps[i] for i in picks.tolist()), strict=True)
    ]


@lru_cache(maxsize=8)
def history(outputs: str, slots: int) -> tuple[Outcome, ...]:
    """Returns outcomes of past requests, one a second, which all ended before time 0.

    They come from other draws of the same prompts and clients, and LightGBM and exact match know no others.
    """
    rows = requests_of(outputs, Poisson(1.0), HISTORY_SEED, HISTORY)
    step_s = _sizing(outputs, slots).step_s
    last_s = rows[-1].at_s
    made = []
    for r in rows:
        shifted = dataclasses.replace(r, request_id=f"past {r.request_id}", at_s=r.at_s - last_s)
        outcome = outcomes_of([shifted])[0]
        finish_s = shifted.at_s + r.output_tokens * step_s
        if finish_s < 0.0:
            made.append(dataclasses.replace(outcome, finish_s=finish_s))
    return tuple(made)


@lru_cache(maxsize=8)
def _sizing(outputs: str, slots: int) -> cluster.Sizing:
    rows = requests_of(outputs, Poisson(1.0), HISTORY_SEED, HISTORY)
    return cluster.Sizing.of(rows, WORKERS, slots, profiles.load(cluster.PROFILE))


def running_first(cell: Pool) -> int:
    """Returns the number of requests that run from the beginning, which arrive `RUSH_S` apart."""
    return round(min(cell.load, 1.0) * WORKERS * cell.slots)


@lru_cache(maxsize=2)
def load_of(pool: str, outputs: str, seed: int, size: float) -> cluster.Load:
    """Returns the requests of a cell. `size` is the length of the run against that of `OUTPUTS`.

    As many slots as the load needs are taken at first, one request after the other. In "long" the pool fills next.
    """
    cell, kind = POOLS[pool], OUTPUTS[outputs]
    sizing = _sizing(outputs, cell.slots)
    places = WORKERS * cell.slots
    warmup_s, measure_s = (size * steps * sizing.step_s for steps in (kind.warmup_steps, kind.steps))
    running = running_first(cell)
    waiting = round(cell.prompts * WORKERS) if cell.load > 1.0 else 0
    first_s = running * RUSH_S
    # In these units of time a balanced group serves one request; two outputs last 2 * places of them.
    arrivals: Arrivals = Poisson(cell.load)
    if cell.bursts is not None:
        arrivals = MarkovModulated(cell.bursts, (2.0 * places, 2.0 * places))
    end = (warmup_s + measure_s - first_s) * sizing.requests_per_s
    most = max(cell.bursts or (cell.load,))
    count = running + waiting + int(most * end + 6.0 * math.sqrt(most * end)) + 1
    rows = requests_of(outputs, arrivals, seed, count)
    shares = np.random.default_rng((seed, 1)).random(running).tolist()
    begun = [
        _begun(r, i * RUSH_S, share) for i, (r, share) in enumerate(zip(rows[:running], shares, strict=True))
    ]
    pooled = [dataclasses.replace(r, at_s=first_s) for r in rows[running : running + waiting]]
    zero = rows[running + waiting].at_s
    later = takewhile(lambda r: r.at_s - zero < end, rows[running + waiting :])
    rest = [dataclasses.replace(r, at_s=first_s + (r.at_s - zero) / sizing.requests_per_s) for r in later]
    made = (*begun, *pooled, *rest)
    mean_prompt = sum(r.prompt_tokens for r in made) / len(made)
    pool_tokens = int(max(cell.prompts * WORKERS * mean_prompt, 2 * max(r.prompt_tokens for r in made)))
    return cluster.Load(made, sizing, pool_tokens, warmup_s, measure_s)


def _begun(request: WorkloadRequest, at_s: float, share: float) -> WorkloadRequest:
    """Returns a request of which only a `share` of the output is still to come; so is its cap if it ends there."""
    left = 1 + int(share * (request.output_tokens - 1))
    ends_at_cap = request.output_tokens == request.max_tokens
    cap = left if ends_at_cap else request.max_tokens
    return dataclasses.replace(request, at_s=at_s, output_tokens=left, max_tokens=cap)


# -------------------------------------------------------------------------------------------------------- predictors


@lru_cache(maxsize=8)
def fitted(outputs: str, slots: int) -> LgbmPredictor:
    """Returns a LightGBM predictor that is fitted on `history`."""
    outcomes = history(outputs, slots)
    return fit_lgbm(outcomes, replay(outcomes), LgbmConfig())


@lru_cache(maxsize=8)
def past(outputs: str, slots: int) -> Past:
    """Returns what `history` says of requests in general."""
    return Past.of(history(outputs, slots))


def predictor_of(source: str, outputs: str, slots: int, lengths: Mapping[str, int], seed: int) -> Predictor:
    """Returns a new predictor: "oracle", "dial AUC" or one of `PREDICTORS`."""
    if source == "oracle":
        return Oracle(lengths)
    if source.startswith("dial "):
        return Dial(lengths, past(outputs, slots), float(source.removeprefix("dial ")), seed)
    if source == "lightgbm":
        return fitted(outputs, slots)
    outcomes = history(outputs, slots)
    survival = EmpiricalSurvival.fit(outcomes)
    if source == "survival":
        return survival
    if source != "exact match":
        raise ValueError(f"no forecast source is called {source!r}")
    memory = Memorised(EXACT_MATCH, survival)
    for outcome in outcomes:
        memory.observe(outcome)
    return memory


# -------------------------------------------------------------------------------------------------------------- runs


def run(config: Config, seed: int) -> Metrics:
    """Simulates one run of a cell under a policy and returns its metrics.

    `config` has pool, outputs, size, policy and params, source (None: no forecasts), and `expected`: whether shares of
    requests leave the projection of BR-H by their chance to end (`forecast_expected`).
    """
    pool, outputs, source = POOLS[config["pool"]], config["outputs"], config["source"]
    load = load_of(config["pool"], outputs, seed, config["size"])
    judges: list[Judge] = []
    remembered: list[Remembered] = []
    forecasts = None
    if source is not None:

        def make(lengths: Mapping[str, int]) -> Predictor:
            # No predictor can know what is left of the requests that run from the beginning.
            since_s = running_first(pool) * RUSH_S
            judges.append(Judge(predictor_of(source, outputs, pool.slots, lengths, seed), lengths, since_s))
            if not config["expected"]:
                return judges[-1]
            remembered.append(Remembered(judges[-1]))
            return remembered[-1]

        # Only LightGBM reads features, which learn from what was before the run.
        known = history(outputs, pool.slots) if source == "lightgbm" else ()
        forecasts = Forecasting(make, HORIZON, ForecastConfig(gate=GATE), history=known)
    setup = dataclasses.replace(sim_config(config, load, seed), forecasts=forecasts)
    sim = Cluster(setup, iter(load.requests), None, None)
    if remembered:
        dispatcher = sim.dispatcher
        assert isinstance(dispatcher.decode, BalanceRouteH)
        dispatcher.decode = ExpectedBalanceRouteH(dispatcher.decode, dispatcher.state, remembered[-1])
    result = sim.run()
    scores = judges[0].scores(GATE) if judges else {}
    return {**measures(result, load.warmup_s + load.measure_s), **scores}


def sim_config(config: Config, load: cluster.Load, seed: int) -> SimConfig:
    """Returns the simulator's configuration of a run, without forecasts."""
    case = cluster.StandIn("synthetic-heavy-tail-long-context", slots=POOLS[config["pool"]].slots)
    base = cluster.sim_config({**config, "workers": WORKERS}, case, load, seed)
    engines = tuple(
        dataclasses.replace(
            spec,
            profile=dataclasses.replace(
                spec.profile, prefill_per_token_s=1e-8, transfer_bandwidth_bytes_per_s=FAST_BYTES_PER_S
            ),
        )
        for spec in base.engines
    )
    return dataclasses.replace(base, engines=engines)


def measures(result: RunResult, end_s: float) -> dict[str, float | None]:
    """Returns the metrics of a run whose window ended at `end_s`.

    A request without a first token by then counts in TTFT with the time that it has waited, and one that is still in
    the pool counts there until then. Else a policy that lets some wait forever would look quick.
    """
    found, steps = summarise(result), result.steps
    ttft_s = [
        (r.first_token_s if r.first_token_s is not None else end_s) - r.arrived_s for r in result.requests
    ]
    pooled_s = sum(
        (r.decode_routed_s if r.decode_routed_s is not None else end_s) - r.prefill_done_s
        for r in result.requests
        if r.prefill_done_s is not None
    )
    return {
        "imbalance_tokens": steps.mean_imbalance_tokens,
        "ttft_mean_s": float(np.mean(ttft_s)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "tpot_p95_ms": None if found["tpot_p95_s"] is None else 1e3 * found["tpot_p95_s"],
        "throughput_tok_s": steps.tokens / result.duration_s,
        "barrier_idle_share": found["barrier_idle_share"],
        "running": steps.tokens / steps.steps,
        "pooled": pooled_s / result.duration_s,
        "requests": float(len(result.requests)),
        "finished": found["finished"],
    }
