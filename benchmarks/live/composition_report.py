"""The report of `benchmarks.live.composition`: the figures of each block, ratios to NetKV's, tables and a plot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.live.stats import percentile
from benchmarks.seeds import Spread, spread

# The first second of a block, in which the app fills up, is not measured.
SKIP_S = 1.0
BASE = "NetKV"
FIGURES = ("ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "tpot_mean_s", "tokens_per_s")
# The limit is that of `experiments.twin`: what makes the client late also delays the engines.
LATE_MS = 5.0
# All roles but `others` are one process each, which is saturated at 1 core.
BUSIEST = ("ingress", "router", "client", "others")

Column = tuple[str, Callable[[Mapping[str, Any]], str]]


@dataclass(frozen=True, slots=True)
class Stream:
    """One whole answer; its times are seconds from the block's start."""

    sent_s: float
    first_s: float
    last_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Block:
    """One policy's block.

    `cores` is the number of busy cores by role, and `late_ms` the 95th percentile of the client's delay in sending. A
    simulated block has neither.
    """

    case: str
    load: float
    round: int
    requests: int
    lost: int
    figures: Mapping[str, float]
    cores: Mapping[str, float]
    late_ms: float


def measure(streams: Sequence[Stream], seconds: float) -> dict[str, float]:
    """Returns the figures (`FIGURES`) of a block with `seconds` of arrivals.

    Raises ValueError where nothing was measured.
    """
    counted = [one for one in streams if one.sent_s >= SKIP_S]
    ttft_s = [one.first_s - one.sent_s for one in counted]
    tpot_s = [(one.last_s - one.first_s) / (one.tokens - 1) for one in counted if one.tokens > 1]
    if not ttft_s or not tpot_s:
        raise ValueError("no answer to measure: make the block longer or the load higher")
    streamed = sum(_tokens_between(one, SKIP_S, seconds) for one in streams)
    return {
        "ttft_mean_s": sum(ttft_s) / len(ttft_s),
        "ttft_p50_s": percentile(ttft_s, 0.5),
        "ttft_p95_s": percentile(ttft_s, 0.95),
        "tpot_mean_s": sum(tpot_s) / len(tpot_s),
        "tokens_per_s": streamed / (seconds - SKIP_S),
    }


def _tokens_between(one: Stream, start_s: float, end_s: float) -> float:
    """Returns the stream's tokens in [start_s, end_s).

    The first token counts at its time, and the others are spread evenly up to the last.
    """
    first = 1.0 if start_s <= one.first_s < end_s else 0.0
    length_s = one.last_s - one.first_s
    if length_s <= 0:
        return one.tokens * first
    within_s = max(0.0, min(one.last_s, end_s) - max(one.first_s, start_s))
    return first + (one.tokens - 1) * within_s / length_s


def line(block: Block) -> str:
    """Returns the line that is printed when a block ends."""
    f, cores = block.figures, block.cores
    busy = ", ".join(f"{who} {cores.get(who, 0.0):.2f}" for who in BUSIEST)
    return (
        f"round {block.round} load {block.load:g} {block.case}: TTFT {1e3 * f['ttft_mean_s']:.0f} ms (p95 "
        f"{1e3 * f['ttft_p95_s']:.0f}), {block.requests} requests, {block.lost} lost; "
        f"{sum(cores.values()):.2f} cores busy ({busy}), client {block.late_ms:.1f} ms late"
    )


def ratios(blocks: Sequence[Block], case: str, figure: str, load: float | None = None) -> list[float]:
    """Returns the ratio of a figure in each of the case's blocks to the base's block with the same requests.

    `load` None takes the blocks of all loads.
    """
    base = {(b.load, b.round): b.figures[figure] for b in blocks if b.case == BASE}
    return [
        b.figures[figure] / base[b.load, b.round] for b in blocks if b.case == case and load in (None, b.load)
    ]


def rows(live: Sequence[Block], simulated: Sequence[Block]) -> list[dict[str, Any]]:
    """Returns a row for each load and policy, and one for each policy over all loads.

    A row has means over the blocks, and ratios to the base's blocks.
    """
    loads, names = _loads(live), _names(live)
    found = []
    for load in [*loads, None]:
        for case in names:
            own, twins = (
                [b for b in blocks if b.case == case and load in (None, b.load)]
                for blocks in (live, simulated)
            )
            row: dict[str, Any] = {"load": load, "case": case, "blocks": len(own)}
            row["requests"], row["lost"] = sum(b.requests for b in own), sum(b.lost for b in own)
            for figure in FIGURES:
                row[figure] = sum(b.figures[figure] for b in own) / len(own)
                row[f"simulated_{figure}"] = sum(b.figures[figure] for b in twins) / len(twins)
                for side, blocks in (("live", live), ("simulated", simulated)):
                    values = ratios(blocks, case, figure, load)
                    row[f"{side}_{figure}_ratio"] = _shown(spread(values)) | {"blocks": values}
            row["cores"] = {
                who: sum(b.cores.get(who, 0.0) for b in own) / len(own)
                for who in sorted({w for b in own for w in b.cores})
            }
            row["busy_cores"] = sum(row["cores"].values())
            row["client_late_p95_ms_worst"] = max(b.late_ms for b in own)
            found.append(row)
    return found


