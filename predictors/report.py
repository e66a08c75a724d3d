"""A training report consists of Markdown tables, and of plots of calibration and error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from predictors.evaluate import Evaluation, Scores
from predictors.permutation import SignalTest

_DASH = "–"


def table(evaluations: Mapping[str, Evaluation]) -> str:
    """Returns a Markdown table with one row per predictor: its scores over all age points and windows, and those of
    the total length.
    """
    lines = [
        "| realisation | ROC-AUC | Brier | ECE | largest ECE of a window (by chance) | conditional MAE, tokens | "
        "pinball at arrival | pinball at age | MAE of the mean total | below q10 / q50 / q90 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, e in evaluations.items():
        o, t = e.overall, e.total_at_arrival
        worst = max(e.by_window.values(), key=lambda s: s.ece or 0.0)
        cells = [
            name,
            _number(o.roc_auc, 3),
            _number(o.brier, 5),
            _number(o.ece, 4),
            f"{_number(worst.ece, 4)} ({_number(worst.ece_by_chance, 4)})",
            _number(o.conditional_mae_tokens, 3),
            _number(t.pinball_tokens, 1),
            _number(e.total_at_rows.pinball_tokens, 1),
            _number(t.mean_mae_tokens, 1),
            " / ".join(f"{c:.2f}" for c in t.coverage),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_window(evaluations: Mapping[str, Evaluation]) -> str:
    """Returns a Markdown table of Brier score, ECE and conditional MAE for each window H."""
    return _grid(
        evaluations, {n: {f"H={w}": s for w, s in e.by_window.items()} for n, e in evaluations.items()}
    )


def by_age(evaluations: Mapping[str, Evaluation]) -> str:
    """Returns a Markdown table of Brier score, ECE and conditional MAE for each range of ages, over all windows."""
    return _grid(
        evaluations, {n: {f"age {a}": s for a, s in e.by_age.items()} for n, e in evaluations.items()}
    )


def _grid(evaluations: Mapping[str, Evaluation], cells: Mapping[str, Mapping[str, Scores]]) -> str:
    columns = list(next(iter(cells.values()))) if cells else []
    lines = [
        "| realisation: Brier, ECE, cond. MAE | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in evaluations:
        row = [
            f"{_number(s.brier, 4)}, {_number(s.ece, 3)}, {_number(s.conditional_mae_tokens, 2)}"
            for s in cells[name].values()
        ]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def signal_line(signal: SignalTest | None) -> str:
    """Returns the result of the permutation test as one line of text."""
    if signal is None:
        return "Permutation test: too few held-out requests."
    verdict = "the features carry signal" if signal.found else "no signal found in the features"
    return (
        f"Permutation test on the held-out part ({signal.shifts} circular shifts): largest |rank correlation| "
        f"{signal.statistic:.3f} ({signal.feature}), p = {signal.p_value:.3f}: {verdict}."
    )


def _number(value: float | None, digits: int) -> str:
    return _DASH if value is None else f"{value:.{digits}f}"


def plot(path: Path, title: str, evaluations: Mapping[str, Evaluation]) -> None:
    """Writes a PNG of three plots to `path`: reliability, Brier score by age relative to survival, and conditional
    MAE by window. It needs matplotlib (extra dev).
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = {n: e for n, e in evaluations.items() if n not in ("oracle", "constant")}
    figure, (calibration, age, window) = plt.subplots(1, 3, figsize=(15, 4.5))
    figure.suptitle(title)
    calibration.plot((0, 1), (0, 1), color="grey", linewidth=0.8)
    reference = evaluations["survival"]
    for name, e in shown.items():
        points = [r for r in e.overall.reliability if r.rows >= 30]
        calibration.plot(
            [r.predicted for r in points], [r.observed for r in points], marker="o", ms=3, label=name
        )
        ages = [a for a, s in e.by_age.items() if s.brier is not None and reference.by_age[a].brier]
        ratio = [(e.by_age[a].brier or 0.0) / (reference.by_age[a].brier or 1.0) for a in ages]
        age.plot(ages, ratio, marker="o", ms=3, label=name)
        windows = [w for w, s in e.by_window.items() if s.conditional_mae_tokens is not None and w > 1]
        error = [(e.by_window[w].conditional_mae_tokens or 0.0) / w for w in windows]
        window.plot([str(w) for w in windows], error, marker="o", ms=3, label=name)
    calibration.set(
        xlabel="predicted P(finish within H)", ylabel="observed", title="reliability, bins of 30+ rows"
    )
    age.set(xlabel="age, tokens", ylabel="Brier / Brier of survival", title="stage 1 by age")
    # On a linear axis one bad age would flatten all other points.
    if age.get_ylim()[1] > 4:
        age.set_yscale("log")
    window.set(xlabel="window H, tokens", ylabel="conditional MAE / H", title="stage 2 by window")
    calibration.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
