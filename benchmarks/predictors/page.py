"""Makes the page of the predictors' results (`benchmarks/results/predictors/README.md`) from results.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from benchmarks.checkout import Origin
from benchmarks.predictors import cost
from predictors.evaluate import Evaluation
from predictors.permutation import SignalTest
from predictors.report import by_age, by_window, signal_line, table


def markdown(whole: Mapping[str, Any]) -> str:
    """Returns the page of the results `whole`."""
    lines = [
        "# Predictors on published traces",
        "",
        f"`{whole['command']}`, {made_by(whole)}.",
        "Last 20 % of each trace by time; every request is asked about at ages 0, 16, 32, ... and windows H = 1, 8,",
        "24, 48, 96. *constant* and *survival* are fitted on the first 80 %; *learning* and *memorised* take each",
        "outcome in as it comes, as LightGBM's features do. ServeGen draws output independently of input given the",
        "client: *memorised, client* (survival given the client) is the fair reference there. Full numbers are in",
        "results.json.",
        "",
        "| trace | signal in the features (permutation test) | LightGBM against survival: Brier | conditional MAE "
        "| ECE, all (largest of a window; due to chance there) | Brier at H = 96, own features "
        "| with another request's features |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in whole["traces"].items():
        signal, against = r["signal"], r["lightgbm_against_survival"]
        found = (
            "too few"
            if signal is None
            else f"{'yes' if signal['found'] else 'no'}, p = {signal['p_value']:.3f}"
        )
        learned = r["evaluations"]["lightgbm"]
        ece, worst = learned["overall"]["ece"], max(learned["by_window"].values(), key=lambda s: s["ece"])
        own, other = r["brier_h_max"]["own_features"], r["brier_h_max"]["permuted_features"]
        lines.append(
            f"| {name} | {found} | {against['brier']:+.1%} | {against['conditional_mae']:+.1%} "
            f"| {ece:.4f} ({worst['ece']:.4f}, {worst['ece_by_chance']:.4f}) | {own:.4f} | {other:.4f} |"
        )
    lines += ["", "## Cost", "", *cost.lines(whole["cost"]), ""]
    return "\n".join([*lines, *("\n" + _section(name, r) + "\n" for name, r in whole["traces"].items())])


def made_by(whole: Mapping[str, Any]) -> str:
    """Returns the commit, seed and machine of the results. Files written before runs kept their origin have no digest
    of the code.
    """
    if "origin" not in whole:
        return f"commit {whole['commit']}, seed {whole['seed']}; {whole['machine']}"
    origin = Origin.of(whole["origin"])
    changed = "" if origin.clean else " and changes"
    return f"commit {origin.commit}{changed}, code {origin.code}, seed {whole['seed']}; {origin.machine}"


def _section(name: str, trace: Mapping[str, Any]) -> str:
    evaluations = msgspec.convert(trace["evaluations"], dict[str, Evaluation], str_keys=True)
    signal = None if trace["signal"] is None else msgspec.convert(trace["signal"], SignalTest)
    return "\n\n".join(
        (
            f"## {name}",
            f"{trace['requests']} requests, the last {trace['held_out_requests']} held out.",
            signal_line(signal),
            table(evaluations),
            by_window(evaluations),
            by_age(evaluations),
            f"![reliability and errors]({name}.png)",
        )
    )
