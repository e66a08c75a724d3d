"""The composition, which is this project's own policy, against each of its parts alone and the parts in sequence.

The cells are a grid of load x context length x oversubscription of the core x output tail, with decode workers behind
one barrier, and a few cells without a barrier (see `composition_cluster`). No paper has this experiment, so the aims
are the project's. In every cell mean TTFT and throughput are at most 1 % worse than those of the best single part.
Where outputs are heavy-tailed, TTFT is at least 5 points below that of NetKV alone.

`composition` runs with its default weights and with forecasts that a deployment can have (lengths by client). In one
group of cells "composition, oracle" knows the lengths, which bounds the gain from a better predictor, and "composition,
no forecasts" is the objective alone. BR-H and the static stack have the oracle everywhere. Like NetKV, the composition
knows only the engine's own coefficients (t_iter's base and slopes). All parameters are tuned alike, by
`composition_tuning` on seeds 100 and above.

The papers' own forms stand beside the parts and count as parts: NetKV with its own queue term and feasible set, which
only memory bounds, and BR-0 and BR-H without ageing, with the W of `balance_route_tuning`.

A cell's aim is met or missed where the whole interval of the paired difference lies on one side of the limit, and
otherwise undecided. The part that is best on a few seeds is best partly by luck. So each half of the seeds is compared
with the part that is best on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import composition_cluster as cluster
from benchmarks.experiments.balance_route_cluster import AIM
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.seeds import Spread, met, spread
from benchmarks.sim.cluster import simulate
from benchmarks.sim.metrics import summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "the joint objective against its parts alone and stacked: load x context x oversubscription x output tail; "
    "synthetic requests of 20 clients"
)
SEEDS = (12, 1)

OWN = {**cluster.STEP, "seconds_per_kv_token": cluster.SECONDS_PER_KV_TOKEN}
# These are the best points of `composition_tuning`, on the first of its seeds.
TUNED: Mapping[str, Mapping[str, Any]] = {
    "NetKV": {"variant": "topo_only"},
    "BR-H": {"ageing_s": None, **AIM},
    "BR-0": {"ageing_s": None},
    "CLA": {"cache_weight": 1.0, "load_weight": 4.0},
    "static stack": {"ageing_s": None, **AIM},
    "composition": {"ageing_s": 3.0},
}
POLICIES: Mapping[str, tuple[str, Mapping[str, Any], str | None]] = {
    "NetKV": ("netkv", {**cluster.STEP, **TUNED["NetKV"]}, None),
    "BR-H": ("balance_route_h", TUNED["BR-H"], "oracle"),
    "BR-0": ("balance_route_0", TUNED["BR-0"], None),
    "JSQ": ("join_shortest_queue", {}, None),
    "CLA": ("cache_load_aware", TUNED["CLA"], None),
    "static stack": ("static_stack", TUNED["static stack"], "oracle"),
    "composition": ("composition", {**OWN, **TUNED["composition"]}, "client"),
    "composition, oracle": ("composition", {**OWN, **TUNED["composition"]}, "oracle"),
    "composition, no forecasts": ("composition", {**OWN, **TUNED["composition"]}, None),
    "NetKV, the paper's": ("netkv", {**cluster.STEP, "queue": "iterations"}, None),
    "BR-H, the paper's": ("balance_route_h", {"ageing_s": None, "window": 12}, "oracle"),
    "BR-0, the paper's": ("balance_route_0", {"ageing_s": None, "window": 12}, None),
}
# The paper's feasible set is by memory alone.
LIMITS: Mapping[str, Mapping[str, Any]] = {"NetKV, the paper's": {"overcommit_slots": cluster.MANY}}
OURS, BOUNDS, BOUNDED = (
    "composition",
    ("composition, oracle", "composition, no forecasts"),
    "9K 4:1 heavy barrier",
)
PAPERS = ("NetKV, the paper's", "BR-H, the paper's", "BR-0, the paper's")
PARTS = ("NetKV", "BR-H", "BR-0", "JSQ", "CLA", *PAPERS)
LOADS = (0.6, 0.9, 1.1)
TTFT, P95, RATE = "ttft_mean_s", "ttft_p95_s", "throughput_tok_s"
LIMIT_PERCENT = 1.0
MET, MISSED, UNDECIDED = "met", "missed", "undecided"
KEPT = (
    "ttft_mean_s",
    "ttft_p95_s",
    "throughput_tok_s",
    "tpot_mean_s",
    "jct_mean_s",
    "pool_mean_s",
    "transfer_mean_s",
    "imbalance_tokens",
    "barrier_idle_share",
    "decode_hit_share",
    "tier_share/2",
    "requests",
    "rejected",
    "unfinished",
)


def variants(quick: bool) -> list[Variant]:
    return [
        Variant(f"{cell} {policy}", {**config, **policy_config(policy)})
        for cell, config in cells(quick).items()
        for policy in POLICIES
        if policy not in BOUNDS or cell.startswith(BOUNDED)
    ]


def policy_config(name: str) -> dict[str, Any]:
    """Returns the entries of a config that select a policy of this experiment."""
    policy, params, forecasts = POLICIES[name]
    limits = LIMITS.get(name, {})
    return {"label": name, "policy": policy, "params": dict(params), "forecasts": forecasts, **limits}


def cells(quick: bool) -> dict[str, dict[str, Any]]:
    """Returns the cells of the grid by name; a quick run has only the corners that differ most."""
    grid = [(c, o, t, True) for c, o in ((4_000, 4.0), (9_000, 4.0), (9_000, 8.0)) for t in cluster.OUTPUT_CV]
    grid.append((9_000, 4.0, "heavy", False))
    loads: Sequence[float] = LOADS
    if quick:
        grid, loads = [(9_000, 4.0, "heavy", True)], (0.6, 1.1)
    made = {}
    for context, oversubscription, tail, barrier in grid:
        for load in loads:
            behind = "barrier" if barrier else "no barrier"
            name = f"{context // 1000}K {oversubscription:g}:1 {tail} {behind} load {load:g}"
            made[name] = {
                "gpus": 64,
                "context_tokens": context,
                "oversubscription": oversubscription,
                "tail": tail,
                "barrier": barrier,
                "load": load,
                "warmup_s": 40.0 if quick else 50.0,
                "measure_s": 40.0 if quick else 100.0,
                "cell": name,
            }
    return made


def run_one(config: Config, seed: int) -> Metrics:
    found = summarise(simulate(cluster.sim_config(config, seed), cluster.workload(config, seed)))
    return {name: found.get(name) for name in KEPT}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One aim in one cell: by how many per cent ours is worse than the best part on each seed (below 0: better)."""

    cell: str
    metric: str
    worse: Spread
    # The best part on each half of the seeds.
    parts: str
    # The values of `worse`: first those of the even seeds, then those of the odd ones.
    by_seed: tuple[float, ...]

    @property
    def outcome(self) -> str:
        low, high = self.worse.low, self.worse.high
        if low is None or high is None:
            return UNDECIDED
        return {True: MET, False: MISSED, None: UNDECIDED}[met(low, high, most=LIMIT_PERCENT)]


