"""Attainment by rate: the figures that mfs_moe and mfs_dense make of it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from benchmarks.experiments.base import Results, Row

Attainments = Mapping[str, Mapping[float, float]]
"""Share of requests in time, by policy and rate, rates in order."""

LEAST = 0.3
"""Least share of fair sharing's requests in time at the rate at which policies are compared (ASSUMPTION: the paper's
"high request rates" are those at which rivals fail and still serve some)."""
SUSTAINED = 0.8
"""Attainment at which sustained rates are compared (ASSUMPTION: the paper says "similar SLO attainment")."""


def attainments(results: Results, model: str, work: str, groups: int) -> Attainments:
    """Returns the mean share of requests in time under each policy, by rate."""
    found: dict[str, dict[float, float]] = {}
    for name in results.where(model=model, workload=work):
        config = results.variants[name]
        if config.get("groups", 8) == groups:
            found.setdefault(config["policy"], {})[config["rate"]] = results.mean(name, "ttft_slo_share")
    return {policy: dict(sorted(by_rate.items())) for policy, by_rate in found.items()}


def over_rivals(where: str, found: Attainments, paper: float, against: str = "fair") -> list[Row]:
    """Returns rows with MFS's attainment over each rival's; the paper's figure is that over `against`."""
    fair = found["fair"]
    enough = [rate for rate, share in fair.items() if share >= LEAST]
    rate = max(enough) if enough else min(fair)
    ours, rows = found["mfs"][rate], []
    for rival, by_rate in found.items():
        if rival == "mfs":
            continue
        ratio = ours / by_rate[rate] if by_rate[rate] else None
        is_aim = rival == against
        rows.append(
            Row(
                f"{where}: in time at {rate:g}/s, MFS vs {rival}",
                paper if is_aim else None,
                ratio,
                "x",
                None,
                f"at least {paper:g}" if is_aim else "",
                (ratio is not None and ratio >= paper) if is_aim else None,
            )
        )
    return rows


def sustained(where: str, found: Attainments, paper: float | None) -> Row:
    """Returns a row with the rate that MFS sustains over the rate that Karuna does; None where either never drops."""
    rates = [rate_at(found[policy], SUSTAINED) for policy in ("mfs", "karuna")]
    ours, theirs = rates
    ratio = ours / theirs if ours is not None and theirs is not None else None
    what = f"{where}: rate with {100 * SUSTAINED:g} % in time, MFS vs karuna"
    reached = None if ratio is None or paper is None else ratio >= paper
    aim = "" if paper is None else f"at least {paper:g}"
    return Row(what, paper, ratio, "x", None, aim, reached)


def rate_at(by_rate: Mapping[float, float], share: float) -> float | None:
    """Returns the rate at which attainment falls to `share`, between the rates that ran; None where it does not."""
    points = list(by_rate.items())
    for (low, above), (high, below) in pairwise(points):
        if above >= share > below:
            return low + (high - low) * (above - share) / (above - below)
    return None
