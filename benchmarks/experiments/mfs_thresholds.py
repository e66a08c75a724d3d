"""MFS's thresholds swept (MFS 4.3): Q_1, the ratio E and the number of levels K, on three workloads.

The paper calls U = 0.5, E = 4 empirical, and its own Table 1 is served whole only with Q_1 = 1. Here a point is Q_1 =
U / E, the MLU from which a P2D transfer goes before collectives, with E and K. One part of the paper's point changes at
a time for E and K; Q_1 is swept whole, at the paper's E and K. With Q_1 = 1 they are swept as well.

The workloads are those on which the forms of MFS are reported: DBRX on conversations (`mfs_breakdown`), and Llama3-8B
on Mooncake's conversations and on its synthetic agent trace (`mfs_dense`), each at the rate at which these compare.
Seeds lie below `mfs_common.SEEDS_FROM`, so what is chosen here has seen no seed that is reported there.

The rule, written before the runs: the shipped default stays the paper's point unless another point has more requests in
time on every workload, and by at least `LEAST` percentage points in the mean over them; of several such points, the one
with most is proposed. A point that wins on some workloads only is named and not taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.mfs_common import MOONCAKE, named, run_one
from benchmarks.workloads.catalog import available, or_excerpt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SEEDS_FROM", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "MFS's thresholds: requests in time by Q_1, E and K, on seeds that no report uses"
SEEDS = (3, 1)
SEEDS_FROM = 4
LEAST = 1.0
Point = tuple[float, float, int]
"""(Q_1, E, K)."""
PAPER: Point = (0.125, 4.0, 8)
Q_1 = (0.03125, 0.125, 0.25, 0.5, 0.75, 1.0)
BASES = (1.5, 2.0, 4.0, 8.0)
LEVELS = (2, 4, 8, 16)
AT = ("dbrx conversation", "llama3-8b mooncake-conversation", "llama3-8b mooncake-agent")
_RATES = {AT[0]: 0.5, AT[1]: 0.3, AT[2]: 0.2}
_DENSE: dict[str, Any] = {"instances": 4, "requests": 512, "warmup": 200}
_SIZES: Mapping[str, dict[str, Any]] = {
    AT[0]: {"instances": 4, "requests": 512, "warmup": 128},
    AT[1]: {**_DENSE, "history": 3_000},
    AT[2]: {**_DENSE, "history": 1_500},
}
_QUICK: dict[str, Any] = {"instances": 2, "requests": 40, "warmup": 10, "groups": 4}


def points(quick: bool) -> list[Point]:
    """Returns the points to run, the paper's first."""
    if quick:
        return [PAPER, (1.0, *PAPER[1:])]
    made = [PAPER, *((q, *PAPER[1:]) for q in Q_1)]
    for q in (PAPER[0], 1.0):
        made += [(q, base, PAPER[2]) for base in BASES]
        made += [(q, PAPER[1], levels) for levels in LEVELS]
    return list(dict.fromkeys(made))


def label(point: Point) -> str:
    """Returns a point's name."""
    first, base, levels = point
    return f"Q_1 = {first:g}, E = {base:g}, K = {levels}"


def variants(quick: bool) -> list[Variant]:
    made = []
    for where in AT:
        model, work = where.split()
        size: dict[str, Any] = dict(_SIZES[where])
        if work in MOONCAKE:
            # Conversations are shipped in part; the agents' trace is not.
            trace = MOONCAKE[work]
            if work == "mooncake-conversation":
                trace = or_excerpt(trace)
            elif not available(trace):
                continue
            size["trace"] = trace
        if quick:
            size |= {**_QUICK, "history": 200}
        made += [
            named(model, work, "mfs", _RATES[where], label(point), params=_params(point), **size)
            for point in points(quick)
        ]
        made.append(named(model, work, "sjf", _RATES[where], "rival", **size))
    return made


def _params(point: Point) -> dict[str, Any]:
    first, base, levels = point
    return {"scale": first * base, "base": base, "levels": levels}


def _name(where: str, point: Point) -> str:
    return f"{where} {label(point)} {_rate(where)} mfs"


def _rate(where: str) -> str:
    return f"{_RATES[where]:g}/s"


def _in_time(results: Results, name: str) -> float:
    """Returns the requests in time, in per cent."""
    return 100.0 * results.mean(name, "ttft_slo_share")


def _present(results: Results) -> list[str]:
    """Returns the workloads that ran."""
    return [where for where in AT if _name(where, PAPER) in results.runs]


def proposed(results: Results) -> Point | None:
    """Returns the point that the rule takes in place of the paper's, None where there is none."""
    where = _present(results)
    gains = {
        point: [
            _in_time(results, _name(each, point)) - _in_time(results, _name(each, PAPER)) for each in where
        ]
        for point in points(results.quick)
    }
    enough = {
        point: sum(found) / len(found)
        for point, found in gains.items()
        if min(found) > 0.0 and sum(found) / len(found) >= LEAST
    }
    return max(enough, key=lambda point: enough[point]) if enough else None


def compare(results: Results) -> list[Row]:
    rows = []
    for where in _present(results):
        for point in points(results.quick):
            share = _in_time(results, _name(where, point))
            more = share - _in_time(results, _name(where, PAPER))
            note = "the paper's point" if point == PAPER else f"{more:+.2f} points against the paper's"
            rows.append(Row(f"{where}, {label(point)}: in time", None, share, "%", note=note))
        share = _in_time(results, f"{where} rival {_rate(where)} sjf")
        rows.append(Row(f"{where}, sjf: in time", None, share, "%"))
    best = proposed(results)
    what = "points that the rule takes in place of the paper's"
    rows.append(Row(what, None, float(best is not None), "", note="none" if best is None else label(best)))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    where = _present(results)
    made, axes = look.figure(columns=len(where))
    swept = sorted({point[0] for point in points(results.quick) if point[1:] == PAPER[1:]})
    for axis, each in zip(axes, where, strict=True):
        ours = [_in_time(results, _name(each, (q, *PAPER[1:]))) for q in swept]
        rival = _in_time(results, f"{each} rival {_rate(each)} sjf")
        series = {
            "MFS": look.Series(swept, ours),
            "SJF": look.Series([swept[0], swept[-1]], [rival, rival], quiet=True),
        }
        look.lines(axis, series, "Q_1", "in time, %", each)
    return {"mfs_thresholds": made}