def compare(results: Results) -> list[Row]:
    cells = list(dict.fromkeys(c["cell"] for c in results.variants.values()))
    bounded = [cell for cell in cells if f"{cell} {BOUNDS[0]}" in results.variants]
    bounds = [_bound(results, cell, ours) for cell in bounded for ours in BOUNDS]
    beside = [
        row
        for cell in bounded
        for ours in (OURS, *BOUNDS)
        for row in (
            _against_best(results, [cell], cell, ours),
            *(_against(results, cell, part, ours) for part in ("BR-H", "BR-0")),
        )
    ]
    return [
        *_aims(results, cells, OURS),
        _against_best(results, cells, "mean of all cells", OURS),
        *bounds,
        *beside,
    ]


def _bound(results: Results, cell: str, ours: str) -> Row:
    """Returns a row with the TTFT in a cell against NetKV's, for a variant with other forecasts."""
    ttft, tail, rate = (spread(_differences(results, cell, "NetKV", m, ours)) for m in (TTFT, P95, RATE))
    note = f"p95 {tail.mean:+.1f} %, throughput {rate.mean:+.2f} %"
    return Row(f"{ours}, {cell}: TTFT against NetKV", None, ttft.mean, "%", ttft.half_width, note=note)


def _against(results: Results, cell: str, part: str, ours: str) -> Row:
    """Returns a row with the TTFT in a cell against one part's; the note has p95 and throughput."""
    ttft, *others = (spread(_differences(results, cell, part, m, ours)) for m in (TTFT, P95, RATE))
    note = f"p95 {_shown(others[0])} %, throughput {_shown(others[1])} %"
    return Row(f"{ours}, {cell}: TTFT against {part}", None, ttft.mean, "%", ttft.half_width, note=note)


