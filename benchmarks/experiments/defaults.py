"""The policies that are shipped as the defaults of the two stages, chosen among pairs as nobody has tuned them.

Somebody who starts the application has described no network, fitted no constant and fitted no predictor. So every pair
of a prefill and a decode policy runs here with the parameters that it has by itself and without forecasts. The
situations differ in what they ask of a policy:

    one pair         one prefill and one decode engine, chat; every policy decides alike, so it shows what none may cost
    one node         2 prefill and 4 decode engines, one fast network, prompts without shared prefixes
    prefixes         the same engines; seven prompts of ten share their beginnings
    racks            NetKV's fat tree with a core of 4:1, long contexts
    ranks            the same tree with a barrier for each 12 decode engines, heavy output tails

each below saturation and near it (`LOADS`). The regret of a pair in a cell is by how much its mean TTFT, or its mean
completion time, is above that of the best pair there, in per cent, whichever is more.

The rule, which was written down before the first run: the default is the pair whose largest regret over all cells is
least. If that of the pair of `join_shortest_queue`, which needs nothing and is the easiest to explain, is within
`CLOSE_POINTS` of it, that pair is the default. Seeds are those from 600 on, on which nothing was tuned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import composition_cluster as cluster
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from benchmarks.seeds import spread
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import EngineSpec, SimConfig
from benchmarks.sim.metrics import summarise
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.lengths import Lognormal
from benchmarks.workloads.prefixes import Sharing
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Synthetic
from policies.dispatch.config import DispatchConfig
from policies.state.views import Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "which policies to ship as defaults: pairs of prefill and decode policies, untuned, in five situations"
)
SEEDS = (4, 1)
FIRST_SEED = 600
PREFILL = ("join_shortest_queue", "predicted_ttft", "cache_load_aware")
DECODE = ("join_shortest_queue", "netkv", "balance_route_0", "balance_route_h", "composition")
SIMPLE = ("join_shortest_queue", "join_shortest_queue")
# (prefill engines, decode engines, probability that a prompt shares its beginning)
SMALL = {"one pair": (1, 1, 0.3), "one node": (2, 4, 0.0), "prefixes": (2, 4, 0.7)}
LARGE: Mapping[str, Mapping[str, Any]] = {
    "racks": {"context_tokens": 9_000, "tail": "light", "barrier": False},
    "ranks": {"context_tokens": 9_000, "tail": "heavy", "barrier": True},
}
LOADS = (0.5, 0.9)
CLOSE_POINTS = 5.0
# ASSUMPTION: a chat, with the coefficients of variation of `composition_cluster`
PROMPT_TOKENS, OUTPUT_TOKENS = 2_000, 300
SLOTS = 32
TTFT, JCT = "ttft_mean_s", "jct_mean_s"
KEPT = (TTFT, JCT, "ttft_p95_s", "tpot_mean_s", "throughput_tok_s", "pool_mean_s", "unfinished")


def variants(quick: bool) -> list[Variant]:
    length = {"warmup_s": 10.0, "measure_s": 20.0} if quick else {"warmup_s": 50.0, "measure_s": 100.0}
    situations: dict[str, dict[str, Any]] = {name: {} for name in SMALL}
    situations |= {name: {"gpus": 64, "oversubscription": 4.0, **some} for name, some in LARGE.items()}
    return [
        Variant(
            _name(situation, load, prefill, decode),
            {
                "situation": situation,
                "load": load,
                "prefill": prefill,
                "policy": decode,
                "params": {},
                **length,
                **more,
            },
        )
        for situation, more in situations.items()
        for load in (LOADS[-1:] if quick else LOADS)
        for prefill in PREFILL
        for decode in DECODE
    ]


def _name(situation: str, load: float, prefill: str, decode: str) -> str:
    return f"{situation}, load {load:g}: {prefill} + {decode}"


def run_one(config: Config, seed: int) -> Metrics:
    seed += FIRST_SEED
    if config["situation"] in LARGE:
        run, work = cluster.sim_config(config, seed), cluster.workload(config, seed)
        run = dataclasses.replace(run, prefill=(config["prefill"], {}))
    else:
        run, work = _small(config, seed), _chat(config, seed)
    found = summarise(simulate(run, work))
    return {name: found.get(name) for name in KEPT}


def _small(config: Config, seed: int) -> SimConfig:
    prefill, decode, _ = SMALL[config["situation"]]
    return SimConfig(
        (
            EngineSpec("p", Role.PREFILL, prefill, cluster.PROFILE),
            EngineSpec("d", Role.DECODE, decode, cluster.PROFILE, slots=SLOTS),
        ),
        prefill=(config["prefill"], {}),
        decode=(config["policy"], {}),
        dispatch=DispatchConfig(queue_timeout_s=600.0, max_queue=cluster.MANY, seed=seed),
        seed=seed,
        warmup_s=config["warmup_s"],
        measure_s=config["measure_s"],
    )


def _chat(config: Config, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of a small cluster; its capacity is that of its tighter stage, without prefix hits."""
    prefill, decode, shared = SMALL[config["situation"]]
    profile = cluster.PROFILE
    full_s = profile.step_s(0, SLOTS, SLOTS * (PROMPT_TOKENS + OUTPUT_TOKENS // 2))
    capacity_per_s = min(
        prefill / (PROMPT_TOKENS * profile.prefill_per_token_s), decode * SLOTS / (OUTPUT_TOKENS * full_s)
    )
    work = Synthetic(
        "defaults",
        Poisson(config["load"] * capacity_per_s),
        prompt=Lognormal.of_mean(PROMPT_TOKENS, cluster.PROMPT_CV, 16_384),
        output=Lognormal.of_mean(OUTPUT_TOKENS, cluster.OUTPUT_CV["heavy"], 4_096),
        sharing=Sharing(shared, block_tokens=16),
        block_tokens=16,
    )
    end_s = config["warmup_s"] + config["measure_s"]
    return list(takewhile(lambda request: request.at_s < end_s, work.stream(seed)))


def compare(results: Results) -> list[Row]:
    cells = list(dict.fromkeys((c["situation"], c["load"]) for c in results.variants.values()))
    regrets = {pair: {cell: _regret(results, cell, pair) for cell in cells} for pair in _pairs()}
    largest = {pair: max(of_cell.values()) for pair, of_cell in regrets.items()}
    chosen = choice(largest)
    rows = []
    for pair in sorted(largest, key=lambda pair: largest[pair]):
        worst = max(cells, key=lambda cell: regrets[pair][cell])
        mean = spread(list(regrets[pair].values())).mean
        note = f"in {worst[0]} at load {worst[1]:g}; mean of the cells {mean:.1f} %"
        note += "; the default by the rule" if pair == chosen else ""
        rows.append(Row(f"{' + '.join(pair)}: largest regret", None, largest[pair], "%", note=note))
    for situation, load in cells:
        for pair in _pairs():
            name = _name(situation, load, *pair)
            ttft, jct = results.spread(name, TTFT), results.mean(name, JCT)
            note = f"completion {jct:.2f} s, regret {regrets[pair][situation, load]:.1f} %"
            rows.append(Row(f"{name}: mean TTFT", None, ttft.mean, "s", ttft.half_width, note=note))
    return rows


def choice(largest: Mapping[tuple[str, str], float]) -> tuple[str, str]:
    """Returns the pair that is the default by the rule, from the largest regret of each pair in per cent."""
    best = min(largest, key=lambda pair: (largest[pair], pair))
    return SIMPLE if largest[SIMPLE] <= largest[best] + CLOSE_POINTS else best


def _pairs() -> list[tuple[str, str]]:
    return [(prefill, decode) for prefill in PREFILL for decode in DECODE]


def _regret(results: Results, cell: tuple[str, float], pair: tuple[str, str]) -> float:
    """Returns by how many per cent the pair's mean TTFT or mean completion time is above the cell's least."""
    return max(
        100.0
        * (
            results.mean(_name(*cell, *pair), metric)
            / min(results.mean(_name(*cell, *other), metric) for other in _pairs())
            - 1.0
        )
        for metric in (TTFT, JCT)
    )


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, (axes,) = look.figure()
    rows = [row for row in compare(results) if row.name.endswith("largest regret") and row.ours is not None]
    values = {row.name.removesuffix(": largest regret"): (float(row.ours or 0.0), None) for row in rows}
    look.bars(axes, values, "largest regret over all cells, %", "Untuned pairs of policies")
    return {"defaults": made}
