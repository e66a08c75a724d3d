"""A page and a picture of the kept runs: figures by kind of fault, and the timeline of the last run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.loans import RESULTS
from benchmarks.chaos.totals import MOST_FROZEN, added_up
from benchmarks.plots import COLOURS, QUIET, figure, with_palette

BIN_S = 5.0


def lines_of(total: Mapping[str, Any]) -> list[str]:
    """Returns the sums over runs as lines of text."""
    lines = [
        f"runs {total['runs']}, {total['minutes']} minutes, seeds {', '.join(map(str, total['seeds']))}, "
        f"commits {', '.join(total['commits'])}",
        f"faults {total['faults']}",
        f"requests {total['requests']}: right {total['right']} ({total['near_ties']} after a near tie), "
        f"failed {sum(total['failed'].values())}, wrong {sum(total['wrong'].values())}, unended {total['unended']}",
        *_frozen(total["frozen"]),
    ]
    orders = total["orders"]
    if orders is not None:
        lines.append(
            f"orders {orders['number']}: acknowledged {orders['acknowledged']}, after"
            f" {orders['acknowledged_longest_s']:g} s at most; reached before the next one {orders['reached']}, after"
            f" {orders['reached_longest_s']:g} s at most"
        )
    loans = total["loans"]
    if loans is not None:
        ends = ", ".join(f"{result} {loans[result]}" for result in RESULTS)
        lines.append(f"loans of prefixes {loans['begun']}: {ends}")
    counters: Mapping[str, int] | None = total["counters"]
    if counters is not None:
        migrated, retried = _counted(counters, "migration"), _counted(counters, "retries")
        lines.append(f"migrated {migrated:g}, retried {retried:g}")
    lines += [f"  failed: {cause}: {count}" for cause, count in _most(total["failed"])]
    lines += [f"  wrong: {form}: {count}" for form, count in _most(total["wrong"])]
    lines += [f"  apart: {cause}: {count}" for cause, count in _most(total["apart"])]
    lines += [f"  note: {cause}: {count}" for cause, count in _most(total["notes"])]
    lines += [
        f"  outcome: {kind}: {', '.join(f'{what} {count}' for what, count in _most(counts))}"
        for kind, counts in sorted(total["outcomes"].items())
    ]
    lines += [f"  counter: {name}: {count:g}" for name, count in sorted((counters or {}).items())]
    lines += [f"  LEAK: {leak}" for leak in total["leaks"]] or ["leaks: none"]
    return lines


HEAD = (
    "fault", "number", "alone", "longest stall alone s", "aim s", "beyond the aim", "longest stall s", "median stall s",
    "stalled streams", "whole answer late s, longest",
    "served again s, longest", "whole again s, median", "longest", "never whole", "not waited for",
)  # fmt: skip
FIELDS = (
    "number", "alone", "stall_alone_longest_s", "aim_s", "alone_beyond_aim", "stall_longest_s", "stall_median_s",
    "stalled_requests", "late_longest_s", "served_longest_s",
    "whole_median_s", "whole_longest_s", "never_whole", "not_waited_for",
)  # fmt: skip


def table_of(total: Mapping[str, Any]) -> list[str]:
    """Returns a table of the figures of each kind of fault, in Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "| --- |" + " --: |" * (len(HEAD) - 1)]
    for kind, figures in total["kinds"].items():
        cells = [f"{'' if figures[name] is None else f'{figures[name]:g}'}" for name in FIELDS]
        lines.append("| " + " | ".join([kind, *cells]) + " |")
    return lines


def slopes_of(run: Mapping[str, Any], least_s: float = 1_200.0) -> list[str]:
    """Returns a table of memory and open files of the processes that lived long enough for a slope, in Markdown."""
    lived = [p for p in run["processes"] if p["lived_s"] >= least_s and p["rss_mib_per_h"] is not None]
    lines = [
        "| process | lived s | RSS MiB first | last | MiB per hour | files first | last | per hour |",
        "| --- |" + " --: |" * 7,
    ]
    for p in sorted(lived, key=lambda p: -p["rss_mib_per_h"]):
        lines.append(
            f"| {p['name']} | {p['lived_s']} | {p['rss_mib'][0]:g} | {p['rss_mib'][1]:g} | {p['rss_mib_per_h']:+g} | "
            f"{p['fds'][0]} | {p['fds'][1]} | {p['fds_per_h']:+g} |"
        )
    return lines if lived else []


