"""Draws all plots in one style: quiet axes, lines labelled where they end, no legends and no frames.

It needs matplotlib. The plots are PNG files. They contain no dates, so the same data gives the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

# The palette of Okabe and Ito, whose colours are distinct for colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
QUIET = "#9A9A9A"
# For each figure: the colour of each name.
_BY_NAME: WeakKeyDictionary[object, dict[str, str]] = WeakKeyDictionary()
MAX_BANDS = 3
DPI = 120
# The number of colours of a file: those of the lines, and their mixtures with white where edges are smoothed.
PALETTE = 64
# The least distance between the middles of two labels, in points.
LABEL_POINTS = 10.0
_TICKS = FuncFormatter(lambda value, _: f"{value:,.6g}")
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": "#333333",
    "axes.titlesize": 10,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot: its points, and half of their 95 % intervals (None: not drawn). A `quiet` line is grey."""

    x: Sequence[float]
    y: Sequence[float]
    half_width: Sequence[float | None] | None = None
    quiet: bool = False


def figure(
    columns: int = 1, rows: int = 1, width: float = 5.2, height: float = 3.4
) -> tuple[Figure, list[Axes]]:
    """Returns (a figure of `rows` x `columns` panels in the common style, its axes row by row)."""
    with mpl.rc_context(_STYLE):
        made, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    return made, list(axes.flat)


def lines(
    axes: Axes, series: Mapping[str, Series], x: str, y: str, title: str = "", log_x: bool = False
) -> None:
    """Draws lines with their intervals, and writes each name at its line's end.

    Names that would overlap are moved apart. A name has the same colour in all panels of a figure.
    """
    colours = _BY_NAME.setdefault(axes.figure, {})
    ends = []
    with_intervals = sum(one.half_width is not None for one in series.values())
    if log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for one in series.values() for x in one.x})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    for name, one in series.items():
        colour = QUIET if one.quiet else colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        axes.plot(one.x, one.y, color=colour, marker="o", markersize=3)
        if one.half_width is not None:
            _intervals(axes, one, colour, as_band=with_intervals <= MAX_BANDS)
        ends.append((one.y[-1], one.x[-1], name, colour))
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left")
    axes.margins(x=0.03)
    axes.yaxis.set_major_formatter(_TICKS)
    _label_ends(axes, ends)


def _intervals(axes: Axes, one: Series, colour: str, as_band: bool) -> None:
    """Draws a line's intervals as a band, or as thin bars where many bands would hide each other."""
    assert one.half_width is not None
    halves = [h or 0.0 for h in one.half_width]
    if as_band:
        low = [v - h for v, h in zip(one.y, halves, strict=True)]
        high = [v + h for v, h in zip(one.y, halves, strict=True)]
        axes.fill_between(one.x, low, high, color=colour, alpha=0.15, linewidth=0)
    else:
        axes.errorbar(one.x, one.y, yerr=halves, fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.45)


def _label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Writes the names beside the last points. Names that would overlap form a pile around the mean of their points."""
    low, high = axes.get_ylim()
    # Printer's points per unit of y.
    points = axes.bbox.height * 72.0 / axes.figure.dpi / (high - low)
    ends = sorted(ends)
    wanted = [at * points for at, _, _, _ in ends]
    for (at, x, name, colour), y in zip(ends, spread(wanted, LABEL_POINTS), strict=True):
        axes.annotate(
            name,
            xy=(x, at),
            xytext=(6, y - at * points),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8,
            annotation_clip=False,
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Returns positions near the `wanted` ones (ascending), in the same order, at least `gap` apart.

    Positions that are too close form a pile around their mean.
    """
    piles: list[list[float]] = []
    for at in wanted:
        piles.append([at])
        while (
            len(piles) > 1
            and _middle(piles[-1]) - _middle(piles[-2]) < gap * (len(piles[-1]) + len(piles[-2])) / 2
        ):
            last = piles.pop()
            piles[-1] += last
    return [_middle(pile) + gap * (i - (len(pile) - 1) / 2) for pile in piles for i in range(len(pile))]


def _middle(pile: Sequence[float]) -> float:
    return sum(pile) / len(pile)


def bars(axes: Axes, values: Mapping[str, tuple[float, float | None]], x: str, title: str = "") -> None:
    """Draws horizontal bars, the first on top, with their intervals and figures.

    `values` are (mean, half of the interval) by name. The axis is scaled for the bars, so the ends of an interval that
    is far longer than the bars (as from two seeds) are cut off.
    """
    names = list(values)[::-1]
    means = [values[n][0] for n in names]
    halves = [values[n][1] or 0.0 for n in names]
    axes.grid(False)
    axes.barh(
        names, means, xerr=halves, color=COLOURS[0], height=0.62, error_kw={"ecolor": "#555555", "lw": 1}
    )
    longest = max(map(abs, means), default=1.0) or 1.0
    least = min((m - h for m, h in zip(means, halves, strict=True) if m < 0), default=0.0)
    low = max(min(0.0, least, *(1.15 * m for m in means)), -1.6 * longest) if means else 0.0
    high = longest * min(1.6, 1.2 + max((h / longest for h in halves), default=0.0))
    for i, (mean, half) in enumerate(zip(means, halves, strict=True)):
        beside = min(max(mean, 0.0) + half, high) + 0.015 * longest
        axes.text(beside, i, _figure(mean), va="center", fontsize=8, color="#333333")
    axes.set(xlabel=x)
    axes.set_title(title, loc="left")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(low, high)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(_TICKS)


def _figure(value: float) -> str:
    """Returns the number as text with three significant digits and separated thousands."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def save(folder: Path, name: str, made: Figure) -> str:
    """Writes `name`.png into `folder`, closes the figure and returns the file's name."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.png"
    with mpl.rc_context(_STYLE):
        made.tight_layout()
        made.savefig(file, dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    plt.close(made)
    with_palette(file)
    return file.name


def with_palette(file: Path) -> None:
    """Rewrites a PNG with a palette of PALETTE colours.

    The file is a quarter of the size, and the difference cannot be seen in a plot.
    """
    with Image.open(file) as drawn:
        few = drawn.convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
