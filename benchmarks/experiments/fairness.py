"""Fairness: what each tenant gets of its share when one of them asks for far more.

Four tenants share engines of the experiment `overload` (Llama-3.1-8B on L20) in its cells "decode", where the slots of
decode are what is short, and "prefill". They have the weights 1, 1, 2 and 1, and their prompts and outputs come from
the same distributions. The offered load is 0.8 to 5 times what the engines carry, in two mixes:

    greedy    three tenants offer half of their weighted share of the capacity each, and the fourth offers all the rest
    all       each offers a quarter of the load, whatever its weight

A request counts for its cost in the tokens of the virtual token counter (1 for a token of its prompt, 2 for one of its
output), and is served when a decode engine is chosen for it. The service of a tenant is that of the window, and its
demand what came until the end of the window and was neither served nor refused before it; what came so late that its
objective ends after the window counts only if it was served. Its fair share is that of
weighted max-min fairness: the service of all tenants together is shared out by weights, no tenant is given more than
its demand, and what one leaves goes to the others by their weights. Shares are those of what was served in the same
run, so a policy that serves little is not unfair by this measure; the service of all beside that of `none` is a row of
its own.

Each mix runs with the fairness policies `none` and `vtc`, and with the admission policies `open` and `by_wait`. All
requests are of the class standard, with a TTFT objective of 5 s (10 s in the cell "prefill").

The policy was tried on seed 0, and on seeds 300 to 303, of which the results before these were. There the tenant of
weight 2 got 0.91 of its share in the mix "all" with admission `by_wait` in the cell "decode". The policy was at fault,
which lifted a tenant whenever nothing of it waited for a moment, and has `credit_tokens` since. And in the cell
"prefill" all tenants together got 0.96 to 0.97 of the service with `none`, at 5 times capacity with `by_wait`. One
reason is that `none` leaves it to the objectives which requests are served, and these favour short prompts, with which
the prefill engines compute more requests, whose outputs count twice. It is not the only one: a row with the time that
the prefill engines work beside that of `none`, added after those results with the same aim, is below it at 5 times
capacity by its mean on the seeds that are measured now. Why is not known. On seed 0 tenants that offer 0.8
of their share were tried, too: with admission `by_wait` some of these got 0.86 to 0.97 of their shares, because a
tenant so near to its share waits for longer than its objective allows. The runs begin with seed 400. Aims (issue 17),
written before those runs: with `vtc` every tenant gets at least 95 % of its fair share, at every load, in both mixes
and cells and with both admission policies; all tenants together get at least 98 % of the service that they get with
`none`. From 1.25 times capacity on, in the mix "greedy" with admission `by_wait`, at least 95 % of the requests of the
three modest tenants have their first token within their objective. With `none` the three get less than 90 % of their
shares from 2 times capacity on. Not claimed: fairness between classes; a live fleet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.overload import CELLS, OUTPUT_CV, PROFILE, PROMPT_CV, capacity_per_s
from benchmarks.experiments.overload import sim_config as overloaded
from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import SimConfig
from benchmarks.sim.metrics import ttft_s
from benchmarks.sim.records import RequestRecord
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.lengths import Lognormal
from benchmarks.workloads.record import WorkloadRequest
from benchmarks.workloads.synthetic import Synthetic
from policies.fairness.vtc import VirtualTokenCounter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "fairness: each tenant's part of its weighted share with a greedy one, by vtc and without; synthetic requests"
SEEDS = (4, 1)
SEEDS_FROM = 400
LOADS = (0.8, 1.25, 2.0, 5.0)
FAIRNESS = ("none", "vtc")
ADMISSION = ("open", "by_wait")
SHORT_OF = ("decode", "prefill")
MIXES = ("greedy", "all")
WEIGHTS = {"ant": 1.0, "bee": 1.0, "cat": 2.0, "ox": 1.0}
GREEDY = "ox"
MODEST = tuple(name for name in WEIGHTS if name != GREEDY)
MODEST_PART = 0.5
TTFT_S = 5.0
COST = VirtualTokenCounter()


def variants(quick: bool) -> list[Variant]:
    return [
        Variant(
            _name(cell, mix, admission, fairness, load),
            {
                **CELLS[cell],
                "cell": cell,
                "mix": mix,
                "load": load,
                "admission": admission,
                "params": {},
                "fairness": fairness,
                "warmup_s": 30.0 if quick else 60.0,
                "measure_s": 40.0 if quick else 120.0,
            },
        )
        for cell in SHORT_OF
        for mix in MIXES
        for admission in ADMISSION
        for fairness in FAIRNESS
        for load in LOADS
    ]


def _name(cell: str, mix: str, admission: str, fairness: str, load: float) -> str:
    return f"{cell}, {mix}, {admission}, {fairness}, load {load:g}"


def offers(config: Config) -> dict[str, float]:
    """Returns what each tenant offers, as a share of all requests."""
    if config["mix"] == "all":
        return dict.fromkeys(WEIGHTS, 1.0 / len(WEIGHTS))
    whole = sum(WEIGHTS.values())
    modest = {name: MODEST_PART * WEIGHTS[name] / whole / config["load"] for name in MODEST}
    return {**modest, GREEDY: 1.0 - sum(modest.values())}


def work(config: Config, seed: int) -> list[WorkloadRequest]:
    """Returns the requests of warm-up and window, with their tenants."""
    prompt = Lognormal.of_mean(config["prompt"], PROMPT_CV, 16_384)
    output = Lognormal.of_mean(config["output"], OUTPUT_CV, 4_096)
    arrivals = Poisson(config["load"] * capacity_per_s(config))
    made = Synthetic("fairness", arrivals, prompt, output).stream(seed)
    draw = np.random.default_rng((seed, 18))
    names, shares = zip(*offers(config).items(), strict=True)
    end_s = config["warmup_s"] + config["measure_s"]
    requests = []
    for one in takewhile(lambda r: r.at_s < end_s, made):
        name = names[int(draw.choice(len(names), p=shares))]
        requests.append(
            dataclasses.replace(
                one, client=name, weight=WEIGHTS[name], ttft_slo_s=TTFT_S * config["patience"]
            )
        )
    return requests


def sim_config(config: Config, seed: int) -> SimConfig:
    whole_s = config["warmup_s"] + config["measure_s"]
    return dataclasses.replace(
        overloaded(config, seed),
        fairness=(config["fairness"], {}),
        warmup_s=0.0,
        measure_s=whole_s,
        drain=False,
    )


def run_one(config: Config, seed: int) -> Metrics:
    since_s = config["warmup_s"]
    until_s = since_s + config["measure_s"]
    records = simulate(sim_config(config, seed), work(config, seed)).requests
    found: dict[str, float | None] = {}
    demand, served = dict[str, float](), dict[str, float]()
    for name in WEIGHTS:
        of = [r for r in records if r.tenant == name]
        asked = [r for r in of if not _over(r, since_s) and (_sent(r) or _objective_ends_s(r) < until_s)]
        demand[name] = sum(map(cost, asked)) / config["measure_s"]
        sent = [r for r in of if r.decode_routed_s is not None and r.decode_routed_s >= since_s]
        served[name] = sum(map(cost, sent)) / config["measure_s"]
        judged = [r for r in of if since_s <= r.arrived_s and _objective_ends_s(r) < until_s]
        found[f"in_time/{name}"] = sum(map(_in_time, judged)) / max(1, len(judged))
        times = [t for r in judged if (t := ttft_s(r)) is not None]
        found[f"ttft_p99_s/{name}"] = float(np.percentile(times, 99)) if times else None
    fair = fair_shares(sum(served.values()), demand)
    for name in WEIGHTS:
        found[f"demand_tokens_per_s/{name}"] = demand[name]
        found[f"served_tokens_per_s/{name}"] = served[name]
        found[f"part_of_share/{name}"] = served[name] / fair[name]
    found["served_tokens_per_s"] = sum(served.values())
    routed = [r for r in records if r.decode_routed_s is not None and r.decode_routed_s >= since_s]
    found["prefill_s"] = sum(
        PROFILE.prefill_base_s + r.prompt_tokens * PROFILE.prefill_per_token_s for r in routed
    )
    found["in_time/modest"] = sum(found[f"in_time/{name}"] or 0.0 for name in MODEST) / len(MODEST)
    return found


def _sent(r: RequestRecord) -> bool:
    return r.decode_routed_s is not None


def _objective_ends_s(r: RequestRecord) -> float:
    return r.arrived_s + (r.ttft_slo_s or 0.0)


def _over(r: RequestRecord, at_s: float) -> bool:
    """Whether a request was served or refused before a time."""
    return any(one is not None and one < at_s for one in (r.decode_routed_s, r.rejected_s))


def _in_time(r: RequestRecord) -> bool:
    waited_s = ttft_s(r)
    return waited_s is not None and r.ttft_slo_s is not None and waited_s <= r.ttft_slo_s


def cost(r: RequestRecord) -> float:
    """Returns the tokens that a request counts for, weighted as the virtual token counter does."""
    return COST.cost(r.prompt_tokens, r.output_tokens)


def fair_shares(served: float, demand: Mapping[str, float]) -> dict[str, float]:
    """Returns each tenant's part of the service of all by weighted max-min fairness (water filling)."""
    shares: dict[str, float] = {}
    left = served
    for name in sorted(demand, key=lambda one: (demand[one] / WEIGHTS[one], one)):
        rest = sum(WEIGHTS[one] for one in demand if one not in shares)
        shares[name] = min(demand[name], left * WEIGHTS[name] / rest)
        left -= shares[name]
    return shares