def page_of(runs: Sequence[Mapping[str, Any]], picture: str) -> str:
    """Returns the page of all kept runs, in Markdown."""
    total, last = added_up(runs), runs[-1]
    parts = ", ".join(f"{number} {part}" for part, number in last["config"]["parts"].items())
    text = [
        f"# Faults on {last['engines']} engines",
        "",
        f"`{last['command']}`; {parts}; {last['config']['clients']} clients; {last['machine']['cpu']}, "
        f"{last['machine']['cores']} cores.",
        "",
        *(f"- {line.strip()}" for line in lines_of(total)),
        "",
        *table_of(total),
        "",
        "A stall is the longest time in which a stream got nothing, its wait for the first token included; a whole "
        "answer is late by all that delays it. A fault is *alone* if all was whole when it began and no other one "
        "began during its longest stall; only these are compared with the aim, and only in runs in which the clients' "
        "clock, on which stalls are counted, stood still for 5 % of the time at most. *Served "
        "again*: the last moment at which a request waited for longer than a second. *Whole again*: the part has as "
        "many well processes as before, counted from the end of a fault that ends by itself.",
        "",
        f"![timeline of the last run]({picture})",
        "",
    ]
    # in other runs few processes live long, and their caches are large
    slopes = slopes_of(last) if "--soak" in last["command"] else []
    if slopes:
        text += [
            "Memory and open files of the processes of the last run that lived for 20 minutes. Slopes leave out the "
            "first ten of them, in which caches, indexes and rings fill up:",
            "",
            *slopes,
            "",
        ]
    return "\n".join(text)


def draw(path: Path, run: Mapping[str, Any]) -> None:
    """Draws the timeline of a run: faults by kind, the longest wait in vain, requests answered each second."""
    line = run["timeline"]
    minutes = [t / 60 for t in line["at_s"]]
    made, (faults, waits, rate) = figure(1, 3, width=10.0, height=2.6)
    kinds = sorted({row[1] for row in run["faults"]})
    for row in run["faults"]:
        y = kinds.index(row[1])
        # the mark shows faults that have no duration
        faults.plot(
            [row[0] / 60, (row[0] + row[3]) / 60],
            [y, y],
            color=COLOURS[y % 6],
            linewidth=3,
            marker="o",
            markersize=3,
            markevery=[0],
        )
    faults.set_yticks(range(len(kinds)), kinds, fontsize=6)
    faults.set_title("faults", loc="left")
    waits.plot(minutes, line["waiting_s"], color=COLOURS[1], linewidth=0.8)
    waits.set_title("longest time that a request waits in vain, s", loc="left")
    at, rates = _rates(line)
    rate.plot(at, rates, color=COLOURS[0], linewidth=0.8)
    rate.set_title("requests answered each second", loc="left")
    rate.set_xlabel("minutes")
    for axes in (faults, waits, rate):
        axes.set_xlim(min(minutes, default=0), max(minutes, default=1))
        axes.tick_params(colors=QUIET)
    made.tight_layout()
    made.savefig(path, dpi=110, metadata={"Software": None})
    with_palette(path)


def _rates(line: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Returns the requests each second over bins of `BIN_S`, as (minutes, rates)."""
    at: list[float] = []
    rates: list[float] = []
    first = 0
    for i, t in enumerate(line["at_s"]):
        if t - line["at_s"][first] >= BIN_S:
            rates.append((line["ended"][i] - line["ended"][first]) / (t - line["at_s"][first]))
            at.append(t / 60)
            first = i
    return at, rates


def _frozen(shares: Mapping[str, float]) -> list[str]:
    """Returns how much of the runs the clients' clock stood still, and which runs therefore do not count."""
    lines = [f"the clients' clock stood still for {100 * max(shares.values()):.1f} % of a run at most"]
    beyond = [seed for seed, share in shares.items() if share > MOST_FROZEN]
    if beyond:
        lines.append(
            f"NOT COUNTED for the aims of stalls, because it stood still for more than {100 * MOST_FROZEN:g} %: "
            f"seeds {', '.join(beyond)}"
        )
    return lines


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _counted(counters: Mapping[str, int], word: str) -> float:
    return sum(count for name, count in counters.items() if word in name)