def _shown(one: Spread) -> dict[str, float | None]:
    return {"mean": one.mean, "half_width": one.half_width}


def text(live: Sequence[Block], simulated: Sequence[Block]) -> str:
    """Returns two tables: the measured figures, and the cores that each process kept busy."""
    found = rows(live, simulated)
    busy = [
        ("load", _load),
        ("policy", lambda row: row["case"]),
        *((who, _cores(who)) for who in ("app", *BUSIEST)),
    ]
    busy += [("client late, worst p95", lambda row: f"{row['client_late_p95_ms_worst']:.1f} ms")]
    disturbed = sum(b.late_ms > LATE_MS for b in live)
    note = f"in {disturbed} of {len(live)} blocks the client was more than {LATE_MS:g} ms late (p95)"
    note += ": something else had the cores, do not trust them" if disturbed else ""
    return "\n".join(
        [
            _table(_MEASURED, found),
            "",
            "cores busy",
            _table(busy, [row for row in found if row["load"] is not None]),
            "",
            note,
        ]
    )


def _table(columns: Sequence[Column], found: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table whose second column is aligned to the left and whose others are aligned to the right."""
    cells = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in found)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _load(row: Mapping[str, Any]) -> str:
    return "all" if row["load"] is None else f"{row['load']:g}"


def _ms(figure: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{1e3 * row[figure]:,.{1 if figure == 'tpot_mean_s' else 0}f}"


def _cores(who: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns the column of cores that `who` kept busy; `app` is all processes of the app."""

    def show(row: Mapping[str, Any]) -> str:
        cores = row["cores"]
        return f"{sum(cores.values()) - cores['client'] - cores['others'] if who == 'app' else cores.get(who, 0.0):.2f}"

    return show


def _ratio(figure: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns the column of a figure's ratio, live | simulated."""
    names = (f"live_{figure}_ratio", f"simulated_{figure}_ratio")
    return lambda row: " | ".join(_range(row[name]) for name in names)


def _range(ratio: Mapping[str, Any]) -> str:
    """Returns as text the mean, its 95 % interval where there are enough blocks, the least and the greatest ratio."""
    half, values = ratio["half_width"], ratio["blocks"]
    interval = "" if half is None or len(values) < 3 else f" +-{half:.2f}"
    spanned = "" if half is None else f" ({min(values):.2f} .. {max(values):.2f})"
    return f"{ratio['mean']:.2f}{interval}{spanned}"


_MEASURED: tuple[Column, ...] = (
    ("load", _load),
    ("policy", lambda row: row["case"]),
    ("TTFT mean, ms", _ms("ttft_mean_s")),
    ("simulated", _ms("simulated_ttft_mean_s")),
    ("p50", _ms("ttft_p50_s")),
    ("p95", _ms("ttft_p95_s")),
    ("TPOT", _ms("tpot_mean_s")),
    ("tok/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
    ("lost", lambda row: str(row["lost"])),
    ("mean TTFT of NetKV's: live | simulated", _ratio("ttft_mean_s")),
    ("p95 of NetKV's: live | simulated", _ratio("ttft_p95_s")),
)


def draw(live: Sequence[Block], simulated: Sequence[Block], folder: Path) -> None:
    """Writes composition.png, which shows TTFT relative to the base's over load, live and simulated."""
    made, axes = plots.figure(columns=2, rows=2, width=5.0, height=2.9)
    shown = [(f, side) for f in ("ttft_mean_s", "ttft_p95_s") for side in ("live", "simulated")]
    for panel, (figure, side) in zip(axes, shown, strict=True):
        blocks = live if side == "live" else simulated
        what = "mean" if figure == "ttft_mean_s" else "95th percentile"
        plots.lines(panel, _series(blocks, figure), "load", "TTFT, % of NetKV's", f"{what}, {side}")
    plots.save(folder, "composition", made)


def _series(blocks: Sequence[Block], figure: str) -> dict[str, plots.Series]:
    loads = _loads(blocks)
    found = {}
    for case in _names(blocks):
        means = [100.0 * spread(ratios(blocks, case, figure, load)).mean for load in loads]
        found[case] = plots.Series(loads, means, quiet=case == BASE)
    return found


def _loads(blocks: Sequence[Block]) -> list[float]:
    return sorted({b.load for b in blocks})


def _names(blocks: Sequence[Block]) -> list[str]:
    """Returns the names of the policies, in the order of the first round."""
    return list(dict.fromkeys(b.case for b in blocks))
