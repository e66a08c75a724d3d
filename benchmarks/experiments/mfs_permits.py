"""The cost of permits against ideal switch priorities, by chunk, window and delay of control messages.

The paper gives each flow a switch priority. Here the arbiter of the live agents gives permits for chunks
(`policies.flow.arbiter`), and what is posted shares the network fairly; a chunk that is posted cannot be overtaken. So
a collective waits for at most the chunks that are posted at its ports, and a port may idle while a message travels.
With whole reads, one permit covers a flow that is alone at its ports; what comes next then shares the port with it.
Whole reads with a bound on their time stand beside whole reads without one; the live bound is 30 ms.

No live engine lets its collectives wait for permits. So permits for KV alone stand beside permits for all, with the
sizes of the aim and with the live ones; collectives then share the ports fairly with the chunks that are posted.

It runs on the testbed of `mfs_testbed`, where a group's collective takes some milliseconds. The paper has no such
figures. Aims, set before the runs: permits of 2.5 ms, two at a port, with messages of 0.2 ms and no whole reads, keep
80 % of what ideal MFS saves of fair sharing's mean TTFT; ideal fair sharing and fair permits differ by at most 10 %.
The first reports were of a simulator that had the router take an engine for idle after the first group of a prefill,
and of permits that counted the collective of a ring, which stands for as many flows as it has ranks less one, as one
flow. The aims stayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Results, Row, Variant, aimed
from benchmarks.experiments.mfs_common import SEEDS_FROM, named, run_one
from benchmarks.seeds import ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SEEDS_FROM", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "Flow permits against ideal switch priorities: chunk, window and control delay, on MFS's testbed"
SEEDS = (2, 1)
MODEL, WORK, RATE = "mixtral-8x7b", "agent", 1.0
Permits = tuple[float, int, float, bool, float | None, bool]
"""(seconds of a chunk, chunks posted at a port, seconds of a message, whole reads, most seconds of a whole read,
whether collectives wait for permits).
"""
# The aim's permits; the others change one part.
BASE: Permits = (0.0025, 2, 0.0002, False, None, True)
CHUNKS_S = (0.000625, 0.0025, 0.010, 0.040)
WINDOWS = (1, 2, 4)
DELAYS_S = (0.0, 0.0002, 0.001, 0.005)
WHOLE_S = 0.030
# The sizes of live permits, and the delay of their messages as measured on this machine (`make bench-permits`).
LIVE: Permits = (0.010, 2, 0.0002, True, WHOLE_S, True)
KEPT, SAME = 0.8, 10.0


def sweep(quick: bool) -> list[Permits]:
    """Returns the permits to run: the base, and each part on its own."""
    if quick:
        return [BASE, (CHUNKS_S[2], *BASE[1:])]
    made = [BASE, *((chunk_s, *BASE[1:]) for chunk_s in CHUNKS_S)]
    made += [(BASE[0], window, *BASE[2:]) for window in WINDOWS]
    made += [(*BASE[:2], delay_s, *BASE[3:]) for delay_s in DELAYS_S]
    made += [(*BASE[:3], True, WHOLE_S, True), (*BASE[:3], True, None, True), (*BASE[:5], False)]
    return list(dict.fromkeys([*made, LIVE, (*LIVE[:5], False)]))


def label(permits: Permits) -> str:
    """Returns a variant's name for its permits."""
    chunk_s, window, delay_s, whole_reads, most_s, collectives = permits
    bound = "" if most_s is None else f" of at most {1e3 * most_s:g} ms"
    whole = f", whole reads{bound}" if whole_reads else ""
    free = "" if collectives else ", collectives without"
    return f"permits of {1e3 * chunk_s:g} ms x {window}, {1e3 * delay_s:g} ms{whole}{free}"


def variants(quick: bool) -> list[Variant]:
    size: dict[str, Any] = {"requests": 300, "warmup": 100}
    if quick:
        size = {"requests": 60, "warmup": 20, "groups": 4}
    made = [named(MODEL, WORK, policy, RATE, "ideal", **size) for policy in ("fair", "mfs")]
    made.append(named(MODEL, WORK, "fair", RATE, label(BASE), permits=list(BASE), **size))
    made += [
        named(MODEL, WORK, "mfs", RATE, label(permits), permits=list(permits), **size)
        for permits in sweep(quick)
    ]
    return made


def _name(how: str, policy: str) -> str:
    return f"{MODEL} {WORK} {how} {RATE:g}/s {policy}"


def kept(results: Results, permits: Permits) -> tuple[float | None, float | None]:
    """Returns the share of ideal MFS's saving of mean TTFT that permits keep, with half of its 95 % interval; None
    where MFS saves nothing.
    """
    fair, ideal = (results.values(_name("ideal", policy), "ttft_mean_s") for policy in ("fair", "mfs"))
    ours = results.values(_name(label(permits), "mfs"), "ttft_mean_s")
    saved, most = ([a - b for a, b in zip(fair, of, strict=True)] for of in (ours, ideal))
    return ratio(saved, most) if sum(most) > 0 else (None, None)


def compare(results: Results) -> list[Row]:
    rows = []
    for permits in sweep(results.quick):
        name = _name(label(permits), "mfs")
        share, half = (None if of is None else 100 * of for of in kept(results, permits))
        row = Row(f"MFS, {label(permits)}: kept of the ideal saving of TTFT", None, share, "%", half)
        rows += [
            aimed(row, f"at least {100 * KEPT:g} %", least=100 * KEPT) if permits == BASE else row,
            Row(f"MFS, {label(permits)}: mean TTFT", None, 1e3 * results.mean(name, "ttft_mean_s"), "ms"),
            Row(f"MFS, {label(permits)}: mean CCT", None, 1e3 * results.mean(name, "cct_mean_s"), "ms"),
        ]
    for policy in ("fair", "mfs"):
        name = _name("ideal", policy)
        rows += [
            Row(f"ideal {policy}: mean TTFT", None, 1e3 * results.mean(name, "ttft_mean_s"), "ms"),
            Row(f"ideal {policy}: mean CCT", None, 1e3 * results.mean(name, "cct_mean_s"), "ms"),
        ]
    ideal, by_permit = _name("ideal", "fair"), _name(label(BASE), "fair")
    shorter, half = results.reduction_percent(ideal, by_permit, "ttft_mean_s")
    row = Row(f"fair, {label(BASE)} vs ideal: mean TTFT", None, -shorter, "%", half)
    return [*rows, aimed(row, f"within {SAME:g} %", least=-SAME, most=SAME)]


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    parts = [
        (
            what,
            unit,
            [p for p in sweep(results.quick) if all(p[i] == BASE[i] for i in range(len(BASE)) if i != at)],
            at,
        )
        for at, (what, unit) in enumerate((("chunk, ms", 1e3), ("window, chunks", 1.0), ("delay, ms", 1e3)))
    ]
    made, axes = look.figure(columns=len(parts))
    for axis, (what, unit, permits, at) in zip(axes, parts, strict=True):
        permits = sorted(permits, key=lambda p: p[:3][at])
        places = [unit * p[:3][at] for p in permits]
        series = {
            "permits": look.Series(
                places, [1e3 * results.mean(_name(label(p), "mfs"), "ttft_mean_s") for p in permits]
            )
        }
        for policy in ("fair", "mfs"):
            ideal = 1e3 * results.mean(_name("ideal", policy), "ttft_mean_s")
            series[f"ideal {policy}"] = look.Series([places[0], places[-1]], [ideal, ideal], quiet=True)
        look.lines(axis, series, what, "mean TTFT, ms", "")
    return {"mfs_permits": made}
