"""Draws a heatmap, of all rates together and of each alone: blue where disaggregated is faster, red where slower."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policies.routing.deepflow.heatmap import Heatmap

_STACK_FROM = 4
"""Number of ratios from which the panels are drawn above one another instead of side by side."""
Cells = Sequence[Sequence[float | None]]


def draw(
    path: Path,
    heatmap: Heatmap,
    marks: Sequence[Sequence[str]],
    rates: Sequence[Mapping[str, Any]],
    title: str,
) -> None:
    """Writes a PNG or SVG, by the ending of `path`. `rates` is the heatmap file's list of {"rate_per_s", "cells"}."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mean = [[cell / heatmap.rates for cell in row] for row in heatmap.cells]
    panels: list[tuple[str, Cells]] = [("mean of all rates (what the policy reads)", mean)]
    if len(rates) > 1:
        panels += [(f"{rate['rate_per_s']:g} requests/s per engine", rate["cells"]) for rate in rates]
    limit = max(0.05, *(abs(c) for _, cells in panels for row in cells for c in row if c is not None))
    across = len(heatmap.ratios) < _STACK_FROM
    rows, columns = (1, len(panels)) if across else (len(panels), 1)
    width, height = 1.1 * len(heatmap.ratios), 0.5 + 0.7 * len(heatmap.prefill_tokens)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns + 2.2, height * rows + 1.2),
        squeeze=False,
        layout="constrained",
    )
    for index, (axis, (name, cells)) in enumerate(zip(axes.flat, panels, strict=True)):
        image = _panel(axis, heatmap, cells, marks if index == 0 else None, limit)
        axis.set_title(name, fontsize=9)
    figure.supylabel("prefill length (tokens)", fontsize=9)
    figure.supxlabel("decode length / prefill length   (small: decode length in tokens)", fontsize=9)
    figure.colorbar(image, ax=axes, label="JCT colocated / JCT disaggregated − 1", shrink=0.9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(
    axis: Any, heatmap: Heatmap, cells: Cells, marks: Sequence[Sequence[str]] | None, limit: float
) -> Any:
    import numpy as np
    from matplotlib.patches import Rectangle

    values = np.array([[np.nan if c is None else c for c in row] for row in cells], dtype=float)
    image = axis.imshow(
        values, cmap="RdBu", vmin=-limit, vmax=limit, origin="lower", aspect="auto", interpolation="nearest"
    )
    axis.set_facecolor("0.9")
    axis.set_xticks(range(len(heatmap.ratios)), [f"{r:g}" for r in heatmap.ratios])
    axis.set_yticks(range(len(heatmap.prefill_tokens)), [f"{p:g}" for p in heatmap.prefill_tokens])
    for i, prefill in enumerate(heatmap.prefill_tokens):
        for j, ratio in enumerate(heatmap.ratios):
            value = values[i, j]
            colour = "white" if abs(value) > 0.6 * limit else "black"
            text = "not\nmeasured" if np.isnan(value) else f"{value:+.2f}"
            axis.text(j, i, text, ha="center", va="center", color=colour, fontsize=10)
            note = f"{max(1, round(prefill * ratio))}"
            if marks is not None and marks[i][j] != "measured":
                note += f" {marks[i][j]}"
                axis.add_patch(
                    Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="///", edgecolor="0.5", lw=0)
                )
            axis.text(j, i - 0.33, note, ha="center", va="center", color=colour, fontsize=6.5)
    return image