def compare(results: Results) -> list[Row]:
    rows: list[Row] = []
    loads = sorted({config["load"] for config in results.variants.values()})
    for cell in SHORT_OF:
        for mix in MIXES:
            for admission in ADMISSION:
                for load in loads:
                    rows += _rows(results, cell, mix, admission, load)
    return rows


def _rows(results: Results, cell: str, mix: str, admission: str, load: float) -> list[Row]:
    rows = []
    none, ours = (_name(cell, mix, admission, fairness, load) for fairness in FAIRNESS)
    where = f"{cell}, {mix}, {admission}, load {load:g}"
    for name in WEIGHTS:
        part = results.spread(ours, f"part_of_share/{name}")
        before = 100.0 * results.mean(none, f"part_of_share/{name}")
        asked = mix == "greedy" and name in MODEST and load >= 2
        said = f"with none {before:.1f} %"
        if asked:
            said += ", aim < 90: " + ("met" if before < 90 else "not met")
        share = 100.0 * part.mean
        half = None if part.half_width is None else 100.0 * part.half_width
        what = f"{where}: part of its fair share that {name} gets with vtc"
        rows.append(aimed(Row(what, None, share, "%", half, note=said), ">= 95", least=95.0))
    what = f"{where}: service of all with vtc, share of that with none"
    rows.append(_share(results, what, ours, none, "served_tokens_per_s"))
    if cell == "prefill":
        what = f"{where}: work of the prefill engines with vtc, share of that with none"
        rows.append(_share(results, what, ours, none, "prefill_s"))
    if mix == "greedy" and admission == "by_wait" and load >= 1.25:
        in_time = results.spread(ours, "in_time/modest")
        half = None if in_time.half_width is None else 100.0 * in_time.half_width
        said = f"with none {100.0 * results.mean(none, 'in_time/modest'):.1f} %"
        what = f"{where}: requests of the modest tenants that are in time with vtc"
        rows.append(aimed(Row(what, None, 100.0 * in_time.mean, "%", half, note=said), ">= 95", least=95.0))
    return rows


def _share(results: Results, what: str, ours: str, none: str, metric: str) -> Row:
    """Returns the row of a mean with vtc as a share of that with none; the aim is to lose at most 2 %."""
    share, half = results.ratio(ours, none, metric)
    row = Row(what, None, 100.0 * share, "%", None if half is None else 100.0 * half)
    return aimed(row, ">= 98", least=98.0)


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    loads = sorted({config["load"] for config in results.variants.values()})
    made, axes = look.figure(columns=len(SHORT_OF))
    for axis, cell in zip(axes, SHORT_OF, strict=True):
        series = {
            f"{fairness}, {who}": look.Series(
                loads,
                [
                    results.mean(_name(cell, "greedy", "open", fairness, load), f"part_of_share/{who}")
                    for load in loads
                ],
            )
            for fairness in FAIRNESS
            for who in ("ant", GREEDY)
        }
        look.lines(axis, series, "offered load / capacity", "part of its fair share", cell, log_x=True)
    return {"fairness": made}