def _against_best(results: Results, cells: Sequence[str], where: str, ours: str) -> Row:
    """Returns a row with the TTFT against the best part of each cell, as `verdict` chooses it, over the seeds."""
    by_cell = {m: [verdict(results, cell, m, ours).by_seed for cell in cells] for m in (TTFT, RATE)}
    worse, slower = ([sum(of) / len(of) for of in zip(*by_cell[m], strict=True)] for m in (TTFT, RATE))
    ttft, rate = spread(worse), spread([-percent for percent in slower])
    name = f"{ours}, {where}: TTFT against the best part"
    return Row(name, None, ttft.mean, "%", ttft.half_width, note=f"throughput {_shown(rate)} %")


def _shown(found: Spread) -> str:
    half = "" if found.half_width is None else f" (+- {found.half_width:.2f})"
    return f"{found.mean:+.2f}{half}"


def _aims(results: Results, cells: Sequence[str], ours: str) -> list[Row]:
    verdicts = [verdict(results, cell, metric, ours) for cell in cells for metric in (TTFT, RATE)]
    counts = {name: sum(v.outcome == name for v in verdicts) for name in (MET, MISSED, UNDECIDED)}
    heavy = [cell for cell in cells if "heavy" in cell]
    gain = spread([-worse for worse in _everywhere(results, heavy, "NetKV", TTFT, ours)])
    heavy_row = Row(
        f"{ours}: heavy tails, TTFT below NetKV's, mean of cells", None, gain.mean, "%", gain.half_width
    )
    return [
        Row(
            f"{ours}: cells x aims met",
            None,
            float(counts[MET]),
            f"of {len(verdicts)}",
            None,
            "all",
            False if counts[MISSED] else True if counts[MET] == len(verdicts) else None,
            f"{counts[MISSED]} missed, {counts[UNDECIDED]} undecided; better than the best part by the mean on "
            f"{sum(v.worse.mean < 0 for v in verdicts)}",
        ),
        aimed(heavy_row, ">= 5 points", least=5.0),
        *(_overall(results, cells, base, ours) for base in (*parts(results), "static stack")),
        *(_row(results, one, ours) for one in verdicts),
    ]


def parts(results: Results) -> list[str]:
    """Returns the parts that the results have; older ones lack the papers' own forms."""
    labels = {config["label"] for config in results.variants.values()}
    return [part for part in PARTS if part in labels]


def _overall(results: Results, cells: Sequence[str], base: str, ours: str) -> Row:
    """Returns a row with the mean over all cells against one policy used everywhere; its interval is over the seeds."""
    ttft = spread(_everywhere(results, cells, base, TTFT, ours))
    tail = spread(_everywhere(results, cells, base, P95, ours))
    rate = spread(_everywhere(results, cells, base, RATE, ours))
    note = (
        f"p95 {tail.mean:+.1f} % (+- {tail.half_width or 0.0:.1f}), "
        f"throughput {rate.mean:+.2f} % (+- {rate.half_width or 0.0:.2f})"
    )
    row = Row(f"{ours}, all cells: TTFT against {base}", None, ttft.mean, "%", ttft.half_width, note=note)
    half = rate.half_width or 0.0
    as_fast = met(rate.mean - half, rate.mean + half, least=-LIMIT_PERCENT)
    return aimed(row, "<= +1 %, throughput >= -1 %", most=LIMIT_PERCENT, also=[as_fast])


