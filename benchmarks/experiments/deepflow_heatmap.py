"""DeepFlow Figure 5: where prefill and decode should be apart, by prefill length and decode/prefill ratio.

A cell is JCT_colocated / JCT_disaggregated - 1 for identical requests at one rate, on two colocated engines and on a
prefill and a decode engine (the same hardware). The figure's values are not in the text; its three observations are
(5.3.1): disaggregation wins for long prompts and short decodes, and for longer decodes the longer the prompt; its wins
are larger than its losses; over 80 % of the cells keep their sign at all rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.experiments import deepflow_setup as setup
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "DeepFlow Figure 5: heatmap of JCT colocated / disaggregated - 1; synthetic requests"
SEEDS = (3, 1)
RATES = (0.5, 1.0, 1.5)
# The paper's "shorter decode": decodes up to a fifth of the prompt.
SHORT_RATIO = 0.2


def variants(quick: bool) -> list[Variant]:
    rates, length_s = (RATES[::2], 30.0) if quick else (RATES, 60.0)
    return [Variant(f"{rate:g}/s", {"rate_per_s": rate, "length_s": length_s}) for rate in rates]


def run_one(config: Config, seed: int) -> Metrics:
    cells = setup.heatmap(config["rate_per_s"], config["length_s"], seed).cells
    return {_name(i, j): cells[i][j] for i in range(len(cells)) for j in range(len(cells[0]))}


def _name(i: int, j: int) -> str:
    return f"cell/{setup.PREFILL_AXIS[i]:g}/{setup.RATIO_AXIS[j]:g}"


def _cells(results: Results, variant: str) -> npt.NDArray[np.float64]:
    """Returns the cells (prefill lengths, ratios) of a variant as means over the seeds."""
    rows, columns = range(len(setup.PREFILL_AXIS)), range(len(setup.RATIO_AXIS))
    return np.array([[results.mean(variant, _name(i, j)) for j in columns] for i in rows])


def compare(results: Results) -> list[Row]:
    maps = [_cells(results, variant) for variant in results.variants]
    total: npt.NDArray[np.float64] = np.mean(maps, axis=0)
    signs = np.sign(np.array(maps))
    same = 100.0 * float((np.abs(signs.sum(axis=0)) == len(maps)).mean())
    longest = [_longest_won(row) for row in total]
    wins = f"largest ratio with a positive cell, by prompt length: {', '.join(f'{r:g}' for r in longest)}"
    half, short = len(setup.PREFILL_AXIS) // 2, setup.RATIO_AXIS.index(SHORT_RATIO) + 1
    low, high = float(total[:half, :short].mean()), float(total[half:, :short].mean())
    return [
        Row("cells of one sign at all rates", 80.0, same, "%", None, "> 80 % (the paper)", same > 80),
        Row(
            f"mean cell up to ratio {SHORT_RATIO:g}, shorter prompts", None, low, "", note="JCT ratio less 1"
        ),
        Row(
            f"mean cell up to ratio {SHORT_RATIO:g}, longer prompts",
            None,
            high,
            "",
            None,
            "above the shorter half's",
            high > low,
            wins,
        ),
        Row(
            "largest win over largest loss of disaggregation",
            None,
            float(total.max() / -total.min()) if total.min() < 0 else None,
            "",
            None,
            "> 1 (the paper: dark red against light blue)",
            bool(total.max() > -total.min()),
        ),
    ]


def _longest_won(row: npt.NDArray[np.float64]) -> float:
    return max((ratio for ratio, cell in zip(setup.RATIO_AXIS, row, strict=True) if cell > 0), default=0.0)


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure(len(results.variants), 1, 4.2, 3.4)
    for axis, variant in zip(axes, results.variants, strict=True):
        cells = _cells(results, variant)
        axis.imshow(cells, cmap="RdBu_r", vmin=-0.6, vmax=0.6, aspect="auto", origin="lower")
        axis.grid(False)
        axis.set_xticks(range(len(setup.RATIO_AXIS)), [f"{r:g}" for r in setup.RATIO_AXIS])
        axis.set_yticks(range(len(setup.PREFILL_AXIS)), [f"{p:g}" for p in setup.PREFILL_AXIS])
        for (i, j), cell in np.ndenumerate(cells):
            axis.text(j, i, f"{cell:+.2f}", ha="center", va="center", fontsize=7)
        axis.set(xlabel="decode / prefill length", ylabel="prompt tokens")
        axis.set_title(variant.replace("/s", " requests/s"), loc="left")
    made.suptitle(
        "JCT colocated / disaggregated - 1: above 0 (red) disaggregated is faster", x=0.01, ha="left"
    )
    return {"deepflow_heatmap": made}
