"""DeepFlow Figure 5 at the rates at which Figure 6 uses it, with the paper's observations as they are printed.

A cell is JCT_colocated / JCT_disaggregated - 1 for a batch of identical requests at one rate, on two colocated engines
and on a prefill and a decode engine (`deepflow_rates`). `deepflow_heatmap` has three low rates; its aims were narrowed
once it had been seen that the wider ones would be missed. Here they are the paper's words on the whole map (5.3.1),
which is the sum over the rates, judged by the interval over seeds:

    first    disaggregation is better for longer prompts and for shorter decodes: both halves of both axes are compared.
             "As prefill length increases, its advantage becomes more pronounced for requests with longer decode
             lengths": the same comparison of prompts for ratios of `LONG_RATIO` and more
    second   its wins are larger than its losses: the largest of each, as the figure's colours show them. A ratio less 1
             cannot fall below -1 and has no bound above, which favours wins
    third    more than 80 % of the cells keep their sign at all rates

Prompts of equal lengths at eight rates are 576 runs for each seed, of which those with long outputs take the time. The
cell that holds most requests of Figure 6's trace (2,048 tokens in, 28 out) has a row for each rate: its sign is what
the paper's policy decides by there. ASSUMPTION: requests of a batch come by a Poisson process, because the paper says
"at a fixed RPS" only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.experiments import deepflow_rates as rates_of
from benchmarks.experiments import deepflow_setup as setup
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.seeds import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "DeepFlow Figure 5 at the rates of Figure 6: heatmap of JCT colocated / disaggregated - 1; synthetic requests"
SEEDS = (5, 2)
SEEDS_FROM = 500
QUICK_RATES = (0.5, 4.0)
QUICK_PREFILLS, QUICK_RATIOS = (256.0, 2_048.0), (0.01, 0.5)
# The decodes that the paper calls longer: as long as half of the prompt, or longer.
LONG_RATIO = 0.5
TRACE_CELL = (2_048.0, 0.01)
Maps = npt.NDArray[np.float64]


def variants(quick: bool) -> list[Variant]:
    chosen = QUICK_RATES if quick else rates_of.UNIT_RATES
    shape = {
        "batch": 8 if quick else rates_of.BATCH,
        "prefills": list(QUICK_PREFILLS if quick else setup.PREFILL_AXIS),
        "ratios": list(QUICK_RATIOS if quick else setup.RATIO_AXIS),
    }
    return [Variant(f"{rate:g}/s", {"rate_per_s": rate, **shape}) for rate in chosen]


def run_one(config: Config, seed: int) -> Metrics:
    prefills, ratios = tuple(config["prefills"]), tuple(config["ratios"])
    made = rates_of.batch_map(config["rate_per_s"], config["batch"], prefills, ratios, seed)
    return {
        _name(prompt, ratio): cell
        for prompt, row in zip(prefills, made.cells, strict=True)
        for ratio, cell in zip(ratios, row, strict=True)
    }


def _name(prompt: float, ratio: float) -> str:
    return f"cell/{prompt:g}/{ratio:g}"


def _axes(results: Results) -> tuple[list[float], list[float]]:
    config = next(iter(results.variants.values()))
    return config["prefills"], config["ratios"]


def maps(results: Results, variant: str) -> Maps:
    """Returns the cells of a variant, (seeds, prefill lengths, ratios)."""
    prefills, ratios = _axes(results)
    cells = [[results.values(variant, _name(p, r)) for r in ratios] for p in prefills]
    return np.moveaxis(np.array(cells), -1, 0)


def compare(results: Results) -> list[Row]:
    prefills, ratios = _axes(results)
    by_rate = np.array([maps(results, variant) for variant in results.variants])
    total: Maps = by_rate.mean(axis=0)
    signs = np.sign(by_rate)
    same = 100.0 * (np.abs(signs.sum(axis=0)) == len(signs)).mean(axis=(1, 2))
    seen = spread(same.tolist())
    rows = [
        aimed(
            Row("cells of one sign at all rates", 80.0, seen.mean, "%", seen.half_width), "> 80", above=80.0
        )
    ]
    low, high = total[:, : len(prefills) // 2], total[:, len(prefills) // 2 :]
    short, long = total[:, :, : len(ratios) // 2], total[:, :, len(ratios) // 2 :]
    of_long = np.array(ratios) >= LONG_RATIO
    for name, more, less in (
        ("longer prompts less shorter", high, low),
        ("shorter decodes less longer", short, long),
        (f"longer prompts less shorter, ratios from {LONG_RATIO:g}", high[:, :, of_long], low[:, :, of_long]),
    ):
        rows.append(_above_zero(f"mean cell, {name}", _mean(more) - _mean(less)))
    return [*rows, _wins(total), *_cells(results)]


def _mean(cells: Maps) -> npt.NDArray[np.float64]:
    """Returns the mean cell of each seed."""
    found: npt.NDArray[np.float64] = cells.mean(axis=(1, 2))
    return found


def _above_zero(name: str, by_seed: npt.NDArray[np.float64]) -> Row:
    seen = spread(by_seed.tolist())
    row = Row(name, None, seen.mean, "", seen.half_width, note="a JCT ratio")
    return aimed(row, "> 0", above=0.0)


def _wins(total: Maps) -> Row:
    """Returns the row of the largest win over the largest loss. The ratio is 0 where a seed has no win, and the row has
    no figure where one has no loss.
    """
    best, worst = np.maximum(total.max(axis=(1, 2)), 0.0), -total.min(axis=(1, 2))
    seen = spread((best / worst).tolist()) if (worst > 0.0).all() else None
    row = Row(
        "largest win over largest loss of disaggregation",
        None,
        None if seen is None else seen.mean,
        "",
        None if seen is None else seen.half_width,
        note="" if seen is not None else "a seed without a loss",
    )
    return aimed(row, "> 1", above=1.0)


def _cells(results: Results) -> list[Row]:
    """Returns the rows of the cell that holds most requests of Figure 6's trace, if the axes have it."""
    prompt, ratio = TRACE_CELL
    prefills, ratios = _axes(results)
    if prompt not in prefills or ratio not in ratios:
        return []
    rows = []
    for variant in results.variants:
        seen = results.spread(variant, _name(prompt, ratio))
        name = f"cell of {prompt:g} tokens and ratio {ratio:g} at {variant}"
        rows.append(Row(name, None, seen.mean, "", seen.half_width))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    prefills, ratios = _axes(results)
    columns = min(5, len(results.variants))
    made, axes = look.figure(columns, -(-len(results.variants) // columns), 4.2, 3.4)
    for axis, variant in zip(axes, results.variants, strict=False):
        cells = maps(results, variant).mean(axis=0)
        axis.imshow(cells, cmap="RdBu_r", vmin=-0.6, vmax=0.6, aspect="auto", origin="lower")
        axis.grid(False)
        axis.set_xticks(range(len(ratios)), [f"{r:g}" for r in ratios])
        axis.set_yticks(range(len(prefills)), [f"{p:g}" for p in prefills])
        for (i, j), cell in np.ndenumerate(cells):
            axis.text(j, i, f"{cell:+.2f}", ha="center", va="center", fontsize=7)
        axis.set(xlabel="decode / prefill length", ylabel="prompt tokens")
        axis.set_title(variant.replace("/s", " requests/s"), loc="left")
    for axis in axes[len(results.variants) :]:
        axis.set_visible(False)
    made.suptitle(
        "JCT colocated / disaggregated - 1: above 0 (red) disaggregated is faster", x=0.01, ha="left"
    )
    return {"deepflow_map": made}