def _everywhere(results: Results, cells: Sequence[str], base: str, metric: str, ours: str) -> list[float]:
    """Returns for each seed the mean over the cells of the difference to `base`, in per cent.

    The cells of a seed have the same lengths, so they are not independent.
    """
    by_cell = [_differences(results, cell, base, metric, ours) for cell in cells]
    return [sum(of_seed) / len(of_seed) for of_seed in zip(*by_cell, strict=True)]


def _differences(results: Results, cell: str, base: str, metric: str, ours: str) -> list[float]:
    """Returns the differences of ours from `base`, in per cent of `base`, for each seed."""
    pairs = zip(
        results.values(f"{cell} {base}", metric), results.values(f"{cell} {ours}", metric), strict=True
    )
    return [100.0 * (b - a) / a for a, b in pairs]


def verdict(results: Results, cell: str, metric: str, ours: str) -> Verdict:
    """Returns the verdict on ours against the best part. With one seed, the best part is chosen on that seed."""
    sign = 1.0 if metric == TTFT else -1.0
    values = {part: [sign * v for v in results.values(f"{cell} {part}", metric)] for part in parts(results)}
    halves = ((0, 1), (1, 0)) if len(results.seeds) > 1 else ((0, 0),)
    worse: list[float] = []
    chosen: list[str] = []
    for half, other in halves:
        best = min(values, key=lambda part: sum(values[part][other::2]) / len(values[part][other::2]))
        chosen.append(best)
        worse += [sign * d for d in _differences(results, cell, best, metric, ours)[half::2]]
    return Verdict(cell, metric, spread(worse), " or ".join(dict.fromkeys(chosen)), tuple(worse))


def _row(results: Results, found: Verdict, ours: str) -> Row:
    sign = 1.0 if found.metric == TTFT else -1.0
    mean = results.mean(f"{found.cell} {ours}", found.metric)
    netkv = spread(_differences(results, found.cell, "NetKV", found.metric, ours)).mean
    what, value, aim = (
        ("TTFT", f"{mean:.2f} s", "<= +1 %") if sign > 0 else ("throughput", f"{mean:,.0f} tok/s", ">= -1 %")
    )
    note = f"{found.outcome}; best: {found.parts}; {value}; against NetKV {netkv:+.1f} %"
    half = found.worse.half_width
    row = Row(f"{ours}, {found.cell}: {what}", None, sign * found.worse.mean, "%", half, note=note)
    if half is None:
        # One seed decides nothing here, since the best part was chosen on it.
        return replace(row, aim=f"{aim} of the best part")
    least, most = (None, LIMIT_PERCENT) if sign > 0 else (-LIMIT_PERCENT, None)
    return aimed(row, f"{aim} of the best part", least=least, most=most)


def plots(results: Results) -> dict[str, Figure]:
    """Draws TTFT and throughput of each policy relative to NetKV over load, in every cell of the barrier grid."""
    from benchmarks import plots as look

    groups: dict[str, list[Config]] = {}
    for config in results.variants.values():
        groups.setdefault(config["cell"].rsplit(" load ", 1)[0], []).append(config)
    made, axes = look.figure(2, len(groups), 4.6, 2.6)
    for i, (group, configs) in enumerate(groups.items()):
        loads = sorted({config["load"] for config in configs})
        for axis, metric, label in (
            (axes[2 * i], "ttft_mean_s", "TTFT, % of NetKV's"),
            (axes[2 * i + 1], "throughput_tok_s", "throughput, % of NetKV's"),
        ):
            look.lines(axis, _series(results, group, loads, metric), "load", label, group)
    return {"composition": made}


def _series(results: Results, group: str, loads: Sequence[float], metric: str) -> dict[str, Any]:
    from benchmarks import plots as look

    def share(policy: str, load: float) -> float:
        cell = f"{group} load {load:g}"
        return 100.0 * results.mean(f"{cell} {policy}", metric) / results.mean(f"{cell} NetKV", metric)

    present = {c["label"] for c in results.variants.values() if c["cell"].startswith(f"{group} load ")}
    shown = [p for p in (OURS, *BOUNDS, "NetKV", "BR-H", "JSQ", "static stack") if p in present]
    return {
        policy: look.Series(loads, [share(policy, load) for load in loads], quiet=policy == "NetKV")
        for policy in shown
    }
