"""Attainment by rate: the figures that mfs_moe and mfs_dense make of it, for each form of MFS.

The rivals are `RIVALS`; forms of MFS stand beside each other and never count as rivals. The best rival is the one with
the most requests in time at the rate that is compared, or the one that sustains the highest rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.experiments.base import Results, Row, aimed
from benchmarks.experiments.mfs_common import OURS, RIVALS
from benchmarks.seeds import ratio as ratio_of

Attainments = Mapping[str, Mapping[float, float]]
"""Share of requests in time, by policy and rate, rates in order."""

LEAST = 0.3
"""Least share of fair sharing's requests in time at the rate at which policies are compared (ASSUMPTION: the paper's
"high request rates" are those at which rivals fail and still serve some)."""
SUSTAINED = 0.8
"""Attainment at which sustained rates are compared (ASSUMPTION: the paper says "similar SLO attainment")."""
BEST = "the best rival"


def attainments(results: Results, model: str, work: str, groups: int) -> Attainments:
    """Returns the mean share of requests in time under each policy, by rate."""
    found = _values(results, model, work, groups)
    return {
        policy: {rate: sum(shares) / len(shares) for rate, shares in by_rate.items()}
        for policy, by_rate in found.items()
    }


def of_seeds(results: Results, model: str, work: str, groups: int) -> list[Attainments]:
    """Returns what `attainments` returns for each seed alone, in the order of the seeds."""
    found = _values(results, model, work, groups)
    return [
        {policy: {rate: shares[at] for rate, shares in by_rate.items()} for policy, by_rate in found.items()}
        for at in range(len(results.seeds))
    ]


def _values(results: Results, model: str, work: str, groups: int) -> dict[str, dict[float, list[float]]]:
    """Returns the share of requests in time of each seed, by policy and rate, rates in order."""
    found: dict[str, dict[float, list[float]]] = {}
    for name in results.where(model=model, workload=work):
        config = results.variants[name]
        if config.get("groups", 8) == groups:
            found.setdefault(config["policy"], {})[config["rate"]] = results.values(name, "ttft_slo_share")
    return {policy: dict(sorted(by_rate.items())) for policy, by_rate in found.items()}


def compared_at(found: Attainments) -> float:
    """Returns the highest rate at which fair sharing has `LEAST` of its requests in time; the lowest if none is."""
    fair = found["fair"]
    enough = [rate for rate, share in fair.items() if share >= LEAST]
    return max(enough) if enough else min(fair)


def over_rivals(
    where: str, found: Attainments, paper: float, against: str = BEST, seeds: Sequence[Attainments] = ()
) -> list[Row]:
    """Returns rows with each form's attainment over the best rival's and over Karuna's. The paper's figure is that over
    `against`, which is one of the two. `seeds` are the attainments of the single seeds, for the intervals.
    """
    rate = compared_at(found)
    best = max((rival for rival in RIVALS if rival in found), key=lambda rival: found[rival][rate])
    rows = []
    for form, name in OURS.items():
        if form not in found:
            continue
        for what, rival in ((BEST, best), ("karuna", "karuna")):
            ours, theirs = found[form][rate], found[rival][rate]
            ratio = ours / theirs if theirs else None
            half = _half([one[form][rate] for one in seeds], [one[rival][rate] for one in seeds])
            title = f"{where}: in time at {rate:g}/s, {name} vs {what}"
            note = rival if what == BEST else ""
            rows.append(_row(title, paper if what == against else None, ratio, half, note))
    return rows


def sustained(
    where: str, found: Attainments, paper: float | None, seeds: Sequence[Attainments] = ()
) -> list[Row]:
    """Returns rows with the rate that each form sustains, over the best rival's and over Karuna's. The paper's figure
    is the latter. A ratio is None where a rate lies outside of those that ran; the note says whose. `seeds` are the
    attainments of the single seeds. Where one of them does not fall to `SUSTAINED` between rates there is no interval,
    and the aim is open.
    """
    rates = {policy: rate_at(by_rate, SUSTAINED) for policy, by_rate in found.items()}
    best = max(
        (rival for rival in RIVALS if rival in found), key=lambda rival: _order(found[rival], rates[rival])
    )
    rows = []
    for form, name in OURS.items():
        if form not in found:
            continue
        for what, rival in ((BEST, best), ("karuna", "karuna")):
            ours, theirs = rates[form], rates[rival]
            ratio = ours / theirs if ours is not None and theirs is not None else None
            half = _half(*([rate_at(one[policy], SUSTAINED) for one in seeds] for policy in (form, rival)))
            title = f"{where}: rate with {100 * SUSTAINED:g} % in time, {name} vs {what}"
            notes = [rival] if what == BEST else []
            notes += [f"{each} {_outside(found[each])}" for each in (form, rival) if rates[each] is None]
            unsure = ratio is not None and half is None and len(seeds) > 1
            notes += ["a seed without such a rate"] if unsure else []
            row = _row(title, paper if what == "karuna" else None, ratio, half, ", ".join(notes))
            rows.append(replace(row, met=None) if unsure else row)
    return rows


def _half(over: Sequence[float | None], under: Sequence[float | None]) -> float | None:
    """Returns half of the 95 % interval of a ratio over the seeds; None without seeds, or where one has no value."""
    ours, theirs = ([value for value in values if value is not None] for values in (over, under))
    if not ours or len(ours) < len(over) or len(theirs) < len(under) or not any(theirs):
        return None
    return ratio_of(ours, theirs)[1]


def _row(name: str, paper: float | None, ratio: float | None, half: float | None, note: str) -> Row:
    """Returns a row whose aim is at least the paper's figure, where there is one and ours could be measured."""
    row = Row(name, paper, ratio, "x", None if ratio is None else half, note=note)
    return row if paper is None else aimed(row, f"at least {paper:g}", least=paper)


def _order(by_rate: Mapping[float, float], rate: float | None) -> tuple[float, float]:
    """Returns what orders rivals by the rate that they sustain; their mean attainment decides among those without one,
    which sustain all rates that ran or none.
    """
    if rate is None:
        rate = max(by_rate) if _sustains_all(by_rate) else 0.0
    return rate, sum(by_rate.values()) / len(by_rate)


def _sustains_all(by_rate: Mapping[float, float]) -> bool:
    return by_rate[min(by_rate)] >= SUSTAINED


def _outside(by_rate: Mapping[float, float]) -> str:
    which = "above" if _sustains_all(by_rate) else "below"
    return f"{which} {100 * SUSTAINED:g} % at all rates"


def rate_at(by_rate: Mapping[float, float], share: float) -> float | None:
    """Returns the rate at which attainment falls to `share`, between the rates that ran; None where it does not."""
    points = list(by_rate.items())
    for (low, above), (high, below) in pairwise(points):
        if above >= share > below:
            return low + (high - low) * (above - share) / (above - below)
    return None
